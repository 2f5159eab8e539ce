"""Writes the files of a run: the best checkpoint with its `training.json` and model card, and the training state.

`training.json` holds the curve and what a reader needs to repeat the run: models, data and versions by name and
fingerprint.
"""

import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.checkpoints import save_checkpoint
from dflash.common.fingerprints import NOT_THE_MODEL, fingerprint, model_fingerprint
from dflash.common.logits import dtype_name
from dflash.common.provenance import machine, versions
from dflash.common.version import __version__
from dflash.drafter import DFlashDraftModel

from .card import model_card
from .examples import Example, Prompts, described
from .settings import Facts
from .trainer import Trainer
from .training_state import public_settings, remove_state, save_errors, save_state, state_folder


@dataclass
class TrainingRecord:
    """The result of a run: what was measured, and which checkpoint was kept.

    Attributes:
        curve: A point for each measurement, in order: a dict with `step`, the training counts and the acceptance.
        best_step: Step of the checkpoint that was kept.
        best_tau: Tau of this checkpoint on the held-out prompts, NaN if there were none.
        seconds: Duration of the run with measurements and saving, without loading. For a resumed run this is the sum
            over all starts; each start counts up to the training state from which the next one continued.
        stopped_at: The step at which a signal ended the run; `None` if it is complete.
        signal: Number of the signal that this process received, if any.
        was_complete: Whether the run was already complete when it was started again, so that nothing was trained.
    """

    curve: list[Facts] = field(default_factory=list)
    best_step: int = 0
    best_tau: float = float("-inf")
    seconds: float = 0.0
    stopped_at: int | None = None
    signal: int | None = None
    was_complete: bool = False

    @classmethod
    def of_finished(cls, facts: Facts) -> "TrainingRecord":
        """Returns the record of a complete run from the content of its `training.json`, with `was_complete` set."""
        best_step, best_tau = facts["best_step"], math.nan
        for point in facts["curve"]:
            if point["step"] == best_step:
                best_tau = point.get("tau", math.nan)
        return cls(
            facts["curve"],
            best_step,
            best_tau,
            facts["seconds"],
            was_complete=True,
        )


def describe_inputs(
    target: PreTrainedModel, drafter: DFlashDraftModel, examples: Sequence[Example], held_out: Prompts
) -> Facts:
    """Returns sizes and fingerprints of target, drafter, data and held-out prompts, without any local path."""
    shape = drafter.config.to_diff_dict()
    shape = {name: value for name, value in shape.items() if value is not None}
    for name in NOT_THE_MODEL & shape.keys():
        del shape[name]
    return {
        "target": {
            "class": type(target).__name__,
            "parameters": target.num_parameters(),
            "revision": getattr(target.config, "_commit_hash", None),  # on the Hub
            "fingerprint": model_fingerprint(target),
        },
        "drafter": {"parameters": drafter.num_parameters(), "fingerprint": fingerprint(shape)},
        "data": described(examples),
        "held_out": {"prompts": len(held_out), "fingerprint": fingerprint(list(map(list, held_out)))},
    }


def describe_run(trainer: Trainer, inputs: Facts, record: TrainingRecord) -> Facts:
    """Returns the content of `training.json`: settings, inputs, versions, machine, and the measured curve."""
    return {
        "settings": asdict(public_settings(trainer.settings)),
        "recipe": f"{trainer.settings.recipe_text()} ({trainer.rates})",
        "precision": trainer.precision,
        "processes": trainer.accelerator.num_processes,
        "parameters": inputs["drafter"]["parameters"],
        **inputs,
        "versions": {"dflash": __version__, **versions(), "accelerate": accelerate.__version__},
        **machine(trainer.accelerator.device),
        "target_dtype": dtype_name(trainer.target),
        "attention": trainer.target.config._attn_implementation,
        "seconds": record.seconds,
        "best_step": record.best_step,
        "curve": record.curve,
    }


@dataclass
class Checkpointer:
    """Writes the files of a run on the first process. All processes must call its methods."""

    trainer: Trainer
    output: Path  # folder of the checkpoint
    inputs: Facts  # what `describe_inputs` returned
    provenance: Facts  # further entries of `training.json`
    record: TrainingRecord  # grows while the run goes on
    elapsed: Callable[[], float]  # seconds since this start of the run

    def __post_init__(self) -> None:
        self._seconds_before = self.record.seconds

    def save_checkpoint(self) -> None:
        """Replaces the checkpoint in `output` with the current drafter. After an OSError the older one is kept."""
        drafter = self.trainer.decodable_drafter()
        if self.trainer.is_first:
            with save_errors("checkpoint", self.output):
                save_drafter(drafter, self.output, self._facts())

    def save_state(self, is_beginning: bool = False) -> None:
        """Writes the training state beside `output`. After an OSError the older state is kept.

        With `is_beginning` the state holds no tensors, and only marks `output` as that of an unfinished run.
        """
        tensors = None if is_beginning else self.trainer.state()
        if self.trainer.is_first:
            self._read_clock()
            record = dict(vars(self.record))
            for name in ("stopped_at", "signal", "was_complete"):  # these describe this start alone
                del record[name]
            facts = {
                "step": self.trainer.step_number,
                "settings": asdict(self.trainer.settings),
                "processes": self.trainer.accelerator.num_processes,
                "precision": self.trainer.precision,
                "inputs": self.inputs,
                "record": record,
            }
            save_state(state_folder(self.output), facts, tensors)

    def finish(self) -> None:
        """Completes the run: writes the whole curve to `training.json` and model card; deletes the training state."""
        if not self.trainer.is_first:
            return
        output = self.output
        # A kill must not leave half-written files in the checkpoint.
        aside = output.with_name(f".{output.name}.partial-{os.getpid()}")
        config = self.trainer.drafter.config
        with save_errors("checkpoint", output):
            texts = _texts(config, output.name, self._facts())
            for name, text in texts.items():
                aside.write_text(text, encoding="utf-8")
                os.replace(aside, output / name)
        remove_state(state_folder(output))

    def _facts(self) -> Facts:
        self._read_clock()
        return describe_run(self.trainer, self.inputs, self.record) | self.provenance

    def _read_clock(self) -> None:
        self.record.seconds = round(self._seconds_before + self.elapsed(), 1)


def save_drafter(drafter: DFlashDraftModel, folder: Path, facts: Facts, dtype: torch.dtype = torch.bfloat16) -> None:
    """Saves a copy of `drafter` in `dtype`, with `facts` as `training.json` and, if they have a curve, a model card.

    If the process is killed or the disk is full, the older checkpoint is kept.
    """
    rounded: Any = copy.deepcopy(drafter)
    texts = _texts(drafter.config, folder.name, facts)
    save_checkpoint(rounded.to(dtype), folder, files=texts)


def _texts(config: Any, name: str, facts: Facts) -> dict[str, str]:
    """Returns the texts of `training.json` and, if `facts` have a curve, `README.md`, by file name."""
    card = {"README.md": model_card(config, name, facts)} if "curve" in facts else {}
    return {"training.json": json.dumps(facts, indent=2) + "\n", **card}
