"""Estimates the memory of a run from its shapes and its time from a few measured steps: `dflash train --dry-run`."""

import copy
import os
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dflash.common.messages import Announce, counted, say_nothing
from dflash.common.stopwatch import seconds_of
from dflash.model.generation_dflash import generate_blocks

from .loading import Prepared, prepare, prompt_of
from .run import tracker_options
from .settings import TrainingSettings
from .size_estimate import estimate_memory, oversize
from .sources import Source
from .trainer import Trainer


# Number of steps to measure, after one step that is not measured.
MEASURED_STEPS = 3


def rehearse(
    target: str,
    data: Source | Sequence[Source],
    settings: TrainingSettings,
    announce: Announce = say_nothing,
) -> Iterator[str]:
    """Yields lines on the memory and time that [`train_drafter`] would need with these arguments. It writes no output.

    The models and the data are loaded, and a few steps are trained and measured, while the lines are read. Processes
    other than the first do the same and yield no lines.

    Raises:
        ValueError: as [`train_drafter`].

    Example:
        >>> for line in rehearse("Qwen/Qwen3-8B", "chats.jsonl", TrainingSettings(steps=1000)):
        ...     print(line)
    """
    tracker_options(settings, Path())  # raises for a tracker that is not installed, as the run itself would
    ready = prepare(target, data, settings, announce)
    trainer = Trainer(ready.drafter, ready.target, ready.examples, replace(settings, features=None))
    for lines in (_described(ready, settings, trainer), _measured(trainer)):
        for line in lines:
            if trainer.is_first:
                yield line


def _described(ready: Prepared, settings: TrainingSettings, trainer: Trainer) -> Iterator[str]:
    """Yields the lines that need no measurement: recipe, steps, data, drafter, memory and stored features."""
    drafter = ready.drafter
    config = drafter.config
    batches = trainer.batches_per_epoch
    tokens = sum(len(example) for example in ready.examples)
    supervised = sum(sum(example.mask_array) for example in ready.examples)
    epochs = trainer.num_steps / batches
    yield f"recipe    {settings.recipe_text()}: {trainer.rates}, weights {settings.position_weights}"
    yield f"steps     {trainer.num_steps:,} ({epochs:.1f} epochs of {batches:,} batches)"
    yield (
        f"data      {counted(len(ready.examples), 'sequence')}, {tokens:,} tokens an epoch, {supervised:,} "
        f"supervised; {counted(len(ready.held_out), 'held-out prompt')}"
    )
    yield (
        f"drafter   {drafter.num_parameters():,} parameters in {counted(config.num_hidden_layers, 'layer')}, "
        f"block {config.block_size}, target layers {config.target_layer_ids}; target "
        f"{ready.target.num_parameters():,} parameters"
    )
    too_large = oversize(drafter, ready.target, settings.init is not None)
    if too_large:
        yield f"size      {too_large}"
    yield _memory(trainer)
    if settings.features is not None:
        yield (
            f"features  {_bytes(trainer.feature_bytes())} in {settings.features}, written once by the run; computed "
            "anew in the steps measured here"
        )


def _memory(trainer: Trainer) -> str:
    sizes = estimate_memory(trainer)
    total = _bytes(sum(sizes.values()))
    parts = [f"{name} {_bytes(size)}" for name, size in sizes.items()]
    listed = ", ".join(parts)
    kept = _kept_by_glibc(trainer)
    return f"memory    about {total} per process, estimated from shapes: {listed}{kept}"


def _measured(trainer: Trainer) -> Iterator[str]:
    """Trains a few steps, and yields lines on their time, the cost of a decoding step, and the peak memory."""
    if trainer.num_steps <= MEASURED_STEPS:
        yield "time      not measured: the run is shorter than a measurement"
        return
    trainer.step()
    seconds = seconds_of(lambda: [trainer.step() for _ in range(MEASURED_STEPS)]) / MEASURED_STEPS
    yield (
        f"time      about {_duration(seconds * trainer.num_steps)}: {seconds:.2f} s a step, mean of {MEASURED_STEPS} "
        "measured steps; the decoding of held-out prompts is not included"
    )
    if trainer.accelerator.num_processes == 1:
        ratio = _step_cost(trainer)
        yield (
            f"speed     a verify step, draft included, takes as long as {ratio:.1f} tokens of plain decoding: decoding "
            "is faster if tau is larger than that"
        )
    device = trainer.accelerator.device
    if device.type == "cuda":
        yield f"measured  {_bytes(torch.cuda.max_memory_allocated(device))} at most on {device}, in these steps"
    else:  # the peak of everything in the process, Python and the data too
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        yield f"measured  {_bytes(peak)} at most on {device}, by the whole process up to here"


def _kept_by_glibc(trainer: Trainer) -> str:
    """Returns a note that freed memory which glibc keeps is not included in the estimate; empty where there is none."""
    is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ
    if trainer.accelerator.device.type != "cpu" or platform.libc_ver()[0] != "glibc" or is_set:
        return ""
    return "; freed memory that glibc keeps is not included (set MALLOC_MMAP_THRESHOLD_=65536 to have none)"


def _step_cost(trainer: Trainer) -> float:
    """Returns the time of a decoding step with the drafter, divided by the time of a token without it.

    Both run eagerly after a short prompt. The drafter has the target's dtype, as when it is used, and not the precision
    of its training.
    """
    target: Any = trainer.target
    drafter: Any = copy.deepcopy(trainer.decodable_drafter())
    drafter = drafter.to(target.dtype).eval()
    ids = torch.tensor([prompt_of(trainer.examples[0])[:16]], device=target.device)
    eager: dict[str, Any] = {
        "temperature": 0.0,
        "compile": False,
        "cuda_graph": False,
        "prompt_lookup_num_tokens": 0,
        "stop_token_ids": [],
    }
    num_steps = 0

    def plain() -> None:
        target.generate(ids, max_new_tokens=17, min_new_tokens=17, do_sample=False).tolist()

    def drafted() -> None:
        nonlocal num_steps
        blocks = generate_blocks(drafter, target, ids, max_new_tokens=17, **eager)
        num_steps = sum(not block.is_prefill for block in blocks)

    ratios = []
    for _ in range(4):
        of_token = seconds_of(plain) / 16
        of_steps = seconds_of(drafted)
        ratios.append(of_steps / num_steps / of_token)
    return median(ratios[1:])  # the first run is a warm-up


def _bytes(size: float) -> str:
    power = min(3, max(0, int(size).bit_length() - 1) // 10)
    return f"{size / 1024**power:.{power // 2}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
