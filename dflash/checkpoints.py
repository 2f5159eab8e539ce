"""A checkpoint of any published dialect, read and written in the form that engines share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .hub import check_replaceable, save_checkpoint
from .modeling_dflash import DFlashDraftModel


def convert_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Path:
    """Reads a drafter of any dialect and writes it to `folder` in this library's form, its code beside its weights.

    Tensors keep their values and dtype. What a dialect stores of the target (frozen copies of its embedding and head) is
    left out; a reduced vocabulary and an anchor that predicts stay, since without them it would be another drafter.

    Args:
        source: A local folder or an id on the Hub.
        folder: Where to; an older checkpoint there is replaced once the new one is complete.
        target: The drafter's target, whose config.json says what some dialects leave out (its depth, its vocabulary).
        kwargs: Passed on to `DFlashDraftModel.from_pretrained` (`revision`, `weights_only`, …).

    Raises:
        ValueError: if the checkpoint cannot be read exactly, belongs to another target, or would replace something else.
    """
    check_replaceable(Path(folder).expanduser().absolute())
    drafter = DFlashDraftModel.from_pretrained(source, dtype="auto", **kwargs)
    if target is not None:
        _complete(drafter.config, target)
    return save_checkpoint(drafter, folder)


def export_checkpoint(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], target: str | os.PathLike[str], **kwargs: Any
) -> Path:
    """As [`convert_checkpoint`], with a card, and only if every engine that serves DFlash can read the outcome.

    Raises:
        ValueError: also for a drafter or a folder name that some engine would not read.
    """
    folder = Path(folder).expanduser().absolute()
    if "dflash" not in folder.name.lower():
        raise ValueError(
            f"{folder.name!r} does not contain 'DFlash', by which vLLM knows the method: rename the folder."
        )
    check_replaceable(folder)
    drafter = DFlashDraftModel.from_pretrained(source, dtype="auto", **kwargs)
    for name, what in (
        ("draft_vocab_size", "a head of its own over part of the vocabulary, which SGLang and TensorRT-LLM drop"),
        ("sample_from_anchor", "an anchor row that proposes, which vLLM refuses and SGLang ignores"),
    ):
        value = getattr(drafter.config, name)
        if value:
            raise ValueError(
                f"{name}={value}: this drafter has {what}. Use `dflash convert`, which writes it for this library."
            )
    _complete(drafter.config, target)
    return save_checkpoint(drafter, folder, files={"README.md": _card(drafter, folder.name, str(target))})


def _complete(config: Any, target: str | os.PathLike[str]) -> None:
    """Writes into a drafter's config what its target's says; ValueError if the two cannot belong together."""
    from transformers import AutoConfig

    known = AutoConfig.from_pretrained(target).get_text_config(decoder=True)
    for name, mine, its in (
        ("hidden_size", config.hidden_size, known.hidden_size),
        ("vocab_size", config.vocab_size, known.vocab_size),
        ("num_target_layers", config.num_target_layers, known.num_hidden_layers),
    ):
        if mine and mine != its:
            raise ValueError(
                f"{name} is {mine} for the drafter and {its} for {target}: it was trained for another target."
            )
        setattr(config, name, its)
    config.check()


def _card(drafter: DFlashDraftModel, name: str, target: str) -> str:
    """The README.md of an exported drafter: what it is and how it is loaded, and no number that was not measured."""
    config = drafter.config
    base = [] if os.path.isdir(target) else [f"base_model: {target}"]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            *base,
            "pipeline_tag: text-generation",
            "tags: [dflash, speculative-decoding]",
            "---",
            f"# {name}",
            "",
            f"A DFlash drafter for `{target if base else Path(target).name}`: {config.num_hidden_layers} layers, blocks of "
            f"{config.block_size} tokens, target layers {config.target_layer_ids}, mask token {config.mask_token_id}.",
            "",
            "```python",
            "from transformers import AutoModel",
            "",
            f'drafter = AutoModel.from_pretrained("{name}", trust_remote_code=True, dtype="auto")',
            "text = drafter.spec_generate(input_ids, target=target, max_new_tokens=256)",
            "```",
            "",
        ]
    )
