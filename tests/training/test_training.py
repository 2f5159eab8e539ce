"""Data, regeneration and the training loop on tiny random models."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, ScriptedDrafter, greedy, make_prompt, make_target
from transformers import PreTrainedModel

from dflash import DFlashDraftModel, generate_blocks
from dflash.model.targets_dflash import check_pair
from dflash.regeneration import Sampling, regenerate
from dflash.training import (
    DrafterLoss,
    Example,
    FrozenTarget,
    Trainer,
    TrainingSettings,
    build_optimizers,
    collate,
    encode,
    epoch_batches,
    estimate_memory,
    load_examples,
    measure_acceptance,
    new_drafter,
    save_drafter,
    train,
    with_response,
    write_examples,
)
from dflash.training.batches import BatchPlan, batch_indices
from dflash.training.optimizers import group_names, rate_factor
from dflash.training.size_estimate import widest


VOCAB, EOS, MASK_ID = 40, 1, 39


def make_the_target() -> PreTrainedModel:
    shape = {"vocab_size": VOCAB, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 16, "num_hidden_layers": 5, "max_position_embeddings": 256}
    return make_target(seed=0, **shape, tie_word_embeddings=True, eos_token_id=EOS, pad_token_id=0)


@pytest.fixture
def target() -> PreTrainedModel:
    return make_the_target()


@pytest.fixture
def drafter(target: PreTrainedModel) -> DFlashDraftModel:
    torch.manual_seed(1)
    return new_drafter(target, mask_token_id=MASK_ID, num_hidden_layers=2, block_size=6)


def written_by(target: PreTrainedModel, count: int, new_tokens: int = 24) -> list[Example]:
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 38) for _ in range(rng.randrange(3, 7))] for _ in range(count)]
    return [one.example for one in regenerate(target, prompts, max_new_tokens=new_tokens, batch_size=4)]


def test_new_drafter_fits_its_target(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    config = drafter.config
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (VOCAB, 32, 5)
    assert config.target_layer_ids == [0, 1, 2, 3]
    check_pair(target, drafter)  # refuses pairs that do not belong together


def test_regenerated_text_is_what_the_target_writes_for_each_prompt(target: PreTrainedModel) -> None:
    """Whatever the batch: a padded row must not read its padding."""
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 38) for _ in range(rng.randrange(2, 9))] for _ in range(7)]
    found = {one.index: one for one in regenerate(target, prompts, max_new_tokens=12, batch_size=3)}
    assert sorted(found) == list(range(7))
    for index, prompt in enumerate(prompts):
        input_ids = torch.tensor([prompt])
        alone = target.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=12, do_sample=False
        )[0].tolist()
        one = found[index]
        assert one.example.input_ids == alone
        assert one.example.prompt_ids == prompt
        assert one.example.loss_mask == [0] * len(prompt) + [1] * (len(alone) - len(prompt))
        assert one.ended == (alone[-1] == EOS)


def test_sampled_regeneration_depends_on_its_seed_alone(target: PreTrainedModel) -> None:
    def sample(seed: int) -> list[list[int]]:
        found = regenerate(target, [[5, 6, 7]] * 3, max_new_tokens=8, batch_size=2, sampling=Sampling(1.0), seed=seed)
        return [one.example.input_ids for one in found]

    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = sample(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    assert sample(0) == first
    assert sample(1) != first


def test_examples_survive_a_file(tmp_path: Path) -> None:
    examples = [with_response([3, 4], [5, 6, EOS]), with_response([7], [8])]
    write_examples(tmp_path / "rows.jsonl", examples)
    assert load_examples(tmp_path / "rows.jsonl") == examples


class SpelledTokenizer:
    """One token per character, and a chat template that marks (or does not mark) what the assistant says."""

    eos_token_id = EOS

    def __init__(self, marks: bool = True) -> None:
        self.marks = marks

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: object) -> dict[str, list[int]]:
        input_ids: list[int] = []
        mask: list[int] = []
        for message in messages:
            spoken = [ord(character) for character in message["content"]]
            is_answer = message["role"] == "assistant" and self.marks
            input_ids += [2, *spoken, EOS]
            mask += [0, *[int(is_answer)] * (len(spoken) + 1)]
        return {"input_ids": input_ids + [2] * bool(kwargs.get("add_generation_prompt")), "assistant_masks": mask}


def test_every_form_of_a_row_supervises_the_answer_and_its_end() -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    expected = Example([2, 97, 98, EOS, 2, 99, 100, EOS], [0, 0, 0, 0, 0, 1, 1, 1])
    assert encode({"messages": chat}, SpelledTokenizer()) == expected
    assert encode({"prompt": "ab", "completion": "cd"}, SpelledTokenizer(marks=False)) == expected
    assert encode({"prompt_ids": [2, 97, 98, EOS, 2], "response_ids": [99, 100, EOS]}, None) == expected


def test_rows_that_cannot_be_trained_on_are_refused_with_the_remedy() -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    with pytest.raises(ValueError, match=r"\{% generation %\}"):
        encode({"messages": chat}, SpelledTokenizer(marks=False))
    with pytest.raises(ValueError, match=r"\['words'\].*prompt and completion"):
        encode({"words": "ab"}, SpelledTokenizer())


def test_an_epoch_holds_every_example_once_and_repeats_by_its_seed() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(5, 60) for _ in range(300)]
    batches = batch_indices(lengths, 128, random.Random(1), pool=64)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 128 or len(batch) == 1 for batch in batches)

    examples = [with_response([3] * 2, [5] * (length - 2)) for length in lengths]

    def epoch(number: int) -> list[torch.Tensor]:
        plan = BatchPlan(num_anchors=4, batch_tokens=256)
        return [batch.anchors for batch in epoch_batches(examples, number, plan)]

    assert all(map(torch.equal, epoch(0), epoch(0)))
    assert not all(map(torch.equal, epoch(0), epoch(1)))


def test_padding_and_absent_anchors_change_neither_loss_nor_gradient(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    examples = written_by(target, 4)
    anchors = [[6, 9], [8, 9, 10], [7], []]
    loss_of = DrafterLoss(FrozenTarget(target, drafter), TrainingSettings(gamma=3.0, chunk_rows=5))

    together, counts = loss_of(collate(examples, anchors, pad_token_id=0))
    (together / counts.weight_sum).backward()
    gradient = drafter.fc.weight.grad.clone()

    drafter.zero_grad()
    parts = [loss_of(collate([e], [a], pad_token_id=0))[1] for e, a in zip(examples, anchors, strict=True)]
    assert counts.blocks.item() == 6
    torch.testing.assert_close(counts.loss_sum, sum(part.loss_sum for part in parts))
    torch.testing.assert_close(counts.weight_sum, sum(part.weight_sum for part in parts))
    for example, chosen in zip(examples, anchors, strict=True):
        loss, _ = loss_of(collate([example], [chosen], pad_token_id=0))
        (loss / counts.weight_sum).backward()
    torch.testing.assert_close(gradient, drafter.fc.weight.grad, rtol=1e-4, atol=1e-6)


def settings(**fields: object) -> TrainingSettings:
    defaults = {
        "num_anchors": 16,
        "batch_tokens": 512,
        "mixed_precision": "no",
        "eval_every": 60,
        "learning_rate": 5e-3,
    }
    return TrainingSettings(**({"steps": 60} | defaults | fields))


def test_training_raises_true_acceptance_and_leaves_the_target_alone(
    target: PreTrainedModel, drafter: DFlashDraftModel, tmp_path: Path
) -> None:
    examples = written_by(target, 4)
    prompts = [example.prompt_ids for example in examples]
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    untrained = measure_acceptance(drafter, target, prompts, max_new_tokens=24)
    record = train(
        drafter, target, examples, prompts, settings(eval_new_tokens=24), tmp_path / "drafter", show_progress=False
    )
    assert untrained.tau < 1.3
    assert record.best_tau > 2.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())

    saved = DFlashDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32).eval()
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        blocks = generate_blocks(saved, target, input_ids, max_new_tokens=24, temperature=0.0)
        plain = target.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=24, do_sample=False
        )[0].tolist()
        assert prompt + [token_id for block in blocks for token_id in block.token_ids] == plain
    facts = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert facts["curve"][-1]["step"] == 60
    assert str(tmp_path) not in json.dumps(facts)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize(("longest", "is_noted"), [(24, True), (40, False)])
def test_measuring_beyond_the_datas_answers_is_said(
    target: PreTrainedModel, drafter: DFlashDraftModel, tmp_path: Path, longest: int, is_noted: bool
) -> None:
    """Known trap: trained on answers of 160 tokens, tau was 2.73 on texts of 256 and 5.77 on texts of 160."""
    prompts = [example.prompt_ids for example in written_by(target, 4)]
    examples = [
        Example([*prompt, *(4 + i % 30 for i in range(longest))], [0] * len(prompt) + [1] * longest)
        for prompt in prompts
    ]
    lines: list[str] = []
    few = settings(steps=1, eval_every=1, eval_new_tokens=40)
    train(drafter, target, examples, prompts, few, tmp_path / "drafter", show_progress=False, announce=lines.append)
    spoken = [line for line in lines if "eval_new_tokens" in line]
    assert [f"more than {longest} supervised tokens" in line for line in spoken] == [True] * is_noted


def test_the_same_seed_trains_the_same_drafter(target: PreTrainedModel, tmp_path: Path) -> None:
    examples = written_by(target, 3)

    def trained(name: str) -> DFlashDraftModel:
        torch.manual_seed(5)
        drafter = new_drafter(target, mask_token_id=MASK_ID, num_hidden_layers=1, block_size=4)
        train(drafter, target, examples, [], settings(steps=4), tmp_path / name, show_progress=False)
        return drafter

    first, second = trained("a").state_dict(), trained("b").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_checkpoint(
    target: PreTrainedModel, drafter: DFlashDraftModel, tmp_path: Path
) -> None:
    save_drafter(drafter, tmp_path / "drafter", {"mark": 1})
    torch.nn.init.constant_(drafter.norm.weight, float("nan"))
    with pytest.raises(FloatingPointError, match="loss of step 1 is nan, on batch 0 of epoch 0"):
        train(
            drafter,
            target,
            written_by(target, 2),
            [],
            settings(),
            tmp_path / "drafter",
            show_progress=False,
            overwrite=True,
        )
    assert json.loads((tmp_path / "drafter" / "training.json").read_text()) == {"mark": 1}


def test_data_without_a_supervised_token_is_refused(
    target: PreTrainedModel, drafter: DFlashDraftModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no supervised token"):
        train(drafter, target, [with_response([3, 4], [])], [], settings(), tmp_path / "drafter")


@pytest.mark.parametrize(("mask_token_id", "said"), [(EOS, "an end-of-text"), (0, "the padding")])
def test_a_mask_that_means_something_to_the_target_is_refused_from_python_too(
    target: PreTrainedModel, tmp_path: Path, mask_token_id: int, said: str
) -> None:
    """Also where it does not occur in the data: decoding would take the target's own end for a place to fill."""
    drafter = new_drafter(target, mask_token_id=mask_token_id, num_hidden_layers=1, block_size=4)
    with pytest.raises(ValueError, match=f"mask_token_id={mask_token_id} is also {said} token: choose"):
        train(drafter, target, [with_response([3], [4, 5, 6, 7])], [], settings(), tmp_path / "drafter")
    assert list(tmp_path.iterdir()) == []


def test_a_held_out_prompt_that_fills_the_positions_is_refused_before_the_first_step(
    target: PreTrainedModel, drafter: DFlashDraftModel, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match="A held-out prompt has 256 tokens and the target 256 positions: give a smaller"
    ):
        train(drafter, target, written_by(target, 2), [[5] * 256], settings(), tmp_path / "drafter")


def test_rate_climbs_for_four_percent_and_falls_along_a_cosine() -> None:
    factors = [rate_factor(step, 200, 0.04) for step in range(1, 201)]
    assert factors[:8] == [pytest.approx(step / 8) for step in range(1, 9)]
    assert factors[8] == 1.0
    assert factors[8 + 96] == pytest.approx(0.5)
    assert all(0 < later < earlier for earlier, later in pairwise(factors[8:]))
    assert rate_factor(1, 10, 0.0) == 1.0


RECIPE: dict[str, dict[str, Any]] = {
    "learning_rate": {"learning_rate": 1e-2},
    "muon_learning_rate": {"muon_learning_rate": 1e-2},
    "warmup_ratio": {"warmup_ratio": 1.0},
    "weight_decay": {"weight_decay": 0.5},
    "max_grad_norm": {"max_grad_norm": 1e-4, "warmup_ratio": 1.0},
    "loss": {"loss": "forward_kl"},
    "position_weights": {"position_weights": "decay"},
    "recipe": {"recipe": "paper"},
    "gamma": {"gamma": 1.0, "position_weights": "decay"},
    "dpace_alpha": {"dpace_alpha": 0.9},
    "selector_weight": {"selector_weight": 0.1},
    "num_anchors": {"num_anchors": 1},
    "batch_tokens": {"batch_tokens": 96},
    "pack_length": {"pack_length": 64},
    "seed": {"seed": 1},
}


@pytest.fixture(scope="module")
def trained_weights() -> Callable[..., torch.Tensor]:
    """What three steps of a recipe make of the weights."""
    selector = {"selector_rank": 3, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8}
    target = make_the_target()
    data = written_by(target, 10)

    def weights(**changes: Any) -> torch.Tensor:
        torch.manual_seed(1)
        drafter = new_drafter(target, mask_token_id=MASK_ID, num_hidden_layers=1, block_size=6, **selector)
        trainer = Trainer(
            drafter, target, data, settings(**({"steps": 4, "num_anchors": 3, "batch_tokens": 64} | changes))
        )
        for _ in range(3):
            trainer.step()
        return torch.cat([parameter.detach().flatten() for parameter in drafter.parameters()])

    return weights


@pytest.fixture(scope="module")
def default_weights(trained_weights: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Those without a change; they are the same again."""
    weights = trained_weights()
    assert torch.equal(weights, trained_weights())
    return weights


@pytest.mark.parametrize("name", RECIPE)
def test_every_part_of_the_recipe_reaches_the_weights(
    trained_weights: Callable[..., torch.Tensor], default_weights: torch.Tensor, name: str
) -> None:
    others = {key: value for key, value in RECIPE[name].items() if key != name}
    before = trained_weights(**others) if others else default_weights
    assert not torch.equal(before, trained_weights(**RECIPE[name]))


def test_acceptance_is_measured_uncompiled(
    target: PreTrainedModel, drafter: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A near-tie must not depend on how many steps the process has run before: a resumed run has run fewer."""
    asked = []

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options["compile"])
        return generate_blocks(*args, **options)

    monkeypatch.setattr("dflash.training.acceptance.generate_blocks", watched)
    assert measure_acceptance(drafter, target, [[5, 6, 7]], 8).steps > 0
    assert asked == [False]


def test_tokens_that_a_cut_takes_away_are_committed_but_not_kept() -> None:
    """The tokens of a step were counted as kept before its text was cut."""
    target, prompt = make_target(), make_prompt(9)
    text = greedy(target, prompt, max_new_tokens=20)
    drafter, new_ids = ScriptedDrafter(target, text, [BLOCK_SIZE - 1]), text[0, 9:].tolist()
    lengths = [i + 1 for i in range(1, BLOCK_SIZE) if new_ids.index(new_ids[i]) == i]
    assert len(lengths) > 2, "choose a seed whose text repeats itself less"
    for length in lengths:
        target.generation_config.eos_token_id = new_ids[length - 1]
        found = measure_acceptance(drafter, target, prompt.tolist(), 20)
        # One step, and the prefill, whose token is not counted.
        assert (found.steps, found.committed, found.kept) == (1, BLOCK_SIZE, length - 1)


def test_a_run_that_was_resumed_twice_in_an_epoch_is_where_it_would_be(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    """The number of the batch began again at 0 after a resume: the second one repeated data."""
    data, chosen = written_by(target, 10), settings(batch_tokens=64, num_anchors=2)
    trainer = Trainer(drafter, target, data, chosen)
    assert trainer.batches_per_epoch > 4
    for step in range(1, 4):
        trainer.step()
        assert trainer.next_place == (0, step)
        trainer = Trainer(drafter, target, data, chosen, trainer.state())


@pytest.mark.parametrize("pack_length", [None, 64])
def test_the_memory_estimate_is_of_the_widest_batch(
    target: PreTrainedModel, drafter: DFlashDraftModel, pack_length: int | None
) -> None:
    """Where one text is long and many are short, the short ones together have more blocks."""
    data = [with_response([3], [5] * 60), *(with_response([3, 4], [5, 6] * length) for length in (4, 5, 6, 7) * 6)]
    trainer = Trainer(drafter, target, data, settings(num_anchors=8, batch_tokens=128, pack_length=pack_length))
    batches = list(epoch_batches(data, 0, BatchPlan(num_anchors=8, batch_tokens=128, pack_length=pack_length)))
    columns, rows, pairs = widest(trainer)
    most = {
        "columns": max(batch.input_ids.numel() for batch in batches),
        "rows": max(batch.anchors.numel() * 6 for batch in batches),
        "pairs": max(batch.anchors.numel() * 6 * (batch.input_ids.shape[1] + 6) for batch in batches),
    }
    assert {"columns": columns, "rows": rows, "pairs": pairs} == pytest.approx(most, rel=0.3)


SMALL_SHAPE = {"num_hidden_layers": 2, "block_size": 6, "intermediate_size": 16}
PLAIN_STEP = {"num_anchors": 8, "batch_tokens": 1400, "mixed_precision": "no"}


@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        ({}, {}),
        ({"gru_hidden_dim": 256, "emb_dim": 2}, {}),
        ({"intermediate_size": 4096}, {"num_anchors": 40}),
        ({}, {"num_anchors": 100}),
        ({"intermediate_size": 2048}, {"mixed_precision": "bf16", "num_anchors": 1}),
        ({"intermediate_size": 2048}, {"lora_rank": 4, "num_anchors": 1}),
    ],
    ids=["small", "gru", "mlp", "queries", "bf16", "lora"],
)
def test_the_memory_estimate_is_near_what_autograd_keeps_of_a_loss(
    target: PreTrainedModel, shape: dict[str, Any], changed: dict[str, Any]
) -> None:
    data = [with_response([3, 4], [5, 6] * length) for length in (200, 201, 202)]
    drafter = new_drafter(target, mask_token_id=MASK_ID, **SMALL_SHAPE | shape)
    trainer = Trainer(drafter, target, data, settings(**PLAIN_STEP | changed))
    weights = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    held: dict[int, torch.Tensor] = {}
    (batch,) = epoch_batches(data, 0, trainer.plan)
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: held.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
        ),
        torch.autocast("cpu", torch.bfloat16, enabled=trainer.precision == "bf16"),
    ):
        loss_and_counts = DrafterLoss(FrozenTarget(target, drafter), trainer.settings)(batch)
    kept = sum(one.untyped_storage().nbytes() for place, one in held.items() if place not in weights)
    assert loss_and_counts
    parts = estimate_memory(trainer)
    names = ("features of the target", "weight copies for the forward", "activations of the drafter")
    assert sum(parts[name] for name in names) == pytest.approx(kept, rel=0.35)


@pytest.mark.parametrize("changed", [{"mixed_precision": "bf16"}, {"lora_rank": 4}], ids=["bf16", "lora"])
def test_the_memory_estimate_says_what_computing_layers_again_saves(
    target: PreTrainedModel, changed: dict[str, Any]
) -> None:
    """Beside the target's features, which both keep."""
    data, estimated = [with_response([3, 4], [5, 6] * length) for length in (60, 61, 62)], []
    for again in (False, True):
        drafter = new_drafter(target, mask_token_id=MASK_ID, **SMALL_SHAPE | {"num_hidden_layers": 6})
        trainer = Trainer(drafter, target, data, settings(**PLAIN_STEP | changed, gradient_checkpointing=again))
        parts, columns = estimate_memory(trainer), widest(trainer)[0]
        features = columns * len(drafter.config.target_layer_ids) * drafter.config.hidden_size
        parts["features of the target"] -= features * (2 if trainer.precision == "bf16" else 4)
        names = ("features of the target", "weight copies for the forward", "activations of the drafter")
        estimated.append(sum(parts[name] for name in names))
        assert min(parts.values()) >= 0
    assert 0 < estimated[1] < estimated[0] / 3


def test_the_memory_estimate_counts_no_copies_of_layers_that_no_gradient_crosses(target: PreTrainedModel) -> None:
    copies = []
    for is_frozen in (False, True):
        drafter = new_drafter(target, mask_token_id=MASK_ID, **SMALL_SHAPE)
        drafter.layers.requires_grad_(not is_frozen)
        trainer = Trainer(drafter, target, written_by(target, 4), settings(**PLAIN_STEP | {"mixed_precision": "bf16"}))
        copies.append(estimate_memory(trainer)["weight copies for the forward"])
    assert copies[0] > copies[1] == 0


def test_the_memory_estimate_counts_a_mask_for_each_type_of_layer(target: PreTrainedModel) -> None:
    estimated = []
    for types in (["full_attention"] * 2, ["sliding_attention", "full_attention"]):
        drafter = new_drafter(target, mask_token_id=MASK_ID, **SMALL_SHAPE)
        drafter.config.layer_types = types
        trainer = Trainer(drafter, target, written_by(target, 4), settings(**PLAIN_STEP))
        estimated.append(estimate_memory(trainer)["activations of the drafter"])
        *_, scored = widest(trainer)
    assert estimated[1] - estimated[0] == 4 * scored


def test_tables_that_are_trained_alone_need_no_muon(target: PreTrainedModel) -> None:
    """DSpark's bias, added to a frozen drafter, is two tables."""
    drafter = new_drafter(target, mask_token_id=MASK_ID, num_hidden_layers=1, block_size=4, markov_rank=3)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name.startswith("markov_head"))
    (optimizer,) = build_optimizers(drafter, 1e-3, 0.1, 2e-3)
    (group,) = optimizer.param_groups
    assert (type(optimizer).__name__, group["lr"], len(group["params"])) == ("AdamW", 2e-3, 2)


@pytest.mark.parametrize("head", ["selector", "domino", "dspark"])
def test_each_weight_has_its_optimiser_rate_and_decay(target: PreTrainedModel, head: str) -> None:
    """Norms were decayed beside Muon, and it mixed the rows of codebooks, which are looked up by token."""
    heads: dict[str, dict[str, Any]] = {
        "selector": {"selector_rank": 3, "selector_top_k": 8},
        "domino": {"gru_hidden_dim": 4, "emb_dim": 3},
        "dspark": {"markov_rank": 3, "markov_head_type": "gated"},
    }
    shape: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, **heads[head]}
    drafter = new_drafter(target, mask_token_id=MASK_ID, num_hidden_layers=1, block_size=4, **shape)
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}

    def groups(**rates: float) -> list[tuple[str, float, float, set[str]]]:
        found = [(one, group) for one in build_optimizers(drafter, 1e-3, 0.1, **rates) for group in one.param_groups]
        assert sorted(id(weight) for _, group in found for weight in group["params"]) == sorted(names)
        return [
            (type(one).__name__, group["lr"], group["weight_decay"], {names[id(weight)] for weight in group["params"]})
            for one, group in found
        ]

    codebooks = {
        name for name in names.values() if name.endswith(("codebook", "embed_proj.2.weight", "w1.weight", "w2.weight"))
    }
    others = {name for name in names.values() if name.endswith(("norm.weight", "layernorm.weight", "kernel", "bias"))}
    matrices = {*names.values()} - codebooks - others
    assert len(codebooks) == (1 if head == "domino" else 2)
    of_head = {
        "selector": {"candidate_selector.hidden_projection.weight"},
        "domino": {"prefix_gru.weight_hh_l0", "embed_proj.0.weight"},
        "dspark": {"markov_head.gate_proj.weight"},
    }
    assert {"fc.weight", "layers.0.mlp.up_proj.weight", *of_head[head]} < matrices
    names_of = {rate: group_names(build_optimizers(drafter, 1e-3, 0.1, rate)) for rate in (None, 2e-3)}
    assert names_of == {
        None: ["adamw_matrices", "adamw_norms"],
        2e-3: ["muon_matrices", "adamw_tables", "adamw_norms"],
    }
    assert groups(muon_learning_rate=2e-3) == [
        ("Muon", 2e-3, 0.1, matrices),
        ("AdamW", 2e-3, 0.1, codebooks),
        ("AdamW", 1e-3, 0.0, others),
    ]
    assert groups() == [("AdamW", 1e-3, 0.1, matrices | codebooks), ("AdamW", 1e-3, 0.0, others)]


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, "no"),
        ({"architecture": "x86_64", "avx512_bf16": True}, "bf16"),
        ({"architecture": "aarch64"}, "bf16"),
        ({}, "bf16"),
    ],
)
def test_bf16_is_the_default_where_it_is_no_slower(
    capabilities: dict[str, Any], found: str, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without its instructions took three times as long in bf16 as in fp32; what is given wins."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    drafter = new_drafter(target, mask_token_id=MASK_ID, num_hidden_layers=1, block_size=4)
    for asked, expected in ((None, found), ("bf16", "bf16"), ("no", "no")):
        trainer = Trainer(drafter, target, written_by(target, 2), settings(mixed_precision=asked))
        assert trainer.precision == expected


def test_every_rate_follows_its_own_peak(target: PreTrainedModel) -> None:
    """All followed the first one's."""
    drafter = new_drafter(
        target, mask_token_id=MASK_ID, num_hidden_layers=1, block_size=4, selector_rank=3, selector_top_k=8
    )
    chosen = settings(steps=4, warmup_ratio=0.5, learning_rate=1e-3, muon_learning_rate=4e-3)
    trainer = Trainer(drafter, target, written_by(target, 2), chosen)
    for factor in (0.5, 1.0):
        trainer.step()
        rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
        assert rates == pytest.approx([factor * peak for peak in (4e-3, 4e-3, 1e-3)])


def test_a_recipe_gives_the_defaults_and_what_is_given_wins() -> None:
    """The recipe that learns in short runs is the default, but not for a drafter that is trained already."""
    short, paper = TrainingSettings(), TrainingSettings(recipe="paper")
    assert (short.recipe, short.position_weights, short.learning_rate) == ("short", "dpace", 2e-3)
    assert (paper.position_weights, paper.learning_rate, paper.muon_rate(128)) == ("decay", 6e-4, 0.0)
    assert TrainingSettings(init="some/drafter").recipe == "paper"
    assert TrainingSettings(init="some/drafter", recipe="short").recipe == "short"
    mixed = TrainingSettings(learning_rate=1e-3, muon_learning_rate=0)
    assert (mixed.learning_rate, mixed.muon_rate(128), mixed.position_weights) == (1e-3, 0.0, "dpace")
    assert mixed.recipe_text() == "short with learning_rate=0.001, muon_learning_rate=0.0"
    assert TrainingSettings(gamma=3.0).position_weights == "decay"  # D-PACE would ignore it
    assert replace(short, seed=1).recipe_text() == "short"
    with pytest.raises(ValueError, match="recipe='long' is not one of short, paper"):
        TrainingSettings(recipe="long")


def test_the_recipes_rate_of_muon_falls_with_the_root_of_the_width() -> None:
    """A quarter of it at 16 times the width; one that is given is that of any width."""
    rates = [TrainingSettings().muon_rate(width) for width in (128, 2048)]
    assert rates == pytest.approx([2e-2, 5e-3])
    assert TrainingSettings(muon_learning_rate=1e-2).muon_rate(2048) == 1e-2
