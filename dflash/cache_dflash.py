"""Keys and values in preallocated storage: appended in place, rolled back by moving a length.

A `PreallocatedCache` serves any softmax-attention model of transformers (4.57 and 5.x) as `past_key_values`. Every
layer keeps every position, also where the model attends through a sliding window: the model's own mask holds the
window, and a rollback then never misses a position that slid out. It knows nothing about drafters or blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class PreallocatedLayer(CacheLayerMixin):
    """Storage [B, G, capacity, E] of one layer, of which the first `length` positions are valid."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocates on the device and in the dtype of the first keys; values may have another head size."""
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [B, G, S, E] in place and returns views of all that is valid, [B, G, length, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.capacity:
            self._grow(start)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _grow(self, valid: int) -> None:
        """Doubles the storage (or more), so that appending stays linear in all; `valid` positions are kept."""
        self.capacity = max(self.length, 2 * self.capacity)
        old_keys, old_values = self.keys, self.values
        self.lazy_initialization(old_keys, old_values)
        self.keys[:, :, :valid] = old_keys[:, :, :valid]
        self.values[:, :, :valid] = old_values[:, :, :valid]

    def rollback(self, count: int) -> None:
        """Forgets the last `count` positions."""
        self.length -= count

    def crop(self, max_length: int) -> None:
        """Transformers' spelling: keeps `max_length` positions or, if negative, drops so many. 0 changes nothing."""
        if max_length > 0:
            self.length = min(self.length, max_length)
        else:
            self.length = max(0, self.length + max_length)

    def reset(self) -> None:
        """Forgets everything; the storage stays."""
        self.length = 0

    def get_seq_length(self, *args: Any) -> int:
        """Number of valid positions."""
        return self.length

    def get_mask_sizes(self, query: int | torch.Tensor, *args: Any) -> tuple[int, int]:
        """`(keys, offset)` for a mask over what is valid and a query that comes next (4.57 passes its positions)."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: it grows (the name of transformers 4)."""
        return -1


class PreallocatedCache(Cache):
    """One `PreallocatedLayer` per decoder layer, room for `capacity` positions at first.

    Example:
        >>> cache = PreallocatedCache(num_layers=target.config.num_hidden_layers, capacity=4096)
        >>> target(block_ids, past_key_values=cache, use_cache=True)
        >>> cache.rollback(num_rejected)
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[PreallocatedLayer(capacity) for _ in range(num_layers)])

    def rollback(self, count: int) -> None:
        """Forgets the last `count` positions of every layer: no copy, no synchronisation.

        Raises:
            ValueError: if `count` is negative or more than the cache holds.
        """
        if not 0 <= count <= self.get_seq_length():
            raise ValueError(
                f"Cannot roll back {count} of {self.get_seq_length()} positions: give a count from 0 to that length."
            )
        for layer in self.layers:
            layer.rollback(count)
