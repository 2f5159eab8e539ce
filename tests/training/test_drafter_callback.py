"""`dflash.trl.DrafterCallback`: a drafter that is trained while a trainer of transformers moves its policy."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from dflash import Block, History, generate_blocks
from dflash.checkpoints import DRAFTER_NAME, TARGET_NAME, embedded_path, heldout_problems, make_pair
from dflash.engine.many_texts import drafting_of
from dflash.engine.state import PairState
from dflash.training import ADAPTATION, Rollouts, was_rejected
from dflash.trl import DrafterCallback


TARGET, DRAFTER = embedded_path(TARGET_NAME), embedded_path(DRAFTER_NAME)
RECIPE = ADAPTATION.changed(learning_rate=1e-3, num_anchors=8)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded pair as one folder, without lookups, and with drafts that do not depend on the clock; read-only."""
    settings = {"prompt_lookup_num_tokens": 0, "adaptive": False}
    return make_pair(TARGET, DRAFTER, tmp_path_factory.mktemp("pairs") / "pair", settings=settings)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET, padding_side="left")


class RolloutTrainer(Trainer):
    """Writes texts before each step, as trainers of reinforcement learning do, and is moved by what the data says."""

    rollouts: list[Any]
    prompts: Any
    keywords: dict[str, Any]

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        with torch.no_grad():
            texts = model.generate(**self.prompts, max_new_tokens=NEW_TOKENS, eos_token_id=None, **self.keywords)
        self.rollouts.append(texts)
        return super().training_step(model, inputs, *args)


def run(
    folder: Path,
    tokenizer: Any,
    output: Path,
    callback: DrafterCallback | None,
    num_steps: int = 10,
    learning_rate: float = 1e-3,
    **keywords: Any,
) -> RolloutTrainer:
    """A run whose policy learns to write its own answers with every fifth token changed."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    chats = [[{"role": "user", "content": problem.question}] for problem in heldout_problems()[:2]]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    greedy = model.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    generator = torch.Generator().manual_seed(5)
    num_prompt = prompts["input_ids"].shape[1]
    others = torch.randint(10, 2000, (2, NEW_TOKENS), generator=generator)
    is_changed = torch.rand(2, NEW_TOKENS, generator=generator) < 0.2
    answers = torch.where(is_changed, others, greedy[:, num_prompt:])
    data = []
    for prompt_ids, mask, answer in zip(prompts["input_ids"], prompts["attention_mask"], answers, strict=True):
        example = {"input_ids": [*prompt_ids.tolist(), *answer.tolist()]}
        example["labels"] = [-100] * num_prompt + answer.tolist()
        example["attention_mask"] = [*mask.tolist(), *[1] * NEW_TOKENS]
        data.append(example)
    data *= num_steps
    args = TrainingArguments(
        str(output),
        max_steps=num_steps,
        per_device_train_batch_size=2,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = RolloutTrainer(
        model=model,
        args=args,
        train_dataset=data,  # type: ignore[arg-type]
        processing_class=tokenizer,
        callbacks=[] if callback is None else [callback],
    )
    trainer.prompts = prompts
    trainer.rollouts = []
    trainer.keywords = {"do_sample": True, "temperature": 0.8, "top_k": 0, **keywords}
    trainer.train()
    return trainer


def of_log(trainer: Trainer, name: str) -> list[float]:
    """The values of a name in the trainer's log."""
    return [line[name] for line in trainer.state.log_history if name in line]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def followed(folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DrafterCallback]:
    """A run with a callback that trains after each step."""
    callback = DrafterCallback(every=1, steps=2, settings=RECIPE, time_share=None, most_texts=4)
    return run(folder, tokenizer, tmp_path_factory.mktemp("run"), callback), callback


@pytest.fixture(scope="module")
def alone(folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run without one."""
    return run(folder, tokenizer, tmp_path_factory.mktemp("run"), None)


@pytest.fixture(scope="module")
def watched(folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run with a callback that does not train."""
    return run(folder, tokenizer, tmp_path_factory.mktemp("run"), DrafterCallback(every=1000))


def test_the_drafter_follows_a_policy_that_moves(followed: Any, watched: Any) -> None:
    trainer, _ = followed
    without = of_log(watched, "drafter/tau")
    taus = of_log(trainer, "drafter/tau")
    assert taus[0] == without[0]
    assert without[-1] < 0.7 * without[0]
    assert sum(taus[-3:]) > sum(without[-3:]) + 1


def test_the_policy_and_its_samples_are_those_of_a_run_without_it(followed: Any, alone: Any) -> None:
    trainer, _ = followed
    assert all(map(torch.equal, trainer.rollouts, alone.rollouts))
    ours, own = weights(trainer.model), weights(alone.model)
    assert all(torch.equal(ours[name], own[name]) for name in own)
    assert trainer.model.training == alone.model.training
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def test_the_log_says_what_it_did(followed: Any) -> None:
    trainer, callback = followed
    assert of_log(trainer, "drafter/steps") == list(range(2, 22, 2))
    assert len(of_log(trainer, "drafter/tokens_per_step")) == 10
    assert sum(of_log(trainer, "drafter/seconds")) == pytest.approx(callback.seconds)


def test_recorded_texts_are_the_rollouts_with_their_rejected_anchors(followed: Any, tokenizer: Any) -> None:
    trainer, callback = followed
    examples = list(callback.rollouts.examples)
    texts = []
    for batch in trainer.rollouts[-2:]:  # the newest four
        for text in batch:
            first = int(text.ne(tokenizer.pad_token_id).nonzero()[0, 0])
            texts.append(text[first:].tolist())
    assert [example.input_ids for example in examples] == texts
    assert [sum(example.loss_mask) for example in examples] == [NEW_TOKENS] * len(texts)
    assert any(example.rejected for example in examples)
    for example in examples:
        first = len(example) - NEW_TOKENS
        assert all(first <= anchor < len(example) for anchor in example.rejected)


def test_rejected_anchors_are_where_blocks_were_rejected(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    callback = DrafterCallback(every=1000)
    trainer = run(folder, tokenizer, tmp_path, callback, num_steps=1)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    prompt_ids = trainer.rollouts[0][:1, :60]
    anchors, text = [], prompt_ids[0].tolist()
    keywords = {"target": trainer.model, "max_new_tokens": NEW_TOKENS, "temperature": 0.0}
    for block in generate_blocks(callback.drafter, input_ids=prompt_ids, **keywords):
        if was_rejected(block):
            anchors.append(len(text) - 1)
        text += block.token_ids
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    example = callback.rollouts.examples[-1]
    num_padding = len(text) - len(example)
    assert anchors
    assert [anchor + num_padding for anchor in example.rejected] == anchors


def test_batches_of_requests_are_recorded_too(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """What trl calls with `use_transformers_continuous_batching`."""
    pytest.importorskip("transformers.generation.continuous_batching.requests", reason="transformers 5")
    callback = DrafterCallback(every=1000)
    trainer = run(folder, tokenizer, tmp_path, callback, num_steps=1)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    outputs = callback.drafter.generate_batch([[5, 6, 7], [8, 9]], target=trainer.model, max_new_tokens=NEW_TOKENS)
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    recorded = [example.input_ids for example in callback.rollouts.examples][-2:]
    texts = [output.prompt_ids + output.generated_tokens for output in outputs.values()]
    assert sorted(recorded) == sorted(texts)


def test_it_trains_when_tau_has_fallen_and_not_before(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    still = DrafterCallback(when_tau_falls=0.5, steps=1, settings=RECIPE, time_share=None)
    trainer = run(folder, tokenizer, tmp_path / "still", still, num_steps=4, learning_rate=0.0)
    assert of_log(trainer, "drafter/steps")[-1] == 0
    moved = DrafterCallback(when_tau_falls=0.2, steps=1, settings=RECIPE, time_share=None)
    trainer = run(folder, tokenizer, tmp_path / "moved", moved)
    assert 0 < of_log(trainer, "drafter/steps")[-1] < 10


def test_a_fall_of_tau_is_one_of_acceptance_and_not_of_width() -> None:
    """Steps of 3 and of 15 proposals whose tokens are accepted equally often: 9 of 10 are."""
    taus = []
    for width, num_whole in ((3, 27), (15, 3)):
        rollouts = Rollouts(1)
        sequence: Any = SimpleNamespace(new_ids=[0] * 99)
        accepted = [width] * num_whole + [0] * 5 + [width - 1] * 2
        for count in accepted:
            rollouts.watch([sequence], [Block([0], num_proposals=width, num_accepted=count)])
        assert rollouts.tau == 1 + sum(accepted) / len(accepted)
        rate = sum(accepted) / (sum(accepted) + 7)
        assert rollouts.tau_of(15) == pytest.approx((1 - rate**16) / (1 - rate))
        taus.append(rollouts.tau_of(15) / rollouts.tau)
    assert taus[0] > 1.5 > taus[1], "a narrow step is judged as a whole block"


def test_no_round_without_time_for_it(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    callback = DrafterCallback(every=1, steps=1, settings=RECIPE, time_share=0.0)
    trainer = run(folder, tokenizer, tmp_path, callback, num_steps=3)
    assert of_log(trainer, "drafter/steps")[-1] <= 1


def test_a_second_run_has_its_own_clock_and_best_tau(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Bug: seconds of the first run counted against the share of the second."""
    callback = DrafterCallback(every=1000)
    callback.best_tau = callback.seconds = callback._logged_seconds = 1e6
    trainer = run(folder, tokenizer, tmp_path, callback, num_steps=1)
    assert (callback.best_tau, callback.seconds) == (0.0, 0.0)
    assert of_log(trainer, "drafter/seconds") == [0.0]


def test_a_run_that_raised_leaves_nothing_to_the_next_one(folder: Path, tokenizer: Any) -> None:
    """Bug: transformers ends no such run, and the next one counted each step twice, trained on its texts, and left a watcher."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    settings = drafting_of(model).settings
    callback = DrafterCallback(every=1000)
    begin: Any = partial(callback.on_train_begin, None, None, None, model=model, processing_class=tokenizer)
    begin()
    prompt = tokenizer("Hello there, how are you", return_tensors="pt")
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    model.generate(**prompt, **asked)
    callback.on_step_end(None, SimpleNamespace(global_step=1), None)
    begin()
    assert (len(callback.rollouts.examples), callback.rollouts.num_steps, callback._logged.num_steps) == (0, 0, 0)
    model.generate(**prompt, **asked)
    num_steps = sum(map(len, model.dflash_stats["acceptance_lengths"]))
    assert (callback.rollouts.num_steps, callback._logged.num_steps) == (num_steps, num_steps)
    callback.on_train_end(None, None, None)
    assert PairState.of(callback.drafter, model).watchers == []
    assert drafting_of(model).settings is settings


def test_texts_of_the_policy_become_its_history(
    folder: Path, tokenizer: Any, alone: Any, watched: Any, tmp_path: Path
) -> None:
    history = History(ngram_size=3)
    callback = DrafterCallback(every=1000, history=history)
    trainer = run(folder, tokenizer, tmp_path, callback)
    texts = [text[text.ne(tokenizer.pad_token_id)].tolist() for batch in trainer.rollouts for text in batch]
    assert sorted(texts) == sorted(map(list, history._texts.values()))
    assert all(map(torch.equal, trainer.rollouts, alone.rollouts))
    with_history = of_log(trainer, "drafter/tokens_per_step")
    without = of_log(watched, "drafter/tokens_per_step")
    assert with_history[0] == without[0]
    assert sum(with_history) > 1.05 * sum(without)


def test_as_many_tokens_as_pay_are_drafted_while_the_trainer_runs(tokenizer: Any, tmp_path: Path) -> None:
    callback = DrafterCallback(every=1000)
    trainer = run(own_folder(tmp_path), tokenizer, tmp_path / "run", callback, num_steps=1)
    widths = PairState.of(callback.drafter, trainer.model).widths
    assert widths
    widths.clear()
    trainer.model.generate(**trainer.prompts, max_new_tokens=8, do_sample=False)
    assert not widths, "after the run requests are as before"


def test_after_the_run_nothing_is_watched(followed: Any) -> None:
    trainer, callback = followed
    num_texts = len(callback.rollouts.examples)
    num_before = callback.rollouts.num_steps
    trainer.model.generate(**trainer.prompts, max_new_tokens=8, do_sample=False)
    assert (len(callback.rollouts.examples), callback.rollouts.num_steps) == (num_texts, num_before)


# Bad input.


def state_licence(folder: Path, licence: str) -> None:
    (folder / "drafter" / "README.md").write_text(f"---\nlicense: {licence}\n---\n")


def own_folder(tmp_path: Path) -> Path:
    return make_pair(TARGET, DRAFTER, tmp_path / "pair")


def test_a_licence_without_derivatives_is_refused_and_permission_overrides(tmp_path: Path, tokenizer: Any) -> None:
    folder = own_folder(tmp_path)
    state_licence(folder, "cc-by-nc-nd-4.0")
    with pytest.raises(ValueError, match=r"cc-by-nc-nd-4\.0 of .* allows no derivatives.*has_permission=True"):
        run(folder, tokenizer, tmp_path / "run", DrafterCallback(every=1), num_steps=1)
    allowed = DrafterCallback(every=1, has_permission=True, steps=1, settings=RECIPE, time_share=None)
    trainer = run(folder, tokenizer, tmp_path / "allowed", allowed, num_steps=1)
    assert of_log(trainer, "drafter/steps") == [1]


def test_another_tokenizer_is_refused(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    callback = DrafterCallback(every=1)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="tokenizer has 96 tokens and is not the drafter's, of 2048"):
        callback.on_train_begin(None, None, None, model=model, processing_class=make_tokenizer())


def test_a_policy_that_is_no_pair_is_refused(tokenizer: Any) -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    with pytest.raises(ValueError, match="is no pair"):
        DrafterCallback(every=1).on_train_begin(None, None, None, model=target, processing_class=tokenizer)


def test_a_pair_without_a_drafter_of_the_package_is_refused(tmp_path: Path) -> None:
    folder = own_folder(tmp_path)
    content = json.loads((folder / "dflash.json").read_text())
    (folder / "dflash.json").write_text(json.dumps({**content, "version": "99.0.0"}))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="no drafter of this package"):
        DrafterCallback(every=1).on_train_begin(None, None, None, model=model)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({}, "every and when_tau_falls are left out"),
        ({"every": 0}, "every=0"),
        ({"when_tau_falls": 1.5}, "when_tau_falls=1.5"),
        ({"every": 1, "steps": 0}, "steps=0"),
        ({"every": 1, "time_share": 2}, "time_share=2"),
        ({"every": 1, "history": []}, r"history=\[\]"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_at_once(keywords: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DrafterCallback(**keywords)


def test_a_loss_that_is_not_finite_leaves_the_drafter_as_it_was(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    callback = DrafterCallback(every=1000, steps=1, settings=RECIPE)
    trainer = run(folder, tokenizer, tmp_path, callback, num_steps=1)
    examples = list(callback.rollouts.examples)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    before = copy.deepcopy(callback.drafter.state_dict())
    with torch.no_grad():
        next(callback.trainer.student.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        callback.trainer.train(examples, 1)
    after = callback.drafter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())
    assert all(parameter.grad is None for parameter in callback.trainer.student.parameters())
    with pytest.raises(ValueError, match="no examples"):  # it looked for some without an end
        callback.trainer.train([], 1)
