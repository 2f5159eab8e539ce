"""`dflash adapt`: rejected drafts recorded, changes of low rank, the drafter as it was among the candidates, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import (
    BLOCK_SIZE,
    SMALL,
    ScriptedDrafter,
    expected_lengths,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
    make_tokenizer,
    save_target,
)

from dflash import DFlashDraftModel, generate_blocks
from dflash.common.files import only_writer
from dflash.common.fingerprints import model_fingerprint
from dflash.model.decoding_dflash import Block
from dflash.training import (
    ADAPTATION,
    Example,
    Trace,
    TrainingRecord,
    adapt,
    build_optimizers,
    load_examples,
    measure_acceptance,
    recorded,
    sample_anchors,
)
from dflash.training.adaptation import AdaptationGoal, Goal, _examples_of
from dflash.training.adaptation_lora import add_low_rank_updates, merged


PROMPTS = [make_prompt(6, seed=seed)[0].tolist() for seed in range(2)]
TINY = replace(
    ADAPTATION,
    steps=12,
    num_anchors=8,
    batch_tokens=256,
    learning_rate=5e-3,
    mixed_precision="no",
    eval_every=6,
    eval_new_tokens=12,
    held_out=2,
    deduplicate=False,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter, and prompts of which few differ, so that what is held out is learned; read-only."""
    folder = tmp_path_factory.mktemp("adapt")
    save_target(folder / "target", num_hidden_layers=2)
    make_drafter(**SMALL).save_pretrained(folder / "drafter")
    for name, prompts in (("asked", PROMPTS), ("general", PROMPTS[:1])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt_ids": ids}) for ids in prompts * 10))
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> Path:
    """A trace of the target's answers, as the command's first half writes it; read-only."""
    target, path = make_target(num_hidden_layers=2), folder / "answers.jsonl"
    trace = Trace(path, target, make_tokenizer(), str(folder / "target"))
    texts = [greedy(target, torch.tensor([prompt]), max_new_tokens=24)[0].tolist() for prompt in PROMPTS]
    for text in texts * 10:
        length = len(PROMPTS[0])
        trace.append(text[:length], text[length:], [length + 3])
    return path


@pytest.fixture
def run(dflash_command: Callable[..., Any], folder: Path) -> Any:
    """`run(output, data, "--steps", 4)`: exit status, standard output, standard error."""

    def call(output: Path, data: Path, *words: Any) -> tuple[int, str, str]:
        pair = ["--target", folder / "target", "--drafter", folder / "drafter", "--data", data, "--output", output]
        tiny = {name: value for name, value in vars(TINY).items() if value != getattr(ADAPTATION, name)}
        flags = [word for name, value in tiny.items() for word in _flag(name.replace("_", "-"), value)]
        return dflash_command("adapt", *pair, *flags, *words)

    return call


def _flag(name: str, value: Any) -> list[Any]:
    return [f"--no-{name}"] if value is False else [f"--{name}", value]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return DFlashDraftModel.from_pretrained(path, dtype=torch.bfloat16).state_dict()


def test_a_trace_holds_the_text_and_the_anchors_of_the_drafts_that_were_rejected(tmp_path: Path) -> None:
    """Promise: an anchor per step of which a draft was rejected, and none of a step that accepted all; blocks pass unchanged."""
    target, prompt, script = make_target(num_hidden_layers=2), make_prompt(), [1, BLOCK_SIZE - 1, 0, 2]
    truth = greedy(target, prompt, max_new_tokens=40)
    drafter = ScriptedDrafter(target, truth, script, **SMALL)
    how: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": [], "prompt_lookup_num_tokens": 0}
    trace = Trace(tmp_path / "trace.jsonl", target, make_tokenizer(), "org/target")
    ids = prompt[0].tolist()
    blocks = recorded(generate_blocks(drafter, target, prompt, max_new_tokens=20, **how), [ids], trace)
    seen = [token_id for block in blocks for token_id in block.token_ids]
    row = json.loads((tmp_path / "trace.jsonl").read_text())
    assert row["prompt_ids"] + row["response_ids"] == ids + seen == truth[0, : len(ids) + 20].tolist()
    anchors, place = [], len(ids)
    for length in expected_lengths(script, 20):
        if length < BLOCK_SIZE and place < len(ids) + 19:  # for the last token nothing is drafted
            anchors.append(place)
        place += length
    assert row["rejected"] == anchors
    (example,) = load_examples(tmp_path / "trace.jsonl")
    assert example.rejected.tolist() == anchors
    assert example.cut(anchors[1] + 1).rejected.tolist() == anchors[:2]

    early = recorded(generate_blocks(drafter, target, prompt, max_new_tokens=20, **how), [ids], trace)
    next(early)
    early.close()
    assert json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[1])["response_ids"] == seen[:1]


def test_each_sequence_of_a_batch_is_recorded_and_what_lookups_proposed_is_not(tmp_path: Path) -> None:
    steps = [
        Block([4], 0, 0, is_prefill=True),
        Block([5, 6], 3, 1),
        Block([7], 3, 0, is_lookup=True),
        Block([8], 3, 0),
    ]
    batch = [replace(one, sequence=sequence) for one in steps for sequence in (0, 1) if sequence or one != steps[1]]
    trace = Trace(tmp_path / "trace.jsonl", make_target(num_hidden_layers=1), make_tokenizer())
    assert list(recorded(batch, [[1], [1, 2, 3]], trace)) == batch
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(row["response_ids"], row["rejected"]) for row in rows] == [([4, 7, 8], [2]), ([4, 5, 6, 7, 8], [3, 6])]


def test_a_share_of_the_anchors_is_where_drafts_were_rejected() -> None:
    """Promise: that share of them, as far as there are as many; the others are random, none twice, and without a record all."""
    mask, rejected = [0] * 4 + [1] * 60, [2, 9, 17, 30, 31, 44, 63]  # 2 and 63 begin no block
    drawn = [
        sample_anchors(mask, 8, seed=0, epoch=epoch, index=0, rejected=rejected, rejected_share=0.5)
        for epoch in range(200)
    ]
    assert all(len(set(anchors)) == 8 and sorted(anchors) == anchors for anchors in drawn)
    assert min(len({9, 17, 30, 31, 44}.intersection(anchors)) for anchors in drawn) == 4
    assert set().union(*drawn) == set(range(4, 63))
    few = sample_anchors(mask, 8, seed=0, epoch=0, index=0, rejected=[9], rejected_share=1.0)
    assert 9 in few
    assert len(few) == 8
    plain = sample_anchors(mask, 8, seed=0, epoch=0, index=0)
    assert plain == sample_anchors(mask, 8, seed=0, epoch=0, index=0, rejected_share=1.0)


def test_a_change_of_low_rank_begins_at_nothing_and_is_merged_into_the_drafters_own_weights() -> None:
    drafter = make_drafter(**SMALL)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    add_low_rank_updates(drafter, 2, seed=0)
    trained = {name for name, value in drafter.named_parameters() if value.requires_grad}
    assert trained
    assert all(re.search(r"weight\.0\.(up|down)$", name) for name in trained)
    assert [type(one).__name__ for one in build_optimizers(drafter, 1e-3, 0.0, 2e-3)] == ["Muon"]
    whole = merged(drafter)
    assert whole.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    whole = merged(drafter)
    inputs = {"noise_embeds": torch.randn(1, 4, 32), "context_hidden_states": torch.randn(1, 3, 32)}
    states = [model(**inputs).last_hidden_state for model in (drafter, whole)]
    assert torch.equal(*states)
    changed = {name for name, value in whole.state_dict().items() if not torch.equal(value, before[name])}
    assert {
        torch.linalg.matrix_rank(whole.state_dict()[name] - before[name], tol=1e-3).item() for name in changed
    } == {2}
    assert not any("norm" in name for name in changed)
    with pytest.raises(ValueError, match="lora_rank=999 and the largest matrix has rank"):
        add_low_rank_updates(make_drafter(**SMALL), 999, seed=0)


def test_a_drafter_with_dominos_head_is_changed_in_low_rank_too() -> None:
    """Its matrices are read as they are changed; the merged drafter proposes the same."""
    drafter, embedding = make_drafter(**SMALL, gru_hidden_dim=6, emb_dim=4), torch.nn.Embedding(96, 32)
    add_low_rank_updates(drafter, 2, seed=0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    states, anchors, head = torch.randn(3, 5, 32), torch.tensor([[3], [4], [5]]), torch.nn.Linear(32, 96)
    found = [model.propose(states, anchors, head, embed=embedding).token_ids for model in (drafter, merged(drafter))]
    assert torch.equal(*found)
    assert not torch.equal(found[0], head(states).argmax(dim=-1))


def test_the_command_answers_adapts_and_says_before_and_after(run: Any, folder: Path, tmp_path: Path) -> None:
    """Promise: prompts alone are enough. What is kept accepts more, is a plain checkpoint, and its card says what was before."""
    output = tmp_path / "my-DFlash"
    words = ["--general", folder / "general.jsonl", "--max-new-tokens", 24, "--steps", 24, "--lora-rank", 4]
    status, out, err = run(output, folder / "asked.jsonl", *words)
    assert status == 0, err
    facts = json.loads((output / "training.json").read_text())
    first, *_, last = facts["curve"]
    assert (first["step"], first["tau"] < last["tau"], facts["best_step"] > 0) == (0, True, True)
    assert first["domains"].keys() == {"asked", "general"}
    trace = (tmp_path / "my-DFlash.answers" / "asked.trace.jsonl").read_text()
    rejected = [json.loads(line)["rejected"] for line in trace.splitlines()]
    assert len(rejected) == 20
    assert all(rejected)
    best = next(point for point in facts["curve"] if point["step"] == facts["best_step"])["domains"]["asked"]
    said = f"asked: tau {first['domains']['asked']['tau']:.2f} before, {best['tau']:.2f} after; accepted by position"
    assert said in out
    card = (output / "README.md").read_text()
    assert f"| asked | {first['domains']['asked']['tau']:.2f} | {best['tau']:.2f} | " in card
    assert "Adapted from `drafter`" in card
    assert str(tmp_path) not in card + json.dumps(facts)
    assert weights(output).keys() == weights(folder / "drafter").keys()
    drafter = DFlashDraftModel.from_pretrained(output, dtype=torch.float32)
    assert measure_acceptance(drafter, make_target(num_hidden_layers=2), PROMPTS, 24).tau > first["tau"]
    assert run(output, folder / "asked.jsonl", *words)[0] == 1  # it holds a run now


def test_streamed_prompts_are_answered_as_far_as_they_are_asked_for(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: no more rows are read, and a log counts their answers."""
    monkeypatch.setattr("dflash.cli.terminal.LINE_SECONDS", 0)
    output = tmp_path / "my-DFlash"
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text((folder / "asked.jsonl").read_text())
    words = ["--max-new-tokens", 24, "--steps", 2, "--lora-rank", 4, "--streaming"]
    status, _, err = run(output, tmp_path / "set", *words)
    assert (status, "give samples (--samples) too" in err) == (1, True)
    status, _, err = run(output, tmp_path / "set", *words, "--samples", 12, "--overwrite")
    assert status == 0, err
    assert "12 of 12: Answering" in err
    assert len((tmp_path / "my-DFlash.answers" / "set.trace.jsonl").read_text().splitlines()) == 12


def test_answers_that_were_not_begun_go_on_and_the_seed_draws_the_rows(run: Any, folder: Path, tmp_path: Path) -> None:
    words = ["--max-new-tokens", 8, "--steps", 1, "--lora-rank", 4, "--samples", 12]
    found = []
    for seed in (0, 1):
        status, _, err = run(tmp_path / f"{seed}", folder / "asked.jsonl", *words, "--seed", seed)
        assert status == 0, err
        rows = map(json.loads, (tmp_path / f"{seed}.answers" / "asked.trace.jsonl").read_text().splitlines())
        found.append(sorted(row["prompt_ids"] for row in rows))
    assert found[0] != found[1]
    # As a kill leaves it before the first answer: the manifest alone.
    answers = tmp_path / "0.answers"
    manifest = json.loads((answers / "asked.manifest.json").read_text())
    (answers / "asked.manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    (answers / "asked.jsonl").unlink()
    (answers / "asked.trace.jsonl").unlink()
    shutil.rmtree(tmp_path / "0")
    status, _, err = run(tmp_path / "0", folder / "asked.jsonl", *words)
    assert status == 0, err
    assert len((answers / "asked.jsonl").read_text().splitlines()) == 12
    # Answers of something else: refused with their trace as it was.
    (answers / "asked.manifest.json").unlink()
    before = (answers / "asked.trace.jsonl").read_text()
    shutil.rmtree(tmp_path / "0")
    status, _, err = run(tmp_path / "0", folder / "asked.jsonl", *words)
    assert (status, "holds something other than a run" in err) == (1, True)
    assert (answers / "asked.trace.jsonl").read_text() == before


def test_overwrite_answers_anew(run: Any, folder: Path, tmp_path: Path) -> None:
    """Promise: `--overwrite` begins with the answers, so that a wrong one does not stay."""
    words = ["--max-new-tokens", 8, "--steps", 1, "--lora-rank", 4, "--samples", 12]
    answers = tmp_path / "drafter.answers" / "asked.trace.jsonl"
    written = []
    for more in ([], ["--overwrite"]):
        status, _, err = run(tmp_path / "drafter", folder / "asked.jsonl", *words, *more)
        assert status == 0, err
        written.append(answers.read_text())
        first, *others = written[-1].splitlines()
        changed = json.loads(first)
        changed["response_ids"][0] += 1
        answers.write_text("\n".join([json.dumps(changed), *others]) + "\n")
    assert written[0] == written[1]


def test_a_drafter_that_only_gets_worse_is_given_back_as_it_was(
    run: Any, folder: Path, answers: Path, tmp_path: Path
) -> None:
    """Promise: never worse. The beginning is a candidate, and the run ends when nothing has improved for `patience` points."""
    good, output = tmp_path / "good", tmp_path / "output"
    assert adapt(folder / "target", folder / "drafter", [answers], good, replace(TINY, steps=24), show_progress=False)
    spoil = replace(TINY, steps=40, eval_every=2, patience=3, learning_rate=10.0, warmup_ratio=0.0)
    record = adapt(folder / "target", good, [answers], output, spoil, show_progress=False)
    assert record.best_step == 0
    assert record.curve[0]["tau"] > 1.2
    assert [point["step"] for point in record.curve] == [0, 2, 4, 6]
    before = weights(good)
    assert all(torch.equal(value, before[name]) for name, value in weights(output).items())
    assert not (tmp_path / "output.state").exists()


def test_what_forgets_a_domain_is_not_better() -> None:
    """The mean of those that are adapted to rises: neither general texts nor one of them may pay for it."""

    def point(step: int, general: float, *own: float) -> dict[str, Any]:
        taus = {"general": general, **{str(place): tau for place, tau in enumerate(own)}}
        return {
            "step": step,
            "tau": sum(own) / len(own),
            "domains": {name: {"tau": tau} for name, tau in taus.items()},
        }

    goal = AdaptationGoal(held_out=[[1]], domains={name: [[1]] for name in ("general", "0", "1")}, general="general")
    record = SimpleNamespace(curve=[], best_tau=float("-inf"))
    assert goal.is_better(point(0, 7.0, 4.0, 4.0), record)
    record.curve, record.best_tau = [point(0, 7.0, 4.0, 4.0)], 4.0
    assert goal.is_better(point(5, 6.9, 4.5, 3.95), record)
    assert not goal.is_better(point(5, 6.8, 4.5, 4.5), record)
    assert not goal.is_better(point(5, 7.5, 5.5, 3.9), record)
    assert not goal.is_better(point(5, 7.5, 3.95, 3.95), record)


def test_divergence_is_one_sentence_and_the_best_weights_are_kept(
    run: Any, folder: Path, answers: Path, tmp_path: Path
) -> None:
    status, _, err = run(tmp_path / "output", answers, "--learning-rate", 1e30)
    assert (status, re.search(r"is nan.*the checkpoint of step 0 is kept in", err) is not None) == (1, True), err
    status, _, err = run(tmp_path / "measured first", answers, "--learning-rate", 1e30, "--eval-every", 1)
    said = r"After step 1 the drafter's logits are NaN or infinite: lower learning_rate=1e\+30; the checkpoint of step 0 is kept"
    assert (status, re.search(said, err) is not None) == (1, True), err
    before = weights(folder / "drafter")
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path / "output").items())


def test_a_run_goes_on_with_its_own_drafter_alone(folder: Path, answers: Path, tmp_path: Path) -> None:
    """Promise: a state of low rank, or of any weights, is not put on another drafter."""
    begun, how = tmp_path / "begun", {"show_progress": False}
    DFlashDraftModel.from_pretrained(folder / "drafter").save_pretrained(begun)
    settings = replace(TINY, lora_rank=2, save_every=3)

    def stop(point: dict[str, Any]) -> None:
        if point["step"]:
            raise MemoryError

    with pytest.raises(MemoryError):
        adapt(folder / "target", begun, [answers], tmp_path / "output", settings, on_point=stop, **how)
    make_drafter(seed=5, **SMALL).save_pretrained(begun)
    with pytest.raises(ValueError, match=r"The run to resume differs \(init: "):
        adapt(folder / "target", begun, [answers], tmp_path / "output", settings, resume=True, **how)
    DFlashDraftModel.from_pretrained(folder / "drafter").save_pretrained(begun)
    record = adapt(folder / "target", begun, [answers], tmp_path / "output", settings, resume=True, **how)
    assert [point["step"] for point in record.curve] == [0, 6, 12]


def test_a_head_alone_is_adapted_and_goes_on_after_a_stop(
    run: Any, folder: Path, answers: Path, tmp_path: Path
) -> None:
    """Promise: the published weights keep their bits, the card names them, and a stop changes nothing."""
    head = {"gru_hidden_dim": 5, "emb_dim": 4}
    words = ["--gru-hidden-dim", 5, "--emb-dim", 4, "--freeze-init"]
    status, _, err = run(tmp_path / "whole", answers, *words)
    assert status == 0, err
    facts = json.loads((tmp_path / "whole" / "training.json").read_text())
    published = DFlashDraftModel.from_pretrained(folder / "drafter", dtype=torch.float32)
    assert facts["adapted"]["weights"] == model_fingerprint(published)
    kept = DFlashDraftModel.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in weights(folder / "drafter").items())

    def stop(point: dict[str, Any]) -> None:
        if point["step"]:
            raise MemoryError

    arguments = folder / "target", folder / "drafter", [answers], tmp_path / "halves"
    settings = replace(TINY, save_every=3, **head, freeze_init=True)
    with pytest.raises(MemoryError):
        adapt(*arguments, settings, on_point=stop, show_progress=False)
    record = adapt(*arguments, settings, resume=True, show_progress=False)
    assert [point["step"] for point in record.curve] == [0, 6, 12]
    assert record.curve == facts["curve"]


def test_bad_input_is_one_sentence_before_anything_is_trained(
    run: Any, dflash_command: Any, folder: Path, answers: Path, tmp_path: Path
) -> None:
    def refused(said: str, data: Path = answers, *words: Any, output: Path = tmp_path / "output") -> None:
        status, _, err = run(output, data, *words)
        assert (status, said in err) == (1, True), err
        assert not (output / "config.json").exists()

    rows = [json.loads(line) for line in answers.read_text().splitlines()]

    def written(name: str, **fields: Any) -> Path:
        (tmp_path / name).write_text("\n".join(json.dumps(row | fields) for row in rows))
        return tmp_path / name

    ours, path = rows[0], tmp_path / "other.jsonl"
    refused(
        f"{path}: Row 1 was recorded with the tokenizer 0a of org/other but ",
        written("other.jsonl", tokenizer="0a", target="org/other"),
    )
    refused(
        f"with the weights 0b of target but {folder / 'target'} has {ours['weights']}",
        written("other.jsonl", weights="0b"),
    )
    refused("holds answers, which are read whole: leave --streaming out", answers, "--streaming", "--samples", 5)
    refused("has at least 6 tokens (a block) and two supervised", written("short.jsonl", response_ids=[5]))
    path.write_text("\n".join(answers.read_text().splitlines()[:9]))
    for held_out, words in (
        (2, ()),
        (24, ("--held-out", 24)),
    ):  # once `held_out=24: … give at most 0` came first, or that no acceptance is measured
        status, _, err = run(tmp_path / "output", path, *words)
        assert (status, err.splitlines()[-1]) == (
            1,
            f"dflash: {path} has 9 usable sequences and held_out is {held_out}, so none can be held out to measure acceptance: "
            "give ten sequences or more, and a held_out above 0.",
        )
        assert "held out:" not in err
    refused("held_out is 0, so none can be held out to measure acceptance", answers, "--held-out", 0)
    (tmp_path / "asked.jsonl").write_text((folder / "asked.jsonl").read_text())
    refused("have the same name in reports (asked)", folder / "asked.jsonl", "--data", tmp_path / "asked.jsonl")
    assert not (tmp_path / "output.answers").exists()
    refused("general_share=1.0: give a share", answers, "--general-share", 1)
    refused("lora_rank=999 and the largest matrix", answers, "--lora-rank", 999)
    with only_writer(tmp_path / "busy"):
        refused("is being written by process", answers, output=tmp_path / "busy")
    trace = ["--target", folder / "target", "--data", folder / "asked.jsonl", "--output", tmp_path / "a.jsonl"]
    status, _, err = dflash_command("regenerate", *trace, "--trace", tmp_path / "t.jsonl")
    assert (status, "there is no drafter: give --drafter" in err) == (1, True)
    words = [*trace, "--trace", tmp_path / "a.jsonl", "--drafter", folder / "drafter"]
    status, _, err = dflash_command("regenerate", *words)
    assert (status, "is also --data or --output" in err) == (1, True)
    words = [
        "--target",
        folder / "target",
        "--data",
        written("other.jsonl", weights="0b"),
        "--output",
        tmp_path / "new",
    ]
    status, _, err = dflash_command("train", *words, "--block-size", 4)
    assert (status, "Row 1 was recorded with the weights 0b of target" in err) == (1, True)


def test_an_adapter_is_refused_as_a_drafter_by_each_command(
    run: Any, dflash_command: Callable[..., Any], answers: Path, tmp_path: Path
) -> None:
    """Promise: one sentence says that it must be merged."""
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for status, _, err in (
        run(tmp_path / "output", answers, "--drafter", adapter),
        dflash_command("check", adapter),
        dflash_command("convert", adapter, tmp_path / "output"),
    ):
        assert (status, err.count("\n")) == (1, 1), err
        assert f"{adapter} is a peft adapter, which holds no whole model: merge it first" in err


def test_a_licence_that_forbids_changes_is_refused_unless_there_is_permission_which_the_card_says(
    run: Any, folder: Path, answers: Path, tmp_path: Path
) -> None:
    card = folder / "drafter" / "README.md"
    card.write_text("---\nlicense: cc-by-nc-nd-4.0\n---\n# A drafter\n")
    try:
        status, _, err = run(tmp_path / "output", answers)
        assert (status, "cc-by-nc-nd-4.0" in err, "allows no derivatives, and adapting makes one" in err) == (
            1,
            True,
            True,
        )
        assert run(tmp_path / "output", answers, "--i-have-permission", "--steps", 1)[0] == 0
    finally:
        card.unlink()
    said = (tmp_path / "output" / "README.md").read_text()
    assert "whose licence is cc-by-nc-nd-4.0. The licence allows no derivatives: " in said
    assert "No licence was stated" not in said


def test_the_licence_of_the_first_drafter_holds_for_what_is_adapted_from_an_adapted_one(
    run: Any, folder: Path, answers: Path, tmp_path: Path
) -> None:
    """Promise: an adapted checkpoint states no licence of its own; the one that it inherited refuses, permits and is named."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(folder / "drafter", first)
    (first / "training.json").write_text(json.dumps({"init_licence": "cc-by-nd-4.0"}))
    words = ["--drafter", first, "--steps", 1]
    status, _, err = run(second, answers, *words)
    assert (status, f"The licence cc-by-nd-4.0 of {first} allows no derivatives" in err) == (1, True), err
    status, _, err = run(second, answers, *words, "--i-have-permission")
    assert status == 0, err
    assert (
        "drafter states none, trained from one of cc-by-nd-4.0 (no derivatives): changed copies may not be shared."
        in err
    )
    facts = json.loads((second / "training.json").read_text())
    assert (facts["init_licence"], facts["has_permission"]) == ("cc-by-nd-4.0", True)
    said = (second / "README.md").read_text()
    assert "whose licence is cc-by-nd-4.0. The licence allows no derivatives: whoever made this drafter stated" in said
    assert "No licence was stated" not in said


# What the general texts are for.


def test_tau_is_the_mean_of_the_domains_that_are_adapted_to() -> None:
    """Promise: the general domain is measured beside them and does not count."""
    trainer: Any = SimpleNamespace(
        measure=lambda prompts: {"step": 3},
        acceptance=lambda prompts: SimpleNamespace(figures=lambda: {"tau": prompts[0][0]}),
    )
    domains = {"first": [[2]], "second": [[4]], "general": [[9]]}
    goal = AdaptationGoal(held_out=[[1]], domains=domains, general="general")
    point = goal.measure(trainer)
    assert (point["step"], point["tau"]) == (3, 3)
    assert {name: figures["tau"] for name, figures in point["domains"].items()} == {
        "first": 2,
        "second": 4,
        "general": 9,
    }
    assert replace(goal, general="").measure(trainer)["tau"] == 5


def test_general_texts_are_at_most_their_share_of_the_tokens() -> None:
    """Promise: drawn by the seed among all of them; those of the other domains are all there, once."""

    def domain(start: int, count: int) -> Any:
        return SimpleNamespace(examples=[Example([token] * 5, [1] * 5) for token in range(start, start + count)])

    domains = {"first": domain(0, 4), "second": domain(10, 8), "general": domain(100, 50)}

    def drawn(share: float, seed: int) -> list[int]:
        examples = _examples_of(domains, "general", share, seed)
        tokens = [example.input_ids[0] for example in examples]
        assert tokens[:12] == [*range(4), *range(10, 18)]
        return tokens[12:]

    some = drawn(0.25, seed=0)
    assert len(some) == len(set(some)) == 4, "20 of 80 tokens"
    assert min(some) >= 100
    assert sorted(some) != [100, 101, 102, 103]
    assert drawn(0.25, seed=0) == some != drawn(0.25, seed=1)
    assert len(drawn(0.9, seed=0)) == 50
    alone = {name: part for name, part in domains.items() if name != "general"}
    assert len(_examples_of(alone, "", 0.25, 0)) == 12


def test_the_general_texts_are_the_last_domain(
    folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: `adapt` measures and trains by the file that is named as the general one."""
    general = shutil.copy(answers, tmp_path / "broad.trace.jsonl")
    given: list[Any] = []

    def train(*arguments: Any) -> Any:
        given.extend(arguments)

    monkeypatch.setattr("dflash.training.adaptation.train_prepared", train)
    adapt(folder / "target", folder / "drafter", [answers], tmp_path / "output", TINY, general=general)
    ready, _, _, options = given
    assert options.goal.general == "broad"
    assert list(options.goal.domains) == ["answers", "broad"]
    num_own = sum(len(example) for example in load_examples(answers, make_tokenizer()))
    assert sum(map(len, ready.examples)) < num_own / 0.7 + 1


def test_a_domain_may_not_be_forgotten_slowly() -> None:
    """Promise: what it has lost is counted from the beginning, and not from the point before."""

    def point(general: float, own: float) -> dict[str, Any]:
        return {"tau": own, "domains": {"general": {"tau": general}, "own": {"tau": own}}}

    goal = AdaptationGoal(held_out=[[1]], domains={"general": [[1]], "own": [[1]]}, general="general")
    record: Any = SimpleNamespace(curve=[point(7.0, 4.0), point(6.9, 4.5)], best_tau=4.5)
    assert goal.is_better(point(6.9, 5.0), record)
    assert not goal.is_better(point(6.8, 5.0), record)


def test_a_point_is_better_where_it_accepts_more_or_nothing_is_held_out() -> None:
    """Promise: the first of equal points stays; without held-out prompts the last one is the best."""
    goal, record = Goal([[1]]), TrainingRecord()
    assert goal.is_better({"tau": 0.0}, record)
    record.best_tau = 2.0
    assert [goal.is_better({"tau": tau}, record) for tau in (1.9, 2.0, 2.1)] == [False, False, True]
    record.best_tau = math.nan
    assert Goal([]).is_better({}, record)
