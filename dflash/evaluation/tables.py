"""Results as tables: the columns of every field, the tables that a kind of result has, and a table in Markdown.

It knows nothing about files and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .methods import NATIVE, OURS, PLAIN, PROMPT_LOOKUP
from .results import Row


ROUNDING = ("bfloat16", "float16")

# Headings and rows of cells.
Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Column:
    """How a field of a row is written.

    Attributes:
        heading: Above it.
        write: A row's cell.
        short: The heading on a terminal, where that is another.
    """

    heading: str
    write: Callable[[Row], str]
    short: str | None = None


def _any(key: str, heading: str | None = None) -> Column:
    """A field of any type; figures with four digits."""

    def write(row: Row) -> str:
        value = row[key]
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return Column(heading or key.replace("_", " "), write)


def _figure(
    key: str, heading: str, digits: int, short: str | None = None, unit: str = "", scale: float = 1.0
) -> Column:
    return Column(heading, lambda row: f"{row[key] * scale:.{digits}f}{unit}", short)


def _pair(first: str, second: str, heading: str, digits: int, between: str, short: str | None = None) -> Column:
    def write(row: Row) -> str:
        return between.join(f"{row[key]:.{digits}f}" for key in (first, second) if row.get(key) is not None)

    return Column(heading, write, short)


def _share(key: str, heading: str, short: str | None = None) -> Column:
    """A count, of how many where the row says it."""

    def write(row: Row) -> str:
        of = next((row[whole] for whole in ("prompts", "requests", "chats") if whole in row), None)
        return str(row[key]) if of is None else f"{row[key]} of {of}"

    return Column(heading, write, short)


# By field. A column without any value is left out; a field that is not here is written as it is.
COLUMNS: dict[str, Column] = {
    "task": _any("task"),
    "method": _any("method"),
    "server": _any("server"),
    "concurrency": _figure("concurrency", "requests at once", 0),
    "requests": _figure("requests", "requests", 0),
    "failed": _figure("failed", "failed", 0),
    "identical": _share("identical", "identical texts", "same"),
    "score": _figure("score", "score", 1, unit=" %", scale=100),
    "tau_micro": _figure("tau_micro", "tau", 2),
    "tau_macro": _figure("tau_macro", "tau, macro", 2),
    "tau": _figure("tau", "tau", 2),
    "tau_interval": _figure("tau_interval", "± (95 %)", 2),
    "tokens_per_step": _figure("tokens_per_step", "tokens per step", 2, "tok/ step"),
    "tokens_per_second": _figure("tokens_per_second", "tokens/s", 0, "tok/s"),
    "speedup": _figure("speedup", "speed-up", 2, unit="x"),
    "speedup_p10": _pair("speedup_p10", "speedup_p90", "10 to 90 % of prompts", 1, "-", "10-90 %"),
    "ms_per_step": _figure("ms_per_step", "step, ms", 2, "step ms"),
    "profiled_ms_draft": _figure("profiled_ms_draft", "a step's draft, ms", 2, "draft ms"),
    "profiled_ms_verify": _figure("profiled_ms_verify", "verify, ms", 2, "verify ms"),
    "profiled_ms_rest": _figure("profiled_ms_rest", "rest, ms", 2, "rest ms"),
    "profiled_host_syncs_per_step": _figure("profiled_host_syncs_per_step", "host reads per step", 1, "syncs"),
    "profiled_memory_bytes": _figure("profiled_memory_bytes", "allocated, MiB", 1, "peak MiB", scale=2**-20),
    "compilations": _figure("compilations", "compilations", 0),
    "ms_to_first_token": _figure("ms_to_first_token", "first token, ms", 1, "TTFT ms"),
    "ms_per_output_token": _figure("ms_per_output_token", "per token, ms", 2, "TPOT ms"),
    "ms_to_first_token_p50": _pair(
        "ms_to_first_token_p50", "ms_to_first_token_p99", "first token, ms, p50 / p99", 1, " / "
    ),
    "ms_per_output_token_p50": _pair(
        "ms_per_output_token_p50", "ms_per_output_token_p99", "per token, ms, p50 / p99", 2, " / "
    ),
    "peak_memory_bytes": _figure("peak_memory_bytes", "peak memory, GiB", 2, "peak GiB", scale=2**-30),
    "cost_per_million_tokens": _figure("cost_per_million_tokens", "cost per million tokens", 3),
}
AXES = {
    "context": "context, tokens",
    "length": "new tokens",
    "width": "block",
    "loss": "loss and weights of positions",
    "anchors": "anchors per sequence",
    "scheme": "where anchors stand",
    "layers": "layers of the drafter",
    "taps": "tapped layers",
}
# Fields of the benchmarks' rows, which the tables of bench, eval and canary do not have.
OF_BENCHMARKS: dict[str, Column] = {
    "shape": _any("shape"),
    "batch_size": _any("batch_size", "batch"),
    "prompt_tokens": _figure("prompt_tokens", "prompt tokens", 1),
    "reused_tokens": _figure("reused_tokens", "of them kept", 1),
    "proposals": _any("proposals", "proposals at temperature 1"),
    "axis": Column("what changes", lambda row: AXES.get(row["axis"]) or str(row["axis"])),
    "context_tokens": _any("context_tokens", "context, tokens"),
    "growth": _figure("growth", "growth", 2, unit="x"),
    "ms_per_token": _figure("ms_per_token", "ms per token", 2),
    "speedup_at_stated_tau": _figure("speedup_at_stated_tau", "speed-up", 2, unit="x"),
    "tau_to_match_plain": _figure("tau_to_match_plain", "break-even tau", 2),
    "allocated_bytes": _figure("allocated_bytes", "allocated, MiB", 0, scale=2**-20),
    "over_plain": _figure("over_plain", f"to {PLAIN}", 2, unit="x"),
    "taps_bytes": _figure("taps_bytes", "of it hidden states, MiB", 0, scale=2**-20),
    "way": _any("way", "layout"),
    "over_naive": _figure("over_naive", "to naive", 2, unit="x"),
    "live_bytes": _figure("live_bytes", "peak memory, MiB", 0, scale=2**-20),
    "ms": _figure("ms", "ms", 0),
    "vllm": _any("vllm", "vLLM's CPU kernel"),
    "identical_in_one_batch": _share("identical_in_one_batch", "identical in one batch"),
    "vllm_tau": _figure("vllm_tau", "tau in vLLM", 2),
    "recipe_tau": _any("recipe_tau", "tau"),
    "recipe_gain": _any("recipe_gain", "to the base"),
    "ms_per_step_p10": _pair("ms_per_step_p10", "ms_per_step_p90", "p10-p90", 2, "-"),
    "step_over_floor": _figure("step_over_floor", "x floor", 2),
    "generate_over_this": _figure("generate_over_this", "x generate", 2),
    "peak_memory_gb": _figure("peak_memory_gb", "GB", 1),
}
UNLESS_ZERO = ("failed", "compilations")
DECODED = ("task", "method", "identical", "tau_micro", "tokens_per_step", "tokens_per_second", "speedup")
EVALUATED = ("task", "method", "identical", "score", *DECODED[3:])
# The ways among which a user chooses; the others are variants.
HEADLINE = (PLAIN, PROMPT_LOOKUP, NATIVE, OURS)


def table_of(rows: Sequence[Row], keys: Iterable[str] = COLUMNS, short: bool = False) -> Table:
    """Headings and cells of rows: a column for each of `keys` that a row has a value for, lists left out.

    A field that holds a dict gives a column for each of its names.
    """
    flat = [dict(_flattened(row)) for row in rows]
    paths = list(dict.fromkeys(path for row in flat for path in row))
    columns = {
        path: COLUMNS.get(key) or OF_BENCHMARKS.get(key) or _any(key)
        for key in keys
        for path in paths
        if path[0] == key and (key not in UNLESS_ZERO or any(row.get(path) for row in flat))
    }
    cells = [
        [column.write({**row, path[0]: values[path]}) if path in values else "" for path, column in columns.items()]
        for row, values in zip(rows, flat, strict=True)
    ]
    headings = [(short and column.short) or column.heading for column in columns.values()]
    return [", ".join([*path[1:], heading]) for path, heading in zip(columns, headings, strict=True)], cells


def any_table(rows: Sequence[Row]) -> Table:
    """`table_of` rows of any shape, with every field that they have."""
    return table_of(rows, dict.fromkeys(key for row in rows for key in row))


def tables_of(result: dict[str, Any], headline: bool = False) -> list[Table]:
    """The tables by which a result of its kind is shown, none if it has no rows.

    Args:
        result: What `read_result` gives.
        headline: With the rows of the methods of `HEADLINE` alone.
    """
    parts = PARTS.get(result["kind"], lambda result: [(result["summary"], None)])(result)
    if headline:
        parts = [([row for row in rows if row.get("method") in HEADLINE], keys) for rows, keys in parts]
    return [any_table(rows) if keys is None else table_of(rows, keys) for rows, keys in parts if rows]


# Rows, and the fields that are shown of them; `None`: all.
Part = tuple[list[Row], Sequence[str] | None]


def _summary(*keys: str) -> Callable[[dict[str, Any]], list[Part]]:
    return lambda result: [(result["summary"], keys)]


def _swept(result: dict[str, Any]) -> list[Part]:
    """Methods side by side: by the context if nothing else was swept, or by each value; and what a prompt allocates."""
    timed = [row for row in result["summary"] if row.get("ms_per_token") is not None]
    rows = [row for row in timed if row.get("axis") != "budget"]  # of a tree no tau is stated
    allocated = [row for row in result["summary"] if "allocated_bytes" in row]
    joined: dict[Any, Row] = {}
    by_context = {row.get("axis") for row in rows} == {"context"}
    for row in rows:
        if by_context:
            costs = joined.setdefault(row["method"], {"method": row["method"], "ms_per_token": {}})["ms_per_token"]
            costs[f"after {row['context_tokens']} tokens"] = row["ms_per_token"]
            joined[row["method"]]["growth"] = row["ms_per_token"] / next(iter(costs.values()))
            continue
        axis, value = row.get("axis"), row.get("value")
        point = joined.setdefault((axis, value), {"axis": axis, "value": value})
        point.setdefault("ms_per_token", {})[row["method"]] = row["ms_per_token"]
        if row["method"] != PLAIN:
            for key in ("speedup_at_stated_tau", "tau_to_match_plain"):
                point.setdefault(key, {})[row["method"]] = row.get(key)
    keys = ("method", "axis", "value", "ms_per_token", "growth", "speedup_at_stated_tau", "tau_to_match_plain")
    return [
        (list(joined.values()), keys),
        (allocated, ("context_tokens", "method", "allocated_bytes", "over_plain", "taps_bytes")),
    ]


def _drafter(result: dict[str, Any]) -> list[Part]:
    """What its training record says of held-out prompts, or what was measured afterwards."""
    figures = result["training"].get("figures") or {}
    rows = [{"task": task.replace("_", " "), **row} for task, row in figures.items()] or result["summary"]
    accepting = [row for row in rows if row.get("tau", row.get("tau_micro")) is not None]
    keys = ("task", "method", "identical", "tau", "tau_micro", "tokens_per_step")
    return [(accepting, keys if figures else keys[1:])]


def _recipes(result: dict[str, Any]) -> list[Part]:
    """Tau and its difference to the base, the targets side by side."""
    joined: dict[Any, Row] = {}
    for row in result["summary"]:
        cell = joined.setdefault((row["axis"], row["cell"]), {"axis": row["axis"], "cell": row["cell"]})
        spread = "" if row["tau_interval"] is None else f" ± {row['tau_interval']:.2f}"
        gain = "base" if row["gain"] is None else f"{row['gain']:+.2f} ± {row['gain_interval'] or 0:.2f}"
        cell.setdefault("recipe_tau", {})[row["target"]] = f"{row['tau']:.2f}{spread}"
        cell.setdefault("recipe_gain", {})[row["target"]] = gain
    return [(list(joined.values()), ("axis", "cell", "recipe_tau", "recipe_gain"))]


def _training_step(result: dict[str, Any]) -> list[Part]:
    rows = [
        {**row, "over_naive": row.get("speedup"), "live_bytes": row["peak_memory_bytes"]} for row in result["summary"]
    ]
    losses = [{**row, "live_bytes": row["peak_memory_bytes"]} for row in result.get("losses", ())]
    return [
        (rows, ("way", "batches", "tokens_per_second", "over_naive", "live_bytes")),
        (losses, ("vocabulary", "loss", "ms", "live_bytes")),
    ]


def _device_code(result: dict[str, Any]) -> list[Part]:
    """Launches of the whole cases, else of the smallest ones."""
    rows = []
    for case in result.get("cases") or result.get("smoke", ()):
        products, attention = (case["by_kind"].get(kind, 0) for kind in ("extern_kernels.mm", "flex attention"))
        fused = case["launches"] - products - attention
        rows.append({**case, "matrix products": products, "attention": attention, "fused kernels": fused})
    keys = ("size", "what", "width", "capacity", "num_sequences", "launches", "matrix products", "attention")
    return [(rows, (*keys, "fused kernels"))]


def _device_operations(result: dict[str, Any]) -> list[Part]:
    rows = [
        {
            "mode": row["mode"],
            "path": row["path"],
            "operations from Python, a step": max(row["operations"]),
            "waits of the host, a step": max(row["waits"]),
        }
        for row in result.get("modes", ())
    ]
    return [
        (rows, None),
        ([{**row, "layers": " + ".join(map(str, row["layers"]))} for row in result.get("native", ())], None),
    ]


def _dialects(result: dict[str, Any]) -> list[Part]:
    rows = [
        {
            "checkpoint": name,
            "written by": f"{fixture['package']} {fixture.get('version', '')}",
            f"same outputs, within {result['tolerance']:g}": fixture.get("agrees"),
        }
        for name, fixture in result["fixtures"].items()
    ]
    return [(rows, None)]


def _gpu(result: dict[str, Any]) -> list[Part]:
    """Decoding, training, floors, goals, and what was not measured."""
    of: dict[str, list[Row]] = {}
    for row in result["summary"]:
        of.setdefault(row["kind"] if row["status"] == "measured" else "rest", []).append(row)
    decoded = [{**row, "label": row["label"].split(":")[0]} for row in of.get("decode", ())]
    step = ("ms_per_step", "ms_per_step_p10", "tokens_per_step", "step_over_floor", "generate_over_this")
    return [
        (decoded, ("shape", "context", "batch", "label", *step, "peak_memory_gb", "recordings")),
        (of.get("training", []), ("shape", "label", "tokens_per_second", "ms_per_step", "peak_memory_gb")),
        (of.get("floor", []), ("shape", "copy_gb_per_second")),
        (result.get("goals", []), None),
        (of.get("rest", []), ("name", "status", "reason")),
    ]


# By kind; results of another kind are shown with all their rows and fields.
PARTS: dict[str, Callable[[dict[str, Any]], list[Part]]] = {
    "decode": _summary(*DECODED),
    "eval": _summary(*EVALUATED),
    "serving": _summary(*COLUMNS),
    "batch": _summary("batch_size", "identical", "tokens_per_second", "speedup"),
    "conversation": _summary("turn", "identical", "prompt_tokens", "reused_tokens", "ms_to_first_token"),
    "sampling": _summary("proposals", "prompts", "tau"),
    "sweep": _swept,
    "drafter": _drafter,
    "training": _recipes,
    "training_step": _training_step,
    "engine": _summary("vllm", "identical", "identical_in_one_batch", "tau", "vllm_tau"),
    "device_code": _device_code,
    "device_operations": _device_operations,
    "dialects": _dialects,
    "gpu": _gpu,
}


def caveat(rows: Sequence[Row], dtype: str | None = None) -> str:
    """What has to be said of rows whose texts may differ, and of a speed-up where they differ in length; else empty.

    Args:
        rows: Of `summarise`.
        dtype: The target's, `None` if it is not known.
    """
    said = []
    if dtype in ROUNDING and any("identical" in row for row in rows):
        said.append(
            f"In {dtype} two tokens can be within rounding of each other, and a text may then go another way than "
            f"{PLAIN}'s: --dtype float32 shows that they are equal."
        )
    lengths: dict[Any, set[int]] = {}
    for row in rows:
        if {"task", "method", "tokens"} <= set(row):
            lengths.setdefault(row["task"], set()).add(row["tokens"])
    if any(len(of_task) > 1 for of_task in lengths.values()):
        said.append(
            "Texts that are not identical differ in length here: a speed-up is a ratio of seconds, not of tokens/s."
        )
    return " ".join(said)


def markdown(table: Table) -> str:
    """The table in Markdown."""
    headings, cells = table
    return "\n".join([_line(headings), "|" + "---|" * len(headings), *map(_line, cells)])


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _flattened(row: Row, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Every value with its field, and the further names of one that is nested; lists and what is missing are left out."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flattened(value, (*path, key))
        elif value is not None and not isinstance(value, list):
            yield (*path, key), value
