"""What came of a run and what a reader needs to repeat it: the curve, the facts beside the checkpoint, its card."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import accelerate
import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from dflash.common.fingerprints import NOT_THE_MODEL, model_fingerprint
from dflash.common.provenance import library_version, public_name
from dflash.model.generation_dflash import write_card
from dflash.model.modeling_dflash import DFlashDraftModel

from .data import Example, fingerprint
from .settings import TrainingSettings


@dataclass
class TrainingRecord:
    """What came of a run: one point of the curve per measurement.

    Attributes:
        curve: Points in order.
        best_step: Step of the checkpoint that was kept.
        best_tau: Its acceptance on the held-out prompts, NaN if there were none.
        seconds: From the start to the end, measurements and saving included, loading not; of a resumed run, of all starts, each
            up to where the next one went on.
        stopped_at: The step at which a signal ended the run; `None` if it is complete.
        signal: That signal's number.
    """

    curve: list[dict[str, Any]] = field(default_factory=list)
    best_step: int = 0
    best_tau: float = float("-inf")
    seconds: float = 0.0
    stopped_at: int | None = None
    signal: int | None = None


def describe_inputs(
    target: PreTrainedModel, drafter: DFlashDraftModel, examples: Sequence[Example], held_out: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Models, data and prompts by size and fingerprint, without a path of the machine."""
    fields = drafter.config.to_diff_dict().items()
    shape = {name: value for name, value in fields if value is not None and name not in NOT_THE_MODEL}
    return {
        "target": {
            "class": type(target).__name__,
            "parameters": sum(parameter.numel() for parameter in target.parameters()),
            "revision": getattr(target.config, "_commit_hash", None),  # on the Hub
            "fingerprint": model_fingerprint(target),
        },
        "drafter": {
            "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
            "fingerprint": hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:16],
        },
        "data": {
            "examples": len(examples),
            "tokens": sum(map(len, examples)),
            "supervised_tokens": sum(sum(example.loss_mask) for example in examples),
            "fingerprint": fingerprint(examples),
        },
        "held_out": {
            "prompts": len(held_out),
            "fingerprint": hashlib.sha256(repr([list(prompt) for prompt in held_out]).encode()).hexdigest()[:16],
        },
    }


def describe_run(
    drafter: DFlashDraftModel,
    inputs: dict[str, Any],
    settings: TrainingSettings,
    record: TrainingRecord,
    num_processes: int = 1,
) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    return {
        "settings": asdict(settings) | {name: public_name(getattr(settings, name)) for name in ("init", "features")},
        "processes": num_processes,
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        **inputs,
        "versions": {
            "dflash": library_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "seconds": record.seconds,
        "best_step": record.best_step,
        "curve": record.curve,
    }


def model_card(config: Any, name: str, facts: dict[str, Any]) -> str:
    """The README.md of a trained drafter: what it is, how it was trained and what was measured while it was."""
    data, settings, answers = facts["data"], facts["settings"], facts.get("answers")
    stated = answers["data"]["license"] if answers else None
    licence = settings["license"] or (stated if stated and "," not in stated else None)
    card = write_card(config, name, facts.get("target_name"))
    if facts.get("target_is_local"):
        card = card.replace(f"base_model: {facts['target_name']}\n", "", 1)
    if licence:
        card = card.replace("---\n", f"---\nlicense: {licence}\n", 1)
    source = facts.get("data_name")
    points = [
        f"| {point['step']} | {point['loss']:.3f} | {point['accepted_per_block']:.2f} | {_shown(point.get('tau'))} |"
        for point in facts["curve"]
    ]
    lines = [
        "## Training",
        "",
        f"{data['examples']:,} sequences{f' of {source}' if source else ''}, {data['tokens']:,} tokens of which "
        f"{data['supervised_tokens']:,} supervised (fingerprint {data['fingerprint']}); loss {settings['loss']}, position "
        f"weights {settings['position_weights']}, {settings['num_anchors']} {settings['anchors']} anchors, seed "
        f"{settings['seed']}. {facts['parameters']:,} parameters; the weights are those of step {facts['best_step']}, of "
        f"{facts['seconds'] / 60:.1f} minutes on {_counted(facts['processes'], 'process', 'processes')} in all. Settings, "
        "versions, fingerprints and the whole curve are in `training.json`.",
        "",
        *([_answers_text(answers), ""] if answers else []),
        f"| step | loss | accepted drafts per block, teacher-forced | tau on {facts['held_out']['prompts']} held-out prompts |",
        "|---|---|---|---|",
        *points,
        "",
        *([f"`{facts['command']}`", ""] if isinstance(facts.get("command"), str) else []),
        *([] if licence else ["No licence was stated for these weights.", ""]),
    ]
    return card + "\n" + "\n".join(lines)


def _answers_text(answers: dict[str, Any]) -> str:
    """Who wrote the data, how, and from what: of the manifest beside it."""
    how, source = answers["settings"], answers["data"]
    law = "greedily"
    if how["temperature"]:
        law = (
            f"at temperature {how['temperature']:g}, top-p {how['top_p']:g}, top-k {how['top_k']}, seed {how['seed']}"
        )
    revision = f" (revision {answers['revision']})" if answers.get("revision") else ""
    licence = f", licence {source['license']}" if source["license"] else ""
    return (
        f"Its answers were written by {_code(answers['target']) or 'the target'}{revision} {law}, thinking "
        f"{'on' if how['thinking'] else 'off'}, at most {how['max_new_tokens']:,} tokens each, to "
        f"{_code(source['name']) or 'rows'} ({source['rows']:,} rows{licence})."
        + (f" `{answers['command']}`" if answers.get("command") else "")
    )


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def facts_file(facts: dict[str, Any]) -> str:
    """The text of `training.json`."""
    return json.dumps(facts, indent=2) + "\n"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
