"""Sequences whose items are read when they are asked for, so that data may be larger than memory. Of lists they are lists."""

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar


Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """A sequence by its length and `read`."""

    @abstractmethod
    def read(self, place: int) -> Item:
        """The item at `place`, from 0 to the length."""

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        return self.read(places) if isinstance(places, int) else [self.read(place) for place in places]


def chosen(items: Sequence[Item], places: Iterable[int]) -> Sequence[Item]:
    """The items at `places`."""
    return [items[place] for place in places] if isinstance(items, list) else _Chosen(items, places)


def joined(parts: Sequence[Sequence[Item]]) -> Sequence[Item]:
    """The items of all parts, one part after the other."""
    if all(isinstance(part, list) for part in parts):
        return [item for part in parts for item in part]
    return parts[0] if len(parts) == 1 else _Joined(parts)


def changed(items: Sequence[Item], change: Callable[[Item], Item]) -> Sequence[Item]:
    """Each item as `change` makes it."""
    return [change(item) for item in items] if isinstance(items, list) else _Changed(items, change)


class _Chosen(LazySequence[Item]):
    def __init__(self, items: Sequence[Item], places: Iterable[int]) -> None:
        self._items, self._places = items, array("q", places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, place: int) -> Item:
        return self._items[self._places[place]]


class _Joined(LazySequence[Item]):
    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self._parts, self._begins = parts, [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._begins[-1]

    def read(self, place: int) -> Item:
        part = bisect_right(self._begins, place) - 1
        return self._parts[part][place - self._begins[part]]


class _Changed(LazySequence[Item]):
    def __init__(self, items: Sequence[Item], change: Callable[[Item], Item]) -> None:
        self._items, self._change = items, change

    def __len__(self) -> int:
        return len(self._items)

    def read(self, place: int) -> Item:
        return self._change(self._items[place])
