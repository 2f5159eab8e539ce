"""An eager step on a GPU without a GPU: fake tensors on "cuda". Needs torch's CUDA build.

Counts are compared with those of `benchmarks/results/device_counts.json`, which `counts.py` writes: what changes a count on
purpose writes them anew.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from dflash import DFlashConfig
from dflash.engine import recorded, steps
from dflash.engine.waiting import Recordable
from dflash.engine.whole import Inputs, whole_step


pytestmark = pytest.mark.cuda_build
if torch.version.cuda is None:
    pytest.skip("needs torch's CUDA build", allow_module_level=True)

HERE = Path(__file__).parent
sys.path.append(str(HERE))

import counts  # noqa: E402


def committed() -> dict[str, Any]:
    """The result; skips where it was written with other versions, which dispatch otherwise."""
    path = HERE.parents[1] / "benchmarks" / "results" / "device_counts.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    theirs = {package: result["environment"][package].split("+")[0] for package in ("torch", "transformers")}
    mine = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    if mine != theirs:
        pytest.skip(f"the counts are those of {theirs}")
    return result


@pytest.mark.parametrize("mode", counts.MODES)
def test_an_eager_step_launches_and_waits_as_counted(mode: str) -> None:
    """Promise: one wait a step, and no attention of another shape in a text of another length."""
    row = counts.rows_of(counts.SHALLOW, mode)
    assert row["waits"] == 1
    assert row["new_attention_problems"] == 0
    assert row in committed()["summary"]


@pytest.mark.parametrize(
    ("mode", "head"),
    [
        ("chain", {}),
        ("batch of 4", {}),
        ("sampled", {}),
        ("sampled", {"selector_rank": 8, "selector_top_k": 16}),
        ("sampled", {"gru_hidden_dim": 16, "emb_dim": 8}),
        ("sampled", {"markov_rank": 8}),
        ("lookup", {}),
        ("lookups in a batch", {}),
    ],
    ids=str,
)
def test_a_step_that_is_recorded_asks_nothing_of_the_host(
    mode: str, head: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: what refuses to record a step for that reason lets these steps pass, also with drawn proposals."""
    passed = set()
    monkeypatch.setattr(counts, "DFlashConfig", partial(DFlashConfig, **head))

    def record(inputs: Inputs) -> Any:
        with Recordable():
            whole_step(inputs)
        assert (inputs.state.draft_uniforms is not None) == bool(head)
        passed.add(inputs.state.num_looked_up)
        return SimpleNamespace(run=lambda state: whole_step(replace(inputs, state=state)))

    monkeypatch.setattr(recorded, "RecordedStep", record)
    monkeypatch.setattr(recorded, "checked", lambda run, inputs: run())  # fake tensors hold no numbers
    monkeypatch.setattr(steps, "is_in_torch_dispatch_mode", lambda: False)
    lookups: dict[str, Any] = {"num_looked_up": 12}
    modes = counts.MODES | {"lookup": (lookups, 1), "lookups in a batch": (lookups, 4)}
    keywords, num_prompts = modes[mode]
    monkeypatch.setitem(counts.MODES, mode, ({**keywords, "cuda_graph": True}, num_prompts))
    counts.rows_of(counts.SHALLOW, mode)
    assert passed == {"lookup": {0, 12}, "lookups in a batch": {15}}.get(mode, {0})
