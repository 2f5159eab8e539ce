"""Checkpoint folders: weights, config, code and card, written whole or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.common.files import followed, restore_replaced
from dflash.common.json_text import parsed_json


if TYPE_CHECKING:  # the names of a checkpoint's files are asked for where nothing else needs torch
    from transformers.modeling_utils import PreTrainedModel


DRAFTERS = ("DFlashDraftModel", "DFlash2DraftModel")

LICENCE_TEXTS = ("LICENSE*", "LICENCE*")
# All that a checkpoint of this library, or of a target that it saves, is made of.
FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "README.md", "training.json", "*_dflash.py", *LICENCE_TEXTS
)  # fmt: skip
FOLDERS = ("custom_generate", "__pycache__")


def save_checkpoint(
    model: "PreTrainedModel",
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    files: Mapping[str, str | bytes] | None = None,
    inspect: Callable[[Path], None] | None = None,
) -> Path:
    """Writes `model` to `folder` and returns the path; a drafter's code goes beside its weights, `custom_generate` included.

    Everything is written aside and then renamed, so `folder` never holds half a checkpoint.

    Args:
        model: A drafter or a target.
        folder: Where to; an older checkpoint of the same kind there is replaced.
        tokenizer: Saved beside the model, if there is one.
        files: Texts and other content by file name, such as the card in README.md.
        inspect: Called with the complete checkpoint before it takes its place; what it raises leaves `folder` as it was.

    Raises:
        ValueError: if `folder` holds something that is not such a checkpoint.
    """
    folder = Path(folder).expanduser().absolute()
    is_drafter = hasattr(model, "spec_generate")
    check_replaceable(folder, DRAFTERS if is_drafter else (type(model).__name__,))
    with written_aside(folder) as aside:
        model.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        if is_drafter:
            from dflash.model.generation_dflash import write_custom_generate

            write_custom_generate(aside)
        for name, content in (files or {}).items():
            (aside / name).write_bytes(content.encode() if isinstance(content, str) else content)
        for weights in aside.glob("*.safetensors"):  # they come out readable by their owner alone
            shutil.copymode(aside / "config.json", weights)
        if inspect is not None:
            inspect(aside)
    return folder


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `folder` after the body; if that raises, nothing of it is left.

    A link to a folder stays one, and the folder that it leads to is replaced.
    """
    folder = followed(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    restore_replaced(folder)
    aside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
        for pattern in LICENCE_TEXTS:  # a text that somebody has put there stays
            for path in folder.glob(pattern):
                if path.is_file() and not (aside / path.name).exists():
                    shutil.copyfile(path, aside / path.name)
        replace_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_replaceable(folder: Path, architectures: tuple[str, ...] = DRAFTERS) -> None:
    """Raises ValueError unless `folder` is free, or holds a checkpoint of `architectures` and nothing else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} exists and is not a checkpoint (no config.json): choose another folder.")
    if not _classes(folder / "config.json") & set(architectures):
        raise ValueError(f"{folder} holds another model than {architectures[0]}: choose another folder.")
    for path in sorted(folder.iterdir()):
        is_known = any(map(path.match, FILES))
        if path.is_dir():
            is_known = path.name in FOLDERS
        if not is_known:
            raise ValueError(f"{folder} holds {path.name}, which replacing it would delete: choose another folder.")


def _classes(path: Path) -> set[str]:
    """The classes that a config.json names; none if it cannot be read."""
    with suppress(ValueError, AttributeError, TypeError):
        config = parsed_json(path.read_bytes())
        entry = (config.get("auto_map") or {}).get("AutoModel")
        names = [*(config.get("architectures") or []), str(entry).removeprefix("modeling_dflash.")]
        return set(map(str, names))
    return set()


def replace_folder(new: Path, folder: Path) -> None:
    """Renames `new` to `folder` and deletes what was there; an error or an interrupt before the end restores it."""
    old = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:  # an interrupt between the two renames too
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
