"""Caches that a user keeps from turn to turn: the same text as starting afresh, and only the new tokens are run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from tiny_models import SMALL, make_prompt
from tiny_models import ScriptedDrafter as AnyScriptedDrafter
from tiny_models import make_drafter as any_drafter
from tiny_models import make_target as any_target
from tiny_models import remembered_greedy as greedy
from transformers import PreTrainedModel

from dflash import Conversation, generate_blocks, spec_generate


NEW = 14

ScriptedDrafter = partial(AnyScriptedDrafter, **SMALL)
make_drafter = partial(any_drafter, **SMALL)


@cache
def make_target(kind: str = "qwen3") -> PreTrainedModel:
    """One of two layers of each kind; read-only."""
    windows = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "qwen3_sliding" else {}
    return any_target(kind, num_hidden_layers=2, **windows)


@contextmanager
def counted_tokens(target: PreTrainedModel) -> Iterator[list[int]]:
    """A list that grows by the width of each forward of `target`."""
    widths: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    handle = target.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


def turns(target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A first prompt, a second that goes on from its answer, and the second's answer."""
    first = make_prompt(9)
    second = torch.cat([greedy(target, first, max_new_tokens=NEW), make_prompt(4, seed=5)], dim=1)
    return first, second, greedy(target, second, max_new_tokens=NEW)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama"])
@pytest.mark.parametrize("script", [[5], [0], [2, 0, 4]], ids=str)
def test_a_second_turn_runs_only_the_new_tokens(kind: str, script: list[int]) -> None:
    """Promise: text and acceptance equal those of starting afresh; the first turn's tokens are not run again."""
    target = make_target(kind)
    first, second, truth = turns(target)
    # The drafter's script starts over with each call, as its cache's length tells it; a fresh one per turn does too.
    conversation, drafter = Conversation(), ScriptedDrafter(target, truth, script)
    spec_generate(drafter, target, first, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    assert conversation.token_ids == second[0, : 9 + NEW - 1].tolist()
    with counted_tokens(target) as widths:
        text = spec_generate(drafter, target, second, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    assert torch.equal(text, truth)
    assert conversation.num_reused == 9 + NEW - 1
    assert widths[0] == second.shape[1] - conversation.num_reused == 5


def test_the_drafters_cache_is_the_one_of_starting_afresh() -> None:
    """Promise: keys of both caches equal those of a conversation that was given the whole text at once."""
    target = make_target()
    first, second, truth = turns(target)
    kept, fresh = Conversation(), Conversation()
    drafter = ScriptedDrafter(target, truth, [2, 0, 4])
    spec_generate(drafter, target, first, max_new_tokens=NEW, temperature=0.0, conversation=kept)
    for conversation in (kept, fresh):
        drafter.num_blocks = 0
        spec_generate(drafter, target, second, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    assert kept.token_ids == fresh.token_ids
    for mine, theirs in ((kept.target_cache, fresh.target_cache), (kept.context.cache, fresh.context.cache)):
        length = min(mine.get_seq_length(), theirs.get_seq_length())
        assert length > second.shape[1]
        for layer, other in zip(mine.layers, theirs.layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, :length], other.keys[:, :, :length], rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_same", [0, 1, 6, 9, 15])
def test_a_prompt_that_differs_from_some_token_on(num_same: int) -> None:
    """Promise: what differs is forgotten: an edited history costs what was edited, never the text."""
    target = make_target()
    first = make_prompt(9)
    text = greedy(target, first, max_new_tokens=NEW)
    edited = torch.cat([text[:, :num_same], (text[:, num_same : num_same + 6] + 1).clamp(1, 90)], dim=1)
    truth = greedy(target, edited, max_new_tokens=NEW)
    conversation, drafter = Conversation(), ScriptedDrafter(target, truth, [3, 1])
    spec_generate(drafter, target, first, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    again = spec_generate(drafter, target, edited, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    assert torch.equal(again, truth)
    assert conversation.num_reused == num_same


def test_the_same_prompt_twice_runs_one_token() -> None:
    """Promise: one token is always left to run, since its forward chooses the first new one."""
    target, prompt = make_target(), make_prompt(9)
    truth = greedy(target, prompt, max_new_tokens=NEW)
    conversation, drafter = Conversation(), ScriptedDrafter(target, truth, [4])
    for _ in range(2):
        text = spec_generate(drafter, target, prompt, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
        assert torch.equal(text, truth)
    assert conversation.num_reused == 8


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_consumer_that_stops_early_leaves_caches_that_go_on(num_blocks: int) -> None:
    """Promise: after a close the caches hold what was yielded, and no more."""
    target, prompt = make_target(), make_prompt(9)
    truth = greedy(target, prompt, max_new_tokens=40)
    conversation, drafter = Conversation(), ScriptedDrafter(target, truth, [3, 0, 5])
    blocks = generate_blocks(drafter, target, prompt, max_new_tokens=40, temperature=0.0, conversation=conversation)
    written = [token_id for _ in range(num_blocks) for token_id in next(blocks).token_ids]
    blocks.close()
    text = torch.cat([prompt, torch.tensor([written])], dim=1)
    assert conversation.token_ids == text[0, :-1].tolist()
    left = 40 - len(written)
    rest = spec_generate(drafter, target, text, max_new_tokens=left, temperature=0.0, conversation=conversation)
    assert torch.equal(rest, truth)
    assert conversation.num_reused == text.shape[1] - 1


@pytest.mark.parametrize("failing_call", [2, 3])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_forward_that_fails_half_way_spoils_nothing(failing_call: int, layer: int) -> None:
    """Promise: a call that raised leaves a conversation that still writes the right text."""
    target, prompt = make_target(), make_prompt(9)
    truth = greedy(target, prompt, max_new_tokens=NEW)
    conversation, drafter = Conversation(), ScriptedDrafter(target, truth, [3, 1])
    calls: list[int] = []

    def fail(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == failing_call:
            raise RuntimeError("out of memory")

    handle = target.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        spec_generate(drafter, target, prompt, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    handle.remove()
    text = spec_generate(drafter, target, prompt, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    assert torch.equal(text, truth)


def test_sampled_turns_equal_those_of_starting_afresh() -> None:
    """Promise: the caches change nothing of what a seed writes."""
    target, drafter = make_target(), make_drafter()
    first, second, _ = turns(target)
    conversation = Conversation()
    spec_generate(drafter, target, first, max_new_tokens=NEW, temperature=0.0, conversation=conversation)
    texts = [
        spec_generate(
            drafter,
            target,
            second,
            max_new_tokens=NEW,
            temperature=1.2,
            generator=torch.Generator().manual_seed(3),
            **kept,
        )
        for kept in ({}, {"conversation": conversation})
    ]
    assert torch.equal(*texts)


def test_a_conversation_of_other_models_is_refused() -> None:
    """Promise: caches of another pair are named, before any compute."""
    target, drafter, prompt = make_target(), make_drafter(), make_prompt()
    conversation = Conversation()
    spec_generate(drafter, target, prompt, max_new_tokens=3, temperature=0.0, conversation=conversation)
    with pytest.raises(ValueError, match="begun with another Qwen3ForCausalLM"):
        spec_generate(drafter, make_target("llama"), prompt, max_new_tokens=3, conversation=conversation)
    with pytest.raises(ValueError, match="or another drafter"):
        spec_generate(make_drafter(), target, prompt, max_new_tokens=3, conversation=conversation)
    with pytest.raises(ValueError, match="one prompt at a time, not 2"):
        spec_generate(drafter, target, prompt.repeat(2, 1), max_new_tokens=3, conversation=Conversation())


def test_a_conversation_begun_in_inference_mode_goes_on_outside() -> None:
    """Promise: its caches are written on, though torch lets nobody write outside into what was made inside."""
    target, prompt = make_target(), make_prompt(14)
    conversation, asked = Conversation(), {"max_new_tokens": 8, "temperature": 0.0}
    with torch.inference_mode():
        first = spec_generate(make_drafter(), target, prompt, **asked).clone()
        drafter = make_drafter()
        spec_generate(drafter, target, prompt, conversation=conversation, **asked)
    longer = torch.cat([first.clone(), make_prompt(3, seed=5)], dim=1)
    again = spec_generate(drafter, target, longer, conversation=conversation, **asked)
    assert conversation.num_reused == first.shape[1] - 1
    assert torch.equal(again, greedy(target, longer, max_new_tokens=8))


def test_a_conversation_read_in_chunks_holds_its_text() -> None:
    """Promise: `prefill_chunk_size` changes neither the text that the caches hold nor how much of it is reused."""
    target = make_target()
    first, second, truth = turns(target)
    conversation, drafter = Conversation(), make_drafter()
    asked: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "prefill_chunk_size": 4}
    text = spec_generate(drafter, target, first, conversation=conversation, **asked)
    assert conversation.token_ids == text[0, :-1].tolist()
    assert torch.equal(spec_generate(drafter, target, second, conversation=conversation, **asked), truth)
    assert conversation.num_reused == 9 + NEW - 1
    assert conversation.token_ids == truth[0, :-1].tolist()


def test_a_conversation_that_another_request_has_used_ends_the_older_one() -> None:
    """Bug: the older request went on over the other one's caches, and its text was wrong without a word."""
    target, drafter, conversation = make_target(), make_drafter(), Conversation()
    first, second = make_prompt(9), make_prompt(9, seed=3)
    asked: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW, "conversation": conversation}
    older = generate_blocks(drafter, target, first, **asked)
    next(older)
    newer = generate_blocks(drafter, target, second, **asked)
    written = [*next(newer).token_ids]
    with pytest.raises(ValueError, match=r"went on with another request.*a conversation of its own"):
        list(older)
    written += [token_id for block in newer for token_id in block.token_ids]
    truth = greedy(target, second, max_new_tokens=NEW)
    assert written == truth[0, 9:].tolist()
    assert conversation.token_ids == truth[0, :-1].tolist()
