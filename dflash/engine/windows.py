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

    @property
    def excess(self) -> list[int]:
        """How many keys of each sequence are beyond the window; 0 until they are an eighth of it, so that few moves are needed."""
        first, newest = self.window
        excess = [length - first - newest for length in self.lengths]
        return [count if 8 * count > newest else 0 for count in excess]

    def drop(self) -> None:
        """Drops the keys beyond the window, those after the first ones, and moves the newest up to these."""
        counts = self.excess
        if not any(counts):
            return
        first = self.window[0]
        lengths = self.lengths
        for layer in self._attention_layers():
            for place, count in enumerate(counts):
                for states in (layer.keys[place], layer.values[place]):
                    newest = states[:, first + count : lengths[place]].clone()
                    states[:, first : lengths[place] - count] = newest
        self.dropped = [dropped + count for dropped, count in zip(self.dropped, counts, strict=True)]
        self._set_lengths([length - count for length, count in zip(lengths, counts, strict=True)])

    def truncate(self, length: int) -> int:
        """Keeps the keys of a single text's first `length` positions. If it ends among dropped ones, the first are left."""
        first = min(length, self.window[0])
        num_kept = max(first, length - self.dropped[0])
        super().truncate(num_kept)
        self.dropped = [length - num_kept]
        return length

    def put_sequence(self, place: int, single: PreallocatedCache) -> None:
        """As `PreallocatedCache.put_sequence`, of another cache with a window."""
        super().put_sequence(place, single)
        self.dropped[place] = single.dropped[0] if isinstance(single, WindowedCache) else 0

    def keep_sequences(self, places: Sequence[int]) -> None:
        """As `PreallocatedCache.keep_sequences`."""
        super().keep_sequences(places)
        self.dropped = [self.dropped[place] for place in places]

    def reset(self) -> None:
        """Empties the cache."""
        super().reset()
        self.dropped = [0] * self.batch_size


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
