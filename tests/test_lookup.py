"""Proposals found in the text itself: the same text, fewer steps where it repeats, and off where it does not pay."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
import torch
from tiny_models import (
    BLOCK_SIZE,
    SMALL,
    ScriptedDrafter,
    counted_forwards,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
)
from transformers import PreTrainedModel

from dflash import generate_blocks, spec_generate
from dflash.evaluation import timed_blocks
from dflash.model.proposals_dflash import REACH, PromptLookup, TextSequence


OPTIONS: dict[str, Any] = {"max_new_tokens": 50, "temperature": 0.0, "max_matching_ngram_size": 4}


def lookup_of(text: list[int], num_tokens: int, ngram_size: int, new: list[int] | None = None) -> PromptLookup:
    lookup = PromptLookup(num_tokens, ngram_size)
    lookup.read(TextSequence(0, torch.tensor(text), new or []))
    return lookup


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([1, 2, 7, 1, 2, 8, 9, 1, 2], [8, 9]),  # the newest
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], [7, 6]),  # the longest before the newest
        ([1, 2, 3, 4, 5], None),
        ([5], None),
    ],
    ids=str,
)
def test_it_proposes_what_followed_the_longest_then_the_newest_earlier_occurrence(
    text: list[int], found: list[int] | None
) -> None:
    assert lookup_of(text, 2, 2).propose() == (None if found is None else (0, found))


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    """Promise: a text that repeats with a period shorter than the proposals is continued with that period."""
    assert lookup_of([9, 1, 2, 3, 1, 2], 5, 2).propose() == (0, [3, 1, 2, 3, 1])
    assert lookup_of([9, 1, 2, 3, 8, 1], 5, 2).propose([2]) == (1, [3, 8, 1, 2])


def test_it_reads_on_as_the_sequence_grows() -> None:
    """Promise: what was written since the last call is found too."""
    lookup, sequence = PromptLookup(1, 2), TextSequence(0, torch.tensor([1, 2, 3]), [])
    lookup.read(sequence)
    assert lookup.propose() is None
    for new, found in (([4, 1, 2], [3]), ([6, 1, 2], [6])):
        sequence.new_ids += new
        lookup.read(sequence)
        assert lookup.propose() == (0, found)


def test_the_drafters_own_proposals_are_looked_up() -> None:
    """Promise: the first proposals after which the text is found are kept, and what followed comes after them."""
    lookup = lookup_of([1, 2, 3, 4, 5, 6, 7, 8], 4, 2)
    assert lookup.propose([9, 2, 3, 4, 9]) == (3, [4])
    assert lookup.propose([3, 4, 9]) == (2, [5, 6])
    assert lookup.propose([9, 9, 9]) is None


def test_a_text_repeats_itself_for_a_while_after_it_did() -> None:
    """Promise: a text that never repeats is not looked up: its steps are those without lookups."""
    lookup, sequence = PromptLookup(4, 3), TextSequence(0, torch.arange(200), [])
    assert not lookup.read(sequence)
    sequence.new_ids += [5, 6, 7]
    assert lookup.read(sequence)
    sequence.new_ids += range(300, 300 + REACH)
    assert lookup.read(sequence)
    sequence.new_ids += [999]
    assert not lookup.read(sequence)


def test_more_tokens_have_to_match_after_lookups_that_failed() -> None:
    """Promise: twice as many after a lookup of which nothing was accepted, half as many after others."""
    lookup = lookup_of([*range(10), 50, *range(10)], 4, 3)
    sizes = []
    for num_accepted in (0, 0, 0, None, None, 4):
        found = lookup.propose()
        sizes.append(None if found is None else lookup._num_matching)
        lookup.record(num_accepted or 0)
    assert sizes == [3, 6, None, None, None, None]
    lookup._first, lookup._num_matching = 0, 12
    lookup.record(2)
    assert lookup.propose() is not None
    lookup.propose([1])
    lookup._first = 3  # of the drafter's own proposals fewer were accepted: that says nothing about the lookup
    lookup.record(2)
    assert lookup._num_matching == 6


@pytest.mark.parametrize("script", [[0], [5], [2, 0, 4]], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_tokens", [2, 11])
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


def repeating(prompt_seed: int) -> tuple[PreTrainedModel, torch.Tensor, torch.Tensor]:
    """A target whose text comes to repeat itself, a prompt that does, and both together."""
    target = make_target("qwen3", seed=11, num_hidden_layers=2)
    prompt = torch.cat([make_prompt(8, seed=prompt_seed)] * 2, dim=1)
    return target, prompt, greedy(target, prompt, max_new_tokens=60)


def test_tau_is_the_drafters_and_what_lookups_add_has_a_name_of_its_own() -> None:
    """Known bug: the default's tau counted looked-up tokens and stood beside the paper's, which has none."""
    target, prompt, truth = repeating(1)
    drafter = ScriptedDrafter(target, truth, [2], **SMALL)
    asked = {"prompt_lookup_num_tokens": 20, "max_matching_ngram_size": 4, "max_new_tokens": 60, "temperature": 0.0}
    blocks = [b for b in generate_blocks(drafter, target, prompt, **asked) if not b.is_prefill]
    drafted = [block.acceptance_length for block in blocks if not block.is_lookup]
    assert 0 < len(drafted) < len(blocks)
    output = spec_generate(drafter, target, prompt, return_dict_in_generate=True, **asked)
    assert output.tau == mean(drafted)
    assert output.tau_with_lookup == mean(block.acceptance_length for block in blocks) > output.tau
    run = timed_blocks(drafter, target, prompt, **asked)
    assert (run.tau, run.tau_with_lookup) == (output.tau, output.tau_with_lookup)
    assert len(run.lookup_steps) == len(blocks) - len(drafted)


def test_a_text_that_repeats_is_looked_up_and_not_drafted() -> None:
    """Promise: where the text's past is right, steps cost no forward of the drafter and more than a block is accepted."""
    target, prompt, truth = repeating(1)
    drafter = make_drafter(**SMALL)
    with counted_forwards(drafter) as drafts:
        blocks = list(generate_blocks(drafter, target, prompt, prompt_lookup_num_tokens=12, **OPTIONS))
    assert [t for block in blocks for t in block.token_ids] == truth[0, 16 : 16 + 50].tolist()
    looked_up = [block for block in blocks if block.is_lookup]
    assert max(block.num_accepted for block in looked_up) == 12 > BLOCK_SIZE
    assert len(drafts) == sum(block.num_proposals == BLOCK_SIZE - 1 for block in blocks)
    assert {block.num_proposals for block in blocks[1:]} <= {0, BLOCK_SIZE - 1, 12}, "one wider width"


def test_a_text_is_looked_up_unless_that_is_refused() -> None:
    """Promise: on without a keyword, off by 0, and the same text."""
    target, prompt, truth = repeating(1)
    found = []
    for asked in ({}, {"prompt_lookup_num_tokens": 0}):
        blocks = list(
            generate_blocks(make_drafter(**SMALL), target, prompt, max_new_tokens=50, temperature=0.0, **asked)
        )
        assert [t for block in blocks for t in block.token_ids] == truth[0, 16 : 16 + 50].tolist()
        found.append(max((block.num_accepted for block in blocks if block.is_lookup), default=None))
    assert found == [31, None]


@pytest.mark.parametrize("num_repeating", [1, 2])
def test_all_sequences_are_verified_wider_only_where_half_of_them_repeat(num_repeating: int) -> None:
    """Promise: one text of three that repeats does not make the step wider for the others; two do."""
    target, _, text = repeating(1)
    prompts = [text[:, :60]] * num_repeating + [make_prompt(60, seed=31 + i) for i in range(3 - num_repeating)]
    truths = [greedy(target, prompt, max_new_tokens=30) for prompt in prompts]
    drafter = ScriptedDrafter(target, truths, [1], **SMALL)
    asked = {**OPTIONS, "max_new_tokens": 16, "prompt_lookup_num_tokens": 12}
    blocks = list(generate_blocks(drafter, target, torch.cat(prompts), **asked))
    for index, truth in enumerate(truths):
        mine = [t for block in blocks if block.sequence == index for t in block.token_ids]
        assert mine == truth[0, 60 : 60 + 16].tolist()
    first = [block for block in blocks if not block.is_prefill][:3]
    assert [block.is_lookup for block in first] == [True] * num_repeating + [False] * (3 - num_repeating)
    assert {block.num_proposals for block in first} == {BLOCK_SIZE - 1 if num_repeating == 1 else 12}


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_lookup_fills_the_tail_of_a_draft(num_sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the drafter's first proposals are kept, and what followed them earlier is accepted in the same step."""
    target, prompt, truth = repeating(2)
    drafter, kept, propose = (
        ScriptedDrafter(target, [truth] * num_sequences, [5], **SMALL),
        set[int](),
        PromptLookup.propose,
    )

    def noted(lookup: PromptLookup, drafted: Any = ()) -> Any:
        found = propose(lookup, drafted)
        kept.update([found[0]] if found else [])
        return found

    monkeypatch.setattr(PromptLookup, "propose", noted)
    prompts = torch.cat([prompt] * num_sequences)
    blocks = list(generate_blocks(drafter, target, prompts, prompt_lookup_num_tokens=12, **OPTIONS))
    for index in range(num_sequences):
        mine = [block for block in blocks if block.sequence == index]
        assert [t for block in mine for t in block.token_ids] == truth[0, 16 : 16 + 50].tolist()
        assert any(block.is_lookup and BLOCK_SIZE - 1 < block.num_accepted < 12 for block in mine)
    assert len(kept) > 2


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
        ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens=-1"),
        ({"prompt_lookup_num_tokens": 64}, "prompt_lookup_num_tokens=64: use 1 to 63"),
        ({"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 0}, "max_matching_ngram_size=0"),
        ({"prompt_lookup_num_tokens": 0, "max_matching_ngram_size": 2}, "belongs to a prompt lookup"),
    ],
)
def test_settings_that_say_nothing_are_refused(options: dict[str, int], message: str) -> None:
    """Promise: named with the value, before any compute."""
    with pytest.raises(ValueError, match=message):
        spec_generate(make_drafter(), make_target(), make_prompt(), max_new_tokens=2, temperature=0.0, **options)
