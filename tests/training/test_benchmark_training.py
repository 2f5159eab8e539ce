"""Benchmarks of training: a table of recipes whose cells are runs of their own, and what a trained drafter accepts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from reporting import tables_of
from tiny_models import MASK_TOKEN_ID, make_drafter, make_target, make_tokenizer, save_target

from dflash.training import TrainingSettings, measure_acceptance, new_drafter, train, with_response


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("recipes", monkeypatch)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark's script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_finished_rows_are_not_run_again_and_equal_time_gives_a_slower_recipe_fewer_steps(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target(tmp_path / "target")
    rows = [{"prompt_ids": [5, 6, 7 + i], "response_ids": [20 + i, *range(30, 44), 8]} for i in range(12)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "recipes.json"
    base = "num_hidden_layers=1+block_size=4+batch_tokens=128+held_out=1+eval_new_tokens=4"
    words = ["recipes.py", "--threads", "1", "--work", str(tmp_path / "work"), "--output", str(output)]
    words += ["--pair", "tiny", str(tmp_path / "target"), str(tmp_path / "answers.jsonl"), "--base", base]
    words += ["--budgets", "4", "--seeds", "2", "--axis", "recipe", "recipe=paper", "recipe=short"]
    speeds = {"paper": 1.0, "short": 2.0}
    monkeypatch.setattr(benchmark, "TIMED_STEPS", 2)
    taken: list[str] = []  # the first steps are for warming up and last 100 s
    ticks = iter([100, 100, 1, 5, 2, 7])

    def seconds_of(step: Any) -> float:
        taken.append(step.__self__.settings.recipe)
        step()
        return next(ticks)

    monkeypatch.setattr(benchmark, "seconds_of", seconds_of)
    cells = {recipe: TrainingSettings(**benchmark.given(base), steps=4, recipe=recipe) for recipe in speeds}
    timed = benchmark.seconds_per_step(tmp_path / "target", tmp_path / "answers.jsonl", cells)
    assert taken == ["paper", "short"] * 3
    assert timed == {"paper": 1.5, "short": 6}

    def result(*more: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        benchmark.main()
        return json.loads(output.read_text())

    first = result()
    monkeypatch.setattr(benchmark, "train_drafter", lambda *_, **__: pytest.fail("ran again"))
    assert result() == first
    monkeypatch.undo()
    busy = iter([1, 8])  # how much slower the machine is each time; what it is first is the first cell's

    def seconds_per_step(target: str, data: str, cells: dict[str, TrainingSettings]) -> dict[str, float]:
        slower = next(busy)
        return {cell: slower * speeds[settings.recipe] for cell, settings in cells.items()}

    monkeypatch.setattr(benchmark, "seconds_per_step", seconds_per_step)
    both = result("--equal", "time")
    assert both["measurements"][:4] == first["measurements"]
    found = [(row["axis"], row["cell"], row["seed"], row["steps"], row["is_base"]) for row in both["measurements"]]
    assert found[:4] == [
        ("recipe, 4 steps", f"recipe={name}", seed, 4, name == "paper") for seed in (0, 1) for name in speeds
    ]
    of_time = [
        ("recipe, time of 4 steps", f"recipe={name}", seed, 4 // speeds[name], name == "paper")
        for seed in (0, 1)
        for name in speeds
    ]
    assert found[4:] == of_time
    assert [row["tau"] for row in both["measurements"][4::2]] == [row["tau"] for row in first["measurements"][::2]]
    assert both["measurements"][1]["recipe"].startswith("short (learning_rate=0.002")
    assert both["kind"] == "training"
    assert str(tmp_path) not in json.dumps(both)
    with pytest.raises(ValueError, match=r"runs of another base \(held_out: 1, now 2\)"):
        result("--base", base.replace("held_out=1", "held_out=2"))
    with pytest.raises(
        ValueError, match=r"to resume differs \(held_out: 1, now 2\)"
    ):  # the runs below --work are of that base too
        result("--base", base.replace("held_out=1", "held_out=2"), "--output", str(tmp_path / "new.json"))
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows[1:])))
    with pytest.raises(ValueError, match=r"Runs of tiny, seed 0, have other data: give another --work"):
        result("--budgets", "5")


def test_the_intervals_are_students_and_gains_those_of_one_seed(benchmark: ModuleType) -> None:
    rows = [
        {"target": "t", "axis": "a", "cell": cell, "seed": seed, "is_base": cell == "base", "tau": tau}
        | {"accepted_per_block": tau}
        for cell, taus in (("base", (1.0, 2.0, 3.0)), ("other", (1.5, 2.5, 4.5)))
        for seed, tau in enumerate(taus)
    ]
    base, other = benchmark.summarise(rows)
    assert (base["tau"], base["tau_interval"]) == (2.0, 2.4843)  # 4.303 / sqrt(3)
    assert (base["gain"], base["gain_interval"]) == (None, None)
    assert (other["gain"], other["gain_interval"]) == (0.8333, 1.4343)  # of 0.5, 0.5 and 1.5
    assert benchmark.summarise(rows[:1])[0]["tau_interval"] is None


def test_a_trained_drafter_is_measured_beside_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block size: its tau is the trainer's, its texts are the target's, and what it was trained on is there."""
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    drafter = new_drafter(target, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=1, block_size=4)
    data = [with_response([5, 6], [20 + i, 21, 22, 23, 24]) for i in range(4)]
    settings = TrainingSettings(steps=2, mixed_precision="no", num_anchors=2)
    train(drafter, target, data, [], settings, tmp_path / "my-DFlash", show_progress=False)
    facts_file = tmp_path / "my-DFlash" / "training.json"
    facts_file.write_text(json.dumps({**json.loads(facts_file.read_text()), "figures": {"said_before": {"tau": 9.0}}}))
    rows = [{"prompt_ids": [5, 6, 7]}, {"prompt": "why"}, {"text": "once upon a time there"}]
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "more_held.jsonl").write_text(json.dumps({"prompt": "how"}))
    # More threads would stay for all tests after this one.
    words = ["pair.py", "drafter", "--threads", "1", "--repeats", "1", "--max-new-tokens", "10"]
    words += ["--block-sizes", "4", "3", "--output", str(tmp_path / "d.json")]
    for name, *places in (
        ("target", "target"),
        ("drafter", "my-DFlash"),
        ("prompts", "held.jsonl", "more_held.jsonl"),
    ):
        words += [f"--{name}", *(str(tmp_path / place) for place in places)]
    monkeypatch.setattr(sys, "argv", words)
    script = load("pair", monkeypatch)
    script.main()
    with pytest.raises(SystemExit):
        script.arguments([*words[1:], "--domino"])
    result = json.loads((tmp_path / "d.json").read_text())
    facts = json.loads((tmp_path / "my-DFlash" / "training.json").read_text())
    assert (result["kind"], result["training"]) == ("drafter", facts)
    assert [row["task"] for row in result["summary"]] == ["held"] * 3 + ["more held"] * 3
    ((_, cells),) = tables_of(result)
    assert [row[0] for row in cells] == ["held"] * 2 + ["more held"] * 2  # as measured, not as said before
    plain, whole, short = result["summary"][:3]
    assert [row["method"] for row in (plain, whole, short)] == [
        "target.generate",
        "dflash, block 4",
        "dflash, block 3",
    ]
    assert all((row["prompts"], row["identical"]) == (3, 3) for row in (plain, whole, short))
    assert (
        max(map(max, (m["acceptance_lengths"] for m in result["measurements"] if m["method"] == short["method"]))) <= 3
    )
    saved = script.DFlashDraftModel.from_pretrained(tmp_path / "my-DFlash", dtype=script.torch.float32).eval()
    prompts = [script.ids_to_continue(row, make_tokenizer()) for row in rows]
    assert whole["tau_micro"] == pytest.approx(measure_acceptance(saved, target, prompts, 10).tau, abs=1e-4)
    assert str(tmp_path) not in json.dumps(result)


def test_sampling_compares_drawn_positions_with_the_argmax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the proposals are really drawn: they are lent uniforms, and another draw is accepted otherwise."""
    script = load("pair", monkeypatch)
    target, drafter = make_target(), make_drafter()
    drafter.propose = script.draw_positions_independently(drafter)
    drafter.causal_head = lambda _: drafter.propose
    taus = {rule: script.sampled_tau(target, drafter, [[5, 6, 7]] * 4, rule, 16) for rule in ("rejection", "block")}
    assert all(tau >= 1 for tau in taus.values())
    few, many = (script.scripted(share, 3, num_blocks=200) for share in (0.2, 0.9))
    assert many["accepted_by_block"] > few["accepted_by_block"]
    assert few["gain"] >= 1
