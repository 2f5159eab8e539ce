"""Recorded steps: a CUDA graph of the eager whole step, on static state. No compiler is involved.

A graph holds addresses. So a `RecordedStep` owns its inputs, and a `Recording` the storage of both caches: a text that runs on it
has its keys and values there. One text at a time runs on a recording; another one makes its own, and the two that were used
last are kept. All kinds of step, greedy, sampled, or with lookups, are recorded over the same storage.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from dflash.common.messages import is_out_of_memory
from dflash.model.cache_dflash import CAPACITY_STEP, PreallocatedCache, room_like
from dflash.model.decoding_dflash import INITIAL_NEW_TOKENS

from .options import Options
from .steps import WholeRunner, checked
from .waiting import Recordable
from .whole import Inputs, Kind, State, Storage, WholeStep, whole_step


MOST_RECORDINGS = 2
MOST_STEPS = 4  # of a recording, those used last
SMALLEST_CAPACITY = 2048  # positions; further capacities are powers of two, and three quarters of them
# By default, the share of the free memory that the keys and values of a recording may take.
AUTO_SHARE = 1 / 4
# New tokens of a request below which a recording takes longer than it saves, unless many requests of one shape follow.
AUTO_TOKENS = 64


def record_cuda_graph(function: Callable[[], WholeStep]) -> tuple[Callable[[], None], WholeStep]:
    """Records `function` as a CUDA graph: what replays it, and its outputs, which each replay overwrites.

    Raises:
        RuntimeError: A graph cannot hold what it does.
    """
    # Twice: libraries allocate in the first runs.
    with Recordable():
        function()
    function()
    graph = torch.cuda.CUDAGraph()
    # Of this device: torch's own stream for recordings is one for all devices. Other threads may allocate meanwhile.
    stream = torch.cuda.Stream()
    with _recording_lock, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = function()
    return graph.replay, outputs


RECORDERS = {"cuda": record_cuda_graph}  # by kind of device
_recording_lock = threading.Lock()  # torch records one graph at a time
RecordingKey = tuple[int, int]  # number of sequences, capacity
StepKey = tuple[Kind, int]  # kind of step, number of proposals that are looked up


def adopt(cache: PreallocatedCache, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Moves the sequences of a cache to storage of the caller, a tensor of each a layer, and goes on there."""
    layers = cache.attention_layers()
    for layer, layer_keys, layer_values in zip(layers, keys, values, strict=True):
        num_sequences = min(len(layer_keys), len(layer.keys))
        sequences = slice(num_sequences)
        positions = slice(layer.length)
        used = (sequences, slice(None), positions)
        layer_keys[used] = layer.keys[used]
        layer_values[used] = layer.values[used]
        layer.keys = layer_keys
        layer.values = layer_values
        layer.capacity = layer_keys.shape[2]


def release(cache: PreallocatedCache) -> None:
    """Moves the sequences of a cache from adopted storage to storage of its own."""
    capacity = max(cache.lengths) + CAPACITY_STEP
    num_sequences = cache.batch_size
    own_keys = []
    own_values = []
    for layer in cache.attention_layers():
        own_keys.append(room_like(layer.keys, num_sequences, capacity))
        own_values.append(room_like(layer.values, num_sequences, capacity))
    adopt(cache, own_keys, own_values)


def capacity_for(length: int) -> int:
    """The capacity of a recording for a text of some length: few different ones, so that recordings serve later texts."""
    power = 1 << (length - 1).bit_length()
    three_quarters = power * 3 // 4
    return max(SMALLEST_CAPACITY, three_quarters if length <= three_quarters else power)


class RecordedStep:
    """A whole step as a graph, with its state. It does not keep the models alive."""

    def __init__(self, inputs: Inputs) -> None:
        """Records the step."""
        self._state = inputs.state.clone()
        static = replace(inputs, state=self._state)
        step = partial(whole_step, static)
        device_type = self._state.anchors.device.type
        if device_type not in RECORDERS:
            raise RuntimeError(f"{device_type} is no CUDA device")
        with torch.cuda.device_of(self._state.anchors):
            self._replay, self._outputs = RECORDERS[device_type](step)
        # A graph that does nothing must not be taken for one that works: its outputs still hold those of the recording.
        for output in self._outputs:
            output.fill_(float("nan") if output.is_floating_point() else -1)

    def run(self, state: State) -> WholeStep:
        """The step after `state`, of at most as many sequences as recorded."""
        for name, tensor in vars(state).items():
            if tensor is not None:
                static = getattr(self._state, name)
                static.zero_()  # further sequences count nothing
                static[: len(tensor)] = tensor
        self._replay()
        num_live = len(state.anchors)
        # Copied, because the next replay overwrites them.
        return WholeStep(*[output[:num_live].clone() for output in self._outputs])


class Recording:
    """The storage of both caches of a text, and the steps that are recorded over it.

    Attributes:
        storages (`tuple[Storage, Storage]`): Of the target and the drafter. It belongs to the recording alone.
        steps (`OrderedDict[StepKey, RecordedStep]`): The steps, the last used one last.
    """

    def __init__(self, *storages: Storage) -> None:
        self.storages = storages
        self.steps = OrderedDict[StepKey, RecordedStep]()
        self._device = storages[0].index.device
        self._is_free: torch.cuda.Event | None = None

    @property
    def capacity(self) -> int:
        """Positions of a text."""
        return self.storages[0].num_keys

    def lend(self, *caches: PreallocatedCache) -> None:
        """Moves a text's keys and values here. What other texts have left is gone: 0 times NaN, in a masked slot, is NaN."""
        if self._is_free is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._is_free)
        for cache, storage in zip(caches, self.storages, strict=True):
            for states in storage.tensors:
                states.zero_()
            adopt(cache, storage.keys, storage.values)

    def free(self) -> None:
        """Ends the use by a text. The next one may run on another stream, and waits for what this one still does."""
        if self._device.type == "cuda":
            self._is_free = torch.cuda.current_stream(self._device).record_event()

    @property
    def num_bytes(self) -> int:
        """Bytes of its storage."""
        return sum(states.nbytes for storage in self.storages for states in storage.tensors)

    def holds(self, *caches: PreallocatedCache) -> bool:
        """Whether a text's keys and values still lie here. A cache that outgrows its storage moves to another."""
        for cache, storage in zip(caches, self.storages, strict=True):
            layer = cache.attention_layers()[0]
            if layer.keys is not storage.keys[0]:
                return False
        return True

    def add(self, key: StepKey, step: RecordedStep) -> None:
        """Keeps a step that was recorded with as many sequences as the storage has."""
        while len(self.steps) >= MOST_STEPS:
            self.steps.popitem(last=False)
        self.steps[key] = step

    def run(self, key: StepKey, state: State) -> WholeStep:
        """The step after `state` of a text whose keys and values lie here."""
        self.steps.move_to_end(key)
        return self.steps[key].run(state)


class RecordedRunner(WholeRunner):
    """Runs whole steps on a recording, and moves to a larger one when the text has outgrown it."""

    keyword = "cuda_graph"
    takes_lookups = True
    _recording: Recording | None = None
    _key: RecordingKey  # of the recording
    _shelf: OrderedDict[RecordingKey, Recording]  # where it belongs
    _weights: Sequence[torch.Tensor] = ()  # a graph reads their memory, also when a model has others since

    def compute(self, state: State) -> WholeStep:
        """As `WholeRunner.compute`."""
        recording: Any = self._recording if self._has_room() else self._move(len(state.anchors))
        key = self._step_key(state)
        if key in recording.steps:
            output = recording.run(key, state)
        else:
            inputs = self.inputs(state, *recording.storages)
            step = RecordedStep(inputs)
            output = checked(partial(step.run, state), inputs)
            recording.add(key, step)
        self._recording = recording  # not before: if its first step here fails, its storage stays the caches'
        return output

    def _step_key(self, state: State) -> StepKey:
        """The key of a step. One that drafts nothing serves blocks of every size."""
        kind = self.kind
        if state.num_looked_up and not kind.is_batch:
            kind = kind._replace(block_size=0, num_proposals=0)
        return kind, state.num_looked_up

    def _may_be_whole(self) -> bool:
        """As `WholeRunner._may_be_whole`. What autocast makes is of another dtype than what later texts store there."""
        device_type = self.request.target.device.type
        return super()._may_be_whole() and not torch.is_autocast_enabled(device_type)

    @cached_property
    def _width(self) -> int:
        """Columns of the widest step."""
        options = Options.of(self.request)
        return 1 + max(self.kind.num_proposals, options.prompt_lookup_num_tokens)

    def _length(self) -> int:
        """How many positions the next step may need."""
        longest: int = max(self.conversation.target_cache.lengths)
        return longest + 2 * self._width + self.kind.block_size

    def _has_room(self) -> bool:
        """Whether the next step can run on this text's recording."""
        recording = self._recording
        # An eager step between may have been too wide for it, and have moved a cache to other storage.
        caches = (self.conversation.target_cache, self.conversation.context.cache)
        return recording is not None and self._length() <= recording.capacity and recording.holds(*caches)

    def _next_key(self, num_sequences: int) -> RecordingKey:
        """The key of another recording, with room for the next step and for new tokens."""
        length = self._length() + min(self.request.max_new_tokens, INITIAL_NEW_TOKENS)
        return num_sequences, capacity_for(length)

    def _move(self, num_sequences: int) -> Recording:
        """Moves the text to another recording."""
        self._release()
        target_cache = self.conversation.target_cache
        draft_cache = self.conversation.context.cache
        self._key = self._next_key(num_sequences)
        _, capacity = self._key
        self._shelf = self.pair.recordings
        self._weights = weights_of(self.request.target, self.request.drafter)
        recording = self._shelf.pop(self._key, None)
        if recording is not None:
            recording.lend(target_cache, draft_cache)
            return recording
        self._trim(MOST_RECORDINGS - 1)
        target_storage = Storage.of(target_cache, capacity)
        draft_storage = Storage.of(draft_cache, capacity)
        return Recording(target_storage, draft_storage)

    def close(self) -> None:
        """As `EagerRunner.close`, also before an eager step: the recording is free for another text."""
        with suppress(torch.OutOfMemoryError):  # then the caches keep its storage, and the recording is gone
            self._release()

    def _release(self) -> None:
        """Moves the caches to storage of their own, and frees the recording."""
        recording = self._recording
        if recording is not None:
            self._recording = None
            self._weights = ()
            release(self.conversation.target_cache)
            release(self.conversation.context.cache)
            recording.free()
            with self.pair.lock:
                self._shelf[self._key] = recording
                self._trim(MOST_RECORDINGS)

    def _trim(self, most: int) -> None:
        """Drops the recordings that were used longest ago, until at most `most` are kept."""
        while len(self._shelf) > most:
            self._shelf.popitem(last=False)


class AutoRecordedRunner(RecordedRunner):
    """The default on a GPU: records steps if the text may be long and a recording needs little of the free memory."""

    is_asked_for = False
    _is_too_large = False

    def _may_be_whole(self) -> bool:
        """As `WholeRunner._may_be_whole`."""
        is_short = self.request.max_new_tokens < AUTO_TOKENS
        if is_short or self._is_too_large or not super()._may_be_whole():
            return False
        self._is_too_large = not self._has_room() and not self._fits()
        return not self._is_too_large

    def give_up(self, error: Exception) -> None:
        """As `WholeRunner.give_up`. A lack of memory may pass: this text alone goes on eagerly."""
        if not is_out_of_memory(error):
            super().give_up(error)
            return
        self._is_too_large = True
        with self.pair.lock:
            self.pair.recordings.clear()

    def _fits(self) -> bool:
        """Whether the next recording is there, or would hold little of the free memory."""
        num_sequences = self.conversation.target_cache.batch_size
        key = self._next_key(num_sequences)
        if key in self.pair.recordings:
            return True
        _, capacity = key
        drafter = self.request.drafter  # whose own cache may be empty yet
        config = drafter.config
        per_layer = 2 * config.num_key_value_heads * config.head_dim * drafter.dtype.itemsize
        per_position = config.num_hidden_layers * per_layer
        for layer in self.conversation.target_cache.attention_layers():
            for states in (layer.keys, layer.values):
                per_position += states.shape[1] * states.shape[3] * states.element_size()
        num_bytes = num_sequences * capacity * per_position
        return num_bytes <= AUTO_SHARE * free_bytes(self.request.target.device)


def weights_of(*models: Any) -> list[torch.Tensor]:
    """The memory of all weights and buffers of models."""
    tensors = []
    for model in models:
        tensors += [tensor.data for tensor in (*model.parameters(), *model.buffers())]
    return tensors


def make_room(recordings: OrderedDict[RecordingKey, Recording], num_positions: int, device: torch.device) -> None:
    """Drops recordings that no text runs on, if the keys and values of new prompts would take half of the free memory."""
    if not recordings:
        return
    (num_sequences, capacity), recording = next(iter(recordings.items()))
    num_bytes = num_positions * recording.num_bytes / (num_sequences * capacity)
    if num_bytes > free_bytes(device) / 2:
        recordings.clear()


def free_bytes(device: torch.device) -> int:
    """The unused memory of a CUDA device. What torch has reserved for its next tensors is part of it."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
