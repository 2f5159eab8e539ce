"""Proposals found in the text itself: the same text, fewer steps where it repeats, and off where it does not pay."""

from __future__ import annotations

from functools import partial
from statistics import mean
from types import SimpleNamespace
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

from dflash import History, custom_generate, generate_blocks, spec_generate
from dflash.engine.lookup import LookupProposer, PromptLookup, with_lookups
from dflash.evaluation import timed_blocks
from dflash.model.acceptance_dflash import Proposals
from dflash.model.sequences_dflash import TextSequence


OPTIONS: dict[str, Any] = {"max_new_tokens": 50, "temperature": 0.0, "max_matching_ngram_size": 4}


def lookup_of(text: list[int], num_tokens: int, ngram_size: int, new: list[int] | None = None) -> PromptLookup:
    lookup = PromptLookup(num_tokens, ngram_size)
    lookup.read(TextSequence(0, torch.tensor(text), new or []))
    return lookup


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ([1, 2, 7, 1, 2, 8, 9, 1, 2], [8, 9]),  # the newest
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], [7, 6]),  # the longest before the newest
        ([1, 2, 3, 4, 5], None),
        ([5], None),
        ([5, 5], None),  # shorter than an n-gram and its continuation
    ],
    ids=str,
)
def test_the_longest_then_the_newest_occurrence_is_continued(text: list[int], token_ids: list[int] | None) -> None:
    assert lookup_of(text, 2, 2).match() == token_ids


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    assert lookup_of([9, 1, 2, 3, 1, 2], 5, 2).match() == [3, 1, 2, 3, 1]


def test_it_reads_on_as_the_sequence_grows() -> None:
    lookup, sequence = PromptLookup(1, 2), TextSequence(0, torch.tensor([1, 2, 3]), [])
    lookup.read(sequence)
    assert lookup.match() is None
    for new, token_ids in (([4, 1, 2], [3]), ([6, 1, 2], [6])):
        sequence.new_ids += new
        lookup.read(sequence)
        assert lookup.match() == token_ids


def test_more_tokens_have_to_match_after_lookups_that_failed() -> None:
    """Promise: twice as many after a lookup of which nothing was accepted, half as many after others."""
    text = [*range(10), 50, *range(10)]  # the last 10 tokens occurred before
    lookup = lookup_of(text, 4, 3)
    match = lookup.match()
    assert match == [50, 0, 1, 2]
    for num_accepted in (0, 0):
        lookup.record(num_accepted)  # 6, 12
    assert lookup.match() is None
    lookup.record(1)  # 6
    assert lookup.match() == match


def test_asking_changes_nothing() -> None:
    lookup = lookup_of([1, 2, 3, 4, 1, 2], 4, 2)
    assert lookup.match() == lookup.match() == [3, 4, 1, 2]


def test_lookups_stand_among_drafted_proposals() -> None:
    """Promise: sequences without a lookup keep theirs, and a draft that is longer than the lookup keeps its tail."""
    drafted = Proposals(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    mixed = with_lookups(drafted, {0: [10, 11, 12, 13], 2: [14, 15, 16, 17]}, 9)
    assert mixed.token_ids.tolist() == [[10, 11, 12, 13], [4, 5, 6, 0], [14, 15, 16, 17]]
    assert mixed.looked_up == (0, 2)
    assert with_lookups(drafted, {1: [11]}, 9).token_ids.tolist() == [[1, 2, 3], [11, 5, 6], [7, 8, 9]]
    assert drafted.token_ids.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_lookups_without_drafts_stand_alone() -> None:
    mixed = with_lookups(Proposals(torch.empty(2, 0, dtype=torch.long)), {0: [5, 6], 1: [7, 8]}, 9)
    assert mixed.token_ids.tolist() == [[5, 6], [7, 8]]


class CountingDrafts:
    """Proposes the same tokens for every sequence, and counts."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_drafts = 0
        self.recorded: list[Proposals] = []

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        self.num_drafts += 1
        return Proposals(torch.tensor([self.token_ids[:most]] * len(sequences)))

    def record(self, proposals: Proposals, blocks: Any) -> None:
        self.recorded.append(proposals)


REPEATS, VARIES = [1, 2, 3, 4, 1, 2], [11, 12, 13, 14, 15, 16]


def proposed(texts: list[list[int]], drafts: CountingDrafts, most: int = 9, num_tokens: int = 5) -> Proposals:
    sequences = [TextSequence(index, torch.tensor(text)) for index, text in enumerate(texts)]
    anchors = torch.tensor([text[-1:] for text in texts])
    return LookupProposer(drafts, partial(PromptLookup, num_tokens, 2)).propose(sequences, anchors, most)


def test_nothing_is_drafted_where_all_texts_have_a_match() -> None:
    drafts = CountingDrafts([7, 8, 9])
    assert proposed([REPEATS, REPEATS], drafts).token_ids.tolist() == [[3, 4, 1, 2, 3]] * 2
    assert drafts.num_drafts == 0
    assert proposed([REPEATS, VARIES], drafts).token_ids.tolist() == [[3, 4, 1, 2, 3], [7, 8, 9, 0, 0]]
    assert drafts.num_drafts == 1


def test_a_step_is_wider_than_a_block_only_for_half_of_the_texts() -> None:
    drafts = CountingDrafts([7, 8, 9])
    few = proposed([REPEATS, VARIES, VARIES], drafts)
    assert few.token_ids.tolist() == [[3, 4, 1], [7, 8, 9], [7, 8, 9]]
    assert few.looked_up == (0,)
    assert proposed([REPEATS, REPEATS, VARIES], drafts).token_ids.shape[1] == 5


def test_drawn_proposals_keep_their_q() -> None:
    """Promise: nothing is looked up among them, so that no token is accepted by the q of another one."""
    sequences = [TextSequence(index, torch.tensor(text)) for index, text in enumerate([REPEATS, VARIES])]
    drawn = Proposals(torch.tensor([[7], [8]]), torch.tensor([[[7, 9]], [[8, 9]]]), torch.full((2, 1, 2), 0.5))
    drafts = SimpleNamespace(propose=lambda *_: drawn)
    assert (
        LookupProposer(drafts, partial(PromptLookup, 5, 2)).propose(sequences, torch.tensor([[2], [16]]), 9) is drawn
    )


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_than_the_most_is_proposed(most: int) -> None:
    for texts in ([REPEATS], [REPEATS, VARIES], [VARIES]):
        assert proposed(texts, CountingDrafts([7, 8, 9]), most).token_ids.shape[1] == most


def test_only_what_was_verified_of_a_lookup_is_recorded() -> None:
    """Promise: a match adapts by the proposals of its own step, and other steps leave it as it is."""
    sequence, drafts = TextSequence(4, torch.tensor(REPEATS)), CountingDrafts([7, 8, 9])
    proposer, anchors = LookupProposer(drafts, partial(PromptLookup, 5, 2)), torch.tensor([[2]])
    assert proposer.matches([sequence])
    for _ in range(4):
        proposer.record(Proposals(anchors), [SimpleNamespace(sequence=4, num_accepted=0)])  # of a step without lookup
        nothing = proposer.propose([sequence], anchors, 0)
        proposer.record(nothing, [SimpleNamespace(sequence=4, num_accepted=0)])
    assert proposer.matches([sequence])
    proposals = proposer.propose([sequence], anchors, 9)
    proposer.record(proposals, [SimpleNamespace(sequence=4, num_accepted=0)])
    assert not proposer.matches([sequence]), "4 tokens have to match now"
    assert drafts.recorded[-1] is proposals


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


@pytest.mark.parametrize("history", [None, History()])
@pytest.mark.parametrize("most", [0, 2])
def test_a_lookup_proposes_no_more_than_max_draft_tokens(most: int, history: History | None) -> None:
    """Bug: it bounded drafts alone, and 31 tokens were looked up beside."""
    target, prompt, truth = repeating(1)
    if history is not None:
        history.add(truth[0].tolist())
    asked: dict[str, Any] = {"max_new_tokens": 50, "temperature": 0.0, "max_draft_tokens": most, "history": history}
    blocks = list(generate_blocks(make_drafter(**SMALL), target, prompt, **asked))
    assert [t for block in blocks for t in block.token_ids] == truth[0, 16 : 16 + 50].tolist()
    assert max(block.num_proposals for block in blocks) == most
    assert any(block.is_lookup for block in blocks) == (most > 0)


def test_generate_looks_up_as_its_own_keywords_say() -> None:
    """Bug: `target.generate(custom_generate=…)` kept `prompt_lookup_num_tokens` for its config, and no one read it there."""
    target, prompt, _ = repeating(1)
    drafter = make_drafter(**SMALL)
    found = []
    for asked in ({}, {"prompt_lookup_num_tokens": 12, "max_matching_ngram_size": 4}, {"prompt_lookup_num_tokens": 0}):
        blocks = target.generate(
            prompt,
            custom_generate=custom_generate,
            drafter=drafter,
            as_blocks=True,
            max_new_tokens=50,
            do_sample=False,
            **asked,
        )
        found.append(max((block.num_accepted for block in blocks if block.is_lookup), default=None))
    assert found == [31, 12, None]


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


def test_the_newest_of_many_occurrences_is_continued() -> None:
    """Promise: where more occurrences exist than are compared, the old ones are left out."""
    early, late = [1, 2, 7], [1, 2, 8]
    assert lookup_of(early * 40 + [9, *late, 9, 1, 2], 1, 2).match() == [8]


def test_each_text_learns_from_its_own_lookup() -> None:
    """Promise: also where a text without a match is before it, or others have left the batch."""
    proposer = LookupProposer(CountingDrafts([7, 8, 9]), partial(PromptLookup, 5, 2))
    varies, repeats = TextSequence(3, torch.tensor(VARIES)), TextSequence(1, torch.tensor(REPEATS))
    proposals = proposer.propose([varies, repeats], torch.tensor([[16], [2]]), 9)
    assert proposals.looked_up == (1,)
    blocks = [SimpleNamespace(sequence=3, num_accepted=5), SimpleNamespace(sequence=1, num_accepted=0)]
    proposer.record(proposals, blocks)
    needed = {index: lookup._num_matching for index, lookup in proposer._lookups.items()}
    assert needed == {3: 2, 1: 4}
