"""A step on a GPU without a GPU: fake tensors on "cuda", and Inductor's code for one. Needs torch's CUDA build.

Counts are compared with those under `benchmarks/results`, which the programs of the same names beside this file write: what
changes a count on purpose writes them anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


pytestmark = pytest.mark.cuda_build
if torch.version.cuda is None:
    pytest.skip("needs torch's CUDA build", allow_module_level=True)

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import device_operations as operations  # noqa: E402  which counts, and shares its arguments with the benchmarks


def committed(name: str) -> dict[str, Any]:
    """A result; skips where it was written with other versions, which dispatch otherwise."""
    result: dict[str, Any] = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    theirs = {package: result["environment"][package].split("+")[0] for package in ("torch", "transformers")}
    mine = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    if mine != theirs:
        pytest.skip(f"the counts are those of {theirs}")
    return result


@pytest.mark.parametrize("path", ["eager", "compiled"])
@pytest.mark.parametrize("mode", operations.MODES)
def test_a_step_on_a_gpu(mode: str, path: str) -> None:
    """Promise: it waits where it reads the verdict and nowhere else, and writes no logits in float32.

    A read of a number that is not on the host, and an operation on tensors of two devices, raise by themselves.
    """
    counts, waits, faults = operations.on_fake_gpu(mode, path == "compiled")
    assert vars(faults) == {"wide": set(), "strays": set(), "waits": set()}
    assert set(waits) == {operations.MODES[mode][2]}
    (row,) = [row for row in committed("device_operations")["modes"] if (row["mode"], row["path"]) == (mode, path)]
    assert counts == row["operations"]


def test_an_eager_step_is_no_longer_than_the_native_one() -> None:
    """By operations dispatched, on shallow models and on deep ones."""
    if not operations.HAS_NATIVE:
        pytest.skip("this transformers has no DFlash of its own")
    for layers in operations.DEPTHS:
        counts = operations.beside_native(*layers)
        assert counts["ours"] <= counts["native"]


def test_faults_are_seen() -> None:
    """The watch itself: a wide copy, a number taken along from the host, a copy that waits."""
    watch = operations.Watch()
    with operations.fake_gpu(operations.Gate(), watch), watch:
        logits = torch.zeros(16, operations.VOCAB_SIZE, dtype=torch.bfloat16, device="cuda")
        logits.float()
        logits + torch.tensor(1.0)
        torch.tensor([1, 2], device="cuda")
        with pytest.raises(Exception, match=r"item|data-dependent|_local_scalar_dense"):
            logits.amax().item()
    assert all(vars(watch.faults).values())


def test_the_code_for_a_gpu_launches_no_more_than_it_did(tmp_path: Path) -> None:
    """Of two layers, one of the drafter; in a process of its own, which is made to believe in a GPU."""
    written = tmp_path / "code.json"
    command = [sys.executable, str(HERE / "device_code.py"), "--smoke", "--output", str(written)]
    folders = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=folders, cwd=BENCHMARKS.parent)
    assert ended.returncode == 0, ended.stderr[-2000:]
    expected = committed("device_code_qwen3")["smoke"]
    for mine, theirs in zip(json.loads(written.read_text(encoding="utf-8"))["smoke"], expected, strict=True):
        assert mine["launches"] <= theirs["launches"], mine["what"]
        assert mine["over_vocabulary"] == theirs["over_vocabulary"]
        assert mine["allocated_bytes"] <= theirs["allocated_bytes"]
        assert not mine["timed_products"]
