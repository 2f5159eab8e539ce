"""Batches: each row accepts its own number of tokens per step and reads as if it were alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import (
    MASK_TOKEN_ID,
    PAD_TOKEN_ID,
    SMALL,
    TARGET_KINDS,
    greedy,
    left_padded,
    make_drafter,
    make_prompt,
    make_target,
    scripted,
    small_target,
)
from transformers import TextStreamer

from dflash import generate_blocks, spec_generate
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.drafting_dflash import Context


NEW_TOKENS = 24
LENGTHS = [9, 1, 5, 12]


def prompts_of(lengths: list[int]) -> list[torch.Tensor]:
    return [make_prompt(length, seed=10 + row) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_each_row_equals_its_prompt_alone(kind: str, attention: str) -> None:
    """Ragged rows: same tokens and same acceptance lengths as alone, whatever the others accept (no public loop did this)."""
    target = small_target(kind)
    target.set_attn_implementation(attention)
    prompts = prompts_of(LENGTHS)
    drafter = scripted(target, prompts, **SMALL)
    drafter.set_attn_implementation(attention)
    ids, mask = left_padded(prompts)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "return_dict_in_generate": True}
    output = spec_generate(drafter, target, ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = spec_generate(drafter, target, prompt, **options)
        assert output.sequences[row, ids.shape[1] :].tolist() == alone.sequences[0, prompt.shape[1] :].tolist()
        assert alone.sequences[0].tolist() == drafter.truths[row][: prompt.shape[1] + NEW_TOKENS]
        # The last steps may differ: alone, a block is never wider than what is still wanted.
        lengths = alone.acceptance_lengths[0]
        assert output.acceptance_lengths[row][: len(lengths) - 2] == lengths[:-2]
    assert len({tuple(lengths) for lengths in output.acceptance_lengths}) > 1, "the rows are not ragged"


@pytest.mark.parametrize("overrides", [{"sliding_window": 4}, {"sliding_window": 4, "is_causal": False}], ids=str)
def test_drafter_windows_are_the_same_in_a_batch(overrides: dict[str, Any]) -> None:
    """A random drafter on few tokens accepts now and then; a wrong mask in the batch would change what it accepts."""
    target = make_target("qwen3", vocab_size=6)
    drafter = make_drafter(
        vocab_size=6,
        mask_token_id=5,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
        **overrides,
    )
    prompts = [make_prompt(length, seed=row, vocab_size=6) for row, length in enumerate([3, 11, 6, 8, 2])]
    ids, mask = left_padded(prompts)
    options: dict[str, Any] = {"max_new_tokens": 32, "temperature": 0.0, "return_dict_in_generate": True}
    options["prompt_lookup_num_tokens"] = 0
    output = spec_generate(drafter, target, ids, attention_mask=mask, **options)
    assert output.tau > 1.02, "nothing is accepted, so nothing is shown"
    for row, prompt in enumerate(prompts):
        alone = spec_generate(drafter, target, prompt, **options)
        assert output.sequences[row, ids.shape[1] :].tolist() == alone.sequences[0, prompt.shape[1] :].tolist()
        lengths = alone.acceptance_lengths[0]
        assert output.acceptance_lengths[row][: len(lengths) - 2] == lengths[:-2]


def test_rows_that_stop_leave_the_batch_and_are_padded() -> None:
    """Rows that are done cost nothing: the target's forwards get narrower, and the text is padded as `generate` pads it."""
    target = small_target("qwen3")
    prompts = prompts_of(LENGTHS)
    texts = [greedy(target, prompt, max_new_tokens=NEW_TOKENS)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    stop_ids = [texts[0][4], texts[2][11]]
    ids, mask = left_padded(prompts)
    drafter = scripted(target, prompts, **SMALL)
    rows_run: list[int] = []
    handle = target.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: rows_run.append(len(args[0]))
    )
    output = spec_generate(
        drafter, target, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=stop_ids, pad_token_id=PAD_TOKEN_ID,
    )  # fmt: skip
    handle.remove()
    expected = greedy(
        target, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=stop_ids, pad_token_id=PAD_TOKEN_ID
    )
    assert torch.equal(output, expected)
    assert rows_run == sorted(rows_run, reverse=True)
    assert rows_run[0] == len(prompts)
    assert rows_run[-1] < len(prompts)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_processors_see_each_rows_own_prefix(options: dict[str, Any]) -> None:
    target = small_target("llama")
    prompts = prompts_of(LENGTHS)
    ids, mask = left_padded(prompts)
    options = {**options, "max_new_tokens": NEW_TOKENS, "pad_token_id": PAD_TOKEN_ID, "eos_token_id": 7}
    ours = spec_generate(
        scripted(target, prompts, **SMALL), target, ids, attention_mask=mask, temperature=0.0, **options
    )
    assert torch.equal(ours, greedy(target, ids, attention_mask=mask, **options))


def test_sampled_rows_do_not_depend_on_the_batch() -> None:
    """Row 0 of a batch samples what it samples alone at the same seed: noise belongs to row and position."""
    target = make_target("qwen3")
    prompts = prompts_of([7, 7, 7])
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 1.3, "top_k": 20}

    def sample(ids: torch.Tensor, **more: Any) -> torch.Tensor:
        return make_drafter().spec_generate(ids, target, generator=torch.Generator().manual_seed(5), **options, **more)

    alone, batch = sample(prompts[0]), sample(torch.cat(prompts))
    assert torch.equal(alone[0], batch[0])
    several = sample(prompts[0], num_return_sequences=3)
    assert several.shape[0] == 3
    assert torch.equal(several[0], alone[0])
    assert len({tuple(row) for row in several.tolist()}) == 3


def test_blocks_name_their_row() -> None:
    target = make_target("qwen3")
    prompts = prompts_of([4, 8])
    ids, mask = left_padded(prompts)
    texts: list[list[int]] = [[], []]
    for block in generate_blocks(
        scripted(target, prompts), target, ids, attention_mask=mask, max_new_tokens=10, temperature=0.0
    ):
        assert len(block.token_ids) <= block.acceptance_length
        texts[block.sequence] += block.token_ids
    for text, prompt in zip(texts, prompts, strict=True):
        assert text == greedy(target, prompt, max_new_tokens=10)[0, prompt.shape[1] :].tolist()


def test_a_ragged_cache_equals_lists_of_rows() -> None:
    """Appends with padding, rollbacks by row, rows that leave, growth: what a row holds is what was put in it."""
    rng = random.Random(0)
    cache = PreallocatedCache(num_layers=1, capacity=4, batch_size=3)
    rows: list[list[float]] = [[], [], []]
    for step in range(30):
        columns = rng.randint(1, 5)
        num_real = [rng.randint(0, columns) for _ in rows]
        slots = torch.tensor(cache.lengths)[:, None] + torch.arange(columns)
        values = torch.arange(len(rows) * columns).view(len(rows), columns) + 100.0 * step
        with cache.appending(slots, num_real):
            keys, _ = cache.layers[0].update(values[:, None, :, None], -values[:, None, :, None])
        for place, row in enumerate(rows):
            row += values[place, : num_real[place]].tolist()
        counts = [rng.randint(0, min(2, len(row))) for row in rows]
        cache.rollback(counts)
        rows = [row[: len(row) - count] for row, count in zip(rows, counts, strict=True)]
        assert cache.lengths == [len(row) for row in rows]
        for place, row in enumerate(rows):
            assert keys[place, 0, : len(row), 0].tolist() == row
            assert torch.equal(cache.layers[0].values[place, 0, : len(row), 0], -torch.tensor(row))
    cache.keep_sequences([2])
    assert not cache.is_ragged
    keys, _ = cache.layers[0].update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
    assert keys[0, 0, :, 0].tolist() == [*rows[2], 1.0]


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_attention_without_a_4d_mask_is_refused_for_batches(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_target("qwen3"), make_drafter()
    monkeypatch.setattr(
        {"target": target, "drafter": drafter}[which].config, "_attn_implementation", "flash_attention_2"
    )
    with pytest.raises(ValueError, match=rf"The {which}'s attn_implementation='flash_attention_2' takes no 4-D mask"):
        generate_blocks(drafter, target, torch.cat(prompts_of([5, 5])), max_new_tokens=4, temperature=0.0)


def test_a_streamer_takes_one_prompt() -> None:
    with pytest.raises(ValueError, match="one prompt at a time"):
        spec_generate(
            make_drafter(), make_target(), torch.cat(prompts_of([5, 5])), streamer=TextStreamer(None), max_new_tokens=4
        )


def test_the_mask_id_is_in_no_prompt() -> None:
    assert all(MASK_TOKEN_ID not in prompt for prompt in prompts_of(LENGTHS))


def test_joined_context_begins_with_each_sequences_own_columns() -> None:
    """Promise: padding between two parts of a text is moved behind it."""
    first, second = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[5, 0], [6, 7]])
    joined = Context.joined([Context(first[..., None], [3, 1]), Context(second[..., None], [1, 2])])
    assert joined.num_real == [4, 3]
    for features, expected in zip(joined.features, ([1, 2, 3, 5], [4, 6, 7]), strict=True):
        assert features[: len(expected), 0].tolist() == expected
