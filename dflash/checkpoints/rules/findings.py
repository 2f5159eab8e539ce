"""What a rule yields: one fault, whom it concerns, and the remedy."""

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .engine_readings import ENGINES


Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
VERDICT_OF: dict[Severity, str] = {"error": "fails", "warning": "degraded", "note": "works"}
ALL = tuple(ENGINES)
TRANSFORMERS = ("remote-code", "native")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CONVERT = "rewrite it with `dflash convert`"
RETRAIN = "take a checkpoint from before its training diverged."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, for whom, and what to do about it."""

    severity: Severity
    field: str
    value: Any
    why: str
    fix: str
    engines: tuple[str, ...] = ALL
    file: str = CONFIG
    rule: str = ""


error = partial(Finding, "error")  # the engines refuse, or run another drafter
warning = partial(Finding, "warning")  # the engines run, and draft worse or need something
note = partial(Finding, "note")  # no engine minds


def all_but(*engines: str) -> tuple[str, ...]:
    """The engines that are not named."""
    return tuple(engine for engine in ALL if engine not in engines)


def engine_names(engines: tuple[str, ...]) -> str:
    """The engines' names, with commas between."""
    return ", ".join(ENGINES[engine] for engine in engines)


def shown(value: Any) -> str:
    """`value` in one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def summary(tensors: list[str]) -> str:
    """A few tensor names in one line: layer numbers folded, and how many there are."""
    without_numbers = [re.sub(r"\blayers\.\d+\.", "layers.*.", name) for name in tensors]
    kinds = list(dict.fromkeys(without_numbers))
    first = ", ".join(kinds[:3])
    num_more = len(kinds) - 3
    if num_more <= 0:
        return first
    return f"{first} and {num_more} more kinds"
