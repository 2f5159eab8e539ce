"""What a result file says: its rows, what their figures depend on, and what follows from a row without being stored.

`records` writes them. It knows the shape that `dflash bench`, `dflash eval` and `dflash canary` write, and nothing about pages or plots.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dflash.common.provenance import SCHEMA_VERSION


Row = dict[str, Any]

# By kind, the fields by which a row is known; rows of other kinds may be of any shape.
KNOWN_BY = {"decode": ("task", "method"), "eval": ("task", "method"), "serving": ("server", "concurrency")}


def read_result(path: str | Path, needs_rows: bool = True) -> dict[str, Any]:
    """A result file's content, its `summary` a list of rows; of none, where a result without rows is one too.

    Raises:
        ValueError: for a file that cannot be read, is no result or one of another schema version, naming the file.
    """
    writers = "`dflash bench`, `dflash eval` or `dflash canary`"
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a result of {writers}.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON ({error}): give a result of {writers}.") from error
    version = result.get("schema_version") if isinstance(result, dict) else None
    if version is None:
        raise ValueError(f"{path} is no result: it has no schema_version; give one of {writers}.")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, and this version of dflash reads {SCHEMA_VERSION}: measure again."
        )
    for name, shape in (("environment", dict), ("decoding", dict), ("kind", str)):
        if not isinstance(result.get(name, shape()), shape):
            raise ValueError(f"{path} is no result: its {name} is {result[name]!r}; give one of {writers}.")
    rows = result.get("summary")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and row for row in rows):
        if not needs_rows:
            return {**result, "summary": []}
        raise ValueError(f"{path} is no result: its summary holds no rows; give one of {writers}.")
    for name in KNOWN_BY.get(result.get("kind", ""), ()):
        if not all(name in row for row in rows):
            raise ValueError(f"{path} is no whole result: a row of its summary has no {name}; measure again.")
    return result


def position_rates(histogram: Sequence[int]) -> tuple[list[float], list[float]]:
    """How often the proposal at position 1, 2, … is accepted: of all verify steps, and of those that got that far.

    Args:
        histogram: How many verify steps gave 1, 2, 3, … tokens, the target's own included.

    Returns:
        Both rates by position, one position fewer than `histogram` is long. The second is the conditional acceptance.
    """
    reached = list(accumulate(reversed(histogram)))[::-1]  # steps that gave at least 1, 2, 3, … tokens
    reached = [count for count in reached if count]
    of_all = [count / reached[0] for count in reached[1:]]
    of_reached = [count / before for before, count in pairwise(reached)]
    return of_all, of_reached


def published(result: dict[str, Any]) -> tuple[dict[str, float], str] | None:
    """The paper's speed-up by task for exactly this pair, temperature and thinking mode, and where it stands."""
    table = _published()
    pair = (named(result, "target"), named(result, "drafter"))
    decoding = result.get("decoding", {})
    for entry in table["figures"]:
        if (
            pair == (entry["target"], entry["drafter"])
            and decoding.get("temperature") == entry["temperature"]
            and thinking(result) == entry["thinking"]
        ):
            speedups = {task_key(task): speedup for task, speedup, _ in entry["rows"]}
            return speedups, f"{table['source']}, {entry['where']}: {entry['engine']}, {entry['setup']}"
    return None


def task_key(task: str) -> str:
    """A task's name without case and punctuation: MATH-500 and math500 are the same."""
    return "".join(letter for letter in task.lower() if letter.isalnum())


def named(result: dict[str, Any], role: str) -> str | None:
    """The id of the `target` or `drafter` that was measured, `None` if the file does not say."""
    return next(
        (part[role] for part in (result, result.get("environment", {}), result.get("decoding", {})) if role in part),
        None,
    )


def thinking(result: dict[str, Any]) -> bool | None:
    """Whether the chat template asked for thinking, `None` if the file does not say."""
    decoding = result.get("decoding", {})
    return decoding.get("enable_thinking", decoding.get("thinking"))


def place_of(environment: dict[str, Any]) -> str:
    """Where a result was measured: how many CPU threads, or what its device is called; empty if nobody said."""
    threads = environment.get("threads")
    if environment["device"] != "cpu" or threads is None:
        return environment["device"] or ""
    return f"{threads} thread{'s' * (threads != 1)}"


def setup(result: dict[str, Any]) -> dict[str, str | None]:
    """What the figures of a result depend on, by name; `None` where the file does not say."""
    environment, decoding = result.get("environment", {}), result.get("decoding", {})
    is_thinking = thinking(result)
    template = decoding.get("chat_template")
    device = environment.get("device")
    source = next((row["tau_source"] for row in result.get("summary", ()) if row.get("tau_source")), None)
    if device == "cpu" and "cpu" in environment:
        device = f"{environment['cpu']}, {place_of(environment)}"
    versions = [environment["engine"]] if environment.get("engine") else []
    versions += [f"{name} {environment[name]}" for name in VERSIONED if environment.get(name) is not None]
    facts = {
        "pair": _pair(result),
        "hardware": device,
        "dtype": environment.get("target_dtype", environment.get("dtype")),
        "attention": environment.get("attention"),
        "versions": ", ".join(versions) or None,
        "thinking": None if is_thinking is None else "on" if is_thinking else "off",
        "chat template": None if template is None else str(template),
        "temperature": None if decoding.get("temperature") is None else f"{decoding['temperature']:g}",
        "command": result.get("command"),
        "revision": result.get("revision"),
        **({"tau by": source} if source else {}),
    }
    return {name: value or None for name, value in facts.items()}


def _pair(result: dict[str, Any]) -> str | None:
    """Both ids, or at least both sizes."""
    environment = result.get("environment", {})
    names = [named(result, role) for role in ("target", "drafter")]
    sizes = [environment.get(f"{role}_parameters") for role in ("target", "drafter")]
    if not any(names) and all(sizes):
        return " + ".join(
            f"{role} of {size / 1e6:,.1f} M parameters"
            for role, size in zip(("target", "drafter"), sizes, strict=True)
        )
    return " + ".join(filter(None, names)) or None


VERSIONED = ("dflash", "torch", "transformers", "vllm", "sglang", "python")


@cache
def _published() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
