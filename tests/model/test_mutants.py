"""Promises that nine planted bugs broke while every other test stayed green; each docstring tells the bug.

The tests use public names. What they need of the core's files is imported in one line.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from distributions import p_value
from test_batch import BatchScriptedDrafter
from tiny_models import (
    BLOCK_SIZE,
    PAD_TOKEN_ID,
    ScriptedDrafter,
    greedy,
    left_padded,
    make_drafter,
    make_prompt,
    make_target,
    make_tokenizer,
)
from transformers import PreTrainedModel

from dflash import Conversation, DFlashDraftModel, generate_blocks, spec_generate
from dflash.model.acceptance_dflash import Proposals, accept_block


NEW = 14
WHOLE = BLOCK_SIZE - 1  # proposals of a whole block
GREEDY: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": []}


def chain(seed: int, sharpness: float, vocab_size: int = 4) -> torch.Tensor:
    """Probabilities of the next token after each token, float64 [V, V]."""
    noise = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharpness * noise).softmax(dim=-1)


def test_block_verification_writes_the_targets_distribution_with_an_unlike_drafter() -> None:
    """The residual after a rejection did not weigh the target's probabilities by how far the block was reached.

    The text was then distributed wrongly, by less than a test sees whose drafter resembles the target. This one does not.
    """
    target, drafter, num_texts, depth = chain(1, 0.6), chain(2, 1.6), 60_000, 3
    noise = torch.Generator().manual_seed(0)

    def drawn(probabilities: torch.Tensor) -> torch.Tensor:
        return probabilities.multinomial(1, generator=noise)

    texts = torch.zeros(num_texts, 1, dtype=torch.long)  # every text begins with token 0, the anchor
    for _ in range(depth):
        texts = torch.cat([texts, drawn(drafter[texts[:, -1]])], dim=1)
    candidate_ids = torch.arange(len(drafter)).expand(num_texts, depth, -1)
    proposals = Proposals(texts[:, 1:], candidate_ids, drafter[texts[:, :-1]])
    uniforms = torch.rand(num_texts, depth + 1, generator=noise, dtype=torch.float64)
    verdict = accept_block(proposals, target[texts].log(), uniforms)

    written = verdict.token_ids[:, :depth].clone()
    for i in range(1, depth):  # what the next steps write
        is_written = verdict.num_accepted >= i
        written[:, i] = torch.where(is_written, written[:, i], drawn(target[written[:, i - 1]])[:, 0])
    every_text = torch.tensor(list(itertools.product(range(len(target)), repeat=depth)))
    before = torch.cat([torch.zeros(len(every_text), 1, dtype=torch.long), every_text[:, :-1]], dim=1)
    expected = target[before, every_text].prod(dim=1)
    cells = (written * len(target) ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    assert p_value(cells, expected) > 1e-3


def test_a_stop_token_ends_the_text_when_stop_strings_are_given_too() -> None:
    """The answer of the stop strings overwrote that of the stop tokens: a stop token before the string was ignored."""
    target, tokenizer, prompt = make_target(), make_tokenizer(), make_prompt(9)
    text = greedy(target, prompt, max_new_tokens=24)
    drafter = ScriptedDrafter(target, text, [WHOLE])
    new_ids = text[0, 9:].tolist()
    firsts = [i for i in range(1, 12) if new_ids.index(new_ids[i]) == i]
    assert {i % BLOCK_SIZE for i in firsts} == set(range(BLOCK_SIZE)), "choose a seed whose stops lie at every place"
    for i in firsts:
        string = tokenizer.decode(new_ids[i + 2 : i + 4])
        asked: dict[str, Any] = {"stop_strings": string, "tokenizer": tokenizer, "max_new_tokens": 24}
        assert greedy(target, prompt, **asked).shape[1] == 9 + i + 4, "the string does not end the text by itself"
        output = spec_generate(drafter, target, prompt, temperature=0.0, stop_token_ids=[new_ids[i]], **asked)
        assert output.tolist() == [text[0, : 9 + i + 1].tolist()]


def test_processors_treat_each_sequence_as_its_own_place_in_the_batch() -> None:
    """Every sequence got the scores that the processors gave to the first of the batch.

    The repetition penalty leaves each sequence's padding out, so the first must be the shortest to show it.
    """
    target = make_target("llama")
    prompts = [make_prompt(length, seed=10 + i) for i, length in enumerate([1, 5, 9, 12])]
    ids, mask = left_padded(prompts)
    asked: dict[str, Any] = {"repetition_penalty": 1.4, "max_new_tokens": NEW, "pad_token_id": PAD_TOKEN_ID}
    expected = greedy(target, ids, attention_mask=mask, eos_token_id=None, **asked)
    truths = [expected[i, ids.shape[1] - prompt.shape[1] :] for i, prompt in enumerate(prompts)]
    drafter = BatchScriptedDrafter(target, truths)
    output = spec_generate(drafter, target, ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY, **asked)
    assert torch.equal(output.sequences, expected)
    assert output.tau > 1.5, "little is accepted, so little is shown"


def assert_caches_hold_the_text(
    conversation: Conversation, drafter: DFlashDraftModel, target: PreTrainedModel, num_read: int
) -> None:
    """The keys of both caches equal those of a fresh conversation that gets the same text at once.

    The drafter may not have read the end of the text yet, but has read the first `num_read` tokens.
    """
    text, fresh = torch.tensor([conversation.token_ids]), Conversation()
    # Three tokens are enough for a draft, before which the drafter reads the whole prompt.
    spec_generate(drafter, target, text, max_new_tokens=3, conversation=fresh, **GREEDY)
    assert conversation.target_cache.lengths == [text.shape[1]]
    assert num_read <= conversation.context.cache.lengths[0] <= text.shape[1]
    pairs = ((conversation.target_cache, fresh.target_cache), (conversation.context.cache, fresh.context.cache))
    for held, expected in pairs:
        length = held.lengths[0]
        assert expected.lengths[0] >= length
        for layer, other in zip(held.layers, expected.layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, :length], other.keys[:, :, :length], rtol=0, atol=2e-5)


def assert_an_edit_leaves_no_trace(num_same: int) -> None:
    """A second prompt keeps the first `num_same` tokens of the first call's text: then its caches hold its text alone."""
    target, prompt = make_target(), make_prompt(9)
    text = greedy(target, prompt, max_new_tokens=NEW)
    edited = torch.cat([text[:, :num_same], (text[:, num_same : num_same + 6] + 1).clamp(1, 90)], dim=1)
    truth = greedy(target, edited, max_new_tokens=NEW)
    conversation, drafter = Conversation(), ScriptedDrafter(target, text, [1, 3])
    spec_generate(drafter, target, prompt, max_new_tokens=NEW, conversation=conversation, **GREEDY)
    drafter.truths = [truth[0].tolist()]
    again = spec_generate(drafter, target, edited, max_new_tokens=NEW, conversation=conversation, **GREEDY)
    assert torch.equal(again, truth)
    assert conversation.num_reused == num_same
    assert_caches_hold_the_text(conversation, drafter, target, edited.shape[1])


@pytest.mark.parametrize("num_same", [1, 6, 9, 15])
def test_the_drafters_cache_forgets_what_an_edited_prompt_leaves_out(num_same: int) -> None:
    """The drafter's cache was not cut where an edited prompt departs from the text: it held more positions than the text.

    The text stayed right, and what was drafted after it was no longer accepted.
    """
    assert_an_edit_leaves_no_trace(num_same)


@pytest.mark.parametrize("num_same", range(9 + NEW - BLOCK_SIZE, 9 + NEW))
def test_an_edit_next_to_the_end_leaves_no_context_of_what_it_removed(num_same: int) -> None:
    """Context that the drafter had not read when its text was edited was kept whole, with that of the removed tokens."""
    assert_an_edit_leaves_no_trace(num_same)


def test_adaptive_steps_leave_the_caches_with_the_text_alone() -> None:
    """Drafts that were run to time them stayed in the drafter's cache: it held more positions than the text.

    The outcome does not depend on the times: whatever widths they lead to, both caches hold the text.
    """
    target, prompt = make_target(), make_prompt(9)
    truth = greedy(target, prompt, max_new_tokens=30)
    conversation, drafter = Conversation(), ScriptedDrafter(target, truth, [WHOLE])
    asked: dict[str, Any] = {"max_new_tokens": NEW, "conversation": conversation, "adaptive": True, **GREEDY}
    assert torch.equal(spec_generate(drafter, target, prompt, **asked), truth[:, : 9 + NEW])
    assert_caches_hold_the_text(conversation, drafter, target, prompt.shape[1])


def test_the_caches_hold_nothing_after_a_stop_inside_a_block() -> None:
    """The target's cache kept the accepted tokens after a stop: it held more positions than the text."""
    target, prompt = make_target(), make_prompt(9)
    text = greedy(target, prompt, max_new_tokens=30)
    new_ids = text[0, 9:].tolist()
    firsts = [i for i in range(1, 2 * BLOCK_SIZE) if new_ids.index(new_ids[i]) == i]
    assert {i % BLOCK_SIZE for i in firsts} == set(range(BLOCK_SIZE)), "choose a seed whose stops lie at every place"
    for i in firsts:
        conversation, drafter = Conversation(), ScriptedDrafter(target, text, [WHOLE])
        asked: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "conversation": conversation}
        stopped = spec_generate(drafter, target, prompt, stop_token_ids=[new_ids[i]], **asked)
        assert stopped.tolist() == [text[0, : 9 + i + 1].tolist()]
        assert conversation.token_ids == stopped[0, :-1].tolist()
        assert conversation.target_cache.lengths == [stopped.shape[1] - 1]
        assert_caches_hold_the_text(conversation, drafter, target, prompt.shape[1])


@pytest.mark.parametrize("script", [[WHOLE, 0], [0, WHOLE]], ids=["first_ahead", "second_ahead"])
def test_a_sequence_near_its_end_does_not_narrow_the_blocks_of_the_others(script: list[int]) -> None:
    """A batch drafted only as many tokens as the sequence nearest its end wanted, for the others too."""
    target = make_target()
    prompts = [make_prompt(5, seed=10), make_prompt(9, seed=11)]
    truths = [greedy(target, prompt, max_new_tokens=40) for prompt in prompts]
    ids, mask = left_padded(prompts)
    num_near = 0
    for max_new_tokens in range(8, 22):
        drafter = ScriptedDrafter(target, truths, script)
        left = [max_new_tokens] * 2
        for block in generate_blocks(
            drafter, target, ids, attention_mask=mask, max_new_tokens=max_new_tokens, compile=False, **GREEDY
        ):
            if (
                not block.is_prefill and left[block.sequence] > WHOLE
            ):  # of a block's tokens the last is the target's own
                assert block.num_proposals == WHOLE
                num_near += 0 < left[1 - block.sequence] <= WHOLE
            left[block.sequence] -= len(block.token_ids)
    assert num_near > 4, "no sequence had room while the other was near its end"


class SensitiveDrafter(DFlashDraftModel):
    """Proposes something else as soon as what it read differs by more than rounding."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = (20.0 * output.last_hidden_state).sin()
        return output


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that compile=True hands to the compiler, which run as they are: to capture them takes seconds."""
    functions: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: functions.append(function) or function)
    return functions


def test_compiled_batches_accept_as_eager_ones_do_after_a_step_without_a_draft(
    handed_over: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Context of two steps was read as if each sequence's real columns came first, which is so for one step alone.

    To show it, sequences accept different numbers, and in some steps all proposals are looked up: their context waits.
    """
    vocab_size, shared = 12, {"vocab_size": 12, "num_hidden_layers": 2}
    target = make_target(seed=1, **shared)
    drafter = make_drafter(seed=1, mask_token_id=vocab_size - 1, num_target_layers=2, target_layer_ids=[0], **shared)
    drafter.__class__ = SensitiveDrafter
    asked: dict[str, Any] = {"max_new_tokens": 80, "pad_token_id": PAD_TOKEN_ID, "return_dict_in_generate": True}
    for seed in (10, 50):
        prompts = [make_prompt(length, seed=seed + length, vocab_size=vocab_size)[0] for length in (11, 6, 8)]
        # The first compiled steps are compared with eager ones, and are to be usual ones.
        spec_generate(drafter, target, prompts, compile=True, **asked, **GREEDY)
        lookups = {"prompt_lookup_num_tokens": 1, "max_matching_ngram_size": 2}
        eager, compiled = (
            spec_generate(drafter, target, prompts, compile=compile, **lookups, **asked, **GREEDY)
            for compile in (False, True)
        )
        assert torch.equal(compiled.sequences, eager.sequences)
        assert eager.tau_with_lookup > 1.1
        for found, expected in zip(compiled.acceptance_lengths, eager.acceptance_lengths, strict=True):
            # A compiled block may be wider than what is still wanted: a sequence's last steps may count more.
            assert found[:40] == expected[:40]
    assert handed_over
    assert "eagerly" not in caplog.text
