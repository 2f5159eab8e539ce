"""What a run leaves behind: the best checkpoint with its record and card and, until it is complete, its training state."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoints import save_checkpoint
from dflash.model.modeling_dflash import DFlashDraftModel

from .record import TrainingRecord, describe_run, facts_file, model_card
from .sharding import whole_copy
from .state import remove_state, save_state, saving, state_folder
from .trainer import Trainer


class Keeper:
    """Writes what a run leaves behind, on the first process; all must call.

    Args:
        trainer: The run.
        output: Folder of the checkpoint.
        inputs: What `describe_inputs` says.
        provenance: More facts for the record.
        record: What came of the run so far; it grows while the run goes on.
        elapsed: Seconds since this start of the run.
    """

    def __init__(
        self,
        trainer: Trainer,
        output: Path,
        inputs: dict[str, Any],
        provenance: dict[str, Any],
        record: TrainingRecord,
        elapsed: Callable[[], float],
    ) -> None:
        self.trainer = trainer
        self.output = output
        self.inputs = inputs
        self.provenance = provenance
        self.record = record
        self._elapsed, self._seconds_before = elapsed, record.seconds

    def keep_checkpoint(self) -> None:
        """The drafter as it is, in the place of a worse one."""
        whole = whole_copy(self.trainer.drafter)
        if self.trainer.is_first:
            with saving("checkpoint", self.output):
                save_drafter(whole, self.output, self._facts())

    def keep_beginning(self) -> None:
        """That a run has begun: a checkpoint that it leaves before its first state is no finished one."""
        self._keep_state(None)

    def keep_state(self) -> None:
        """What the run needs to go on."""
        self._keep_state(self.trainer.state())

    def _keep_state(self, tensors: dict[str, Any] | None) -> None:
        if self.trainer.is_first:
            self._read_clock()
            record = {name: value for name, value in vars(self.record).items() if name not in ("stopped_at", "signal")}
            facts = {
                "step": self.trainer.step_number,
                "settings": asdict(self.trainer.settings),
                "processes": self.trainer.accelerator.num_processes,
                "inputs": self.inputs,
                "record": record,
            }
            save_state(state_folder(self.output), facts, tensors)

    def finish(self) -> None:
        """The whole curve beside the best checkpoint, and no training state any more."""
        if self.trainer.is_first:
            config = self.trainer.drafter.config
            aside = self.output.with_name(f".{self.output.name}.partial-{os.getpid()}")
            with saving("checkpoint", self.output):
                for name, text in _texts(config, self.output.name, self._facts()).items():
                    aside.write_text(text, encoding="utf-8")
                    os.replace(aside, self.output / name)
            remove_state(state_folder(self.output))

    def _facts(self) -> dict[str, Any]:
        trainer = self.trainer
        self._read_clock()
        described = describe_run(
            trainer.drafter, self.inputs, trainer.settings, self.record, trainer.accelerator.num_processes
        )
        return described | self.provenance

    def _read_clock(self) -> None:
        self.record.seconds = round(self._seconds_before + self._elapsed(), 1)


def save_drafter(
    drafter: DFlashDraftModel, folder: Path, facts: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes the checkpoint in `dtype` with `facts` as `training.json`; a full disk or a kill leaves the older one."""
    rounded: Any = copy.deepcopy(drafter)
    save_checkpoint(rounded.to(dtype), folder, files=_texts(drafter.config, folder.name, facts))


def _texts(config: Any, name: str, facts: dict[str, Any]) -> dict[str, str]:
    """The files beside the weights: the facts and, if they are those of a run, the card that they fill."""
    card = {"README.md": model_card(config, name, facts)} if "curve" in facts else {}
    return {"training.json": facts_file(facts), **card}
