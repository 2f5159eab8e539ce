"""Writes what a run leaves behind: the best checkpoint with its facts and card and, until the run is complete, its state."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoints import save_checkpoint
from dflash.model.modeling_dflash import DFlashDraftModel

from .card import model_card
from .distributed import whole_copy
from .run_record import TrainingRecord, describe_run
from .trainer import Trainer
from .training_state import remove_state, save_state, saving, state_folder


@dataclass
class Checkpointer:
    """Writes, on the first process, what a run leaves behind; all processes must call."""

    trainer: Trainer
    output: Path  # folder of the checkpoint
    inputs: dict[str, Any]  # of `describe_inputs`
    provenance: dict[str, Any]  # more facts for `training.json`
    record: TrainingRecord  # grows while the run goes on
    elapsed: Callable[[], float]  # seconds since this start of the run

    def __post_init__(self) -> None:
        self._seconds_before = self.record.seconds

    def save_checkpoint(self) -> None:
        """Puts the drafter as it is in the place of a worse one."""
        whole = whole_copy(self.trainer.drafter)
        if self.trainer.is_first:
            with saving("checkpoint", self.output):
                save_drafter(whole, self.output, self._facts())

    def save_state(self, is_beginning: bool = False) -> None:
        """What the run needs to go on; at the beginning only that it has begun, which tells its checkpoint from a finished one."""
        tensors = None if is_beginning else self.trainer.state()
        if self.trainer.is_first:
            self._read_clock()
            of_this_start = ("stopped_at", "signal", "was_complete")
            facts = {
                "step": self.trainer.step_number,
                "settings": asdict(self.trainer.settings),
                "processes": self.trainer.accelerator.num_processes,
                "inputs": self.inputs,
                "record": {name: value for name, value in vars(self.record).items() if name not in of_this_start},
            }
            save_state(state_folder(self.output), facts, tensors)

    def finish(self) -> None:
        """Writes the whole curve beside the best checkpoint and deletes the training state."""
        if self.trainer.is_first:
            # Beside the checkpoint, which a kill must leave without half-written files.
            aside = self.output.with_name(f".{self.output.name}.partial-{os.getpid()}")
            with saving("checkpoint", self.output):
                for name, text in _texts(self.trainer.drafter.config, self.output.name, self._facts()).items():
                    aside.write_text(text, encoding="utf-8")
                    os.replace(aside, self.output / name)
            remove_state(state_folder(self.output))

    def _facts(self) -> dict[str, Any]:
        self._read_clock()
        return describe_run(self.trainer, self.inputs, self.record) | self.provenance

    def _read_clock(self) -> None:
        self.record.seconds = round(self._seconds_before + self.elapsed(), 1)


def save_drafter(
    drafter: DFlashDraftModel, folder: Path, facts: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes the checkpoint in `dtype` with `facts` as `training.json`; a full disk or a kill leaves the older one."""
    rounded: Any = copy.deepcopy(drafter)
    save_checkpoint(rounded.to(dtype), folder, files=_texts(drafter.config, folder.name, facts))


def _texts(config: Any, name: str, facts: dict[str, Any]) -> dict[str, str]:
    """The files beside the weights: the facts and, if they are those of a run, the card that they fill."""
    card = {"README.md": model_card(config, name, facts)} if "curve" in facts else {}
    return {"training.json": json.dumps(facts, indent=2) + "\n", **card}
