"""A drafter that reads the first and the newest tokens of a text: what it keeps, at which positions, and the same text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import (
    BLOCK_SIZE,
    GREEDY,
    SMALL,
    ScriptedDrafter,
    greedy,
    left_padded,
    make_drafter,
    make_prompt,
    make_target,
)
from transformers import PreTrainedModel

from dflash import Conversation, generate_blocks, spec_generate
from dflash.engine.windows import WindowedCache


SINK, WINDOW = 3, 8
NEW = 24
ASKED: dict[str, Any] = {**GREEDY, "max_new_tokens": NEW, "draft_window": (SINK, WINDOW)}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target(num_hidden_layers=2)


@pytest.fixture(scope="module")
def prompt(target: PreTrainedModel) -> torch.Tensor:
    return make_prompt(30)


def kept_of(length: int, end: int) -> list[int]:
    """The positions of a text that `length` keys stand for, of which the last is at `end - 1`."""
    return [*range(SINK), *range(end - length + SINK, end)]


def keys_of(conversation: Conversation) -> tuple[torch.Tensor, int]:
    """The drafter's keys [1, G, length, E], and the length of the text that it has read."""
    context: Any = conversation.context
    return context.cache.layers[0].keys[:, :, : context.cache.lengths[0]], context.num_read


def windowed_cache(num_keys: list[int]) -> WindowedCache:
    """A cache of one layer whose keys are the positions of their tokens, `num_keys` of each sequence."""
    cache = WindowedCache(1, 64, len(num_keys), window=(SINK, WINDOW))
    append(cache, num_keys)
    return cache


def append(cache: WindowedCache, counts: list[int]) -> None:
    """Appends keys as a forward does."""
    columns = torch.arange(max(counts))
    slots = torch.tensor(cache.lengths)[:, None] + columns
    keys = cache.positions(slots)[:, None, :, None].float()
    with cache.appending(slots, counts):
        cache.update(keys, -keys, 0)


def positions_in(cache: WindowedCache, place: int = 0) -> list[int]:
    layer: Any = cache.layers[0]
    held = slice(cache.lengths[place])
    assert torch.equal(layer.keys[place, 0, held, 0], -layer.values[place, 0, held, 0])
    return layer.keys[place, 0, held, 0].int().tolist()


def test_a_cache_drops_what_is_between_the_first_and_the_newest() -> None:
    cache = windowed_cache([20])
    cache.drop()
    assert positions_in(cache) == kept_of(SINK + WINDOW, 20)
    assert (cache.lengths, cache.text_lengths, cache.dropped) == ([11], [20], [9])
    append(cache, [1])
    cache.drop()
    assert cache.lengths == [12], "an eighth of the window may stay"
    append(cache, [4])
    cache.drop()
    assert positions_in(cache) == kept_of(SINK + WINDOW, 25)


def test_each_sequence_drops_its_own_keys_and_may_leave() -> None:
    cache = windowed_cache([20, 5, 14])
    cache.drop()
    append(cache, [2, 1, 0])
    expected = [kept_of(SINK + WINDOW + 2, 22), list(range(6)), kept_of(SINK + WINDOW, 14)]
    assert [positions_in(cache, place) for place in range(3)] == expected
    cache.keep_sequences([1, 2])
    assert [positions_in(cache, place) for place in range(2)] == expected[1:]
    assert cache.text_lengths == [6, 14]


def test_a_text_that_is_cut_keeps_the_keys_it_still_has() -> None:
    """Promise: keys after the cut go; where it lies among dropped keys, the first ones are left."""
    for length, expected in ((18, [*range(SINK), *range(12, 18)]), (7, [0, 1, 2]), (2, [0, 1])):
        cache = windowed_cache([20])
        cache.drop()
        assert cache.truncate(length) == length
        assert cache.text_lengths == [length]
        assert positions_in(cache) == expected
        append(cache, [1])
        assert positions_in(cache) == [*expected, length]


@pytest.fixture(params=["eager", "chunks", "compiled"])
def more(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Further keywords of a way to run steps. What is compiled runs as it is: to capture it takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return {"eager": {}, "chunks": {"prefill_chunk_size": 7}}.get(request.param, {"compile": True})


def test_the_first_and_the_newest_keys_are_kept_at_their_own_positions(
    target: PreTrainedModel, prompt: torch.Tensor, more: dict[str, Any]
) -> None:
    """Promise: the keys are those of a drafter that reads all, and no others are kept; after a second turn and a rewind too."""
    drafter, all_kept, windowed = make_drafter(**SMALL), Conversation(), Conversation()
    turns = [prompt, torch.cat([prompt, make_prompt(20, seed=8)], dim=1), prompt[:, :22], make_prompt(12)]
    for text in turns:
        longer = {"draft_window": None, "max_new_tokens": NEW + BLOCK_SIZE}
        spec_generate(drafter, target, text, conversation=all_kept, **{**ASKED, **longer})
        spec_generate(drafter, target, text, conversation=windowed, **ASKED, **more)
        expected, (found, end) = keys_of(all_kept)[0], keys_of(windowed)
        assert end >= text.shape[1] + NEW - 1 - BLOCK_SIZE
        num_kept = found.shape[2]
        # At most an eighth more, and the columns of a step, before the next step drops them.
        assert SINK + min(WINDOW, end - SINK) <= num_kept <= SINK + WINDOW + 1 + BLOCK_SIZE
        assert torch.allclose(found, expected[:, :, kept_of(num_kept, end)], atol=1e-5)
        assert windowed.context.cache.layers[0].keys.shape[2] <= 256, "one unit of room"


@contextmanager
def hidden_states(drafter: Any) -> Iterator[list[torch.Tensor]]:
    """The last hidden states of every draft, as the model computes them."""
    found: list[torch.Tensor] = []
    handle = drafter.norm.register_forward_hook(lambda module, args, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()


def test_sequences_of_a_batch_have_their_own_window(target: PreTrainedModel) -> None:
    """Promise: every draft of a batch is that of the sequence alone, and a window changes it once the text is longer."""
    prompts = [make_prompt(length, seed=length) for length in (29, 5, 14)]
    truths = [greedy(target, prompt, max_new_tokens=NEW) for prompt in prompts]
    ids, mask = left_padded(prompts)

    def drafts(prompt: torch.Tensor, truths: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
        drafter = ScriptedDrafter(target, truths, [0], **SMALL)  # one token a step: steps of all runs correspond
        with hidden_states(drafter) as found:
            spec_generate(drafter, target, prompt, **{**ASKED, **more})
        return found

    together = drafts(ids, truths, attention_mask=mask)
    for index, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        alone, reading_all = drafts(prompt, [truth]), drafts(prompt, [truth], draft_window=None)
        assert len(alone) == len(together) == NEW - 2
        for mine, theirs in zip(together, alone, strict=True):
            assert torch.allclose(mine[index], theirs[0], atol=1e-4)
        assert not torch.allclose(alone[-1], reading_all[-1], atol=1e-2)


def test_a_draft_is_that_of_the_kept_context(target: PreTrainedModel, prompt: torch.Tensor) -> None:
    """Promise: the first draft equals a forward over the kept features alone, at their true positions."""
    drafter: Any = make_drafter(**SMALL)
    with hidden_states(drafter) as found:
        spec_generate(drafter, target, prompt, **ASKED)
    with torch.no_grad():
        features = target(prompt, output_hidden_states=True).hidden_states[drafter.config.target_layer_ids[0] + 1]
        first = greedy(target, prompt, max_new_tokens=1)[:, -1:]
        block = torch.cat([first, torch.full((1, BLOCK_SIZE - 1), drafter.config.mask_token_id)], dim=1)
        length = prompt.shape[1]
        kept = kept_of(SINK + WINDOW, length)
        expected = drafter(
            noise_embeds=drafter.embed(block, target.get_input_embeddings()),
            context_hidden_states=features[:, kept],
            position_ids=torch.tensor([[*kept, *range(length, length + BLOCK_SIZE)]]),
        ).last_hidden_state
    assert torch.allclose(found[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "asked", [{}, {"draft_tree": 8}, {"adaptive": True}, {"prompt_lookup_num_tokens": 5}, {"compile": True}], ids=str
)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_the_text_does_not_depend_on_the_window(
    target: PreTrainedModel, asked: dict[str, Any], num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the drafter alone reads less; chains, trees, lookups, batches and compiled steps write the same text."""
    if num_sequences > 1 and "draft_tree" in asked:
        asked = {"temperature": 0.8, "generator": torch.Generator().manual_seed(3)}  # a tree takes one prompt
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    prompts = torch.cat([make_prompt(30, seed=seed) for seed in range(num_sequences)])
    truth = greedy(target, prompts, max_new_tokens=NEW + BLOCK_SIZE, eos_token_id=None)
    drafter: Any = ScriptedDrafter(target, list(truth), [2, 0, BLOCK_SIZE - 1], **SMALL)
    if "generator" in asked:
        drafter, plain = make_drafter(**SMALL), {"draft_window": None, "generator": torch.Generator().manual_seed(3)}
        truth = spec_generate(drafter, target, prompts, **{**ASKED, **asked, **plain}).sequences
    found = spec_generate(drafter, target, prompts, **{**ASKED, **asked}).sequences
    assert torch.equal(found, truth[:, : 30 + NEW])


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (8, r"draft_window=8: use two numbers"),
        ((8,), r"draft_window=\(8,\): use two numbers"),
        ((-1, 8), r"draft_window=\(-1, 8\): use two numbers"),
        ((2, 0), r"draft_window=\(2, 0\): use two numbers"),
    ],
)
def test_a_window_that_says_nothing_is_refused(target: PreTrainedModel, window: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_generate(make_drafter(**SMALL), target, make_prompt(), **{**ASKED, "draft_window": window})


def test_a_window_of_a_drafter_with_sliding_layers_is_refused(target: PreTrainedModel) -> None:
    drafter = make_drafter(**SMALL, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"])
    with pytest.raises(ValueError, match=r"draft_window=\(3, 8\): this drafter has sliding layers"):
        spec_generate(drafter, target, make_prompt(), **ASKED)


def test_the_config_may_hold_the_window_and_a_conversation_keeps_it(target: PreTrainedModel) -> None:
    """Promise: read where the keyword is missing; what a conversation has dropped stays dropped."""
    conversation, drafter = Conversation(), make_drafter(**SMALL, draft_window=[SINK, WINDOW])
    asked = {**ASKED, "draft_window": None, "conversation": conversation}
    for more in ({}, {"draft_window": (4, 90)}):
        spec_generate(drafter, target, make_prompt(30), **{**asked, **more})
        assert conversation.context.cache.lengths[0] < 30


def test_a_prompt_in_chunks_leaves_one_chunk_waiting(target: PreTrainedModel) -> None:
    """Promise: features of a long prompt are not held until the first draft."""
    conversation, drafter = Conversation(), make_drafter(**SMALL)
    asked: dict[str, Any] = {"max_new_tokens": NEW, "draft_window": (SINK, WINDOW), "prefill_chunk_size": 4}
    next(generate_blocks(drafter, target, make_prompt(30), conversation=conversation, **asked))
    assert conversation.context.waiting.num_columns <= 4


def test_a_window_larger_than_any_text_takes_no_more_memory_than_the_text(target: PreTrainedModel) -> None:
    """Bug: room for the whole window was made at once, of 2**31 positions where that was said."""
    drafter = make_drafter(**SMALL)
    window = (4, 2**31)
    drafted = spec_generate(drafter, target, make_prompt(), **{**ASKED, "draft_window": window}).sequences
    assert torch.equal(
        drafted, spec_generate(drafter, target, make_prompt(), **{**ASKED, "draft_window": None}).sequences
    )


def test_a_keyword_wins_over_the_window_of_the_config(target: PreTrainedModel) -> None:
    conversation, drafter = Conversation(), make_drafter(**SMALL, draft_window=[SINK, WINDOW])
    asked: dict[str, Any] = {**ASKED, "draft_window": (4, 90), "conversation": conversation}
    spec_generate(drafter, target, make_prompt(30), **asked)
    assert conversation.context.cache.window == (4, 90)
