"""The table of recipes: each cell is a run of its own, done once, and what repeats over seeds comes with an interval."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("training_benchmark", BENCHMARKS / "training.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_finished_cell_is_not_run_again(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["training.py", "--smoke", "--only", "scheme", "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "first.json")])
    benchmark.main()
    monkeypatch.setattr(benchmark, "train", lambda *_, **__: pytest.fail("ran again"))
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "second.json")])
    benchmark.main()
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert first["summary"] == second["summary"]
    assert [(row["axis"], row["cell"], row["seeds"]) for row in first["summary"]] == [
        ("scheme", "random", 2),
        ("scheme", "fixed", 2),
    ]
    assert first["kind"] == "training"
    assert str(tmp_path) not in json.dumps(first)
    monkeypatch.setattr(sys, "argv", [*words, "--lr", "1"])
    with pytest.raises(ValueError, match=r"of other settings \(learning_rate: 0\.003, now 1\.0\)"):
        benchmark.main()


def test_cells_change_one_thing_and_are_shared_between_axes(benchmark: ModuleType) -> None:
    args = SimpleNamespace(num_anchors=32, anchors=[8, 32, 256, 512, 1024], layers=2, taps=5)
    subject = SimpleNamespace(most_anchors=300)
    cells = {axis: list(make(args, subject)) for axis, make in benchmark.AXES.items()}
    assert [cell.name for cell in cells["anchors"]] == ["8", "32", "256", "300 and more"]
    assert all("base" in {cell.key for cell in row} for row in cells.values())
    assert all(len({cell.key for cell in row}) == len(row) for row in cells.values())
    assert {cell.key for cell in cells["loss"]} & {cell.key for cell in cells["labels"]} == {"base", "loss=forward_kl"}


def test_the_interval_is_students(benchmark: ModuleType) -> None:
    rows = [
        {"target": "t", "axis": "a", "cell": "c", "tau": tau, "accepted_per_block": tau, "seconds": None}
        for tau in (1.0, 2.0, 3.0)
    ]
    (row,) = benchmark.summarise(rows)
    assert (row["tau"], row["tau_interval"], row["seconds"]) == (2.0, 2.4843, None)  # 4.303 / sqrt(3)
    assert benchmark.summarise(rows[:1])[0]["tau_interval"] is None
