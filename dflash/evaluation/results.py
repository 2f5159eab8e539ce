"""Reads result files: their rows, the facts that their figures depend on, and figures that follow from a row.

`common.provenance` writes result files. This module knows nothing about tables, pages or plots.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from dflash.common.json_text import parsed_json
from dflash.common.provenance import SCHEMA_VERSION


Row = dict[str, Any]
Item = TypeVar("Item")
Key = TypeVar("Key")
# What the figures of a result depend on, by name; `None` where the file does not say.
Facts = dict[str, str | None]

RUN = "training.json"  # what `dflash train` writes into a checkpoint
LONGEST_TEMPLATE = 40  # letters of a chat template that is written out
# The facts that stand in one line, in its order, and the words before each.
STATED = {
    "pair": "",
    "hardware": "",
    "dtype": "dtype ",
    "attention": "attention ",
    "versions": "",
    "run": "",
    "simulated": "",
    "training": "",
    "targets": "",
    "thinking": "thinking ",
    "temperature": "temperature ",
    "chat template": "chat template ",
}
VERSIONED = ("dflash", "torch", "transformers", "vllm", "sglang", "python")

# By kind, the fields that identify a row; rows of other kinds have any shape.
KNOWN_BY = {"decode": ("task", "method"), "eval": ("task", "method"), "serving": ("server", "concurrency")}
# By kind, the facts without which figures cannot be compared. A training run names no pair and is greedy.
NEEDED = {"run": {"hardware", "dtype", "attention", "versions", "thinking", "command"}}
NEEDED |= {kind: {*NEEDED["run"], "pair", "chat template", "temperature", "revision"} for kind in KNOWN_BY}
# How settings of a measurement are written.
SETTINGS = {"batch_size": "batch {}", "max_new_tokens": "at most {} tokens", "repeats": "medians of {} repeats"}


def read_result(path: str | Path) -> dict[str, Any]:
    """A result file's content; its `kind` is a word and its `summary` a list of rows, empty where the kind has no rows.

    The `training.json` of a checkpoint is read as a result of the kind "run", with a row for each measurement, and with
    `domains`: what `dflash adapt` measured of each kind of text before and after.

    Raises:
        ValueError: The file cannot be read, is no result or has another schema version; the message names the file.
    """
    path = Path(path)
    try:
        result = parsed_json(path.read_bytes())
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error.strerror}): give a result") from error
    except ValueError as error:
        raise _refusal(path, f"{error}: give a result") from error
    if not isinstance(result, dict):
        result = {}
    if path.name == RUN and "schema_version" not in result:
        result = _of_run(result)
    if "schema_version" not in result:
        raise _refusal(path, "is no result: it has no schema_version; give one")
    version = result["schema_version"]
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, and this version of dflash reads {SCHEMA_VERSION}: measure again."
        )
    result = {"environment": {}, "decoding": {}, "kind": "", **result}
    for name, shape in (("environment", dict), ("decoding", dict), ("kind", str)):
        if not isinstance(result[name], shape):
            raise _refusal(path, f"is no result: its {name} is {result[name]!r}; give one")
    rows = result.get("summary")
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        rows = []
    for name in KNOWN_BY.get(result["kind"], ()):
        if any(name not in row for row in rows):
            raise ValueError(f"{path} is no whole result: a row of its summary has no {name}; measure again.")
    return {**result, "summary": rows}


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _refusal(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path} {problem} of `dflash bench`, `eval`, `canary` or `train`.")


def _of_run(facts: dict[str, Any]) -> dict[str, Any]:
    """The result of a training run. Runs of older versions have recorded less."""
    points = facts.get("curve") or []
    best_step = facts.get("best_step")
    names = ("step", "loss", "tau", "tokens_per_step", "accepted_per_block")
    rows = []
    for point in points:
        row = {name: point[name] for name in names if point.get(name) is not None}
        row["is_kept"] = row.get("step") == best_step
        rows.append(row)
    environment = dict(facts.get("versions") or {})
    for name in ("cpu", "threads", "device", "target_dtype", "attention"):
        if facts.get(name) is not None:
            environment[name] = facts[name]
    for role in ("target", "drafter"):
        environment[f"{role}_parameters"] = (facts.get(role) or {}).get("parameters")
    settings = facts.get("settings") or {}
    command = facts.get("command")
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "run",
        "environment": environment,
        "decoding": {"enable_thinking": settings.get("thinking")},
        "training": facts,
        "command": " ".join(command) if isinstance(command, list) else command,
        "summary": rows,
        "domains": _before_and_after(points, best_step),
    }


def _before_and_after(points: Sequence[dict[str, Any]], best_step: int | None) -> list[Row]:
    """What an adapted drafter accepts of each kind of text at first, and at the step that was kept."""
    measured = [point for point in points if point.get("domains")]
    kept = [point["domains"] for point in measured if point.get("step") == best_step]
    if not kept:
        return []
    rows = []
    for name, before in measured[0]["domains"].items():
        after = kept[0][name]
        rows.append({"domain": name, "before": before, "after": after})
    return rows


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their key, both in order of appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def position_rates(histogram: Sequence[int]) -> tuple[list[float], list[float]]:
    """How often the proposal at position 1, 2, … is accepted: of all verify steps, and of those that got that far.

    `histogram` says how many verify steps gave 1, 2, 3, … tokens, the target's own included.
    """
    reached = [sum(histogram[place:]) for place in range(len(histogram))]  # steps with at least 1, 2, 3, … tokens
    of_all = []
    of_reached = []
    for before, steps in pairwise(reached):
        if steps:
            of_all.append(steps / reached[0])
            of_reached.append(steps / before)
    return of_all, of_reached


def published(result: dict[str, Any]) -> tuple[dict[str, float], str] | None:
    """The paper's speed-up by task for exactly this pair, temperature and thinking mode, and where it stands."""
    table = _published()
    measured = {
        "target": name_of(result, "target"),
        "drafter": name_of(result, "drafter"),
        "temperature": result["decoding"].get("temperature"),
        "thinking": thinking(result),
    }
    for entry in table["figures"]:
        if measured.items() <= entry.items():
            speedups = {task_key(task): speedup for task, speedup, _ in entry["rows"]}
            source = f"{table['source']}, {entry['where']}: {entry['engine']}, {entry['setup']}"
            return speedups, source
    return None


@cache
def _published() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def task_key(task: str) -> str:
    """A task's name without case and punctuation: MATH-500 and math500 are the same."""
    return "".join(letter for letter in task.lower() if letter.isalnum())


def name_of(result: dict[str, Any], role: str) -> str | None:
    """The id of the `target` or `drafter` that was measured, `None` if the file does not say."""
    for part in (result, result["environment"], result["decoding"]):
        if role in part:
            return part[role]
    return None


def thinking(result: dict[str, Any]) -> bool | None:
    """Whether the chat template asked for thinking, `None` if the file does not say."""
    decoding = result["decoding"]
    return decoding.get("enable_thinking", decoding.get("thinking"))


def place_of(environment: dict[str, Any]) -> str:
    """Where a result was measured: the number of CPU threads, or the name of the device; empty if the result does not say."""
    threads = environment.get("threads")
    if environment["device"] != "cpu" or threads is None:
        return environment["device"] or ""
    return "1 thread" if threads == 1 else f"{threads} threads"


def setup(result: dict[str, Any]) -> Facts:
    """What the figures of a result depend on. A fact that its kind needs and the file lacks is `None`."""
    environment = result["environment"]
    decoding = result["decoding"]
    device = environment.get("device")
    if device == "cpu" and "cpu" in environment:
        device = f"{environment['cpu']}, {place_of(environment)}"
    temperature = decoding.get("temperature")
    taus = [row["tau_source"] for row in result["summary"] if row.get("tau_source")]
    facts = {
        "pair": _pair(result),
        "hardware": device,
        "dtype": environment.get("target_dtype", environment.get("dtype")),
        "attention": environment.get("attention"),
        "versions": _versions(environment),
        "thinking": {None: None, True: "on", False: "off"}[thinking(result)],
        "chat template": decoding.get("chat_template"),
        "temperature": None if temperature is None else f"{temperature:g}",
        "command": result.get("command"),
        "revision": result.get("revision"),
        "run": _settings(decoding),
        "training": _training(result["training"]) if result["kind"] == "run" else None,
        "tau by": taus[0] if taus else None,
    }
    needed = NEEDED.get(result["kind"], ())
    known: Facts = {}
    for name, fact in facts.items():
        if fact:
            known[name] = str(fact)
        elif name in needed:
            known[name] = None
    return known


def stated(facts: Facts) -> str:
    """What `setup` gives in one line, without the command, and what is not recorded; a long chat template is shortened."""
    parts = []
    for name, words in STATED.items():
        fact = facts.get(name)
        if fact:
            shown = template_name(fact) if name == "chat template" else fact
            parts.append(words + shown)
    missing = [name for name in STATED if name in facts and not facts[name]]
    if missing:
        parts.append(f"not recorded: {', '.join(missing)}")
    return " · ".join(parts)


def template_name(template: str) -> str:
    """A short chat template as it is, of a long one the start of its SHA-256."""
    if len(template) <= LONGEST_TEMPLATE:
        return template
    return f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:8]}"


def _pair(result: dict[str, Any]) -> str | None:
    """The ids of target and drafter, or at least their sizes."""
    names = []
    sizes = []
    for role in ("target", "drafter"):
        name = name_of(result, role)
        size = result["environment"].get(f"{role}_parameters")
        if name:
            names.append(name)
        if size:
            sizes.append(f"{role} of {count(size)} parameters")
    if len(sizes) == 2 and not names:
        names = sizes
    return " + ".join(names) or None


def _versions(environment: dict[str, Any]) -> str:
    versions = [environment.get("engine")]
    for name in VERSIONED:
        version = environment.get(name)
        if version is not None:
            versions.append(f"{name} {version}")
    return ", ".join(filter(None, versions))


def _settings(decoding: dict[str, Any]) -> str:
    parts = []
    for name, words in SETTINGS.items():
        value = decoding.get(name)
        if value is not None and (name, value) != ("repeats", 1):
            parts.append(words.format(value))
    return ", ".join(parts)


def _training(facts: dict[str, Any]) -> str:
    """The recipe of a run, its time and its seed, as far as they are recorded."""
    parts = [facts.get("recipe")]
    seconds = facts.get("seconds")
    if seconds is not None:
        settings = facts.get("settings") or {}
        parts.append(f"{seconds / 60:.1f} minutes")
        parts.append(f"seed {settings.get('seed', 0)}")
    return ", ".join(filter(None, parts))


def count(parameters: int) -> str:
    """A number of parameters in millions or thousands."""
    return f"{parameters / 1e6:,.1f} M" if parameters >= 1e6 else f"{parameters / 1e3:.0f} K"
