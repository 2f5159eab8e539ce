"""Keys and values in preallocated storage: appended in place, rolled back by moving a length.

A `PreallocatedCache` serves any softmax-attention model of transformers (4.57 and 5.x) as `past_key_values`. Every
layer keeps every position, also where the model attends through a sliding window: the mask holds the window, and a
rollback then never misses a position that slid out. It knows nothing about drafters or blocks.

One row, or rows that are always equally long, append at the end. Rows of different lengths (`is_ragged`) have a plan
made before each forward: it gives every new column of every row a slot, real ones right behind the row's last, padding
after them, where the next forward overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


# Keys come in multiples of this, or of a quarter of the power of two below them.
SMALLEST_BUCKET = 256


def bucket(length: int) -> int:
    """`length` as one of few sizes: at most a quarter more, from 1024 on."""
    step = max(SMALLEST_BUCKET, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def compiled_length(length: int, device: torch.device) -> int:
    """The number of keys that a compiled forward computes with where `length` are in use.

    On CUDA a graph is recorded for each number, so they are buckets; elsewhere one compilation serves any number.
    """
    return bucket(length) if device.type == "cuda" else length


class PreallocatedLayer(CacheLayerMixin):
    """Storage [B, G, capacity, E] of one layer, of which the first `length` positions are in use."""

    keys: torch.Tensor
    values: torch.Tensor
    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self.slots: torch.Tensor | None = None  # [B, S] where the next columns go; None: at the end

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocates on the device and in the dtype of the first keys; values may have another head size."""
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros and not whatever the memory held: a masked slot has weight 0, and 0 times NaN is NaN.
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [B, G, S, E] in place and returns views of all that is in use, [B, G, length, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.capacity:
            self.grow(max(self.length, 2 * self.capacity))
        if self.slots is None:
            self.keys[:, :, start : self.length] = key_states
            self.values[:, :, start : self.length] = value_states
        else:
            slots = self.slots.to(key_states.device)[:, None, :, None]  # [B, 1, S, 1]
            self.keys.scatter_(2, slots.expand_as(key_states), key_states)
            self.values.scatter_(2, slots.expand_as(value_states), value_states)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` positions and keeps what is there. Doubling keeps appending linear in all."""
        old_keys, old_values, used = self.keys, self.values, self.capacity
        self.capacity = capacity
        self.lazy_initialization(old_keys, old_values)
        self.keys[:, :, :used] = old_keys
        self.values[:, :, :used] = old_values

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forgets all rows of the batch but `rows`: one copy of the storage."""
        if self.is_initialized:
            index = torch.tensor(rows, device=self.keys.device)
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)

    def crop(self, max_length: int) -> None:
        """The spelling of transformers: keeps `max_length` positions or, if negative, drops so many. 0 changes nothing."""
        if max_length > 0:
            self.length = min(self.length, max_length)
        else:
            self.length = max(0, self.length + max_length)

    def reset(self) -> None:
        """Forgets everything; the storage stays."""
        self.length = 0

    def get_seq_length(self, *args: Any) -> int:
        """Number of positions in use."""
        return self.length

    def get_mask_sizes(self, query: int | torch.Tensor, *args: Any) -> tuple[int, int]:
        """`(keys, offset)` for a mask over what is in use and a query that comes next (4.57 passes its positions)."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: it grows (the name of transformers 4)."""
        return -1


class PreallocatedCache(Cache):
    """One `PreallocatedLayer` per decoder layer, room for `capacity` positions at first.

    Args:
        num_layers: Decoder layers of the model.
        capacity: Positions to allocate; the storage doubles when a text outgrows it.
        batch_size: Rows that each have a length of their own. 1, the default, also serves rows of one length.

    Example:
        >>> cache = PreallocatedCache(num_layers=target.config.num_hidden_layers, capacity=4096)
        >>> target(block_ids, past_key_values=cache, use_cache=True)
        >>> cache.rollback(num_rejected)
    """

    def __init__(self, num_layers: int, capacity: int, batch_size: int = 1) -> None:
        super().__init__(layers=[PreallocatedLayer(capacity) for _ in range(num_layers)])
        self._row_lengths = [0] * batch_size

    def _storage(self) -> list[PreallocatedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PreallocatedLayer)]

    @property
    def is_ragged(self) -> bool:
        """Whether rows have lengths of their own, so that every forward needs a plan, positions and a mask."""
        return len(self._row_lengths) > 1

    @property
    def lengths(self) -> list[int]:
        """Valid positions of each row."""
        return list(self._row_lengths) if self.is_ragged else [self.get_seq_length()]

    def plan(self, is_real: torch.Tensor, num_real: Sequence[int]) -> torch.Tensor:
        """Gives each column of the next forward a slot, [B, S] of bool is_real [B, S], whose row sums are `num_real`.

        Real columns become part of their row. A slot is also the position of what stands in it.
        """
        counts = torch.tensor(num_real, device=is_real.device)[:, None]  # [B, 1]
        places = torch.where(is_real, is_real.cumsum(dim=1), counts + (~is_real).cumsum(dim=1)) - 1
        slots = places + torch.tensor(self._row_lengths, device=is_real.device)[:, None]
        longest = max(self._row_lengths)
        for layer in self._storage():
            layer.slots, layer.length = slots, longest
        self._row_lengths = [held + count for held, count in zip(self._row_lengths, num_real, strict=True)]
        return slots

    def rollback(self, counts: int | Sequence[int]) -> None:
        """Forgets the last `counts` positions, of each row or of all: no copy, no synchronisation.

        Raises:
            ValueError: if a count is negative or more than the row holds.
        """
        lengths = self.lengths
        counts = [counts] * len(lengths) if isinstance(counts, int) else list(counts)
        if len(counts) != len(lengths) or not all(0 <= n <= held for n, held in zip(counts, lengths, strict=True)):
            raise ValueError(
                f"Cannot roll back {counts} of {lengths} positions: give each row a count from 0 to that."
            )
        self._row_lengths = [held - n for held, n in zip(lengths, counts, strict=True)]
        if not self.is_ragged:
            for layer in self._storage():
                layer.length -= counts[0]

    @property
    def is_frozen(self) -> bool:
        """Whether it was filled in inference mode and that is over: torch then lets nobody write into it."""
        is_written = any(layer.keys.is_inference() for layer in self._storage() if layer.is_initialized)
        return is_written and not torch.is_inference_mode_enabled()

    def storage(self, capacity: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of all layers, each with room for `capacity` positions at least."""
        for layer in self._storage():
            if layer.capacity < capacity:
                layer.grow(max(capacity, 2 * layer.capacity))
        return [layer.keys for layer in self._storage()], [layer.values for layer in self._storage()]

    def advance(self, counts: Sequence[int]) -> None:
        """Counts what a forward wrote into the storage behind each row's end as part of the row."""
        self._row_lengths = [held + count for held, count in zip(self.lengths, counts, strict=True)]
        for layer in self._storage():
            layer.length = max(self._row_lengths)

    def keep_columns(self, width: int, columns: Sequence[int]) -> None:
        """Of the last `width` positions of a single row keeps those in `columns` (rising), moved together."""
        start = self.get_seq_length() - width
        for layer in self._storage():
            if not layer.is_initialized:  # it reads another layer's
                continue
            index = torch.tensor([start + column for column in columns], device=layer.keys.device)
            kept = slice(start, start + len(columns))
            layer.keys[:, :, kept] = layer.keys.index_select(2, index)
            layer.values[:, :, kept] = layer.values.index_select(2, index)
        self.rollback(width - len(columns))

    def reusable(self, length: int) -> int:
        """How many of a single row's first `length` positions the cache can go back to with `truncate`: all of them."""
        return length

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions of a single row, whatever a forward that failed half-way left behind them."""
        self._row_lengths = [length]
        for layer in self._storage():
            layer.length = length

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forgets all rows of the batch but `rows`; a single one goes on without plan or mask."""
        self._row_lengths = [self._row_lengths[row] for row in rows]
        for layer in self._storage():
            layer.keep_rows(rows)
            if not self.is_ragged:
                layer.slots, layer.length = None, self._row_lengths[0]
