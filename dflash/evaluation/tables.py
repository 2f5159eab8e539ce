"""Results as tables: the columns of every field, the tables that a kind of result has, and a table in Markdown.

It knows nothing about files and pages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .methods import NATIVE, OURS, OURS_CHOOSING, OURS_LOOKING_UP, PLAIN, PROMPT_LOOKUP
from .results import Row


ROUNDING = ("bfloat16", "float16")

# Headings and rows of cells.
Table = tuple[list[str], list[list[str]]]


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
    words: Mapping[str, str] = {}  # in place of values

    def write(self, row: Row, key: str) -> str:
        """A row's cell."""
        value = row[key]
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.is_share:
            return f"{value}{next((f' of {row[of]}' for of in ('prompts', 'requests', 'chats') if of in row), '')}"
        if self.digits is None:
            text = f"{value:.4g}" if isinstance(value, float) else self.words.get(value, str(value))
            return text.replace("_", " ") if key == "task" else text  # a file's name
        values = [row[name] for name in (key, self.last) if row.get(name) is not None]
        return self.between.join(f"{value * self.scale:.{self.digits}f}{self.unit}" for value in values)


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
# By field. A column without any value is left out; a field that is not here is written as it is.
COLUMNS: dict[str, Column] = {
    "task": Column("task"),
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
    "tau_interval": Column("± (95 %)", 2),
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
}
# Fields of the benchmarks' rows, which the tables of bench, eval and canary do not have.
OF_BENCHMARKS: dict[str, Column] = {
    "batch_size": Column("batch"),
    "prompt_tokens": Column("prompt tokens", 1),
    "reused_tokens": Column("of them kept", 1),
    "proposals": Column("proposals at temperature 1"),
    "axis": Column("what changes", words=AXES),
    "context_tokens": Column("context, tokens"),
    "growth": Column("growth", 2, unit="x"),
    "ms_per_token": Column("ms per token", 2),
    "speedup_at_stated_tau": Column("speed-up", 2, unit="x"),
    "tau_to_match_plain": Column("break-even tau", 2),
    "allocated_bytes": Column("allocated, MiB", 0, scale=2**-20),
    "over_plain": Column(f"to {PLAIN}", 2, unit="x"),
    "taps_bytes": Column("of it hidden states, MiB", 0, scale=2**-20),
    "way": Column("layout"),
    "over_naive": Column("to naive", 2, unit="x"),
    "live_bytes": Column("peak memory, MiB", 0, scale=2**-20),
    "ms": Column("ms", 0),
    "ms_per_forward": Column("ms", 1),
    "vllm": Column("vLLM's CPU kernel"),
    "identical_in_one_batch": Column("identical in one batch", is_share=True),
    "vllm_tau": Column("tau in vLLM", 2),
    "recipe_tau": Column("tau"),
    "recipe_gain": Column("to the base"),
    "accepted_per_block": Column("accepted per block", 2),
    "ms_per_step_p10": Column("p10-p90", 2, last="ms_per_step_p90"),
    "ms_per_step_of_first_text": Column("first text's", 2),
    "generate_over_this": Column("x generate", 2),
    "static_over_this": Column("x static", 2),
    "peak_memory_gb": Column("GB", 1),
}
UNLESS_ZERO = ("failed", "compilations")
DECODED = ("task", "method", "identical", "tau_micro", "tokens_per_step", "tokens_per_second", "speedup")
EVALUATED = ("task", "method", "identical", "score", *DECODED[3:])
# The ways among which a user chooses; the others are variants.
HEADLINE = (PLAIN, PROMPT_LOOKUP, NATIVE, OURS, OURS_LOOKING_UP, OURS_CHOOSING)


def table_of(rows: Sequence[Row], keys: Iterable[str] | None = COLUMNS, short: bool = False) -> Table:
    """Headings and cells of rows: a column for each of `keys` (`None`: all) that a row has a value for, lists left out.

    A field that holds a dict gives a column for each of its names.
    """
    flat = [dict(_flattened(row)) for row in rows]
    paths = list(dict.fromkeys(path for row in flat for path in row))
    keys = dict.fromkeys(key for row in rows for key in row) if keys is None else keys
    columns = {
        path: COLUMNS.get(key) or OF_BENCHMARKS.get(key) or Column(key.replace("_", " "))
        for key in keys
        for path in paths
        if path[0] == key and (key not in UNLESS_ZERO or any(row.get(path) for row in flat))
    }
    cells = [
        [
            column.write({**row, path[0]: values[path]}, path[0]) if path in values else ""
            for path, column in columns.items()
        ]
        for row, values in zip(rows, flat, strict=True)
    ]
    headings = [(short and column.short) or column.heading for column in columns.values()]
    return [", ".join([*path[1:], heading]) for path, heading in zip(columns, headings, strict=True)], cells


def tables_of(result: dict[str, Any], headline: bool = False) -> list[Table]:
    """The tables of what `read_result` gives, none if it has no rows; `headline`: of the methods of `HEADLINE` alone."""
    shown = PARTS.get(result["kind"])
    parts = shown(result) if callable(shown) else [(result["summary"], shown)]
    if headline:
        parts = [([row for row in rows if row.get("method") in HEADLINE], keys) for rows, keys in parts]
    return [table_of(rows, keys) for rows, keys in parts if rows]


# Rows, and the fields that are shown of them; `None`: all.
Part = tuple[list[Row], Sequence[str] | None]


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
    """What was measured, or what its training record says of held-out prompts."""
    figures = result["training"].get("figures") or {}
    rows = result["summary"] or [{"task": task.replace("_", " "), **row} for task, row in figures.items()]
    accepting = [row for row in rows if row.get("tau", row.get("tau_micro")) is not None]
    keys = ("task", "method", "identical", "tau", "tau_micro", "tokens_per_step")
    return [(accepting, keys if len({row.get("task") for row in accepting}) > 1 else keys[1:])]


def _recipes(result: dict[str, Any]) -> list[Part]:
    """Tau and its difference to the base, the targets side by side."""
    joined: dict[Any, Row] = {}
    for row in result["summary"]:
        said = row["cell"].replace("+", ", ").replace("=", " ").replace("_", " ")
        cell = joined.setdefault((row["axis"], row["cell"]), {"axis": row["axis"], "cell": said})
        spread = "" if row["tau_interval"] is None else f" ± {row['tau_interval']:.2f}"
        spread_of_gain = "" if row["gain_interval"] is None else f" ± {row['gain_interval']:.2f}"
        gain = "base" if row["gain"] is None else f"{row['gain']:+.2f}{spread_of_gain}"
        cell.setdefault("recipe_tau", {})[row["target"]] = f"{row['tau']:.2f}{spread}"
        cell.setdefault("recipe_gain", {})[row["target"]] = gain
    return [(list(joined.values()), ("axis", "cell", "recipe_tau", "recipe_gain"))]


def _run(result: dict[str, Any]) -> list[Part]:
    """The measurements of a run; of one of `dflash adapt` also tau, and acceptance by position, before and after."""
    taus: list[Row] = []
    positions: list[Row] = []
    for row in result.get("domains", ()):
        measured = {when: row[when] for when in ("before", "after")}
        taus.append(
            {"domain": row["domain"], **{f"tau {when}": f"{one['tau']:.2f}" for when, one in measured.items()}}
        )
        for when, one in measured.items():
            shares = {str(position): f"{share:.2f}" for position, share in enumerate(one["accepted"], start=1)}
            positions.append({"domain": row["domain"], "accepted at position": when, **shares})
    points = ("step", "loss", "tau", "tokens_per_step", "accepted_per_block")
    return [(result["summary"], points), (taus, None), (positions, None)]


def _training_step(result: dict[str, Any]) -> list[Part]:
    rows, losses = (
        [{**row, "over_naive": row.get("speedup"), "live_bytes": row["peak_memory_bytes"]} for row in part]
        for part in (result["summary"], result.get("losses", ()))
    )
    of_steps = ("way", "batches", "tokens_per_second", "over_naive", "live_bytes")
    return [(rows, of_steps), (losses, ("vocabulary", "loss", "ms", "live_bytes"))]


def _shape(result: dict[str, Any]) -> list[Part]:
    """Ways of decoding, and forwards by the number of columns."""
    steps = ("method", "ms_per_step", "stated_tau", "ms_per_token", "speedup_at_stated_tau")
    return [(result["summary"], steps), (result["forwards"], ("dtype", "ms_per_forward"))]


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
    """Decoding, training, and what was not measured."""
    of: dict[str, list[Row]] = {}
    for row in result["summary"]:
        of.setdefault(row["kind"] if row["status"] == "measured" else "rest", []).append(row)
    decoded = [{**row, "label": row["label"].split(":")[0]} for row in of.get("decode", ())]
    step = ("ms_per_step", "ms_per_step_p10", "ms_per_step_of_first_text", "tokens_per_step")
    ratios = ("generate_over_this", "static_over_this")
    return [
        (decoded, ("shape", "context", "batch", "label", *step, *ratios, "peak_memory_gb", "compilations")),
        (of.get("training", []), ("shape", "label", "tokens_per_second", "ms_per_step", "peak_memory_gb")),
        (of.get("rest", []), ("name", "status", "reason")),
    ]


# By kind, the fields of the rows, or what makes the parts; results of another kind are shown with all their rows and fields.
PARTS: dict[str, Sequence[str] | Callable[[dict[str, Any]], list[Part]]] = {
    "decode": DECODED,
    "eval": EVALUATED,
    "serving": tuple(COLUMNS),
    "batch": ("batch_size", "identical", "tokens_per_second", "speedup"),
    "conversation": ("turn", "identical", "prompt_tokens", "reused_tokens", "ms_to_first_token"),
    "sampling": ("proposals", "prompts", "tau"),
    "sweep": _swept,
    "drafter": _drafter,
    "training": _recipes,
    "run": _run,
    "training_step": _training_step,
    "engine": ("vllm", "identical", "identical_in_one_batch", "tau", "vllm_tau"),
    "dialects": _dialects,
    "gpu": _gpu,
    "shape": _shape,
}


def caveat(rows: Sequence[Row], dtype: str | None = None) -> str:
    """What has to be said of rows of `summarise` whose texts may differ, and of a speed-up where they differ in length.

    Empty if there is nothing to say. `dtype` is the target's, `None` if it is not known.
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
