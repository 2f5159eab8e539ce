"""Where a run stands, on disk beside its output: written aside and renamed, so that a kill at any moment leaves a whole one.

The output itself is a checkpoint that anyone loads, so the state has a folder of its own, `OUTPUT.state`, which goes when
the run is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoints import check_replaceable, replace_folder

from .settings import TrainingSettings


FACTS_FILE, TENSORS_FILE = "state.json", "state.pt"


def state_folder(output: Path) -> Path:
    """The folder of the training state that belongs to `output`."""
    return output.with_name(f"{output.name}.state")


def save_state(folder: Path, facts: dict[str, Any], tensors: dict[str, Any] | None) -> None:
    """Writes a training state to `folder` in the place of an older one; before the first step it has no tensors.

    Raises:
        OSError: if it cannot be written, as on a full disk; the older one stands.
    """
    aside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    with saving("training state", folder):
        try:
            aside.mkdir(parents=True)
            if tensors is not None:
                torch.save(tensors, aside / TENSORS_FILE)
            (aside / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            replace_folder(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def saving(what: str, folder: Path) -> Iterator[None]:
    """Turns what a full disk raises, in any of the libraries that write, into one OSError with the remedy."""
    try:
        yield
    except Exception as error:
        # torch raises RuntimeError, safetensors an error of its own.
        if not isinstance(error, (OSError, RuntimeError)) and type(error).__name__ != "SafetensorError":
            raise
        before = "the older one stands" if folder.exists() else "there is no older one"
        reason = str(error).strip().split("\n")[0]
        raise OSError(
            f"The {what} {folder} cannot be written ({reason}); {before}: make room and run again with --resume."
        ) from error


def read_facts(folder: Path) -> dict[str, Any] | None:
    """What a training state says of its run, `None` if there is no state."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return facts


def read_tensors(folder: Path) -> dict[str, Any] | None:
    """Weights, optimisers and counts of a training state, on the CPU; `None` of a run that was stopped before it saved any."""
    if not folder.is_dir():
        raise ValueError(
            f"The training state {folder} is not on this machine: give an output on a disk that all machines share."
        )
    if not (folder / TENSORS_FILE).exists():
        return None
    tensors: dict[str, Any] = torch.load(folder / TENSORS_FILE, map_location="cpu", weights_only=True)
    return tensors


def clear_leftovers(folder: Path) -> None:
    """Takes away what a killed process left half-written beside `folder`, and puts back what it had moved aside."""
    for old in sorted(folder.parent.glob(f".{folder.name}.replaced-*")):
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:  # killed between the two renames
            old.rename(folder)
    for partial in folder.parent.glob(f".{folder.name}.partial-*"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink()


def remove_state(folder: Path) -> None:
    """Deletes the state of a run that is complete."""
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.partial-{os.getpid()}"))  # a kill leaves no half of it
    clear_leftovers(folder)


def claim_output(output: Path, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Makes sure that a run may write to `output`; the facts of the state to go on from, `None` to begin.

    Raises:
        ValueError: if `output` holds another run and neither `resume` nor `overwrite` is given, or something else than a
            drafter's checkpoint.
        OSError: if nothing can be written there.
    """
    folder = state_folder(output)
    for path in (output, folder):
        clear_leftovers(path)
    check_replaceable(output)  # rather now than when there is something to save
    _check_writable(output)
    facts = read_facts(folder)
    holds_checkpoint = output.is_dir() and any(output.iterdir())
    if facts is not None and not facts["step"] and not holds_checkpoint:
        facts = None  # it ended before it had made anything
    holds_run = facts is not None or holds_checkpoint
    if overwrite:
        if resume:
            raise ValueError("resume and overwrite are both given: go on with the run, or begin anew.")
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if resume:
        if facts is None and holds_run:
            raise ValueError(
                f"{output} holds a finished checkpoint and no training state ({folder.name}): there is nothing to resume; "
                "choose another output, or pass overwrite (--overwrite)."
            )
        return facts
    if holds_run:
        raise ValueError(
            f"{output} holds another run: pass resume (--resume) to go on with it, overwrite (--overwrite) to begin anew, "
            "or choose another output."
        )
    return None


def _check_writable(output: Path) -> None:
    probe = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        probe.mkdir(parents=True)
        probe.rmdir()
    except OSError as error:
        raise OSError(f"The output {output} cannot be written ({error.strerror}): choose another folder.") from error


def refuse_changes(settings: TrainingSettings, inputs: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError, naming what differs, unless a run with these settings and inputs goes on from a saved state."""
    changed = settings.changed_from(saved["settings"])
    for name, now in inputs.items():
        before = saved["inputs"].get(name, {}).get("fingerprint")
        if before != now["fingerprint"]:
            changed.append(f"{name}: {before}, now {now['fingerprint']}")
    if changed:
        raise ValueError(
            f"The run to resume had other settings ({'; '.join(changed)}): give the same, or pass overwrite (--overwrite) to "
            "begin anew."
        )
