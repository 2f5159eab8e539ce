"""Results as tables: the columns of every field, the tables that a kind of result has, and a table in Markdown.

It knows nothing about files and pages.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from .methods import NATIVE, OURS, OURS_CHOOSING, OURS_LOOKING_UP, PLAIN, PROMPT_LOOKUP
from .results import Row, grouped


ROUNDING = ("bfloat16", "float16")

# Headings and rows of cells.
Table = tuple[list[str], list[list[str]]]
# Rows, and the fields that are shown of them; `None`: all.
Part = tuple[list[Row], Sequence[str] | None]


class Column(NamedTuple):
    """How a field of a row is written: the heading above it, and the digits of a figure, four significant ones by default."""

    heading: str
    digits: int | None = None
    short: str = ""  # the heading on a terminal, where that is another
    unit: str = ""
    scale: float = 1.0
    last: str = ""  # a second field, written after the first
    between: str = "-"
    is_share: bool = False  # a count, of how many where the row says it
    is_file: bool = False  # the name of a file, where underscores stand for spaces

    def write(self, value: Any, row: Row) -> str:
        """The cell for a value of a row."""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.is_file:
            return value.replace("_", " ")
        if self.is_share:
            totals = [row[name] for name in ("prompts", "requests", "chats") if name in row]
            return f"{value} of {totals[0]}" if totals else str(value)
        if self.digits is None:
            return f"{value:.4g}" if isinstance(value, float) else str(value)
        text = self._figure(value)
        last = row.get(self.last)
        return text if last is None else f"{text}{self.between}{self._figure(last)}"

    def _figure(self, value: float) -> str:
        return f"{value * self.scale:.{self.digits}f}{self.unit}"


Columns = Mapping[str, Column]

# By field. A column without any value is left out; a field that is not here is written as it is.
COLUMNS: Columns = {
    "task": Column("task", is_file=True),
    "method": Column("method"),
    "server": Column("server"),
    "concurrency": Column("requests at once", 0),
    "requests": Column("requests", 0),
    "failed": Column("failed", 0),
    "identical": Column("identical texts", short="same", is_share=True),
    "score": Column("score", 1, unit=" %", scale=100),
    "tau_micro": Column("tau", 2),
    "tau_macro": Column("tau, macro", 2),
    "tau": Column("tau", 2),
    "tokens_per_step": Column("tokens per step", 2, "tok/ step"),
    "tokens_per_second": Column("tokens/s", 0, "tok/s"),
    "speedup": Column("speed-up", 2, unit="x"),
    "speedup_p10": Column("10 to 90 % of prompts", 1, "10-90 %", last="speedup_p90"),
    "ms_per_step": Column("step, ms", 2, "step ms"),
    "profiled_ms_draft": Column("a step's draft, ms", 2, "draft ms"),
    "profiled_ms_verify": Column("verify, ms", 2, "verify ms"),
    "profiled_ms_rest": Column("rest, ms", 2, "rest ms"),
    "profiled_host_syncs_per_step": Column("host reads per step", 1, "syncs"),
    "profiled_memory_bytes": Column("allocated, MiB", 1, "peak MiB", scale=2**-20),
    "compilations": Column("compilations", 0),
    "ms_to_first_token": Column("first token, ms", 1, "TTFT ms"),
    "ms_per_output_token": Column("per token, ms", 2, "TPOT ms"),
    "ms_to_first_token_p50": Column("first token, ms, p50 / p99", 1, last="ms_to_first_token_p99", between=" / "),
    "ms_per_output_token_p50": Column("per token, ms, p50 / p99", 2, last="ms_per_output_token_p99", between=" / "),
    "peak_memory_bytes": Column("peak memory, GiB", 2, "peak GiB", scale=2**-30),
    "cost_per_million_tokens": Column("cost per million tokens", 3),
    "accepted_per_block": Column("accepted per block", 2),
}
UNLESS_ZERO = ("failed", "compilations")
DECODED = ("task", "method", "identical", "tau_micro", "tokens_per_step", "tokens_per_second", "speedup")
EVALUATED = ("task", "method", "identical", "score", *DECODED[3:])
TRAINED = ("step", "loss", "tau", "tokens_per_step", "accepted_per_block")
# By kind, the fields that are shown; of a result of another kind all are.
SHOWN: Mapping[str, Sequence[str]] = {
    "decode": DECODED,
    "eval": EVALUATED,
    "serving": tuple(COLUMNS),
    "run": TRAINED,
}
# The ways among which a user chooses; the others are variants.
HEADLINE = (PLAIN, PROMPT_LOOKUP, NATIVE, OURS, OURS_LOOKING_UP, OURS_CHOOSING)


def table_of(
    rows: Sequence[Row], keys: Iterable[str] | None = COLUMNS, short: bool = False, columns: Columns = COLUMNS
) -> Table:
    """Headings and cells of rows: a column for each of `keys` (`None`: all) that a row has a value for, lists left out.

    A field that holds a dict gives a column for each of its names. `columns` says how fields are written.
    """
    if keys is None:
        keys = dict.fromkeys(key for row in rows for key in row)
    values = []
    paths: dict[tuple[str, ...], None] = {}
    for row in rows:
        of_row = dict(_values(row))
        values.append(of_row)
        paths |= dict.fromkeys(of_row)
    headings = []
    cells: list[list[str]] = [[] for _ in rows]
    for key in keys:
        column = columns.get(key) or Column(key.replace("_", " "))
        heading = column.short if short and column.short else column.heading
        for path in paths:
            if path[0] != key:
                continue
            if key in UNLESS_ZERO and not any(of_row.get(path) for of_row in values):
                continue
            headings.append(", ".join([*path[1:], heading]))
            for row, of_row, line in zip(rows, values, cells, strict=True):
                value = of_row.get(path)
                line.append("" if value is None else column.write(value, row))
    return headings, cells


def _values(row: Row, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value by its field, and by the further names of a nested one; lists and what is missing are left out."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _values(value, (*path, key))
        elif value is not None and not isinstance(value, list):
            yield (*path, key), value


def tables_of(result: dict[str, Any], headline: bool = False) -> list[Table]:
    """The tables of what `read_result` gives, none if it has no rows; `headline`: of the methods of `HEADLINE` alone."""
    kind = result["kind"]
    parts: list[Part] = [(result["summary"], SHOWN.get(kind))]
    if kind == "run":
        parts += _before_and_after(result["domains"])
    shown = chosen(parts, headline)
    return [table_of(rows, keys) for rows, keys in shown if rows]


def chosen(parts: Sequence[Part], headline: bool) -> list[Part]:
    """The parts; with `headline` the rows of the methods of `HEADLINE` alone."""
    if not headline:
        return list(parts)
    shown: list[Part] = []
    for rows, keys in parts:
        of_headline = [row for row in rows if row.get("method") in HEADLINE]
        shown.append((of_headline, keys))
    return shown


def _before_and_after(domains: Sequence[Row]) -> list[Part]:
    """Tau, and acceptance by position, of each kind of text before and after `dflash adapt`."""
    taus: list[Row] = []
    positions: list[Row] = []
    for domain in domains:
        of_domain = {"domain": domain["domain"]}
        taus.append(of_domain)
        for when in ("before", "after"):
            measured = domain[when]
            row = {"domain": domain["domain"], "accepted at position": when}
            for position, share in enumerate(measured["accepted"], start=1):
                row[str(position)] = f"{share:.2f}"
            positions.append(row)
            of_domain[f"tau {when}"] = f"{measured['tau']:.2f}"
    return [(taus, None), (positions, None)]


def means_of_tasks(rows: Sequence[Row]) -> list[Row]:
    """A row for each method besides plain decoding with the means of its tasks, if there are several."""
    drafting = [row for row in rows if row["tau_micro"] is not None]
    means = []
    for method, tasks in grouped(drafting, itemgetter("method")).items():
        if len(tasks) > 1:
            mean: Row = {"task": "mean", "method": method}
            for name in ("speedup", "tau_micro"):
                mean[name] = fmean(row[name] for row in tasks)
            means.append(mean)
    return means


def caveat(rows: Sequence[Row], dtype: str | None = None) -> str:
    """A warning for rows of `summarise` whose texts may differ, or differ in length, where a speed-up compares seconds.

    Empty if neither is the case. `dtype` is the target's, `None` if it is not known.
    """
    sentences = []
    if dtype in ROUNDING and any("identical" in row for row in rows):
        sentences.append(
            f"In {dtype} two tokens can be within rounding of each other, and a text may then go another way than "
            f"{PLAIN}'s: --dtype float32 shows that they are equal."
        )
    lengths = {(row.get("task"), row.get("tokens")) for row in rows if "method" in row}
    tasks = {task for task, _ in lengths}
    if len(lengths) > len(tasks):
        sentences.append(
            "Texts that are not identical differ in length here: a speed-up is a ratio of seconds, not of tokens/s."
        )
    return " ".join(sentences)


def markdown(table: Table) -> str:
    """The table in Markdown."""
    headings, cells = table
    lines = [_line(headings), "|" + "---|" * len(headings)]
    return "\n".join([*lines, *map(_line, cells)])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
