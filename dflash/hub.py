"""A checkpoint folder as others read it: weights, config, the code beside them, and a card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel


def save_checkpoint(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Writes `model` to `folder` and returns it; a drafter's code goes beside its weights, `custom_generate` included.

    Everything is written aside and then renamed, so that neither a reader nor an interruption meets half a checkpoint.

    Args:
        model: A drafter or a target.
        folder: Where to; an older checkpoint there is replaced.
        tokenizer: Saved beside the model if given.
        files: Texts by file name, such as the card in README.md.

    Raises:
        ValueError: if `folder` holds something that is not a checkpoint.
    """
    folder = Path(folder).expanduser().absolute()
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        model.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        if hasattr(model, "spec_generate"):
            door = str(resources.files("dflash") / "custom_generate")
            shutil.copytree(door, aside / "custom_generate", ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in (files or {}).items():
            (aside / name).write_text(text, encoding="utf-8")
        replace_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def check_replaceable(folder: Path) -> None:
    """Raises ValueError if writing a checkpoint to `folder` would lose something else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} exists and is not a checkpoint (no config.json): choose another folder.")


def replace_folder(new: Path, folder: Path) -> None:
    """Renames `new` to `folder`; what was there before is deleted only after that."""
    old = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
