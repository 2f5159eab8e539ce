"""What both training scripts run on: their common options, and one-threaded worker processes that meet over gloo.

Two such processes waste far less than two threads of one process do.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


WORKERS = 2
# Workers keep their memory: half of the time went into giving pages back to the system and asking for them again.
WORKER_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}


def argument_parser(description: str | None, steps: str) -> argparse.ArgumentParser:
    """A parser with the options that both scripts have; `steps` says how many there are by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gsm8k", default="openai/gsm8k", help="Hub id, folder that holds train.jsonl, or .jsonl file"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true", help="replace folders that exist")
    parser.add_argument("--steps", type=int, help=f"optimiser steps, {steps}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps through the same code")
    return parser


def spawn_workers(work: Callable[..., None], *arguments: Any) -> None:
    """Runs `work(rank, *arguments)` in `WORKERS` processes and waits for them."""
    os.environ |= WORKER_ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_join, args=(work, arguments, f"file://{folder}/meeting"), nprocs=WORKERS)


def _join(rank: int, work: Callable[..., None], arguments: tuple[Any, ...], meeting: str) -> None:
    torch.set_num_threads(1)
    # What `torchrun` would set; accelerate reads it.
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(WORKERS))
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORKERS)
    work(rank, *arguments)
    distributed.destroy_process_group()


def gather(value: Any) -> list[Any]:
    """What the workers give, in the order of their ranks; each of them gets all."""
    values: list[Any] = [None] * WORKERS
    distributed.all_gather_object(values, value)
    return values
