"""Checks data, mask token and tokenizer before training. Each error is one sentence with the value and the remedy."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.common.messages import Announce, counted, say_nothing
from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import text_config

from .data import stop_ids
from .examples import Examples, Prompts, lengths_of, selected


def usable(
    examples: Examples, drafter: DFlashDraftModel, target: PreTrainedModel, announce: Announce = say_nothing
) -> Examples:
    """Returns the examples that have a valid anchor and are at least a block long, and announces how many are not.

    Raises:
        ValueError: if no example is left, if the mask token has another use in the target, or if an example holds the
            mask token or an id outside the target's vocabulary.
    """
    config, block_size = text_config(target), drafter.config.block_size
    mask_token_id = drafter.config.mask_token_id or 0
    pad_token_id = getattr(target.generation_config, "pad_token_id", None)
    if pad_token_id is None:
        pad_token_id = config.pad_token_id
    check_mask_token(
        mask_token_id,
        config.vocab_size,
        pad_token_id,
        sorted(stop_ids(target.generation_config)),
    )
    places = []
    has_answer = False
    for place, example in enumerate(examples):
        _check_tokens(
            example.token_array,
            f"Sequence {place + 1}",
            mask_token_id,
            config.vocab_size,
        )
        has_answer = has_answer or 1 in example.mask_array
        if len(example) >= block_size and example.has_anchor:
            places.append(place)
    total = counted(len(examples), "sequence")
    num_left_out = len(examples) - len(places)
    if not has_answer:
        raise ValueError(
            f"The data ({total}) holds no supervised token: give chats in which the assistant says "
            "something, or a longer max_length."
        )
    if not places:
        raise ValueError(
            f"None of {total} (the longest has {max(lengths_of(examples))} tokens) has at least {block_size} tokens (a "
            "block) and two supervised tokens in a row: give longer answers, or a smaller block_size."
        )
    if num_left_out:
        reason = "shorter than a block, or without two supervised tokens in a row"
        announce(f"{num_left_out:,} of {total} left out: {reason}.")
    return selected(examples, places)


def _check_tokens(token_ids: array[int], name: str, mask_token_id: int, vocab_size: int) -> None:
    """Raises ValueError if `token_ids` hold an id outside the target's vocabulary, or the mask token."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} holds the token id {token_id} but the target's vocabulary has {vocab_size} ids: encode the "
                "data with the target's own tokenizer."
            )
    if mask_token_id in token_ids:
        raise ValueError(
            f"{name} holds the mask token ({mask_token_id}, at position {token_ids.index(mask_token_id)}), "
            "which the drafter would read as a position to fill: choose a mask_token_id that never occurs in text, or "
            "leave that sequence out."
        )


def check_lengths(examples: Examples, prompts: Prompts, positions: int | None) -> None:
    """Raises ValueError for a sequence beyond the target's `positions`, or a prompt that leaves none for an answer."""
    if positions is None:
        return
    longest = max(lengths_of(examples), default=0)
    longest_prompt = max(map(len, prompts), default=0)
    limit = f"tokens and the target {positions} positions"
    if longest > positions:
        raise ValueError(f"A sequence has {longest} {limit}: give a max_length of at most {positions}.")
    if longest_prompt >= positions:
        raise ValueError(
            f"A held-out prompt has {longest_prompt} {limit}: give a smaller max_length, or shorter prompts."
        )


def check_mask_token(
    mask_token_id: int, vocab_size: int, pad_token_id: int | None, eos_token_ids: Collection[int]
) -> None:
    """Raises ValueError if the mask token is outside the vocabulary, or is the padding or an end-of-text token."""
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(
            f"mask_token_id={mask_token_id} is not an id of the target: choose one from 0 to {vocab_size - 1} that "
            "never occurs in text."
        )
    meaning = None
    if mask_token_id in eos_token_ids:
        meaning = "an end-of-text"
    if mask_token_id == pad_token_id:
        meaning = "the padding"
    if meaning is not None:
        raise ValueError(
            f"mask_token_id={mask_token_id} is also {meaning} token: choose an id that never occurs in text, such as "
            "an unused one at the end of the vocabulary."
        )


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raises ValueError if the tokenizer cannot belong to a target with `vocab_size` embedding rows.

    An embedding may have unused rows, but more than half must be used. A tokenizer may have up to 1 % more tokens than
    the embedding has rows, such as image tokens that a text-only target never reads. Such an id is refused where it
    occurs in the data.
    """
    size = len(tokenizer)
    if not vocab_size / 2 < size <= vocab_size * 1.01:
        raise ValueError(
            f"The tokenizer has {size} tokens and the target's vocabulary {vocab_size}, so they do not belong "
            "together: load the tokenizer from the target's own folder or id."
        )
