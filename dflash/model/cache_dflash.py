"""Caches of keys, values and running states. Appending writes in place, and a rollback moves a length.

All layers store all positions: sliding windows are applied by the mask alone. A single sequence appends at its end. In a batch
each sequence has its own length: a forward inside `appending` writes its columns to given slots, and says how many of them count.

A linear mixer (gated delta net, delta attention, short convolution) folds each column into a state of fixed size. A rollback
restores its state from before the step and replays the columns that are kept (`RunningState`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model


LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)  # transformers 4 has none

# Names of the cache in forwards, in `generate` and in outputs. transformers 5.24 renamed it.
CACHE_NAMES = ("cache", "past_key_values")
# The name in this transformers.
CACHE_NAME = next(name for name in CACHE_NAMES if name in inspect.signature(Qwen3Model.forward).parameters)

# Capacities are multiples of it, so that shapes of attention repeat from text to text: some kernels plan for each new shape.
CAPACITY_STEP = 256

States = dict[int, torch.Tensor | None]  # those of a mixer, by their index in it


class PreallocatedLayer(CacheLayerMixin):
    """Storage [B, G, capacity, E] of one layer, with `length` positions in use."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, capacity: int, num_sequences: int = 1) -> None:
        super().__init__()
        self.capacity = _rounded(capacity)
        self.num_sequences = num_sequences  # to allocate, or more if the first keys have more
        self.length = 0
        self.slots: torch.Tensor | None = None  # where the next columns go, [B, S]; None: to the end

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocates the storage on the device and in the dtype of the first keys. Values may have another head size."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        num_sequences = max(self.num_sequences, len(key_states))
        value_states = key_states if value_states is None else value_states
        self.keys = room_like(key_states, num_sequences, self.capacity)
        self.values = room_like(value_states, num_sequences, self.capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [B, G, S, E] in place and returns views [B, G, length, E] of all positions in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_sequences, _, width, _ = key_states.shape
        start = self.length
        end = start + width
        self.reserve(end)  # may fail for want of memory, before anything has changed
        self.length = end
        # The storage may have room for more sequences.
        keys = self.keys[:num_sequences, :, :end]
        values = self.values[:num_sequences, :, :end]
        if self.slots is None:
            keys[:, :, start:] = key_states
            values[:, :, start:] = value_states
        else:
            # Compiled in place: an assignment to a view or `scatter_` would copy the whole storage.
            slots = self.slots.to(keys.device)
            sequence = torch.arange(num_sequences, device=keys.device)[:, None]
            self.keys.transpose(1, 2)[sequence, slots] = key_states.transpose(1, 2)
            self.values.transpose(1, 2)[sequence, slots] = value_states.transpose(1, 2)
        return keys, values

    def reserve(self, length: int) -> None:
        """Makes room for at least `length` positions. Capacity doubles, so appending takes linear time in total."""
        if length > self.capacity:
            capacity = _rounded(max(length, 2 * self.capacity))
            padding = (0, 0, 0, capacity - self.capacity)
            with torch.inference_mode(False):
                self.keys = functional.pad(self.keys, padding)
                self.values = functional.pad(self.values, padding)
            self.capacity = capacity

    def move_sequence(self, origin: int, place: int) -> None:
        """Moves the positions of sequence `origin` to those of sequence `place`."""
        if self.is_initialized:  # else it reads the keys of another layer
            self.keys[place] = self.keys[origin]
            self.values[place] = self.values[origin]

    def reset(self) -> None:
        """Empties the layer; the storage stays allocated."""
        self.length = 0
        self.slots = None

    def get_seq_length(self, *args: Any) -> int:
        """Number of positions in use."""
        return self.length

    def get_mask_sizes(self, query: int | torch.Tensor, *args: Any) -> tuple[int, int]:
        """`(keys, offset)` of a mask for the next query, an int or, in transformers 4.57, its positions."""
        width = query if isinstance(query, int) else query.shape[0]
        return self.length + width, 0

    def get_max_length(self) -> int:
        """-1: the layer grows without limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name of transformers 4


def _rounded(capacity: int) -> int:
    return -(-capacity // CAPACITY_STEP) * CAPACITY_STEP


def room_like(states: torch.Tensor, num_sequences: int, capacity: int) -> torch.Tensor:
    """Storage for states like these [B, G, S, E]. Zeros: a masked slot has weight 0, and 0 times NaN is NaN."""
    shape = (num_sequences, states.shape[1], capacity, states.shape[3])
    with torch.inference_mode(False):  # it may be written after inference mode has ended
        return torch.zeros(shape, dtype=states.dtype, device=states.device)


class RunningState:
    """The state of one linear mixer, which a rollback can take back.

    The state after rejected columns cannot be cut. So a step keeps the state before it and the mixer's arguments, and `rewind`
    calls the mixer again on the columns that stand. With four columns of which two are kept:

        state before --- mixer(columns 0 1 2 3) --> state after       `hooks` record the state before and the arguments
        state before --- mixer(columns 0 1) ------> state             `rewind([2])`

    `layer` is where the model reads and writes the state.
    """

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer
        self.layer: Any = LinearAttentionLayer()
        self._before: list[States] = []
        self._had_state: dict[int, bool] = {}
        self._arguments: dict[str, Any] = {}

    @property
    def _states(self) -> list[States]:
        return [self.layer.conv_states, self.layer.recurrent_states]

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> list[States]:
        """New states, `function` of each."""
        return [
            {index: None if state is None else function(state) for index, state in states.items()}
            for states in self._states
        ]

    def forget(self) -> None:
        """Drops what was recorded; the arguments refer to the cache and would keep it alive."""
        self._before = []
        self._arguments = {}

    def hooks(self) -> list[Any]:
        """Adds hooks that record this thread's next call of the mixer; returns their handles."""

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Copied, because mixers write parts of the state in place.
            self._before = self._mapped(torch.clone)
            self._had_state = dict(self.layer.has_previous_state)
            self._arguments = dict(kwargs)
            if args:
                self._arguments["hidden_states"] = args[0]

        hook = in_this_thread(record)
        return [self.mixer.register_forward_pre_hook(hook, with_kwargs=True)]

    @torch.no_grad()
    def rewind(self, num_kept: Sequence[int]) -> None:
        """Sets the state to that after each sequence's first `num_kept` columns of the recorded step."""
        inputs = self._arguments["hidden_states"]  # [B, S, D]
        if min(num_kept) == inputs.shape[1]:  # all columns stand
            return
        result = self._mapped(torch.clone)
        if not any(self._had_state.values()):  # the step was the first one; before it the state counts as zero
            self._before = self._mapped(torch.zeros_like)
        counts = torch.tensor(num_kept)
        is_cut = counts < inputs.shape[1]
        for count in counts[is_cut].unique().tolist():  # sequences with equal counts are replayed together
            places = (counts == count).nonzero().flatten()
            index = to_device(places, inputs.device)
            kept = inputs[:, :count].index_select(0, index)
            self.replay(kept, index)
            for whole, states in zip(result, self._states, strict=True):
                _put_rows(whole, index, states)
        self._set(result)

    def replay(self, inputs: torch.Tensor, sequences: torch.Tensor) -> Any:
        """Calls the mixer on inputs [R, S, D] after the recorded state of `sequences` [R]; its output, `None` without columns."""
        self.restore()
        self.layer.reorder_cache(sequences)
        if inputs.shape[1] == 0:
            return None
        arguments = {**self._arguments, "hidden_states": inputs}
        return self.mixer.forward(**arguments)

    def restore(self) -> None:
        """Sets the state to that before the recorded step."""
        self._set(self._before)
        self.layer.has_previous_state.update(self._had_state)

    def renew(self) -> None:
        """Copies the state, because one made in inference mode cannot be written outside of it."""
        self._set(self._mapped(torch.clone))

    def _set(self, values: Sequence[States]) -> None:
        for states, value in zip(self._states, values, strict=True):
            states.update(value)


def _put_rows(whole: States, index: torch.Tensor, states: States) -> None:
    """Replaces the rows `index` of the states in `whole` by `states`."""
    for i, state in states.items():
        before = whole[i]
        if state is not None and before is not None:
            whole[i] = before.index_copy(0, index, state)


class PreallocatedCache(Cache):
    """`past_key_values` of any model whose layers attend by softmax or are linear mixers (`mixers`, by layer).

    It has room for `capacity` positions of `batch_size` sequences. The capacity is rounded up, and doubles when a text outgrows
    it. With mixers, a forward that may be rolled back runs inside `recording`, and a rollback directly after it drops any
    number of its columns per sequence.
    """

    running_state_class: type[RunningState] = RunningState

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        batch_size: int = 1,
        mixers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        layers: list[Any] = [PreallocatedLayer(capacity, batch_size) for _ in range(num_layers)]
        super().__init__(layers=layers)
        self._running: dict[int, Any] = {}
        for index, mixer in (mixers or {}).items():
            running = self.running_state_class(mixer)
            self._running[index] = running
            self.layers[index] = running.layer
        self._num_recorded: int | None = 0  # columns that mixers can roll back; None: a forward did not finish
        # Counts for several sequences. The layers know the length of a single one, because a model also appends outside of
        # `appending`.
        self._lengths = [0] * batch_size

    # -- how long it is

    @property
    def batch_size(self) -> int:
        """The number of sequences. The storage may have room for more."""
        return len(self._lengths)

    @property
    def is_ragged(self) -> bool:
        """Whether each sequence has its own length, so that every forward needs slots, positions and a mask."""
        return self.batch_size > 1

    @property
    def lengths(self) -> list[int]:
        """Valid positions of each sequence."""
        return list(self._lengths) if self.is_ragged else [self.get_seq_length()]

    def lengths_on(self, device: torch.device) -> torch.Tensor:
        """`lengths` as a tensor on a device, [B]."""
        return to_device(torch.tensor(self.lengths), device)

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """The positions of columns in `slots` [B, S]: the same, because all positions are stored."""
        return slots

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        """Declares the first `lengths` positions of the storage valid. The only place where lengths of layers are set."""
        self._lengths = list(lengths)
        for layer in self.attention_layers():
            layer.slots = None
            layer.length = max(lengths)

    def attention_layers(self) -> list[PreallocatedLayer]:
        """The layers that attend by softmax, in order."""
        return [layer for layer in self.layers if isinstance(layer, PreallocatedLayer)]

    # -- a forward appends

    @contextmanager
    def appending(self, slots: torch.Tensor | None, counts: Sequence[int]) -> Iterator[None]:
        """The forward inside writes its columns to slots [B, S]; after it sequence i has `counts[i]` more positions.

        The columns that count have the slots after a sequence's last position; the next forward overwrites the others. Without
        slots, and for a single sequence, columns are written after the longest sequence. If the forward fails, the lengths
        stay as they were.
        """
        before = self.lengths
        after = [length + count for length, count in zip(before, counts, strict=True)]
        if self.is_ragged:
            for layer in self.attention_layers():
                layer.slots = slots
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self._set_lengths(after if is_done else before)

    def advance(self, counts: Sequence[int]) -> None:
        """Adds `counts` columns, which were written into `storage` from outside after each sequence's end."""
        self._set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    @contextmanager
    def recording(self, num_columns: int) -> Iterator[None]:
        """Records what `rollback` needs of the one forward inside, of `num_columns`; 0: it cannot be rolled back."""
        self._num_recorded = None
        handles: list[Any] = []
        for running in self._running.values():
            running.forget()
            if num_columns:
                handles += running.hooks()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._num_recorded = num_columns

    # -- a rollback drops

    def rollback(self, counts: int | Sequence[int]) -> None:
        """Drops the last `counts` positions of the sequences. ValueError: they are not there, or were not recorded."""
        if isinstance(counts, int):
            counts = [counts] * self.batch_size
        lengths = self.lengths
        num_recorded = self._num_recorded or 0
        if self._running and max(counts) > num_recorded:
            raise ValueError(f"Cannot roll back {counts} positions: linear layers recorded {num_recorded}.")
        if any(not 0 <= count <= length for count, length in zip(counts, lengths, strict=True)):
            raise ValueError(f"Cannot roll back {counts} of {lengths} positions: give one count up to each of these.")
        self._set_lengths([length - count for length, count in zip(lengths, counts, strict=True)])
        self._num_recorded = None  # until all states are taken back
        num_kept = [num_recorded - count for count in counts]
        for running in self._running.values():
            running.rewind(num_kept)
            running.forget()
        self._num_recorded = 0

    def truncate(self, length: int) -> int:
        """Keeps a single sequence's first `length` positions, also after a failed forward.

        Returns how many it kept: `length`, or 0 if running states cannot go back; then begin with a new cache.
        """
        is_finished = self._num_recorded is not None and self.lengths == [length]
        if self._running and not is_finished:
            return 0
        for running in self._running.values():
            running.renew()
        self._set_lengths([length])
        return length

    def reset(self) -> None:
        """Empties the cache; the storage stays allocated."""
        super().reset()
        self._set_lengths([0] * self.batch_size)
        self._num_recorded = 0

    # -- sequences come and go

    def keep_sequences(self, places: Sequence[int]) -> None:
        """Drops all sequences of the batch except those at `places` (rising). A single one needs no slots and no mask.

        Sequences move in place, so the storage stays where it is, with room for as many as before.
        """
        for layer in self.attention_layers():
            for place, origin in enumerate(places):
                if place != origin:
                    layer.move_sequence(origin, place)
        for running in self._running.values():
            running.forget()
            running.layer.reorder_cache(torch.tensor(places))
        if self._num_recorded is not None:
            self._num_recorded = 0
        lengths = self.lengths
        self._set_lengths([lengths[place] for place in places])

    # -- its storage

    def storage(self, capacity: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of all layers, each with room for at least `capacity` positions."""
        layers = self.attention_layers()
        for layer in layers:
            layer.reserve(capacity)
        return [layer.keys for layer in layers], [layer.values for layer in layers]


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that is called in this thread alone. Other threads may run the model at the same time."""
    thread = threading.get_ident()

    def run(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return run


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. Pinned first: otherwise the copy would wait for all work queued on CUDA."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def chosen(tensor: torch.Tensor, dim: int, indices: Sequence[int]) -> torch.Tensor:
    """`tensor.index_select` by a list, without the wait for the device that `tensor[list]` causes."""
    index = torch.tensor(indices, dtype=torch.long)
    return tensor.index_select(dim, to_device(index, tensor.device))


def to_host(tensor: torch.Tensor) -> Callable[[], Any]:
    """Starts to copy a tensor to the host. The returned `read()` waits for this copy alone and gives nested lists."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    copy = tensor.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> Any:
        arrived.synchronize()
        return copy.tolist()

    return read
