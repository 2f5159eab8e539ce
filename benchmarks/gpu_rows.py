"""The rows of `gpu.py`: which there are, how long each may take, and what follows from their figures. It imports no torch."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from gpu_runner import MEASURED, Row, new_row


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
# The other ways' acceptance is not the script's: only their step's time means something.
IN_RATIOS = ("generate", "static", "eager", "compiled", "adaptive", "useless", "sampled")
TRAINING = {"library": "training step, the library's attention", "sdpa": "training step, SDPA"}

SHAPES = ("qwen3-8b", "qwen3-0.6b")
SMOKE: dict[str, Any] = {"shapes": ("smoke",), "contexts": (16, 24), "batches": (1, 2)}

# Seconds that a row may take. They end what hangs; compiling a large pair for the first time takes a minute or two.
LIMITS = {"floor": 90.0, "training": 90.0, "compiled": 240.0, "static": 150.0, "generate": 60.0, "native": 60.0}
OTHER_LIMIT = 120.0
LONG_CONTEXT, LONG_LIMIT = 16384, 45.0  # and so many more for a long prompt

# How the figures of a row are printed.
FIGURES = {
    "copy_gb_per_second": "a copy moves {:,.0f} GB/s",
    "tokens_per_second": "{:,.0f} tokens/s",
    "ms_per_step": "{:.2f} ms a step",
    "tokens_per_step": "{:.2f} tokens a step",
    "peak_memory_gb": "peak {:.1f} GB",
    "not_compiled_because": "NOT compiled: {}",
    "recordings": "{} recordings",
    "compilations": "{} compilations",
    "skips": "{} skips",
}


def all_rows(
    shapes: Sequence[str] = SHAPES, contexts: Sequence[int] = (512, 4096, 32768), batches: Sequence[int] = (1, 8)
) -> list[Row]:
    """Every row, in order of worth.

    The first rows tell most, one shape after the other: the shortest context by every way, a batch, the growth
    with the context, training. All other rows follow.
    """
    short, few, many = contexts[0], batches[0], batches[-1]
    first = ("generate", "compiled", "eager", "static", "native")
    rows: list[Row] = []
    for shape in shapes:
        rows.append(new_row(f"{shape}/floor", LIMITS["floor"], kind="floor", shape=shape))
        rows += [decode_row(shape, short, few, way) for way in first]
        rows += [decode_row(shape, short, many, way) for way in first[:2]]
        rows += [decode_row(shape, short, few, way) for way in WAYS]
        rows += [decode_row(shape, context, few, way) for context in contexts[1:] for way in first[:2]]
        rows += [
            new_row(f"{shape}/training/{way}", LIMITS["training"], kind="training", shape=shape, way=way)
            for way in TRAINING
        ]
    rows += [decode_row(*which) for which in product(shapes, contexts, batches, WAYS)]
    return list({row["name"]: row for row in rows}.values())


def decode_row(shape: str, context: int, batch: int, way: str) -> Row:
    limit = LIMITS.get(way, OTHER_LIMIT) + (LONG_LIMIT if context >= LONG_CONTEXT else 0.0)
    setting = {"shape": shape, "context": context, "batch": batch, "way": way}
    return new_row(f"{shape}/{context}x{batch}/{way}", limit, kind="decode", **setting)


def chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose names match one of the patterns (as file names do), in order of worth; all without patterns.

    Raises:
        ValueError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row["name"], pattern) for row in rows):
            raise ValueError(f"--rows {pattern!r} matches no row: choose from those that --list prints.")
    return [row for row in rows if not patterns or any(fnmatchcase(row["name"], pattern) for pattern in patterns)]


def derived(measured: Sequence[Row]) -> list[Row]:
    """The rows for JSON; beside the figures of a decode stand its floor and its ratios, at the tokens that a step gave."""
    rows = [dict(row) for row in measured]
    done = [row for row in rows if row["status"] == MEASURED]
    decoded = {_point(row): row for row in done if row["kind"] == "decode"}
    bandwidths = {row["shape"]: row["copy_gb_per_second"] for row in done if row["kind"] == "floor"}
    for row in done:
        if row["kind"] == "training":
            row["label"] = f"{TRAINING[row['way']]} ({row['attention']})"
    for row in decoded.values():
        name, reason = WAYS[row["way"]], row["not_compiled_because"]
        # Nothing is called compiled that was not.
        row["label"] = f"{name.replace(', compiled', '')}, NOT compiled: {reason}" if reason else name
        if row["shape"] in bandwidths:
            row["floor_ms"] = row["step_bytes"] / bandwidths[row["shape"]] / 1e6
            row["step_over_floor"] = row["ms_per_step"] / row["floor_ms"]
        for way in ("generate", "static"):
            if row["way"] in IN_RATIOS and (plain := decoded.get(_point({**row, "way": way}))):
                row[f"{way}_over_this"] = plain["ms_per_token"] / row["ms_per_token"]
        if row["batch"] > 1 and (one := decoded.get(_point({**row, "batch": 1}))):
            row["over_batch_of_1"] = row["ms_per_step"] / one["ms_per_step"]
    return [_rounded(row) for row in rows]


def line(row: Row) -> str:
    """What became of a row, in one line."""
    said = [f"{row['status']}, {row['reason']}"]
    if row["status"] == MEASURED:
        said = [form.format(row[name]) for name, form in FIGURES.items() if row.get(name)]
        said += ["WRONG TEXT"] * (not row.get("is_right", True))
    took = "" if row["seconds"] is None else f" [{row['seconds']:.0f} s]"
    return f"{row['name']}: {', '.join(said)}{took}"


def _point(row: Row) -> tuple[Any, ...]:
    return row["shape"], row["context"], row["batch"], row["way"]


def _rounded(value: Any) -> Any:
    """For JSON, which has no infinity."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value
