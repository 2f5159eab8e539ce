"""The preallocated cache against transformers' own `DynamicCache`, and against forwards without any cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from families import FAMILIES
from tiny_models import greedy, make_drafter, make_prompt, make_target
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, Qwen3ForCausalLM

from dflash import spec_generate
from dflash.engine.recorded import adopt, release
from dflash.model import cache_dflash
from dflash.model.attention_dflash import additive_mask
from dflash.model.cache_dflash import CACHE_NAME, CAPACITY_STEP, PreallocatedCache, PreallocatedLayer
from dflash.model.targets_dflash import cache_name, linear_mixers


NUM_LAYERS = 2


def states(length: int, value_size: int = 8, batch_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys [B, 2, length, 8] and values [B, 2, length, value_size]."""
    return torch.randn(batch_size, 2, length, 8), torch.randn(batch_size, 2, length, value_size)


@pytest.fixture
def exact_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacities are not rounded up, so that small caches grow, too."""
    monkeypatch.setattr(cache_dflash, "CAPACITY_STEP", 1)


@pytest.mark.usefixtures("exact_capacities")
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


@pytest.mark.usefixtures("exact_capacities")
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


def test_capacities_are_multiples_of_a_step() -> None:
    """Promise: texts of other lengths have the same strides, so kernels that plan for each shape plan once."""
    for length in (1, CAPACITY_STEP - 1, CAPACITY_STEP):
        layer = PreallocatedLayer(length)
        layer.update(*states(1))
        assert layer.keys.shape[2] == CAPACITY_STEP
    for length, expected in [(CAPACITY_STEP + 1, 2 * CAPACITY_STEP), (5 * CAPACITY_STEP - 9, 5 * CAPACITY_STEP)]:
        layer = PreallocatedLayer(1)
        layer.update(*states(1))
        layer.reserve(length)
        assert layer.keys.shape[2] == expected


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


@pytest.mark.usefixtures("exact_capacities")
def test_sequences_of_their_own_length() -> None:
    """Promise: in a batch every sequence appends after its own end, what does not count is overwritten, and sequences leave.

    Random columns against Python lists of what each sequence holds.
    """
    torch.manual_seed(0)
    cache = PreallocatedCache(NUM_LAYERS, 3, batch_size=3)
    kept: list[list[list[torch.Tensor]]] = [[[] for _ in range(3)] for _ in range(NUM_LAYERS)]
    batch_size = 3
    for step, (width, counts) in enumerate([(5, [5, 2, 3]), (4, [4, 4, 4]), (3, [0, 3, 1]), (6, [6, 2]), (4, [1, 4])]):
        if len(counts) < batch_size:
            pointers = [layer.keys.data_ptr() for layer in cache.layers]  # type: ignore[union-attr]
            cache.keep_sequences([0, 2])
            assert [layer.keys.data_ptr() for layer in cache.layers] == pointers  # type: ignore[union-attr]
            kept = [[rows[0], rows[2]] for rows in kept]
            batch_size = 2
        slots, is_real = slots_for(cache, width, counts, is_left=step % 2 == 0)
        before = cache.lengths
        with cache.appending(slots, counts):
            for layer in range(NUM_LAYERS):
                keys, values = states(width, batch_size=batch_size)
                got, got_values = cache.update(keys, values, layer)
                assert got.shape[:1] + got.shape[2:3] == (batch_size, max(before) + width)
                for row in range(batch_size):
                    kept[layer][row] += list(keys[row][:, is_real[row]].unbind(dim=1))
                    assert torch.equal(got[row, :, : len(kept[layer][row])], torch.stack(kept[layer][row], dim=1))
                assert torch.equal(got_values.isfinite(), torch.ones_like(got_values, dtype=torch.bool))
        assert cache.lengths == [length + count for length, count in zip(before, counts, strict=True)]
        forgotten = [min(count, 2 - row % 2) for row, count in enumerate(counts)]
        cache.rollback(forgotten)
        kept = [[held[: len(held) - n] for held, n in zip(rows, forgotten, strict=True)] for rows in kept]
        assert cache.lengths == [len(held) for held in kept[0]]


def slots_for(
    cache: PreallocatedCache, width: int, counts: list[int], is_left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [B, width] of columns of which `counts` are real, after padding if `is_left`, else before; which are, [B, width]."""
    columns, wanted = torch.arange(width), torch.tensor(counts)[:, None]
    is_real = columns >= width - wanted if is_left else columns < wanted
    offsets = torch.where(is_real, is_real.cumsum(dim=1) - 1, wanted + (~is_real).cumsum(dim=1) - 1)
    return torch.tensor(cache.lengths)[:, None] + offsets, is_real


def filled(lengths: list[int], capacity: int = 8) -> tuple[PreallocatedCache, list[torch.Tensor]]:
    """A cache with random keys of these lengths (values are their negatives), and the keys [G, length, E] of layer 0."""
    cache = PreallocatedCache(NUM_LAYERS, capacity, batch_size=len(lengths))
    slots, _ = slots_for(cache, max(lengths), lengths, is_left=False)
    with cache.appending(slots, lengths):
        for layer in range(NUM_LAYERS):
            keys, _ = states(max(lengths), batch_size=len(lengths))
            cache.update(keys, -keys, layer)
    held = [cache.layers[0].keys[row, :, :length].clone() for row, length in enumerate(lengths)]  # type: ignore[union-attr]
    return cache, held


def assert_holds(cache: PreallocatedCache, expected: list[torch.Tensor]) -> None:
    """Layer 0 holds these keys and their negatives, also after one more column."""
    assert cache.lengths == [keys.shape[1] for keys in expected]
    more = torch.randn(len(expected), 2, 1, 8)
    slots = torch.tensor(cache.lengths)[:, None]
    with cache.appending(slots, [1] * len(expected)):
        keys, values = cache.update(more, -more, 0)
        for layer in range(1, NUM_LAYERS):
            cache.update(more, -more, layer)
    for row, held in enumerate(expected):
        length = held.shape[1] + 1
        assert torch.equal(keys[row, :, :length], torch.cat([held, more[row]], dim=1))
        assert torch.equal(values[row, :, :length], -keys[row, :, :length])
    cache.rollback([1] * len(expected))


@pytest.mark.parametrize("places", [[0], [2], [1, 3], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3]])
def test_kept_sequences_move_in_place(places: list[int]) -> None:
    """Promise: the storage stays where it is and keeps its room; a last sequence appends at its end, without slots."""
    cache, expected = filled([5, 3, 6, 2])
    storage = cache.storage(0)
    cache.keep_sequences(places)
    assert cache.batch_size == len(places)
    assert cache.is_ragged == (len(places) > 1)
    assert_holds(cache, [expected[place] for place in places])
    for before, now in zip(storage, cache.storage(0), strict=True):
        assert [keys.data_ptr() for keys in before] == [keys.data_ptr() for keys in now]
        assert all(len(keys) == 4 for keys in now)
    if len(places) == 1:
        keys, _ = states(2)
        got, _ = cache.update(keys, keys, 0)
        assert torch.equal(got[0], torch.cat([expected[places[0]], keys[0]], dim=1))


def fail_inside(cache: PreallocatedCache, slots: torch.Tensor) -> None:
    """A forward of one column that fails after its first layer."""
    with cache.appending(slots, [1] * len(slots)):
        cache.update(*states(1, batch_size=len(slots)), 0)
        raise ValueError("full")


def test_a_forward_that_fails_changes_no_length() -> None:
    """Promise: after an error the text is the one before, in a batch and alone."""
    for lengths in ([4, 2], [3]):
        cache, expected = filled(lengths)
        slots = torch.tensor(cache.lengths)[:, None]
        with pytest.raises(ValueError, match="full"):
            fail_inside(cache, slots)
        assert_holds(cache, expected)
    cache, (keys,) = filled([6])
    cache.update(*states(2), 0)  # one layer of a forward that fails
    assert cache.truncate(5) == 5
    assert_holds(cache, [keys[:, :5]])


def test_a_text_moves_to_adopted_storage_and_back() -> None:
    """Promise: what is written goes to the caller's tensors, until `release` copies it out; the tensors are then free."""
    for lengths in ([5, 3], [4]):
        cache, expected = filled(lengths)
        room = [[torch.zeros(3, 2, 2 * CAPACITY_STEP, 8) for _ in range(NUM_LAYERS)] for _ in range(2)]
        adopt(cache, *room)
        assert cache.storage(2 * CAPACITY_STEP)[0][0] is room[0][0]
        assert_holds(cache, expected)
        assert torch.equal(room[0][0][0, :, : lengths[0]], expected[0])
        release(cache)
        assert len(cache.storage(0)[0][0]) == len(lengths)
        for tensors in room:
            for tensor in tensors:
                tensor.fill_(torch.nan)
        assert_holds(cache, expected)


def test_columns_written_from_outside_count_after_advance() -> None:
    """Promise: a whole step writes into `storage`, and `advance` says how many columns it wrote."""
    cache, expected = filled([4, 2])
    keys, values = cache.storage(CAPACITY_STEP)
    new = torch.randn(2, 2, 3, 8)
    for row, length in enumerate(cache.lengths):
        keys[0][row, :, length : length + 3] = new[row]
        values[0][row, :, length : length + 3] = -new[row]
    cache.advance([3, 3])
    cache.rollback([0, 2])
    assert_holds(cache, [torch.cat([expected[0], new[0]], 1), torch.cat([expected[1], new[1, :, :1]], 1)])


LINEAR = [name for name in ("qwen3_next", "lfm2", "kimi_linear", "olmo_hybrid") if FAMILIES[name].is_served]


@pytest.mark.parametrize("name", LINEAR)
def test_running_states_are_those_of_the_columns_that_stand(name: str) -> None:
    """Promise: after a rollback of any number of columns a sequence, logits are those of the text without them.

    Sequences leave, come from single caches, and a forward that fails or was not recorded is never rolled back.
    """
    target = FAMILIES[name].make()
    num_layers, mixers = target.config.get_text_config().num_hidden_layers, linear_mixers(target)
    cached = cache_name(target)
    texts = [make_prompt(length, seed=length)[:, :] for length in (9, 12, 7)]
    continued = [make_prompt(5, seed=40 + i) for i in range(3)]
    num_kept = [2, 5, 0]

    def logits_of(text_ids: torch.Tensor) -> torch.Tensor:
        return target(text_ids, use_cache=False).logits[:, -1]

    with torch.no_grad():
        batch = PreallocatedCache(num_layers, 16, 3, mixers=mixers)
        prompts = pad_sequence([text[0] for text in texts], batch_first=True)
        with batch.recording(12), batch.appending(None, [12] * 3):
            target(prompts, **{cached: batch}, use_cache=True)
        batch.rollback([12 - text.shape[1] for text in texts])
        slots = torch.tensor(batch.lengths)[:, None] + torch.arange(5)
        masks = masks_for(target, slots, max(batch.lengths) + 5)
        with batch.recording(5), batch.appending(slots, [5] * 3):
            target(torch.cat(continued), position_ids=slots, attention_mask=masks, **{cached: batch}, use_cache=True)
        with pytest.raises(ValueError, match="linear layers recorded 5"):
            batch.rollback([6, 0, 0])
        batch.rollback([5 - kept for kept in num_kept])
        with pytest.raises(ValueError, match="linear layers recorded 0"):
            batch.rollback(1)
        standing = [
            torch.cat([text, more[:, :kept]], dim=1)
            for text, more, kept in zip(texts, continued, num_kept, strict=True)
        ]
        for places in ([0, 1, 2], [0, 2]):
            if len(places) < batch.batch_size:
                batch.keep_sequences(places)
                standing = [standing[place] for place in places]
            last = make_prompt(len(places), seed=50)
            slots = torch.tensor(batch.lengths)[:, None]
            masks = masks_for(target, slots, max(batch.lengths) + 1)
            with batch.recording(1), batch.appending(slots, [1] * len(places)):
                output = target(last.T, position_ids=slots, attention_mask=masks, **{cached: batch}, use_cache=True)
            for row, text in enumerate(standing):
                expected = logits_of(torch.cat([text, last[:, row : row + 1]], dim=1))
                torch.testing.assert_close(output.logits[row], expected, rtol=0, atol=1e-3)
            batch.rollback(1)
        batch.keep_sequences([1])
        assert all(not running._arguments for running in batch._running.values())
        with pytest.raises(RuntimeError, match="full"), batch.recording(1):
            raise RuntimeError("full")
        assert batch.truncate(batch.lengths[0]) == 0


def masks_for(target: PreTrainedModel, positions: torch.Tensor, num_keys: int) -> dict[str, Any]:
    """The masks of columns at positions [B, S], by layer type."""
    visible = torch.arange(num_keys) <= positions[..., None]
    mask = additive_mask(visible[:, None], torch.float32)
    types = set(target.config.get_text_config().layer_types)
    return {name: mask if "full" in name else None for name in types}


def test_ragged_rollback_out_of_range_is_refused() -> None:
    """Promise: each row's count is checked against that row."""
    cache = PreallocatedCache(1, 8, batch_size=2)
    with cache.appending(torch.tensor([[0, 1], [1, 0]]), [2, 1]):
        cache.update(*states(2, batch_size=2), 0)
    with pytest.raises(ValueError, match=r"Cannot roll back \[1, 2\] of \[2, 1\]"):
        cache.rollback([1, 2])
    assert cache.lengths == [2, 1]
