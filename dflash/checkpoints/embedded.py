"""The tiny pair inside the package, which needs no download: loaded, exported, and its held-out problems.

A second drafter, `tiny-DFlash-Domino`, is the first one, its weights unchanged, with Domino's head, which chooses token by token.
"""

import json
import os
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from dflash.drafter import DFlashDraftModel

from .folders import check_replaceable, save_checkpoint, written_aside


TARGET_NAME = "tiny-target"
DRAFTER_NAME = "tiny-DFlash"
DOMINO_NAME = "tiny-DFlash-Domino"


@dataclass(frozen=True)
class Problem:
    """A word problem that the pair was not trained on, and its worked answer."""

    question: str
    answer: str


def embedded_path(name: str) -> Path:
    """The path of a file or folder of the package's assets; FileNotFoundError if this installation lacks it."""
    path = Path(str(resources.files("dflash") / "assets" / name))
    if not path.exists():
        raise FileNotFoundError(
            f"The embedded pair is incomplete here ({path} is missing): install dflash-transformers again."
        )
    return path


def load_embedded_pair(
    dtype: torch.dtype | str = torch.float32, drafter: str = DRAFTER_NAME
) -> tuple[PreTrainedModel, DFlashDraftModel, Any]:
    """The embedded target, a drafter of it (`DRAFTER_NAME` or `DOMINO_NAME`) and their tokenizer, on the CPU.

    Example:
        >>> target, drafter, tokenizer = load_embedded_pair()
        >>> ids = tokenizer("Ann has 3 apples and buys 4 more. How many has she?", return_tensors="pt")
        >>> print(tokenizer.decode(drafter.spec_generate(ids, target=target, max_new_tokens=128)[0]))
    """
    target_path = embedded_path(TARGET_NAME)
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).eval()
    loaded = DFlashDraftModel.from_pretrained(embedded_path(drafter), dtype=dtype).eval()
    return target, loaded, AutoTokenizer.from_pretrained(target_path)


def heldout_problems() -> list[Problem]:
    """Problems that neither model was trained on."""
    lines = embedded_path("heldout.jsonl").read_text(encoding="utf-8").split("\n")
    return [Problem(**json.loads(line)) for line in lines if line.strip()]


def export_embedded_pair(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes all three checkpoints below `folder`, the code beside drafters, and returns the target's and the first drafter's.

    Older copies are replaced.

    `AutoModel.from_pretrained(drafter, trust_remote_code=True)` then works where this package is not installed.

    Raises:
        ValueError: if one of the folders holds another model, or anything else.
    """
    folder = Path(folder).expanduser().absolute()
    target_path = folder / TARGET_NAME
    source = embedded_path(TARGET_NAME)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    check_replaceable(target_path, tuple(config["architectures"]))
    for name in (DRAFTER_NAME, DOMINO_NAME):
        check_replaceable(folder / name)
    for name in (DRAFTER_NAME, DOMINO_NAME):
        drafter = DFlashDraftModel.from_pretrained(embedded_path(name), dtype="auto")
        card = (embedded_path(name) / "README.md").read_text(encoding="utf-8")
        save_checkpoint(drafter, folder / name, files={"README.md": card})
    with written_aside(target_path) as aside:
        shutil.copytree(source, aside)
    return target_path, folder / DRAFTER_NAME
