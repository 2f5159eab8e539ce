"""The preallocated cache against transformers' own `DynamicCache`, and against forwards without any cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from devices import LateDevice
from tiny_models import greedy, make_drafter, make_prompt, make_target
from transformers import DynamicCache, PreTrainedModel, Qwen3ForCausalLM

from dflash import spec_generate
from dflash.model.cache_dflash import CACHE_NAME, PreallocatedCache, PreallocatedLayer, cache_name


NUM_LAYERS = 2


def states(length: int, value_size: int = 8, batch_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys [B, 2, length, 8] and values [B, 2, length, value_size]."""
    return torch.randn(batch_size, 2, length, 8), torch.randn(batch_size, 2, length, value_size)


@pytest.mark.parametrize("value_size", [8, 5])
@pytest.mark.parametrize("capacity", [1, 4, 100])
def test_append_and_rollback_equal_a_list(capacity: int, value_size: int) -> None:
    """Promise: what comes back is what was appended and not forgotten, past the first capacity and for values of
    another head size than the keys' (as multi-head latent attention has).
    """
    cache = PreallocatedCache(NUM_LAYERS, capacity)
    kept = [(torch.empty(1, 2, 0, 8), torch.empty(1, 2, 0, value_size))] * NUM_LAYERS
    for length, forgotten in [(3, 0), (6, 4), (1, 1), (6, 6), (6, 0), (20, 13), (2, 0)]:
        for layer in range(NUM_LAYERS):
            keys, values = states(length, value_size)
            kept[layer] = (torch.cat([kept[layer][0], keys], dim=2), torch.cat([kept[layer][1], values], dim=2))
            got = cache.update(keys, values, layer)
            assert torch.equal(got[0], kept[layer][0])
            assert torch.equal(got[1], kept[layer][1])
        cache.rollback(forgotten)
        kept = [(k[:, :, : k.shape[2] - forgotten], v[:, :, : v.shape[2] - forgotten]) for k, v in kept]
        assert cache.get_seq_length() == kept[0][0].shape[2]


def test_equals_dynamic_cache() -> None:
    """Promise: a drop-in for `DynamicCache`: same views, same lengths, same mask sizes."""
    ours, theirs = PreallocatedCache(NUM_LAYERS, 4), DynamicCache()
    for length in (3, 1, 5, 2):
        for layer in range(NUM_LAYERS):
            keys, values = states(length)
            for got, expected in zip(
                ours.update(keys, values, layer), theirs.update(keys, values, layer), strict=True
            ):
                assert torch.equal(got, expected)
        assert ours.get_seq_length() == theirs.get_seq_length()
        layer = theirs.layers[0]
        for query in (1, 6):
            try:
                expected = layer.get_mask_sizes(query)
            except (AttributeError, TypeError):  # transformers 4.57 passes the query's positions
                query = torch.arange(query)
                expected = layer.get_mask_sizes(query)
            assert tuple(ours.layers[0].get_mask_sizes(query)) == tuple(expected)
    assert len(ours) == len(theirs)


def test_append_is_in_place_until_the_room_is_used() -> None:
    """Promise: no copy of the whole cache per step: storage stays where it is, and doubles when it is full."""
    layer = PreallocatedLayer(10)
    layer.update(*states(4))
    first = layer.keys.data_ptr()
    layer.update(*states(6))
    assert layer.keys.data_ptr() == first
    layer.update(*states(1))
    assert layer.keys.shape[2] == 20
    second = layer.keys.data_ptr()
    layer.update(*states(9))
    assert layer.keys.data_ptr() == second
    layer.update(*states(100))
    assert layer.length == 120


def test_rollback_copies_nothing_and_can_be_written_over() -> None:
    """Promise: a rollback moves a length; the next append overwrites what was forgotten."""
    cache = PreallocatedCache(1, 16)
    keys, values = states(8)
    cache.update(keys, values, 0)
    pointer = cache.layers[0].keys.data_ptr()
    cache.rollback(3)
    more = states(3)
    got, _ = cache.update(*more, 0)
    assert cache.layers[0].keys.data_ptr() == pointer
    assert torch.equal(got, torch.cat([keys[:, :, :5], more[0]], dim=2))


@pytest.mark.parametrize("count", [-1, 6])
def test_rollback_out_of_range_is_refused(count: int) -> None:
    """Promise: a count that the cache does not hold is said, not applied; the cache stays as it was."""
    cache = PreallocatedCache(NUM_LAYERS, 8)
    for layer in range(NUM_LAYERS):
        cache.update(*states(5), layer)
    with pytest.raises(ValueError, match=rf"Cannot roll back \[{count}\] of \[5\]"):
        cache.rollback(count)
    assert cache.get_seq_length() == 5
    cache.rollback(5)
    assert cache.get_seq_length() == 0


def test_reset_keeps_the_storage() -> None:
    """Promise: a cache can be used for the next prompt."""
    cache = PreallocatedCache(1, 8)
    cache.update(*states(6), 0)
    pointer = cache.layers[0].keys.data_ptr()
    cache.reset()
    assert cache.get_seq_length() == 0
    keys, values = states(2)
    got, _ = cache.update(keys, values, 0)
    assert torch.equal(got, keys)
    assert cache.layers[0].keys.data_ptr() == pointer


def test_batches_and_dtypes_are_taken_from_the_first_keys() -> None:
    """Promise: storage is made in the dtype and the batch of what is appended."""
    cache = PreallocatedCache(1, 4)
    keys, values = (part.to(torch.bfloat16) for part in states(3, batch_size=3))
    got_keys, got_values = cache.update(keys, values, 0)
    assert got_keys.dtype == got_values.dtype == torch.bfloat16
    assert got_keys.shape == keys.shape


class OfOlderCode(Qwen3ForCausalLM):
    """A target with code of its own, which knows the cache by the name that it had before transformers 5.24."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        assert "cache" not in kwargs
        return super().forward(input_ids, **{CACHE_NAME: past_key_values}, **kwargs)


def test_a_target_is_called_by_the_name_of_the_cache_that_its_code_knows() -> None:
    """Promise: `cache` or `past_key_values`, by the forward's own signature, also behind hooks of accelerate."""
    target = make_target("qwen3")
    older = OfOlderCode(target.config).eval()
    older.load_state_dict(target.state_dict())
    assert (cache_name(target), cache_name(older)) == (CACHE_NAME, "past_key_values")
    asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}
    text = spec_generate(make_drafter(), older, make_prompt(), **asked)
    assert torch.equal(text, greedy(target, make_prompt(), max_new_tokens=12))
    add_hook_to_module(target, ModelHook())
    assert cache_name(target) == CACHE_NAME


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_verify_and_rollback_of_a_target_equal_a_full_forward(kind: str, attention: str) -> None:
    """Promise: prompt, block, rollback, block over the cache = one forward over the text that stands.

    Sliding windows (5 here) too: a stock windowed cache loses positions that slid out and cannot be rolled back.
    """
    target: PreTrainedModel = make_target(kind)
    target.set_attn_implementation(attention)
    prompt, wrong, right = make_prompt(12), make_prompt(6, seed=31), make_prompt(6, seed=32)
    cache = PreallocatedCache(target.config.num_hidden_layers, 4)
    with torch.no_grad():
        cached: dict[str, Any] = {CACHE_NAME: cache, "use_cache": True}
        target(prompt, **cached)
        verified = target(wrong, **cached).logits
        cache.rollback(4)
        continued = target(right, **cached).logits
        text = torch.cat([prompt, wrong[:, :2], right], dim=1)
        expected = target(text, use_cache=False).logits[:, -6:]
        first = target(torch.cat([prompt, wrong], dim=1), use_cache=False).logits[:, -6:]
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(verified, first, rtol=0, atol=1e-4)
    torch.testing.assert_close(continued, expected, rtol=0, atol=1e-4)


def test_rows_of_their_own_length() -> None:
    """Promise: in a ragged cache every row appends after its own end, padding is overwritten, and rows can be dropped.

    Random plans against Python lists of what each row holds.
    """
    torch.manual_seed(0)
    cache = PreallocatedCache(NUM_LAYERS, 3, batch_size=3)
    kept: list[list[list[torch.Tensor]]] = [[[] for _ in range(3)] for _ in range(NUM_LAYERS)]
    alive = [0, 1, 2]
    for step, (width, counts) in enumerate([(5, [5, 2, 3]), (4, [4, 4, 4]), (3, [0, 3, 1]), (6, [6, 2]), (4, [1, 4])]):
        if len(counts) < len(alive):
            cache.keep_sequences([0, 2])
            kept = [[rows[0], rows[2]] for rows in kept]
            alive = [0, 2]
        # Padding on the left (a prompt) in even steps, on the right in odd ones.
        columns = torch.arange(width)
        wanted = torch.tensor(counts)[:, None]
        is_real = columns >= width - wanted if step % 2 == 0 else columns < wanted
        before = cache.lengths
        slots = cache.plan(is_real, counts)
        for row, count in enumerate(counts):
            assert slots[row][is_real[row]].tolist() == list(range(before[row], before[row] + count))
        for layer in range(NUM_LAYERS):
            keys, values = states(width, batch_size=len(alive))
            got, got_values = cache.update(keys, values, layer)
            assert got.shape[2] == max(before) + width
            for row in range(len(alive)):
                kept[layer][row] += list(keys[row][:, is_real[row]].unbind(dim=1))
                assert torch.equal(got[row, :, : len(kept[layer][row])], torch.stack(kept[layer][row], dim=1))
            assert torch.equal(got_values.isfinite(), torch.ones_like(got_values, dtype=torch.bool))
        forgotten = [min(count, 2 - row % 2) for row, count in enumerate(counts)]
        cache.rollback(forgotten)
        kept = [[held[: len(held) - n] for held, n in zip(rows, forgotten, strict=True)] for rows in kept]
        assert cache.lengths == [len(held) for held in kept[0]]


def test_ragged_rollback_out_of_range_is_refused() -> None:
    """Promise: each row's count is checked against that row."""
    cache = PreallocatedCache(1, 8, batch_size=2)
    cache.plan(torch.tensor([[True, True], [False, True]]), [2, 1])
    cache.update(*states(2, batch_size=2), 0)
    with pytest.raises(ValueError, match=r"Cannot roll back \[1, 2\] of \[2, 1\]"):
        cache.rollback([1, 2])
    assert cache.lengths == [2, 1]


def test_a_plan_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known bug: lengths went to the device from memory that is not pinned, so each prompt's chunk waited for the last."""
    cache = PreallocatedCache(1, 8, batch_size=2)
    device, is_real = LateDevice(), torch.tensor([[True, True], [False, True]])
    is_real._place = "device"
    device.install(monkeypatch)
    with device:
        slots = cache.plan(is_real, [2, 1])
    assert device.faults == []
    assert slots.tolist() == [[0, 1], [1, 0]]
