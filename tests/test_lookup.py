"""Proposals found in the text itself: the same text, fewer steps where it repeats, and off where it does not pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import ScriptedDrafter, counted_forwards, greedy, make_drafter, make_prompt, make_target

from dflash import generate_blocks, spec_generate
from dflash.model.proposals_dflash import RETRY_AFTER, PromptLookup, TextSequence


def row_of(prompt: list[int], new: list[int] | None = None) -> TextSequence:
    return TextSequence(0, torch.tensor(prompt), new or [])


def test_it_proposes_what_followed_the_latest_earlier_occurrence() -> None:
    """Promise: the latest occurrence of the last `ngram_size` tokens counts, and the end itself does not."""
    lookup = PromptLookup(num_tokens=2, ngram_size=2)
    assert lookup.propose([row_of([1, 2, 7, 1, 2, 8, 9, 1, 2])]) == {0: [8, 9]}
    assert PromptLookup(2, 2).propose([row_of([1, 2, 3, 4, 5])]) == {}
    assert PromptLookup(2, 3).propose([row_of([5, 5])]) == {}


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    """Promise: a text that repeats with a period shorter than the proposals is continued with that period."""
    assert PromptLookup(5, 2).propose([row_of([9, 1, 2, 3, 1, 2])]) == {0: [3, 1, 2, 3, 1]}


def test_it_reads_on_as_the_row_grows() -> None:
    """Promise: what was written since the last call is found too."""
    lookup, row = PromptLookup(1, 2), row_of([1, 2, 3])
    assert lookup.propose([row]) == {}
    row.new_ids += [4, 1, 2]
    assert lookup.propose([row]) == {0: [3]}
    row.new_ids += [6, 1, 2]
    assert lookup.propose([row]) == {0: [6]}


def test_it_stays_silent_where_the_drafter_is_better() -> None:
    """Promise: off unless it pays; a loser is tried again once in a while."""
    lookup, row = PromptLookup(2, 2), row_of([1, 2, 7, 1, 2])
    assert lookup.propose([row])
    lookup.record(is_lookup=True, num_accepted=0)
    lookup.record(is_lookup=False, num_accepted=4)
    tries = [bool(lookup.propose([row])) for _ in range(3 * RETRY_AFTER)]
    assert sum(tries) == 3
    lookup.record(is_lookup=True, num_accepted=40)
    assert lookup.propose([row])


@pytest.mark.parametrize("script", [[0], [5], [2, 0, 4]], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_tokens", [2, 7])
def test_text_equals_greedy_with_lookups(script: list[int], num_rows: int, num_tokens: int) -> None:
    """Promise: verified like any proposal, so lossless, in batches too."""
    target = make_target()
    prompts = [torch.cat([make_prompt(6, seed=20 + i)] * 3, dim=1)[:, : 18 - i] for i in range(num_rows)]
    truths = [greedy(target, prompt, max_new_tokens=26) for prompt in prompts]
    drafter = ScriptedDrafter(target, truths, script)
    asked = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": 1}
    rows = [prompt[0] for prompt in prompts]
    texts = spec_generate(drafter, target, rows, max_new_tokens=26, temperature=0.0, **asked)
    for text, truth in zip(texts, truths, strict=True):
        assert torch.equal(text[-truth.shape[1] :], truth[0])


def test_a_text_that_repeats_is_looked_up_and_not_drafted() -> None:
    """Promise: where the text's past is right, steps cost no forward of the drafter and more than a block is accepted."""
    target = make_target("qwen3", seed=11)
    prompt = make_prompt(6)
    once = greedy(target, prompt, max_new_tokens=60)
    # What the target writes, as its own prompt: whatever repeats of it is found.
    truth = greedy(target, once, max_new_tokens=40)
    drafter = make_drafter()
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "max_matching_ngram_size": 2}
    with counted_forwards(drafter) as drafts:
        blocks = list(generate_blocks(drafter, target, once, prompt_lookup_num_tokens=9, **options))
    assert [t for block in blocks for t in block.token_ids] == truth[0, once.shape[1] :].tolist()
    looked_up = [block for block in blocks if block.is_lookup]
    assert looked_up
    assert len(drafts) == len(blocks) - 1 - len(looked_up) - sum(b.num_proposals == 0 for b in blocks[1:])


def test_sampled_text_is_the_seeds_with_lookups_too() -> None:
    """Promise: at a given seed the text does not depend on what was proposed."""
    target, drafter = make_target(), make_drafter()
    prompt = torch.cat([make_prompt(6)] * 3, dim=1)
    texts = [
        spec_generate(
            drafter,
            target,
            prompt,
            max_new_tokens=24,
            temperature=1.1,
            generator=torch.Generator().manual_seed(5),
            **more,
        )
        for more in ({}, {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1})
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens=0"),
        ({"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 0}, "max_matching_ngram_size=0"),
        ({"max_matching_ngram_size": 2}, "belongs to a prompt lookup"),
    ],
)
def test_settings_that_say_nothing_are_refused(options: dict[str, int], message: str) -> None:
    """Promise: named with the value, before any compute."""
    with pytest.raises(ValueError, match=message):
        spec_generate(make_drafter(), make_target(), make_prompt(), max_new_tokens=2, temperature=0.0, **options)
