"""Data and tokens that cannot be trained on, refused before anything is computed: one sentence with the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.model.modeling_dflash import DFlashDraftModel

from .anchors import valid_anchors
from .data import Example, stop_ids


def usable(
    examples: Sequence[Example],
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    announce: Callable[[str], None] | None = None,
) -> list[Example]:
    """The examples that hold a place for a block; ValueError for data or a mask that the pair cannot be trained with."""
    config, mask_token_id = target.config.get_text_config(decoder=True), drafter.config.mask_token_id or 0
    pad_token_id = getattr(target.generation_config, "pad_token_id", None)
    check_mask_token(
        mask_token_id,
        vocab_size=config.vocab_size,
        pad_token_id=config.pad_token_id if pad_token_id is None else pad_token_id,
        eos_token_ids=sorted(stop_ids(target.generation_config)),
    )
    kept, left_out = usable_examples(
        examples, block_size=drafter.config.block_size, vocab_size=config.vocab_size, mask_token_id=mask_token_id
    )
    if left_out and announce is not None:
        announce(
            f"{left_out:,} of {len(examples):,} sequences are left out: shorter than a block, or without two supervised tokens "
            "in a row."
        )
    return kept


def usable_examples(
    examples: Sequence[Example], *, block_size: int, vocab_size: int, mask_token_id: int
) -> tuple[list[Example], int]:
    """The examples in which a block can begin and end, and how many others were left out.

    Args:
        examples: The data.
        block_size: Tokens of a block; a shorter sequence is left out.
        vocab_size: The target's.
        mask_token_id: What fills blocks.

    Raises:
        ValueError: if nothing is left, or if an id is unknown to the target or is the mask's.
    """
    if not any(1 in example.loss_mask for example in examples):
        raise ValueError(
            f"The data ({len(examples)} sequences) holds no supervised token: give chats in which the assistant says "
            "something, or a longer max_length."
        )
    for number, example in enumerate(examples, start=1):
        input_ids = example.input_ids
        for token_id in (min(input_ids, default=0), max(input_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"Sequence {number} holds the token id {token_id} but the target's vocabulary is {vocab_size}: encode the "
                    "data with the target's own tokenizer."
                )
        if mask_token_id in input_ids:
            raise ValueError(
                f"Sequence {number} holds the mask token ({mask_token_id}, at position {input_ids.index(mask_token_id)}), "
                "which the drafter would take for one to be filled in: choose a mask_token_id that never occurs in text, or "
                "take that sequence out."
            )
    kept = [example for example in examples if len(example) >= block_size and valid_anchors(example.loss_mask)]
    if not kept:
        longest = max(map(len, examples))
        raise ValueError(
            f"None of the {len(examples)} sequences (the longest has {longest} tokens) is as long as a block of {block_size} "
            "with two supervised tokens in a row: give longer answers, or a smaller block_size."
        )
    return kept, len(examples) - len(kept)


def check_lengths(examples: Sequence[Example], prompts: Sequence[Sequence[int]], positions: int | None) -> None:
    """Raises ValueError for a sequence beyond the target's positions, or a held-out prompt that leaves it none to write to."""
    longest = max(map(len, examples), default=0)
    if positions is not None and longest > positions:
        raise ValueError(
            f"A sequence has {longest} tokens and the target {positions} positions: give a max_length of at most {positions}."
        )
    longest = max(map(len, prompts), default=0)
    if positions is not None and longest >= positions:
        raise ValueError(
            f"A held-out prompt has {longest} tokens and the target {positions} positions: give a smaller max_length, or "
            "shorter prompts."
        )


def check_mask_token(
    mask_token_id: int, *, vocab_size: int, pad_token_id: int | None, eos_token_ids: Iterable[int]
) -> None:
    """Raises ValueError if the id that fills blocks is none of the target's or means something to it already."""
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(
            f"mask_token_id={mask_token_id} is no row of the target's embedding, which has {vocab_size}: choose one that "
            "never occurs in text."
        )
    meanings = {"the padding": pad_token_id, **{f"an end-of-text ({i})": i for i in eos_token_ids}}
    for meaning, token_id in meanings.items():
        if mask_token_id == token_id:
            raise ValueError(
                f"mask_token_id={mask_token_id} is also {meaning} token: choose an id that never occurs in text, such as an "
                "unused one at the end of the vocabulary."
            )


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raises ValueError if the tokenizer cannot be that of a target with `vocab_size` embedding rows.

    Targets have rows to spare, but not as many as they use. A tokenizer may know a few tokens more, which a text-only target
    of a family that sees images never reads: an id that it has no row for is refused where it occurs.
    """
    size = len(tokenizer)
    if not vocab_size / 2 < size <= vocab_size * 1.01:
        raise ValueError(
            f"The tokenizer knows {size} tokens and the target's vocabulary is {vocab_size}: they do not belong together; load "
            "the tokenizer from the target's own folder or id."
        )
