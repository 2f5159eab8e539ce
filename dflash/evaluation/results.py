"""A result file: its rows, what their figures depend on, and what follows from a row without being stored.

`common.provenance` writes result files. This module knows nothing about tables, pages or plots.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dflash.common.json_text import parsed_json
from dflash.common.provenance import SCHEMA_VERSION


Row = dict[str, Any]

RUN = "training.json"  # what `dflash train` writes into a checkpoint
LONGEST_TEMPLATE = 40  # letters of a chat template that is written out
# Facts that one line states; of these the first ones need no name beside them.
UNNAMED = ("pair", "hardware", "versions", "run", "simulated", "training", "targets")
STATED = (*UNNAMED[:2], "dtype", "attention", *UNNAMED[2:], "thinking", "temperature", "chat template")
# What a training run has none of: it names no pair, is greedy, and its prompts are stored as ids.
NOT_OF_A_RUN = {"pair", "chat template", "temperature", "revision"}
VERSIONED = ("dflash", "torch", "transformers", "vllm", "sglang", "python")

# By kind, the fields that identify a row; rows of other kinds have any shape.
KNOWN_BY = {"decode": ("task", "method"), "eval": ("task", "method"), "serving": ("server", "concurrency")}


def read_result(path: str | Path) -> dict[str, Any]:
    """A result file's content; its `kind` is a word and its `summary` a list of rows, empty where the kind has no rows.

    The `training.json` of a checkpoint is read as a result of the kind "run", with a row for each measurement, and with
    `domains`: what `dflash adapt` measured of each kind of text before and after.

    Raises:
        ValueError: The file cannot be read, is no result or has another schema version; the message names the file.
    """

    def refused(what: str) -> ValueError:
        return ValueError(f"{path} {what} of `dflash bench`, `eval`, `canary` or `train`.")

    try:
        result = parsed_json(Path(path).read_bytes())
    except OSError as error:
        raise refused(f"cannot be read ({error.strerror}): give a result") from error
    except ValueError as error:
        raise refused(f"{error}: give a result") from error
    if isinstance(result, dict) and "schema_version" not in result and Path(path).name == RUN:
        result = _of_run(result)
    version = result.get("schema_version") if isinstance(result, dict) else None
    if version is None:
        raise refused("is no result: it has no schema_version; give one")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, and this version of dflash reads {SCHEMA_VERSION}: measure again."
        )
    for name, shape in (("environment", dict), ("decoding", dict), ("kind", str)):
        if not isinstance(result.get(name, shape()), shape):
            raise refused(f"is no result: its {name} is {result[name]!r}; give one")
    result.setdefault("kind", "dialects" if "fixtures" in result else "")  # the first fixtures named no kind
    rows = result.get("summary")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row for row in rows):
        rows = []
    for name in KNOWN_BY.get(result["kind"], ()):
        if not all(name in row for row in rows):
            raise ValueError(f"{path} is no whole result: a row of its summary has no {name}; measure again.")
    return {**result, "summary": rows}


def _of_run(facts: dict[str, Any]) -> dict[str, Any]:
    names = ("step", "loss", "tau", "tokens_per_step", "accepted_per_block")
    points = facts.get("curve") or ()
    rows = [{name: point[name] for name in names if point.get(name) is not None} for point in points]
    for row in rows:
        row["is_kept"] = row.get("step") == facts.get("best_step")
    sizes = {f"{role}_parameters": (facts.get(role) or {}).get("parameters") for role in ("target", "drafter")}
    of_machine = {name: facts.get(name) for name in ("cpu", "threads", "device", "target_dtype", "attention")}
    known = {name: value for name, value in of_machine.items() if value is not None}  # earlier runs wrote less
    environment = {**(facts.get("versions") or {}), **sizes, **known}
    decoding = {"enable_thinking": (facts.get("settings") or {}).get("thinking")}
    made = {"schema_version": SCHEMA_VERSION, "kind": "run", "environment": environment, "decoding": decoding}
    made["training"] = facts
    command = facts.get("command")  # earlier runs wrote its words
    made |= {"command": " ".join(command) if isinstance(command, list) else command, "summary": rows}
    return {**made, "domains": _before_and_after(points, facts.get("best_step"))}


def _before_and_after(points: Sequence[dict[str, Any]], best_step: int | None) -> list[Row]:
    """What an adapted drafter accepts of each kind of text at first, and at the step that was kept."""
    measured = [point for point in points if point.get("domains")]
    kept: Row = next((point["domains"] for point in measured if point.get("step") == best_step), {})
    return [
        {"domain": name, "before": before, "after": kept[name]}
        for name, before in (measured[0]["domains"] if kept else {}).items()
    ]


def position_rates(histogram: Sequence[int]) -> tuple[list[float], list[float]]:
    """How often the proposal at position 1, 2, … is accepted: of all verify steps, and of those that got that far.

    `histogram` says how many verify steps gave 1, 2, 3, … tokens, the target's own included.
    """
    reached = list(accumulate(reversed(histogram)))[::-1]  # steps that gave at least 1, 2, 3, … tokens
    reached = [count for count in reached if count]
    of_all = [count / reached[0] for count in reached[1:]]
    of_reached = [count / before for before, count in pairwise(reached)]
    return of_all, of_reached


def published(result: dict[str, Any]) -> tuple[dict[str, float], str] | None:
    """The paper's speed-up by task for exactly this pair, temperature and thinking mode, and where it stands."""
    table = _published()
    temperature = result.get("decoding", {}).get("temperature")
    measured = [named(result, "target"), named(result, "drafter"), temperature, thinking(result)]
    for entry in table["figures"]:
        if measured == [entry[name] for name in ("target", "drafter", "temperature", "thinking")]:
            speedups = {task_key(task): speedup for task, speedup, _ in entry["rows"]}
            return speedups, f"{table['source']}, {entry['where']}: {entry['engine']}, {entry['setup']}"
    return None


def task_key(task: str) -> str:
    """A task's name without case and punctuation: MATH-500 and math500 are the same."""
    return "".join(letter for letter in task.lower() if letter.isalnum())


def named(result: dict[str, Any], role: str) -> str | None:
    """The id of the `target` or `drafter` that was measured, `None` if the file does not say."""
    parts = (result, result.get("environment", {}), result.get("decoding", {}))
    return next((part[role] for part in parts if role in part), None)


def thinking(result: dict[str, Any]) -> bool | None:
    """Whether the chat template asked for thinking, `None` if the file does not say."""
    decoding = result.get("decoding", {})
    return decoding.get("enable_thinking", decoding.get("thinking"))


def place_of(environment: dict[str, Any]) -> str:
    """Where a result was measured: the number of CPU threads, or the name of the device; empty if the result does not say."""
    threads = environment.get("threads")
    if environment["device"] != "cpu" or threads is None:
        return environment["device"] or ""
    return f"{threads} thread{'s' * (threads != 1)}"


def setup(result: dict[str, Any]) -> dict[str, str | None]:
    """What the figures of a result depend on, by name; `None` where the file does not say."""
    environment, decoding = result.get("environment", {}), result.get("decoding", {})
    is_thinking, device = thinking(result), environment.get("device")
    if device == "cpu" and "cpu" in environment:
        device = f"{environment['cpu']}, {place_of(environment)}"
    if "code_for" in environment:
        device = f"code for an {environment['code_for']}, counted and not run"
    versions = [environment["engine"]] if environment.get("engine") else []
    versions += [f"{name} {environment[name]}" for name in VERSIONED if environment.get(name) is not None]
    facts = {
        "pair": _pair(result),
        "hardware": device,
        "dtype": environment.get("target_dtype", environment.get("dtype")),
        "attention": environment.get("attention"),
        "versions": ", ".join(versions),
        "thinking": None if is_thinking is None else "on" if is_thinking else "off",
        "chat template": None if decoding.get("chat_template") is None else str(decoding["chat_template"]),
        "temperature": None if decoding.get("temperature") is None else f"{decoding['temperature']:g}",
        "command": result.get("command"),
        "revision": result.get("revision"),
    }
    source = next((row["tau_source"] for row in result.get("summary", ()) if row.get("tau_source")), None)
    some = {"run": _run(decoding), "simulated": _simulated(decoding, environment), **_trained(result)}
    some["tau by"] = source
    wanted = facts.keys() - NOT_OF_A_RUN if result.get("kind") == "run" else facts.keys()
    return {name: value or None for name, value in {**facts, **some}.items() if name in wanted or value}


def stated(result: dict[str, Any]) -> str:
    """`setup` in one line, without the command: a long chat template as the start of its SHA-256, and what is not recorded."""
    facts = setup(result)
    facts["chat template"] = template_name(facts.get("chat template"))
    said = {name: facts.get(name) for name in STATED}
    parts = [str(fact) if name in UNNAMED else f"{name} {fact}" for name, fact in said.items() if fact]
    missing = [name for name, fact in said.items() if not fact and name in facts]
    if missing and result.get("kind") in KNOWN_BY:
        parts.append(f"not recorded: {', '.join(missing)}")
    return " · ".join(parts)


def template_name(template: str | None) -> str | None:
    """A short chat template as it is, of a long one the start of its SHA-256."""
    if template is None or len(template) <= LONGEST_TEMPLATE:
        return template
    return f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:8]}"


def _pair(result: dict[str, Any]) -> str | None:
    """Both ids, or at least both sizes."""
    names = [named(result, role) for role in ("target", "drafter")]
    sizes = [result.get("environment", {}).get(f"{role}_parameters") for role in ("target", "drafter")]
    if not any(names) and all(sizes) and "targets" not in result:  # which have sizes of their own
        return f"target of {_count(sizes[0])} parameters + drafter of {_count(sizes[1])} parameters"
    return " + ".join(filter(None, names)) or None


def _run(decoding: dict[str, Any]) -> str:
    words = {"batch_size": "batch {}", "max_new_tokens": "at most {} tokens", "repeats": "medians of {} repeats"}
    found = {key: decoding[key] for key in words if decoding.get(key) is not None}
    return ", ".join(words[key].format(found[key]) for key in found if (key, found[key]) != ("repeats", 1))


def _simulated(decoding: dict[str, Any], environment: dict[str, Any]) -> str | None:
    if not decoding.get("is_simulated"):
        return None
    size = environment.get("target_parameters")
    weights = f"random weights ({_count(size)} parameters)" if size else "random weights"
    tau = decoding.get("stated_tau")
    return f"simulated: {weights} and a script that accepts {tau} tokens per step; milliseconds are measured"


def _trained(result: dict[str, Any]) -> dict[str, str]:
    """How a drafter was trained, or what recipes were tried on."""
    made = result.get("training", {})
    if result.get("kind") == "run":
        seconds, settings = made.get("seconds"), made.get("settings") or {}
        how = "" if seconds is None else f"{seconds / 60:.1f} minutes, seed {settings.get('seed', 0)}"
        return {"training": ", ".join(filter(None, (made.get("recipe"), how)))}
    if result.get("kind") == "drafter":
        target, command = made["target"], made["command"]
        command = command if isinstance(command, str) else " ".join(command)
        how = (
            f"trained on {made['data']['examples']} texts of a {target['class']} of {_count(target['parameters'])} parameters, "
            f"{made['settings']['steps']} steps, {made['processes']} process{'es' * (made['processes'] > 1)}, {made['seconds'] / 60:.1f} minutes"
        )
        return {"training": how, "trained by": command}
    if result.get("kind") != "training":
        return {}
    targets = "; ".join(
        f"{name}: {target['class']} of {_count(target['parameters'])} parameters, {target['sequences']} texts of its own, "
        f"{target['held_out']} held-out prompts"
        for name, target in result["targets"].items()
    )
    block = f", block {made['block_size']}" if made["block_size"] else ""  # else the one that a drafter began with
    sizes = f"{made['steps']} steps of {made['batch_tokens']} tokens{block}"
    seeds = "one seed" if made["seeds"] == 1 else f"{made['seeds']} seeds, 95 % intervals"
    return {"targets": targets, "training": f"{sizes}, {seeds}"}


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f} M" if parameters >= 1e6 else f"{parameters / 1e3:.0f} K"


@cache
def _published() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
