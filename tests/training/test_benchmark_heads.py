"""The benchmark of heads: runs of equal time, then their drafters in turns, and a figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import heads
import pytest
from tiny_models import save_target


def test_heads_are_trained_and_their_drafters_decode_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_target(tmp_path / "target")
    rows = [{"prompt_ids": [5, 6, 7 + i], "response_ids": [20 + i, *range(30, 44), 8]} for i in range(12)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "heads.json"
    cells = {heads.NO_HEAD: "none", "head=dspark+markov_rank=4": "DSpark"}
    monkeypatch.setattr(heads, "HEADS", cells)
    monkeypatch.setattr(heads.recipes, "seconds_per_step", lambda target, data, settings: dict.fromkeys(settings, 1.0))
    asked: list[int] = []

    def folder_of(work: Path, target: str, cell: str, steps: int, seed: int) -> Path:
        asked.append(steps)
        return work / cell / str(steps)

    monkeypatch.setattr(heads.recipes, "folder_of", folder_of)
    base = "num_hidden_layers=1+block_size=4+batch_tokens=128+held_out=1+eval_new_tokens=6"
    words = ["heads.py", "--threads", "1", "--work", str(tmp_path / "work"), "--output", str(output), "--base", base]
    words += ["--pair", "tiny", str(tmp_path / "target"), str(tmp_path / "answers.jsonl"), "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--budgets", "1", "2"])
    heads.main()
    result: dict[str, Any] = json.loads(output.read_text())
    assert [(row["cell"], row["budget"]) for row in result["measurements"]] == [
        (cell, budget) for budget in (1, 2) for cell in cells
    ]
    first, second = result["speeds"]
    assert (first["head"], second["head"]) == ("none", "DSpark")
    assert first["over_no_head"] == 1.0
    assert first["identical"] == second["identical"] == 1
    assert asked[-2:] == [2, 2], "the drafters that decode are those of the largest budget"
    assert (tmp_path / "heads_tau.png").read_bytes().startswith(b"\x89PNG")
