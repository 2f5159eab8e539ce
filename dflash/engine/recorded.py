"""Recorded steps: a CUDA graph of the eager whole step, on static state. No compiler is involved.

A graph holds addresses. So a `Recording` owns its inputs and the storage of both caches, and a text that runs on it has its
keys and values moved there. One text at a time runs on a recording; another one makes its own, and the two recordings used
last are kept. Whatever fails leaves the text to eager steps, with one warning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dflash.model.cache_dflash import PreallocatedCache

from .whole import Drawn, Models, Shape, State, Storage, WholeStep, agree, whole_step


MOST_RECORDINGS = 2
SMALLEST_CAPACITY = 2048  # positions; capacities double from here
WARM_UPS = 2  # runs before a recording: libraries allocate in the first ones

# Records a function: what replays it, and its outputs, which each replay overwrites.
Recorder = Callable[[Callable[[], WholeStep]], tuple[Callable[[], None], WholeStep]]


def record_cuda_graph(function: Callable[[], WholeStep]) -> tuple[Callable[[], None], WholeStep]:
    """Records `function` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function()
    return graph.replay, outputs


RECORDERS: dict[str, Recorder] = {"cuda": record_cuda_graph}  # by kind of device


def capacity_for(length: int) -> int:
    """The capacity of a recording for texts of `length` positions."""
    return max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())


class Recording:
    """A recorded whole step of `num_sequences` sequences, with its inputs and the storage of both caches."""

    def __init__(
        self,
        models: Models,
        state: State,
        target_keys: tuple[list[torch.Tensor], list[torch.Tensor]],
        draft_keys: tuple[list[torch.Tensor], list[torch.Tensor]],
        shape: Shape,
        drawn: Drawn | None,
        capacity: int,
    ) -> None:
        """Makes room like that of `target_keys` and `draft_keys`, the keys and values of a text, and records on it."""
        self.capacity = capacity
        self.num_sequences = len(state.anchors)
        self.is_free = False
        self.is_new = True
        self._state = copy.deepcopy(state)
        self._drawn = copy.deepcopy(drawn)
        self._target_storage = self._room_like(*target_keys)
        self._draft_storage = self._room_like(*draft_keys)
        storages = (self._target_storage, self._draft_storage)
        self._step = partial(whole_step, models, self._state, *storages, shape, self._drawn)
        record = RECORDERS[state.anchors.device.type]
        with torch.cuda.device_of(state.anchors):
            self._replay, self._outputs = record(self._step)

    def _room_like(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> Storage:
        """Zeros with as many positions as this recording has."""

        def room(states: torch.Tensor) -> torch.Tensor:
            shape = (self.num_sequences, states.shape[1], self.capacity, states.shape[3])
            return states.new_zeros(shape)

        index = keys[0].new_empty(1).expand(self.capacity)
        return Storage([room(layer) for layer in keys], [room(layer) for layer in values], index)

    def lend(self, target_cache: PreallocatedCache, draft_cache: PreallocatedCache) -> None:
        """Moves a text's keys and values here. What other texts have left is gone: 0 times NaN, in a masked slot, is NaN."""
        for cache, storage in ((target_cache, self._target_storage), (draft_cache, self._draft_storage)):
            for states in (*storage.keys, *storage.values):
                states.zero_()
            cache.adopt(storage.keys, storage.values)

    def holds(self, target_cache: PreallocatedCache, draft_cache: PreallocatedCache) -> bool:
        """Whether a text's keys and values still lie here. A cache that outgrows its storage moves to another."""
        for cache, storage in ((target_cache, self._target_storage), (draft_cache, self._draft_storage)):
            keys, _ = cache.storage(0)
            if keys[0] is not storage.keys[0]:
                return False
        return True

    def run(self, state: State, drawn: Drawn | None) -> WholeStep:
        """A step of at most `num_sequences` sequences, whose keys and values lie in this recording's storage."""
        for name, tensor in vars(state).items():
            _copy_into(getattr(self._state, name), tensor)
        if self._drawn is not None and drawn is not None:
            _copy_into(self._drawn.uniforms, drawn.uniforms)
            _copy_into(self._drawn.settings, drawn.settings)
        self._replay()
        num_live = len(state.anchors)
        # Copied, because the next replay overwrites them.
        outputs = [output[:num_live].clone() for output in self._outputs]
        return WholeStep(*outputs)

    def is_right(self, state: State, drawn: Drawn | None) -> bool:
        """Whether a replay gives what the step gives that was recorded. Asked once, of the first text."""
        self.is_new = False
        output = self.run(state, drawn)
        return agree(output, self._step())


def _copy_into(static: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a tensor into the first places of a static one. Sequences and columns beyond it count nothing."""
    static.zero_()
    places = tuple(slice(size) for size in tensor.shape)
    static[places] = tensor


class Recordings:
    """The recordings of a target and a drafter, the last used one last."""

    def __init__(self) -> None:
        self._by_key: dict[Any, Recording] = {}

    def take(self, key: Any, make: Callable[[], Recording]) -> Recording:
        """A recording under `key` that no text uses, made if there is none."""
        recording = self._by_key.pop(key, None)
        if recording is None or not recording.is_free:
            recording = make()
        recording.is_free = False
        self._by_key[key] = recording
        while len(self._by_key) > MOST_RECORDINGS:
            del self._by_key[next(iter(self._by_key))]
        return recording

    def clear(self) -> None:
        """Drops all recordings, as after a change of the models."""
        self._by_key.clear()
