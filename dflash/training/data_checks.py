"""Refuses data and tokens that cannot be trained on, before anything is computed: one sentence with the value and the remedy."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.common.messages import counted
from dflash.drafter import DFlashDraftModel

from .data import Example, stop_ids
from .lazy_sequences import chosen, lengths_of


def usable(
    examples: Sequence[Example],
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    announce: Callable[[str], None] | None = None,
    eval_new_tokens: int | None = None,
) -> Sequence[Example]:
    """The examples of a block's length or more with a valid anchor; `announce` is told how many others there are.

    Where texts of `eval_new_tokens` are measured, it is told if no answer is as long.

    Raises:
        ValueError: if nothing is left, for a mask token that means something to the target, or if a token id is unknown to the
            target or is the mask's.
    """
    config, mask_token_id = target.config.get_text_config(decoder=True), drafter.config.mask_token_id or 0
    vocab_size, block_size = config.vocab_size, drafter.config.block_size
    pad_token_id = getattr(target.generation_config, "pad_token_id", None)
    pad_token_id = config.pad_token_id if pad_token_id is None else pad_token_id
    check_mask_token(mask_token_id, vocab_size, pad_token_id, sorted(stop_ids(target.generation_config)))
    kept, longest_answer = [], 0
    for number, example in enumerate(examples, start=1):
        tokens = example.token_array
        for token_id in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"Sequence {number} holds the token id {token_id} but the target's vocabulary is {vocab_size}: encode the "
                    "data with the target's own tokenizer."
                )
        if mask_token_id in tokens:
            raise ValueError(
                f"Sequence {number} holds the mask token ({mask_token_id}, at position {tokens.index(mask_token_id)}), "
                "which the drafter would take for one to be filled in: choose a mask_token_id that never occurs in text, or "
                "take that sequence out."
            )
        longest_answer = max(longest_answer, sum(example.mask_array))
        if len(example) >= block_size and example.has_anchor:
            kept.append(number - 1)
    if not longest_answer:
        raise ValueError(
            f"The data ({counted(len(examples), 'sequence')}) holds no supervised token: give chats in which the assistant says "
            "something, or a longer max_length."
        )
    if not kept:
        raise ValueError(
            f"None of {counted(len(examples), 'sequence')} (the longest has {max(lengths_of(examples))} tokens) is as long as a block of "
            f"{block_size} with two supervised tokens in a row: give longer answers, or a smaller block_size."
        )
    if eval_new_tokens is not None and longest_answer < eval_new_tokens and announce is not None:
        announce(
            f"Acceptance is measured on texts of up to {eval_new_tokens} tokens, and the longest answer of the data has "
            f"{longest_answer}. A drafter accepts less beyond the length that it was trained on: eval_new_tokens={longest_answer} "
            "measures up to there."
        )
    if len(kept) < len(examples) and announce is not None:
        why = "shorter than a block, or without two supervised tokens in a row"
        announce(f"{len(examples) - len(kept):,} of {counted(len(examples), 'sequence')} left out: {why}.")
    return chosen(examples, kept)


def check_lengths(examples: Sequence[Example], prompts: Sequence[Sequence[int]], positions: int | None) -> None:
    """Raises ValueError for a sequence beyond the target's positions, or a held-out prompt that leaves no room for an answer."""
    longest, prompt = (max(lengths_of(texts), default=0) for texts in (examples, prompts))
    there = f"tokens and the target {positions} positions"
    if positions is not None and longest > positions:
        raise ValueError(f"A sequence has {longest} {there}: give a max_length of at most {positions}.")
    if positions is not None and prompt >= positions:
        raise ValueError(f"A held-out prompt has {prompt} {there}: give a smaller max_length, or shorter prompts.")


def check_mask_token(
    mask_token_id: int, vocab_size: int, pad_token_id: int | None, eos_token_ids: Iterable[int]
) -> None:
    """Raises ValueError if the target has no such token, or if the token means something to it already."""
    if not 0 <= mask_token_id < vocab_size:
        rows = f"no row of the target's embedding, which has {vocab_size}"
        raise ValueError(f"mask_token_id={mask_token_id} is {rows}: choose one that never occurs in text.")
    meanings = {"the padding": pad_token_id, **{f"an end-of-text ({i})": i for i in eos_token_ids}}
    for meaning, token_id in meanings.items():
        if mask_token_id == token_id:
            raise ValueError(
                f"mask_token_id={mask_token_id} is also {meaning} token: choose an id that never occurs in text, such as an "
                "unused one at the end of the vocabulary."
            )


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raises ValueError if the tokenizer cannot belong to a target with `vocab_size` embedding rows.

    Targets have spare rows, but fewer than used ones. A tokenizer may know a few tokens more, which a text-only target of a
    multimodal family never reads: such an id is refused where it occurs.
    """
    size = len(tokenizer)
    if not vocab_size / 2 < size <= vocab_size * 1.01:
        raise ValueError(
            f"The tokenizer knows {size} tokens and the target's vocabulary is {vocab_size}: they do not belong together; load "
            "the tokenizer from the target's own folder or id."
        )
