"""One-threaded worker processes that meet over gloo: two of them waste far less than two threads of one process do."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, multiprocessing
from train_target import WORKER_ENVIRONMENT, WORKERS


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
