"""The rows of `bench.py`: which there are, in which process, how long each may take, and what follows from their figures."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from correctness import NAMES
from runner import MEASURED, Row, new_row


# Ways to decode, as tables name them.
WAYS = {
    "generate": "target.generate",
    "native": "native dflash",
    "eager": "ours, eager",
    "default": "ours, by default",
    "sampled": "ours, eager, sampled",  # T 1, top-p 0.95, top-k 20
    "tree": "ours, eager, tree of 63",
    "adaptive": "ours, eager, adaptive",
    "useless": "ours, eager, adaptive, useless drafter",
    "recorded": "ours, recorded",
    "compiled": "ours, compiled",
    "static": "target.generate, static cache, compiled",
}
# The other ways' acceptance is not the script's: only their step's time means something.
WITHOUT_SCRIPT = ("native", "tree")
TRAINING = {"library": "training step, the library's attention", "sdpa": "training step, SDPA"}

# Seconds that a row may take. They end what hangs; compiling a large pair for the first time takes a minute or two.
LIMIT, COMPILE_LIMIT = 60.0, 150.0

# How the figures of a row are printed.
FIGURES = {
    "texts": "{} texts are right",
    "tau": "tau {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "ms_per_step": "{:.2f} ms a step",
    "tokens_per_step": "{:.2f} tokens a step",
    "peak_memory_gb": "peak {:.1f} GB",
    "fallback": "EAGER: {}",
    "compilations": "{} compilations",
}


def all_rows(shape: str = "qwen3-8b", contexts: Sequence[int] = (512, 4096, 32768), batch: int = 8) -> list[Row]:
    """Every row, in order of worth: correctness, steps of every kind, recorded ones at all points, training, compiled ones.

    Rows of one group share a process. Compiled steps have processes of their own and come last: they take a minute or more each,
    and nothing else is lost with them.
    """
    rows = []

    def check(group: str, names: Sequence[str], limit: float) -> None:
        for name in names:
            rows.append(new_row(f"correctness/{name}", group, limit, kind="correctness", check=name))

    compiled = [name for name in NAMES if name.startswith("compiled/")]
    check("correctness", [name for name in NAMES if name not in compiled], LIMIT)

    def decode(group: str, context: int, num_sequences: int, way: str) -> None:
        limit = COMPILE_LIMIT if group == "compiled" else LIMIT
        setting = {"shape": shape, "context": context, "batch": num_sequences, "way": way}
        name = f"{shape}/{context}x{num_sequences}/{way}"
        rows.append(new_row(name, group, limit, kind="decode", **setting))

    short = contexts[0]
    points = [(short, 1), (short, batch), *((context, 1) for context in contexts[1:])]
    for way in ("generate", "native", "eager", "default", "sampled", "tree", "adaptive", "useless"):
        decode("steps", short, 1, way)
    for context, num_sequences in points[1:]:
        decode("steps", context, num_sequences, "generate")
        if num_sequences == 1:  # native dflash takes one prompt
            decode("steps", context, 1, "native")
        decode("steps", context, num_sequences, "eager")
    for point in points:
        decode("steps", *point, "recorded")
    for way in TRAINING:
        name = f"{shape}/training/{way}"
        rows.append(new_row(name, "training", LIMIT, kind="training", shape=shape, way=way))
    decode("compiled", short, 1, "static")
    for context in contexts:
        decode("compiled", context, 1, "compiled")
    check("compiled correctness", compiled, COMPILE_LIMIT)
    return rows


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
    """The rows for JSON; beside the figures of a decode stand its ratios, at the tokens that a step gave."""
    rows = [dict(row) for row in measured]
    decoded: dict[Any, Row] = {}
    for row in rows:
        if row["status"] == MEASURED and row["kind"] == "training":
            row["label"] = f"{TRAINING[row['way']]} ({row['attention']})"
        if row["status"] == MEASURED and row["kind"] == "decode":
            decoded[row["context"], row["batch"], row["way"]] = row
    for (context, num_sequences, way), row in decoded.items():
        # Nothing is called recorded or compiled that was not.
        row["label"] = f"{WAYS[way]}, but EAGER: {row['fallback']}" if row["fallback"] else WAYS[way]
        for base in ("generate", "static"):
            plain = decoded.get((context, num_sequences, base))
            if plain is not None and way not in WITHOUT_SCRIPT:
                row[f"{base}_over_this"] = plain["ms_per_token"] / row["ms_per_token"]
    return [
        {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]


def line(row: Row) -> str:
    """What became of a row, in one line."""
    parts = [f"{row['status']}, {row['reason']}"]
    if row["status"] == MEASURED:
        parts = [form.format(row[name]) for name, form in FIGURES.items() if row.get(name)]
        if not row.get("is_right", True):
            parts.append("WRONG TEXT")
    seconds = "" if row["seconds"] is None else f" [{row['seconds']:.0f} s]"
    return f"{row['name']}: {', '.join(parts)}{seconds}"
