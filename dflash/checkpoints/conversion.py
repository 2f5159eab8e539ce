"""Drafters of any published dialect, written in this library's form or in the one that all engines read."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from dflash.common.cards import drafter_card
from dflash.common.messages import first_line, without_load_report
from dflash.drafter import DFlashDraftModel

from .folders import check_replaceable, save_checkpoint
from .licences import carried_licence
from .rules import check
from .rules.findings import RETRAIN, summary
from .rules.pair_rules import SHARED_SIZES


CONVERT = "Use `dflash convert`, which writes it for this library"


def convert_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Path:
    """Reads a drafter of any dialect and writes it to `folder` in this library's form, its code beside its weights.

    Tensors are written in one dtype, as transformers loads them: that of the config, or else of the first tensor. Those that
    are stored in it keep their values, others are cast. Frozen copies of the target's embedding and head, which some
    dialects store, are left out. A reduced vocabulary and an anchor that predicts stay: the drafter depends on them. The licence stays, in
    the card and in its own file, and so does the record of a training run.

    Args:
        source: A local folder or an id on the Hub.
        folder: Where to; an older drafter there is replaced once the new one is complete.
        target: The drafter's target, whose config.json says what some dialects leave out (its depth, its vocabulary).
        trust_remote_code: Run code that the target's repository holds, where its config needs it.
        kwargs: Passed on to `DFlashDraftModel.from_pretrained` (`revision`, `weights_only`, …).

    Raises:
        ValueError: if the checkpoint or its card cannot be read exactly, holds weights that are NaN or infinite, belongs to
            another target, or would replace something else.
    """
    folder = Path(folder).expanduser().absolute()
    drafter = _read(source, folder, **kwargs)
    if target is not None:
        _complete(drafter.config, target, trust_remote_code)
    if not drafter.config.vocab_size:
        raise ValueError(f"The config.json of {source} does not say vocab_size: pass target (--target).")
    files = _files_beside(drafter.config, source, folder.name, target, kwargs.get("revision"))
    return save_checkpoint(drafter, folder, files=files)


def export_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Path:
    """As [`convert_checkpoint`], with a card, and only if [`check`] says of no engine that it fails.

    Raises:
        ValueError: also for a folder name that vLLM would not know, or a drafter that some engine fails on; nothing is
            written then. A DFlash2 drafter is one: `convert_checkpoint` writes it for this library.
    """
    folder = Path(folder).expanduser().absolute()
    if "dflash" not in folder.name.lower():
        raise ValueError(
            f"{folder.name!r} does not contain 'DFlash', by which vLLM knows the method: rename the folder."
        )
    drafter = _read(source, folder, **kwargs)
    for name, what in (
        ("draft_vocab_size", "a head of its own over part of the vocabulary, which SGLang and TensorRT-LLM drop"),
        ("sample_from_anchor", "an anchor that proposes, which vLLM refuses and SGLang ignores"),
    ):
        value = getattr(drafter.config, name)
        if value:
            raise ValueError(f"{name}={value}: this drafter has {what}. {CONVERT}.")
    _complete(drafter.config, target, trust_remote_code)
    files = _files_beside(drafter.config, source, folder.name, target, kwargs.get("revision"), has_card=True)
    return save_checkpoint(drafter, folder, files=files, inspect=partial(_refuse_failing, source, str(target)))


def _refuse_failing(source: str | os.PathLike[str], target: str, written: Path) -> None:
    """Raises ValueError if some engine fails on the pair: the engines, the first reason, and which others read it as it is."""
    verdicts = check(written, target).verdicts
    failing = [verdict for verdict in verdicts if verdict.verdict == "fails"]
    if not failing:
        return
    first = failing[0].findings[0]
    way = CONVERT
    reading = [verdict.name for verdict in verdicts if verdict.verdict == "works" and verdict.engine != "remote-code"]
    if reading:
        way += f" and, by the rules of `dflash check`, for {', '.join(reading)}"
    if (Path(source) / "training.json").exists():
        way += "; a folder that `dflash train` wrote has that form already"
    names = ", ".join(verdict.name for verdict in failing)
    raise ValueError(f"{names} cannot run this drafter ({first.field}: {first.why.rstrip('.')}). {way}.")


def _read(source: str | os.PathLike[str], folder: Path, **kwargs: Any) -> DFlashDraftModel:
    """The drafter at `source`; ValueError if its weights are broken or `folder` would replace something else."""
    if folder.exists() and Path(source).expanduser().resolve() == folder.resolve():
        raise ValueError(f"{source} is the source and the folder to write: choose another folder.")
    check_replaceable(folder)
    try:
        with without_load_report():
            drafter: DFlashDraftModel = DFlashDraftModel.from_pretrained(source, dtype="auto", **kwargs)
    except OSError as error:
        raise ValueError(f"The drafter {source} cannot be read: {first_line(error)}") from error
    broken = []
    for name, tensor in drafter.state_dict().items():
        if tensor.dtype.itemsize > 1 and not tensor.isfinite().all():
            broken.append(name)
    if broken:
        raise ValueError(f"Weights of {source} are NaN or infinite ({summary(broken)}): {RETRAIN}")
    return drafter


def _files_beside(
    config: Any,
    source: str | os.PathLike[str],
    name: str,
    target: str | os.PathLike[str] | None,
    revision: str | None,
    has_card: bool = False,
) -> dict[str, bytes]:
    """The licence and the record of a training run that go with a copy, and its card if it states a licence or `has_card`."""
    licence, files = carried_licence(os.fspath(source), revision)
    if has_card or licence.name is not None:
        target_name = None if target is None else str(target)
        card = drafter_card(config, name, target_name, licence.front_matter)
        files["README.md"] = card.encode()
    return files


def _complete(config: Any, target: str | os.PathLike[str], trust_remote_code: bool) -> None:
    """Completes a drafter's config from its target's; ValueError if they contradict each other."""
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
        target_config = loaded.get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"The config of the target {target} cannot be read: {first_line(error)}") from error
    for name, its_name in SHARED_SIZES.items():
        value = getattr(target_config, its_name)
        own = getattr(config, name)
        if own and own != value:
            raise ValueError(
                f"{name} is {own} for the drafter and {value} for {target}: it was trained for another target."
            )
        setattr(config, name, value)
    config.check()
