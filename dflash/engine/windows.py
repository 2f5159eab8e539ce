"""A drafter that reads the first and the newest tokens of a text alone, so that a draft's time does not grow with the text.

The target reads everything, so the text is the same. Keys keep the positions that their tokens have in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash.model.cache_dflash import PreallocatedCache, to_device
from dflash.model.drafting_dflash import Context, DrafterContext


class WindowedCache(PreallocatedCache):
    """A drafter's cache that keeps the keys of each sequence's first and newest positions, as many as `window` says.

    Attributes:
        dropped (`list[int]`): For each sequence, the positions between these whose keys are gone.
    """

    def __init__(
        self, num_layers: int, capacity: int, batch_size: int = 1, *, window: tuple[int, int], **options: Any
    ) -> None:
        super().__init__(num_layers, capacity, batch_size, **options)
        self.window = window
        self.dropped = [0] * batch_size

    @property
    def text_lengths(self) -> list[int]:
        """The number of positions that each sequence's text has up to its last key."""
        return [length + dropped for length, dropped in zip(self.lengths, self.dropped, strict=True)]

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """The positions in the text of columns in `slots` [B, S], after the dropped ones."""
        dropped = to_device(torch.tensor(self.dropped), slots.device)
        return slots + dropped[:, None]

    def drop(self) -> None:
        """Drops the keys beyond the window, those after the first ones, and moves the newest up to these.

        Nothing is dropped until they are an eighth of the window, so that few moves are needed.
        """
        first, newest = self.window
        lengths = self.lengths
        for place, length in enumerate(lengths):
            excess = length - first - newest
            if 8 * excess <= newest:
                continue
            kept = slice(length - newest, length)
            moved = slice(first, first + newest)
            for layer in self.attention_layers():
                for storage in (layer.keys, layer.values):
                    states = storage[place]
                    states[:, moved] = states[:, kept].clone()
            lengths[place] -= excess
            self.dropped[place] += excess
        self._set_lengths(lengths)

    def truncate(self, length: int) -> int:
        """Keeps the keys of a single text's first `length` positions. If it ends among dropped ones, the first are left."""
        first = min(length, self.window[0])
        num_kept = max(first, length - self.dropped[0])
        super().truncate(num_kept)
        self.dropped = [length - num_kept]
        return length

    def keep_sequences(self, places: Sequence[int]) -> None:
        """As `PreallocatedCache.keep_sequences`."""
        super().keep_sequences(places)
        self.dropped = [self.dropped[place] for place in places]


class WindowedContext(DrafterContext):
    """What a drafter with a window has read and has to read. Long context is read in pieces of the window's size."""

    cache: WindowedCache

    @property
    def num_read(self) -> int:
        """Number of tokens of a single text that were read, also those whose keys were dropped."""
        return self.cache.text_lengths[0]

    def for_next_block(self) -> Context:
        """The context that the drafter reads together with the next block: none if it is longer than the window."""
        self.cache.drop()
        if self.waiting.num_columns > self.cache.window[1]:
            self.absorb()
        return self.waiting

    def _absorb(self, context: Context) -> None:
        size = self.cache.window[1]
        for begin in range(0, context.num_columns, size):
            super()._absorb(context.part(begin, begin + size))
            self.cache.drop()
