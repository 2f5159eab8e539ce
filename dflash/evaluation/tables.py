"""How result rows read as a table: as cells, as Markdown, and in a README between markers.

It knows nothing about result files: rows come in, text goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .methods import PLAIN
from .results import Row


ROUNDING = ("bfloat16", "float16")

Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Column:
    """A field of a row on paper.

    Attributes:
        heading: Above it.
        write: A row's cell.
        short: Its heading on a terminal, where that is another.
    """

    heading: str
    write: Callable[[Row], str]
    short: str | None = None


def _word(key: str) -> Column:
    return Column(key, lambda row: row[key])


def _figure(
    key: str, heading: str, digits: int, short: str | None = None, unit: str = "", scale: float = 1.0
) -> Column:
    return Column(heading, lambda row: f"{row[key] * scale:.{digits}f}{unit}", short)


def _pair(first: str, second: str, heading: str, digits: int, between: str, short: str | None = None) -> Column:
    def write(row: Row) -> str:
        return between.join(f"{row[key]:.{digits}f}" for key in (first, second) if row.get(key) is not None)

    return Column(heading, write, short)


# By a row's field. A column without any value is left out.
COLUMNS: dict[str, Column] = {
    "task": _word("task"),
    "method": _word("method"),
    "server": _word("server"),
    "concurrency": _figure("concurrency", "requests at once", 0),
    "requests": _figure("requests", "requests", 0),
    "failed": _figure("failed", "failed", 0),
    "identical": Column("identical texts", lambda row: _identical(row), "same"),
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
UNLESS_ZERO = ("failed", "compilations")
DECODED = ("task", "method", "identical", "tau_micro", "tokens_per_step", "tokens_per_second", "speedup")


def table_of(rows: Sequence[Row], keys: Iterable[str] = COLUMNS, short: bool = False) -> Table:
    """Headings and cells of rows, a column for each of `keys` ([`COLUMNS`]) that any row has a value for."""
    shown = {
        key: COLUMNS[key]
        for key in keys
        if any(row.get(key) is not None and (key not in UNLESS_ZERO or row[key]) for row in rows)
    }
    cells = [["" if row.get(key) is None else column.write(row) for key, column in shown.items()] for row in rows]
    return [(short and column.short) or column.heading for column in shown.values()], cells


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


def any_table(rows: Sequence[Row]) -> Table:
    """Headings and cells of rows of any shape: a column per number or word, nested ones by their path; lists are left out.

    Fields of [`COLUMNS`] are written as they are there.
    """
    flat = [dict(_flattened(row)) for row in rows]
    paths = list(dict.fromkeys(path for row in flat for path in row))
    cells = [[_cell(row, path, values.get(path)) for path in paths] for row, values in zip(rows, flat, strict=True)]
    return [_heading(path) for path in paths], cells


def markdown(table: Table) -> str:
    """The table in Markdown."""
    headings, cells = table
    return "\n".join([_line(headings), "|" + "---|" * len(headings), *map(_line, cells)])


def with_table(readme: str, name: str, table: str) -> str:
    """`readme` with what stands between the markers of `name` replaced; ValueError if they are not there once, in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        raise ValueError(
            f"The README has no place for this table: put {begin} and {end} there, each once, in this order."
        )
    head, rest = readme.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _identical(row: Row) -> str:
    of = row.get("prompts", row.get("requests"))
    return str(row["identical"]) if of is None else f"{row['identical']} of {of}"


# Where a value stands in a row: its field, and of nested ones each further name.
Path = tuple[str, ...]


def _flattened(row: Row, path: Path = ()) -> Iterable[tuple[Path, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flattened(value, (*path, key))
        elif not isinstance(value, list):
            yield (*path, key), value


def _heading(path: Path) -> str:
    field = COLUMNS[path[0]].heading if path[0] in COLUMNS else path[0].replace("_", " ")
    return ", ".join([*path[1:], field])


def _cell(row: Row, path: Path, value: Any) -> str:
    if value is None:
        return ""
    if path[0] in COLUMNS:
        return COLUMNS[path[0]].write({**row, path[0]: value})
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
