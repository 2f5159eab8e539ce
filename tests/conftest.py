"""Shared fixtures: tiny models on the CPU, seeded, fp32, offline. Builders and the scripted drafter: `tiny_models.py`.

torch is imported where it is used: the process that only hands tests to others does without it.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from dflash import DFlashDraftModel

# For this process and for those that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models of 32 units lose more to threads than they gain, and a process per core is busy already. So is the compiler's: a pool of
# its own imports torch once more in each process, and whether the CPU has the instructions that it names needs no trial.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# pytest reads every logger that does not propagate, and torch's compiler writes into this one for whoever reads it: that
# takes longer than compiling.
_trace = logging.getLogger("torch.__trace")
_trace.propagate, _trace.handlers = True, []


def pytest_configure(config: pytest.Config) -> None:
    """Tests compute on the CPU, also where there is a GPU: `-m gpu` asks for those that are about it."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """What was imported is no garbage: collections need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global noise and one thread, whatever ran before it."""
    import torch

    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # for the devices that are not there it would note the stack, three times
        torch.default_generator.manual_seed(0)
    if torch.get_num_threads() != 1:  # a benchmark asked for more
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target() -> PreTrainedModel:
    """A Qwen3 target of 4 layers; read-only (a test that changes one builds its own with `make_target`)."""
    from tiny_models import make_target

    return make_target("qwen3")


@pytest.fixture(scope="session", params=["llama", "llama_tied"])
def llama_target(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A Llama-3.1-style target with llama3 rope scaling, with an own and with a tied head; read-only."""
    from tiny_models import make_target

    return make_target(request.param)


@pytest.fixture(scope="session")
def tiny_drafter() -> DFlashDraftModel:
    """A random drafter of 2 layers for `tiny_target`: it is never right; read-only."""
    from tiny_models import make_drafter

    return make_drafter()


@pytest.fixture(scope="session")
def prompt_ids() -> torch.Tensor:
    """Nine ids [1, 9], none of them the pad id."""
    from tiny_models import make_prompt

    return make_prompt()


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that many tests share run many steps; what is compiled, and when, is for `test_compiled.py` to say."""
    from dflash.engine import compiled

    monkeypatch.setattr(compiled, "AUTO_SECONDS", float("inf"))


@pytest.fixture
def dflash_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`dflash_command("eval", …)`: exit status, standard output and standard error of `dflash eval …` in this process."""
    from dflash.cli import app as cli  # most tests need none

    def call(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return (stopped.value.code or 0, *capsys.readouterr())

    return call
