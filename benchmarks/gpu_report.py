"""What follows from the rows of `gpu.py`: floors, ratios at the tokens that a step gave, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gpu_rows import IN_RATIOS, TRAINING, WAYS
from gpu_runner import MEASURED, Outcome


# Ratio, where it has to be, and where it should be.
GOALS = {
    "step_over_floor": ("at most", 1.6, 1.15),
    "generate_over_ours": ("at least", 12.0, 25.0),
    "static_generate_over_ours": ("at least", 4.0, 5.0),
    "large_batch_over_small": ("at most", 1.3, 1.1),
}

COLUMNS = ("context", "batch", "way", "ms/step", "p10-p90", "tokens/step", "x floor", "x generate", "GB", "graphs")


def derived(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The rows for JSON, those that were measured with what follows from others beside them."""
    rows = [outcome.to_dict() for outcome in outcomes]
    bandwidths = {row["shape"]: row["copy_gb_per_second"] for row in rows if "copy_gb_per_second" in row}
    plain = {_point(row): row["ms_per_token"] for row in rows if row.get("way") == "generate" and _is_decoded(row)}
    for row in rows:
        if not _is_decoded(row):
            continue
        row["label"] = label(row)
        if row["shape"] in bandwidths:
            row["floor_ms"] = row["step_bytes"] / bandwidths[row["shape"]] / 1e6
            row["step_over_floor"] = row["ms_per_step"] / row["floor_ms"]
        if row["way"] in IN_RATIOS and _point(row) in plain:
            row["generate_over_this"] = plain[_point(row)] / row["ms_per_token"]
    return [{name: _rounded(value) for name, value in row.items()} for row in rows]


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios that have goals, of each shape, as far as their rows were measured."""
    found = []
    decoded = [row for row in rows if _is_decoded(row)]
    for shape in dict.fromkeys(row["shape"] for row in decoded):
        mine = [row for row in decoded if row["shape"] == shape]
        context, batch = min(row["context"] for row in mine), min(row["batch"] for row in mine)
        many = max(row["batch"] for row in mine)
        at = {(row["way"], row["batch"]): row for row in mine if row["context"] == context}
        ours = at.get(("compiled", batch))
        if ours is None or ours["not_compiled_because"]:
            continue
        ratios = {"step_over_floor": ours.get("step_over_floor")}
        for name, way in (("generate_over_ours", "generate"), ("static_generate_over_ours", "static")):
            other = at.get((way, batch))
            ratios[name] = other and other["ms_per_token"] / ours["ms_per_token"]
        larger = at.get(("compiled", many)) if many > batch else None
        ratios["large_batch_over_small"] = larger and larger["ms_per_step"] / ours["ms_per_step"]
        for name, value in ratios.items():
            side, must, aim = GOALS[name]
            if value is not None:
                found.append(
                    {"shape": shape, "ratio": name, "value": _rounded(value), "side": side, "must": must, "aim": aim}
                )
    return found


def label(row: dict[str, Any]) -> str:
    """A row's way as it was run: nothing is called compiled that was not."""
    if row["kind"] == "floor":
        return "floor"
    if row["kind"] == "training":
        ran = f" ({row['attention']})" if "attention" in row else ""
        return TRAINING[row["way"]] + ran
    name, reason = WAYS[row["way"]], row.get("not_compiled_because")
    return f"{name.replace(', compiled', '')}, NOT compiled: {reason}" if reason else name


def line(outcome: Outcome) -> str:
    """What became of a row, in one line."""
    row, name = outcome.to_dict(), outcome.row.name
    took = "" if outcome.seconds is None else f" [{outcome.seconds:.0f} s]"
    if outcome.status != MEASURED:
        return f"{name}: {outcome.status}, {outcome.reason}{took}"
    if row["kind"] == "floor":
        return f"{name}: a copy moves {row['copy_gb_per_second']:,.0f} GB/s{took}"
    if row["kind"] == "training":
        speed = f"{row['tokens_per_second']:,.0f} tokens/s, {row['ms_per_step']:,.1f} ms a step"
        return f"{name}: {speed}, peak {row['peak_memory_gb']:.1f} GB, {row['attention']}{took}"
    notes = [f"NOT compiled: {row['not_compiled_because']}"] if row["not_compiled_because"] else []
    notes += [f"{row[count]} {count}" for count in ("recordings", "compilations", "skips") if row[count]]
    notes += [] if row["is_right"] else ["WRONG TEXT"]
    step = f"{row['ms_per_step']:.2f} ms a step, {row['tokens_per_step']:.2f} tokens a step"
    return f"{name}: {step}{''.join(f', {note}' for note in notes)}{took}"


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=140)
    for shape in dict.fromkeys(row["shape"] for row in rows if _is_decoded(row)):
        table = Table(*COLUMNS, title=f"{shape}, {title}", title_justify="left", title_style="dim", box=None)
        mine = [row for row in rows if row["shape"] == shape and _is_decoded(row)]
        for row in sorted(mine, key=lambda row: (row["context"], row["batch"])):
            table.add_row(*_cells(row))
        console.print(table)
    found = goals(rows)
    if found:
        table = Table("shape", "ratio", "value", "must", "aim", box=None)
        for goal in found:
            must = f"{goal['side']} {goal['must']}"
            table.add_row(goal["shape"], goal["ratio"], f"{goal['value']:,.4g}", must, str(goal["aim"]))
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    def said(name: str) -> str:
        return f"{row[name]:.2f}" if name in row else ""

    spread = f"{row['ms_per_step_p10']:.2f}-{row['ms_per_step_p90']:.2f}"
    sizes = [str(row["context"]), str(row["batch"])]
    ratios = [said("step_over_floor"), said("generate_over_this")]
    return [
        *sizes,
        WAYS[row["way"]].replace(", compiled", ", NOT compiled" if row["not_compiled_because"] else ", compiled"),
        said("ms_per_step"),
        spread,
        said("tokens_per_step"),
        *ratios,
        f"{row['peak_memory_gb']:.1f}",
        str(row["recordings"]),
    ]


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
