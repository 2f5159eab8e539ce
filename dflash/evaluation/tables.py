"""Tables of result rows, as cells and as Markdown, and a README's text between markers.

It knows nothing about result files: rows come in, text goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dflash.evaluation.results import Row


Table = tuple[list[str], list[list[str]]]


def _fixed(key: str, digits: int, unit: str = "", scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: f"{row[key] * scale:.{digits}f}{unit}"


def _both(key: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row[f'{key}_p50']:.{digits}f} / {row[f'{key}_p99']:.{digits}f}"


UNLESS_ZERO = ("failed", "peak_memory_bytes")  # of servers, memory is not measured
# Row key, heading, how it is written. A column without any value is left out.
COLUMNS: list[tuple[str, str, Callable[[Row], str]]] = [
    ("method", "method", lambda row: row["method"]),
    ("server", "server", lambda row: row["server"]),
    ("concurrency", "requests at once", _fixed("concurrency", 0)),
    ("requests", "requests", _fixed("requests", 0)),
    ("failed", "failed", _fixed("failed", 0)),
    ("identical", "identical texts", lambda row: _identical(row)),
    ("score", "score", _fixed("score", 1, " %", 100)),
    ("speedup", "speed-up", _fixed("speedup", 2, "x")),
    ("tokens_per_second", "tokens/s", _fixed("tokens_per_second", 0)),
    ("tau_micro", "tau, micro", _fixed("tau_micro", 2)),
    ("tau_macro", "tau, macro", _fixed("tau_macro", 2)),
    ("tau", "tau, server's counters", _fixed("tau", 2)),
    ("tokens_per_step", "tokens per step", _fixed("tokens_per_step", 2)),
    ("profiled_ms_draft", "a step's draft, ms", _fixed("profiled_ms_draft", 2)),
    ("profiled_ms_verify", "verify, ms", _fixed("profiled_ms_verify", 2)),
    ("profiled_ms_rest", "rest, ms", _fixed("profiled_ms_rest", 2)),
    ("ms_to_first_token", "first token, ms", _fixed("ms_to_first_token", 1)),
    ("ms_per_output_token", "per token, ms", _fixed("ms_per_output_token", 2)),
    ("ms_to_first_token_p50", "first token, ms, p50 / p99", _both("ms_to_first_token", 1)),
    ("ms_per_output_token_p50", "per token, ms, p50 / p99", _both("ms_per_output_token", 2)),
    ("peak_memory_bytes", "peak memory, GiB", _fixed("peak_memory_bytes", 2, scale=2**-30)),
    ("cost_per_million_tokens", "cost per million tokens", _fixed("cost_per_million_tokens", 3)),
]


def method_table(rows: Sequence[Row]) -> Table:
    """Headings and cells of one row per method (of a task) or per load (of a server)."""
    shown = [
        column
        for column in COLUMNS
        if any(row.get(column[0]) is not None and (column[0] not in UNLESS_ZERO or row[column[0]]) for row in rows)
    ]
    cells = [["" if row.get(key) is None else write(row) for key, _, write in shown] for row in rows]
    return [heading for _, heading, _ in shown], cells


def any_table(rows: Sequence[Row]) -> Table:
    """Headings and cells of rows of any shape: a column per number or word, nested ones by their path; lists are left out."""
    flat = [dict(_flattened(row)) for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    return [key.replace("_", " ") for key in keys], [[_plain(row.get(key)) for key in keys] for row in flat]


def decode_table(rows: Sequence[Row]) -> Table:
    """Headings and cells of ways of decoding side by side, a row per task and method."""
    headings = ["task", "method", "identical texts", "tau", "tokens per step", "tokens/s", "speed-up"]
    return headings, [
        [
            row["task"],
            row["method"],
            _identical(row),
            *(
                "" if row[key] is None else f"{row[key]:.{digits}f}{unit}"
                for key, digits, unit in (
                    ("tau_micro", 2, ""),
                    ("tokens_per_step", 2, ""),
                    ("tokens_per_second", 0, ""),
                    ("speedup", 2, "x"),
                )
            ),
        ]
        for row in rows
    ]


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


def _flattened(row: Row, path: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{path}{key} ")
        elif not isinstance(value, list):
            yield f"{path}{key}", value


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
