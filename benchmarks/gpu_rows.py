"""Which rows `gpu.py` measures, the most useful ones first, and how long each may take. It imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from gpu_runner import Row


# Ways to decode, as tables name them. All of ours but "eager" are compiled.
WAYS = {
    "generate": "target.generate",
    "static": "target.generate, static cache, compiled",
    "native": "native dflash",
    "eager": "ours, eager",
    "compiled": "ours, compiled",
    "tree": "ours, compiled, tree of 64",
    "adaptive": "ours, compiled, adaptive",
    "useless": "ours, compiled, adaptive, useless drafter",
    "sampled": "ours, compiled, sampled",  # T 1, top-p 0.95, top-k 20
}
OURS = ("eager", "compiled", "tree", "adaptive", "useless", "sampled")
# Of these the script decides what is accepted, or the target writes alone; of the others only a step's time means something.
IN_RATIOS = ("generate", "static", "eager", "compiled", "adaptive", "useless", "sampled")

TRAINING = {"library": "training step, the library's attention", "sdpa": "training step, SDPA"}

SHAPES = ("qwen3-8b", "qwen3-0.6b")
CONTEXTS = (512, 4096, 32768)
BATCHES = (1, 8)
SMOKE_SHAPES, SMOKE_CONTEXTS, SMOKE_BATCHES = ("smoke",), (16, 24), (1, 2)

# Seconds that a row may take. They end what hangs; compiling a large pair for the first time takes a minute or two.
LIMITS = {"floor": 90.0, "training": 90.0, "compiled": 240.0, "static": 150.0, "generate": 60.0, "native": 60.0}
OTHER_LIMIT = 120.0
LONG_CONTEXT, LONG_LIMIT = 16384, 45.0  # and so many more for a long prompt


def all_rows(
    shapes: Sequence[str] = SHAPES, contexts: Sequence[int] = CONTEXTS, batches: Sequence[int] = BATCHES
) -> list[Row]:
    """Every row, in order of worth.

    First what the goals are about, one shape after the other: the shortest context by every way, a batch, the growth with the
    context, training. Then all other rows.
    """
    short, few, many = contexts[0], batches[0], batches[-1]
    rows: list[Row] = []
    for shape in shapes:
        rows.append(floor_row(shape))
        first = ("generate", "compiled", "eager", "static", "native")
        rows += [decode_row(shape, short, few, way) for way in first]
        rows += [decode_row(shape, short, many, way) for way in ("generate", "compiled")]
        rows += [decode_row(shape, short, few, way) for way in WAYS if way not in first]
        rows += [decode_row(shape, context, few, way) for context in contexts[1:] for way in ("generate", "compiled")]
        rows += [training_row(shape, attention) for attention in TRAINING]
    for shape, context, batch, way in product(shapes, contexts, batches, WAYS):
        rows.append(decode_row(shape, context, batch, way))
    return list({row.name: row for row in rows}.values())


def floor_row(shape: str) -> Row:
    """How fast the device reads, and what a step has to read."""
    return Row(f"{shape}/floor", LIMITS["floor"], {"kind": "floor", "shape": shape})


def decode_row(shape: str, context: int, batch: int, way: str) -> Row:
    """One way to decode."""
    setting: dict[str, Any] = {"kind": "decode", "shape": shape, "context": context, "batch": batch, "way": way}
    limit = LIMITS.get(way, OTHER_LIMIT) + (LONG_LIMIT if context >= LONG_CONTEXT else 0.0)
    return Row(f"{shape}/{context}x{batch}/{way}", limit, setting)


def training_row(shape: str, attention: str) -> Row:
    """A step of training."""
    setting = {"kind": "training", "shape": shape, "way": attention}
    return Row(f"{shape}/training/{attention}", LIMITS["training"], setting)


def chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose names match one of the patterns (as file names do), in order of worth; all without patterns.

    Raises:
        ValueError: for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            raise ValueError(f"--rows {pattern!r} matches no row: choose from those that --list prints.")
    return [row for row in rows if not patterns or any(fnmatchcase(row.name, pattern) for pattern in patterns)]
