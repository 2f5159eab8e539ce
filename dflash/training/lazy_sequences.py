"""Sequences whose items are read when they are asked for, so that data may be larger than memory. Of lists they are lists.

Reading an item takes time, so who asks for lengths alone asks `lengths_of`.
"""

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Sized
from itertools import accumulate
from typing import Any, TypeVar


Item = TypeVar("Item", bound=Sized)


class LazySequence(Sequence[Item]):
    """A sequence by its length, `read` and `lengths`."""

    @abstractmethod
    def read(self, place: int) -> Item:
        """The item at `place`, from 0 to the length."""

    @abstractmethod
    def lengths(self) -> list[int]:
        """The length of each item, of which none is read."""

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        return self.read(places) if isinstance(places, int) else [self.read(place) for place in places]


def lengths_of(items: Sequence[Sized]) -> list[int]:
    """The length of each item; the items of a lazy sequence are not read."""
    return items.lengths() if isinstance(items, LazySequence) else list(map(len, items))


def chosen(items: Sequence[Item], places: Iterable[int]) -> Sequence[Item]:
    """The items at `places`."""
    return [items[place] for place in places] if isinstance(items, list) else _Chosen(items, places)


def joined(parts: Sequence[Sequence[Item]]) -> Sequence[Item]:
    """The items of all parts, one part after the other."""
    if all(isinstance(part, list) for part in parts):
        return [item for part in parts for item in part]
    return parts[0] if len(parts) == 1 else _Joined(parts)


def shortened(items: Sequence[Any], length: int) -> Sequence[Any]:
    """The first `length` of each item, as the item's `cut` gives them."""
    return [item.cut(length) for item in items] if isinstance(items, list) else _Shortened(items, length)


class _Chosen(LazySequence[Item]):
    def __init__(self, items: Sequence[Item], places: Iterable[int]) -> None:
        self._items, self._places = items, array("q", places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, place: int) -> Item:
        return self._items[self._places[place]]

    def lengths(self) -> list[int]:
        lengths = lengths_of(self._items)
        return [lengths[place] for place in self._places]


class _Joined(LazySequence[Item]):
    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self._parts, self._begins = parts, [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._begins[-1]

    def read(self, place: int) -> Item:
        part = bisect_right(self._begins, place) - 1
        return self._parts[part][place - self._begins[part]]

    def lengths(self) -> list[int]:
        return [length for part in self._parts for length in lengths_of(part)]


class _Shortened(LazySequence[Any]):
    def __init__(self, items: Sequence[Any], length: int) -> None:
        self._items, self._length = items, length

    def __len__(self) -> int:
        return len(self._items)

    def read(self, place: int) -> Any:
        return self._items[place].cut(self._length)

    def lengths(self) -> list[int]:
        return [min(length, self._length) for length in lengths_of(self._items)]
