"""Keeps the training state of a run on disk.

It is written aside and renamed, so that a killed process never leaves a half-written state.

The output itself is a checkpoint that users load. The training state is therefore in a folder of its own,
`OUTPUT.state`, which is deleted when the run is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dflash.checkpoints import written_aside
from dflash.common.files import leftovers, restore_replaced
from dflash.common.json_lines import refuse_changes
from dflash.common.messages import first_line
from dflash.common.provenance import public_name
from dflash.common.runs import refuse_both

from .settings import Facts, TrainingSettings


FACTS_FILE, TENSORS_FILE = "state.json", "state.pt"


def state_folder(output: Path) -> Path:
    """Returns the folder of the training state that belongs to `output`."""
    return output.with_name(f"{output.name}.state")


def save_state(folder: Path, facts: Facts, tensors: Facts | None) -> None:
    """Writes a training state to `folder`, replacing an older one. `tensors` are `None` before the first step.

    Raises:
        OSError: if it cannot be written, for example on a full disk; the older state is kept.
    """
    with save_errors("training state", folder), written_aside(folder) as aside:
        aside.mkdir()
        if tensors is not None:
            torch.save(tensors, aside / TENSORS_FILE)
        (aside / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@contextmanager
def save_errors(what: str, folder: Path, left: str | None = None) -> Iterator[None]:
    """Inside the `with`, turns any library's error about a failed write into one OSError with the remedy.

    Its message says that `what` cannot be written, then `left`: what `folder` still holds. Default of `left`: whether
    there is an older one.
    """
    try:
        yield
    except Exception as error:
        # torch raises RuntimeError, safetensors an error of its own.
        if not isinstance(error, (OSError, RuntimeError)) and type(error).__name__ != "SafetensorError":
            raise
        left = left or ("the older one is kept" if folder.exists() else "there is no older one")
        remedy = "make room and run again with --resume"
        raise OSError(f"The {what} {folder} cannot be written ({first_line(error)}); {left}: {remedy}.") from error


def read_tensors(folder: Path) -> Facts | None:
    """Loads the tensors of a training state to the CPU; `None` if it has none, ValueError if there is no folder."""
    if not folder.is_dir():
        remedy = "give an output on a disk that all machines share"
        raise ValueError(f"The training state {folder} is not on this machine: {remedy}.")
    path = folder / TENSORS_FILE
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def clear_leftovers(folder: Path) -> None:
    """Deletes the half-written files that a killed process left beside `folder`.

    Restores `folder` if the process had moved it aside.
    """
    restore_replaced(folder)
    for partial in leftovers(folder, "partial-*"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink()


def remove_state(folder: Path) -> None:
    """Deletes the training state in `folder`, if there is one.

    If the process is killed meanwhile, no half-deleted state is found later.
    """
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.partial-{os.getpid()}"))
    clear_leftovers(folder)


@dataclass(frozen=True)
class Claim:
    """The folder of a run, and what it holds of an earlier start: an unfinished run, a finished run, or neither."""

    output: Path
    saved: Facts | None = None  # content of `state.json` of an unfinished run
    finished: Facts | None = None  # content of `training.json` of a finished run


def find_run(output: Path, settings: TrainingSettings, resume: bool, overwrite: bool) -> Claim:
    """Returns the claim on `output`. It holds the unfinished or finished run to resume, or neither to begin anew.

    Raises:
        ValueError: if `output` holds a run and neither `resume` nor `overwrite` is given, if both are given, or if
            `output` holds a run with other settings, or a checkpoint without a run, and `resume` is given.
    """
    refuse_both(resume, overwrite)
    folder = state_folder(output)
    saved, finished = _read_json(folder / FACTS_FILE), _read_json(output / "training.json")
    holds_checkpoint = output.is_dir() and any(output.iterdir())
    if saved is not None and not saved["step"] and not holds_checkpoint:
        saved = None  # the run ended before it had written a checkpoint
    if overwrite or not (saved or holds_checkpoint):
        return Claim(output)
    if not resume:
        raise ValueError(
            f"{output} holds another run: pass resume (--resume) to go on with it, overwrite (--overwrite) to begin "
            "anew, or choose another output."
        )
    if saved is not None:
        _refuse_other_settings(settings, saved["settings"])
        return Claim(output, saved=saved)
    if finished is None or "curve" not in finished:
        raise ValueError(
            f"{output} holds a checkpoint that no training run wrote, and there is no training state ({folder.name}) "
            "to resume: choose another output, or pass overwrite (--overwrite)."
        )
    _refuse_other_settings(public_settings(settings), finished["settings"])
    return Claim(output, finished=finished)


def _read_json(path: Path) -> Facts | None:
    """Returns the content of a JSON file; `None` if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def public_settings(settings: TrainingSettings) -> TrainingSettings:
    """Returns a copy of the settings in which local paths are reduced to their last part."""
    return replace(
        settings,
        init=public_name(settings.init),
        features=public_name(settings.features),
        eval_data=public_name(settings.eval_data),
    )


def _refuse_other_settings(settings: TrainingSettings, saved: Facts) -> None:
    before = TrainingSettings().decisive()  # a setting that did not exist at the time of the run had its default
    before |= {name: value for name, value in saved.items() if name in before}
    refuse_changes(before, settings.decisive())
