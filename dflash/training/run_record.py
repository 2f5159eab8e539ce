"""What came of a run, and what a reader needs to repeat it: the curve, and models, data and versions by name and fingerprint."""

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
from dflash.common.provenance import library_version
from dflash.model.modeling_dflash import DFlashDraftModel

from .data import Example, fingerprint
from .trainer import Trainer
from .training_state import public_settings


@dataclass
class TrainingRecord:
    """What came of a run: one point of the curve per measurement.

    Attributes:
        curve: Points in order.
        best_step: Step of the checkpoint that was kept.
        best_tau: Its acceptance on the held-out prompts, NaN if there were none.
        seconds: From start to end with measurements and saving, without loading; of a resumed run, over all starts, each up to
            where the next one went on.
        stopped_at: The step at which a signal ended the run; `None` if it is complete.
        signal: That signal's number.
        was_complete: Whether the run was complete before, so that there was nothing to resume.
    """

    curve: list[dict[str, Any]] = field(default_factory=list)
    best_step: int = 0
    best_tau: float = float("-inf")
    seconds: float = 0.0
    stopped_at: int | None = None
    signal: int | None = None
    was_complete: bool = False

    @classmethod
    def of_finished(cls, facts: dict[str, Any]) -> TrainingRecord:
        """The record of a complete run, by its `training.json`."""
        curve, best_step = facts["curve"], facts["best_step"]
        taus = {point["step"]: point.get("tau", float("nan")) for point in curve}
        return cls(curve, best_step, taus.get(best_step, float("nan")), facts["seconds"], was_complete=True)


def describe_inputs(
    target: PreTrainedModel, drafter: DFlashDraftModel, examples: Sequence[Example], held_out: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Models, data and prompts by size and fingerprint, without a path of the machine."""
    fields = drafter.config.to_diff_dict().items()
    told = {name: value for name, value in fields if value is not None and name not in NOT_THE_MODEL}
    shape = json.dumps(told, sort_keys=True, default=str)
    return {
        "target": {
            "class": type(target).__name__,
            "parameters": num_parameters(target),
            "revision": getattr(target.config, "_commit_hash", None),  # on the Hub
            "fingerprint": model_fingerprint(target),
        },
        "drafter": {"parameters": num_parameters(drafter), "fingerprint": _short_hash(shape)},
        "data": {
            "examples": len(examples),
            "tokens": sum(map(len, examples)),
            "supervised_tokens": supervised_tokens(examples),
            "fingerprint": fingerprint(examples),
        },
        "held_out": {"prompts": len(held_out), "fingerprint": _short_hash(repr(list(map(list, held_out))))},
    }


def describe_run(trainer: Trainer, inputs: dict[str, Any], record: TrainingRecord) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    return {
        "settings": asdict(public_settings(trainer.settings)),
        "processes": trainer.accelerator.num_processes,
        "parameters": num_parameters(trainer.drafter),
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


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters of a model; those of a sharded one over all processes."""
    return sum(parameter.numel() for parameter in model.parameters())


def supervised_tokens(examples: Sequence[Example]) -> int:
    """Tokens that the drafter learns to propose."""
    return sum(sum(example.mask_array) for example in examples)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
