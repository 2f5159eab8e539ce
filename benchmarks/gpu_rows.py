"""The rows of `gpu.py`: which there are, how long each may take, and what follows from their figures. It imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from gpu_runner import MEASURED, Row


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

# Ratio, the bound that it must keep, and the one to aim at.
GOALS = {
    "step_over_floor": ("at most", 1.6, 1.15),
    "generate_over_ours": ("at least", 12.0, 25.0),
    "static_generate_over_ours": ("at least", 4.0, 5.0),
    "large_batch_over_small": ("at most", 1.3, 1.1),
}


def all_rows(
    shapes: Sequence[str] = SHAPES, contexts: Sequence[int] = (512, 4096, 32768), batches: Sequence[int] = (1, 8)
) -> list[Row]:
    """Every row, in order of worth.

    The first rows are those of the goals, one shape after the other: the shortest context by every way, a batch, the growth
    with the context, training. All other rows follow.
    """
    short, few, many = contexts[0], batches[0], batches[-1]
    rows: list[Row] = []
    for shape in shapes:
        rows.append(Row(f"{shape}/floor", LIMITS["floor"], {"kind": "floor", "shape": shape}))
        first = ("generate", "compiled", "eager", "static", "native")
        rows += [decode_row(shape, short, few, way) for way in first]
        rows += [decode_row(shape, short, many, way) for way in ("generate", "compiled")]
        rows += [decode_row(shape, short, few, way) for way in WAYS if way not in first]
        rows += [decode_row(shape, context, few, way) for context in contexts[1:] for way in ("generate", "compiled")]
        for way in TRAINING:
            setting = {"kind": "training", "shape": shape, "way": way}
            rows.append(Row(f"{shape}/training/{way}", LIMITS["training"], setting))
    rows += [decode_row(*which) for which in product(shapes, contexts, batches, WAYS)]
    return list({row.name: row for row in rows}.values())


def decode_row(shape: str, context: int, batch: int, way: str) -> Row:
    setting: dict[str, Any] = {"kind": "decode", "shape": shape, "context": context, "batch": batch, "way": way}
    limit = LIMITS.get(way, OTHER_LIMIT) + (LONG_LIMIT if context >= LONG_CONTEXT else 0.0)
    return Row(f"{shape}/{context}x{batch}/{way}", limit, setting)


def chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose names match one of the patterns (as file names do), in order of worth; all without patterns.

    Raises:
        ValueError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            raise ValueError(f"--rows {pattern!r} matches no row: choose from those that --list prints.")
    return [row for row in rows if not patterns or any(fnmatchcase(row.name, pattern) for pattern in patterns)]


def derived(measured: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for JSON; beside the figures of a decode stand its floor and its ratios, at the tokens that a step gave."""
    rows = [row.to_dict() for row in measured]
    bandwidths = {row["shape"]: row["copy_gb_per_second"] for row in rows if "copy_gb_per_second" in row}
    plain = {_point(row): row["ms_per_token"] for row in rows if row.get("way") == "generate" and _is_decoded(row)}
    for row in rows:
        if row["kind"] == "training" and row["status"] == MEASURED:
            row["label"] = f"{TRAINING[row['way']]} ({row['attention']})"
        if not _is_decoded(row):
            continue
        name, reason = WAYS[row["way"]], row["not_compiled_because"]
        # Nothing is called compiled that was not.
        row["label"] = f"{name.replace(', compiled', '')}, NOT compiled: {reason}" if reason else name
        if row["shape"] in bandwidths:
            row["floor_ms"] = row["step_bytes"] / bandwidths[row["shape"]] / 1e6
            row["step_over_floor"] = row["ms_per_step"] / row["floor_ms"]
        if row["way"] in IN_RATIOS and _point(row) in plain:
            row["generate_over_this"] = plain[_point(row)] / row["ms_per_token"]
    return [_rounded(row) for row in rows]


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios that have goals, of each shape, as far as their rows were measured."""
    found = []
    decoded = [row for row in rows if _is_decoded(row)]
    for shape in dict.fromkeys(row["shape"] for row in decoded):
        mine = [row for row in decoded if row["shape"] == shape]
        context, batches = min(row["context"] for row in mine), sorted({row["batch"] for row in mine})
        at = {(row["way"], row["batch"]): row for row in mine if row["context"] == context}
        few, many = batches[0], batches[-1]
        ours, larger = at.get(("compiled", few)), at.get(("compiled", many)) if many > few else None
        if ours is None or ours["not_compiled_because"]:
            continue
        plain, static = at.get(("generate", few)), at.get(("static", few))
        ratios = {
            "step_over_floor": ours.get("step_over_floor"),
            "generate_over_ours": plain and plain["ms_per_token"] / ours["ms_per_token"],
            "static_generate_over_ours": static and static["ms_per_token"] / ours["ms_per_token"],
            "large_batch_over_small": larger and larger["ms_per_step"] / ours["ms_per_step"],
        }
        for name, (side, must, aim) in GOALS.items():
            if ratios[name] is not None:
                bound = {"side": side, "must": must, "aim": aim}
                found.append({"shape": shape, "ratio": name, "value": _rounded(ratios[name]), **bound})
    return found


def line(measured: Row) -> str:
    """What became of a row, in one line."""
    row, took = measured.to_dict(), "" if measured.seconds is None else f" [{measured.seconds:.0f} s]"
    if measured.status != MEASURED:
        said = f"{measured.status}, {measured.reason}"
    elif row["kind"] == "floor":
        said = f"a copy moves {row['copy_gb_per_second']:,.0f} GB/s"
    elif row["kind"] == "training":
        speed = f"{row['tokens_per_second']:,.0f} tokens/s, {row['ms_per_step']:,.1f} ms a step"
        said = f"{speed}, peak {row['peak_memory_gb']:.1f} GB, {row['attention']}"
    else:
        notes = [f"{row['ms_per_step']:.2f} ms a step, {row['tokens_per_step']:.2f} tokens a step"]
        notes += [f"NOT compiled: {row['not_compiled_because']}"] * bool(row["not_compiled_because"])
        notes += [f"{row[count]} {count}" for count in ("recordings", "compilations", "skips") if row[count]]
        said = ", ".join(notes + ["WRONG TEXT"] * (not row["is_right"]))
    return f"{measured.name}: {said}{took}"


def _is_decoded(row: dict[str, Any]) -> bool:
    return row["kind"] == "decode" and row["status"] == MEASURED


def _point(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["shape"], row["context"], row["batch"]


def _rounded(value: Any) -> Any:
    """For JSON, which has no infinity."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value
