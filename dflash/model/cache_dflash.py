"""What a text leaves in both models: keys, values and running states, appended in place and taken back by moving a length.

Every layer keeps every position, also where the model attends through a sliding window: the mask holds the window, and a
rollback never misses a position that slid out. Sequences of one length append at the end. In a ragged cache each forward is
told the slots of its new columns: real ones right after the sequence's last, padding after them, to be overwritten.

A linear mixer (gated delta net, delta attention, short convolution) folds every column into a state of fixed size. After a
rollback it alone takes its state from before the step and reads the columns that stand once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin


LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)  # transformers 4 has none

# What an element of `layer_types` calls a layer with a running state of a kind that is replayed here.
LINEAR_TYPES = ("linear_attention", "conv")


class PreallocatedLayer(CacheLayerMixin):
    """Storage [B, G, capacity, E] of one layer, of which the first `length` positions are in use.

    `slots` [B, S] say where the next columns go; `None`: to the end.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_croppable = True

    def __init__(self, capacity: int, num_rows: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.num_rows = num_rows  # None: those of the first keys
        self.length = 0
        self.slots: torch.Tensor | None = None

    @classmethod
    def lent(cls, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, num_keys: int) -> PreallocatedLayer:
        """Storage that another layer owns: the next columns go to `slots`, and the first `num_keys` come out."""
        layer = cls(capacity=num_keys)
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        layer.slots, layer.length = slots, num_keys - slots.shape[1]
        return layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocates on the device and in the dtype of the first keys; values may have another head size."""
        self.dtype, self.device = key_states.dtype, key_states.device

        def zeros(states: torch.Tensor) -> torch.Tensor:
            # Zeros, because a masked slot has weight 0, and 0 times NaN is NaN.
            shape = (self.num_rows or len(states), states.shape[1], self.capacity, states.shape[3])
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        with torch.inference_mode(False):  # it may be written after inference mode has ended
            self.keys, self.values = zeros(key_states), zeros(key_states if value_states is None else value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [B, G, S, E] in place and returns views of all that is in use, [B, G, length, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        self.length = end  # read no more here: after flex attention, torch's compiler may forget that it was set
        self.reserve(end)
        rows = len(key_states)
        if self.slots is None:
            self.keys[:rows, :, start:end] = key_states
            self.values[:rows, :, start:end] = value_states
        else:
            # Assigned, which compiled code does in place: of `scatter_` it makes a copy of the storage, there and back.
            slots = self.slots.to(key_states.device)
            index = torch.arange(rows, device=slots.device)[:, None]
            self.keys.transpose(1, 2)[index, slots] = key_states.transpose(1, 2)
            self.values.transpose(1, 2)[index, slots] = value_states.transpose(1, 2)
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions at least, doubling it: then appending is linear in all."""
        if length > self.capacity:
            added = max(length - self.capacity, self.capacity)
            with torch.inference_mode(False):
                self.keys = functional.pad(self.keys, (0, 0, 0, added))
                self.values = functional.pad(self.values, (0, 0, 0, added))
            self.capacity += added

    def crop(self, max_length: int) -> None:
        """The spelling of transformers: keeps `max_length` positions or, if negative, drops so many. 0 changes nothing."""
        self.length = min(self.length, max_length) if max_length > 0 else max(0, self.length + max_length)

    def reset(self) -> None:
        """Forgets everything; the storage stays."""
        self.length, self.slots = 0, None

    def get_seq_length(self, *args: Any) -> int:
        """Number of positions in use."""
        return self.length

    def get_mask_sizes(self, query: int | torch.Tensor, *args: Any) -> tuple[int, int]:
        """`(keys, offset)` for a mask over what is in use and a query that comes next (4.57 passes its positions)."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    get_max_cache_shape = get_max_length  # the name of transformers 4


def is_supported() -> bool:
    """Whether this transformers has a common form of running states."""
    return LinearAttentionLayer is not None


def linear_mixers(layers: nn.ModuleList, layer_types: Sequence[str]) -> dict[int, nn.Module]:
    """The modules with a running state, by index of their decoder layer; ValueError if a layer does not show exactly one."""
    mixers = {}
    for index, layer_type in enumerate(layer_types):
        if layer_type not in LINEAR_TYPES:
            continue
        found = [child for child in layers[index].children() if getattr(child, "layer_idx", None) == index]
        if len(found) != 1:
            raise ValueError(f"Layer {index}, a {layer_type}, shows {len(found)} states, not 1: use target.generate.")
        mixers[index] = found[0]
    return mixers


class RunningState:
    """The state of one linear mixer before and after a verify step, and what the mixer was called with in it."""

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer
        self.layer: Any = LinearAttentionLayer()  # where the model reads and writes the state
        self._states: list[dict[int, torch.Tensor | None]] = [self.layer.conv_states, self.layer.recurrent_states]
        self.forget()

    def forget(self) -> None:
        """Lets go of what was kept and recorded: the call holds the cache, which would keep itself alive."""
        self._before: list[dict[int, torch.Tensor | None]] = []
        self._call: dict[str, Any] = {}

    def keep(self) -> None:
        """Keeps the state as it is now. Copies, because mixers write some of it in place."""
        self._before = [{i: None if s is None else s.clone() for i, s in held.items()} for held in self._states]

    def record(self, thread: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: keeps what `thread` calls the mixer with. Another may generate on the model too."""
        if threading.get_ident() == thread:
            self._call = {**kwargs, "hidden_states": args[0] if args else kwargs["hidden_states"]}

    @torch.no_grad()
    def rewind(self, num_kept: Sequence[int]) -> None:
        """As if each row had been given only its first `num_kept` columns in the recorded step."""
        inputs = self._call["hidden_states"]  # [B, S, D]
        after = [dict(held) for held in self._states]
        for count in sorted(set(num_kept) - {inputs.shape[1]}):  # rows that keep equally many are replayed together
            rows = [row for row, kept in enumerate(num_kept) if kept == count]
            index = to_device(torch.tensor(rows), inputs.device)
            for held, before in zip(self._states, self._before, strict=True):
                held.update(before)
            self.layer.reorder_cache(index)
            if count:
                self.mixer(**{**self._call, "hidden_states": inputs[:, :count].index_select(0, index)})
            for whole, held in zip(after, self._states, strict=True):
                for i, state in held.items():
                    if state is not None:
                        whole[i] = cast(torch.Tensor, whole[i]).index_copy(0, index, state)
        for held, whole in zip(self._states, after, strict=True):
            held.update(whole)


class PreallocatedCache(Cache):
    """`past_key_values` of any model whose layers attend by softmax or are linear mixers (`linear_mixers`).

    It has room for `capacity` positions, which doubles when a text outgrows it, of `num_rows` rows or those of the first
    forward. With a `batch_size` above 1 each row has a length of its own. With mixers, a forward that may be rolled back
    runs inside `recording()`, and a rollback right behind it takes back any number of its columns, of each row.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        batch_size: int = 1,
        num_rows: int | None = None,
        mixers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        super().__init__(layers=[PreallocatedLayer(capacity, num_rows) for _ in range(num_layers)])
        self._row_lengths = [0] * batch_size
        self._running = {index: RunningState(mixer) for index, mixer in (mixers or {}).items()}
        for index, running in self._running.items():
            self.layers[index] = running.layer
        # Columns that mixers can take back; None: a forward has not come to its end.
        self._num_recorded: int | None = 0

    def _storage(self) -> list[PreallocatedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PreallocatedLayer)]

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Takes the first `lengths` positions of the storage for the text, whatever was there."""
        self._row_lengths = list(lengths)
        for layer in self._storage():
            layer.slots, layer.length = None, max(lengths)

    @property
    def is_ragged(self) -> bool:
        """Whether rows have lengths of their own, so that every forward needs slots, positions and a mask."""
        return len(self._row_lengths) > 1

    @property
    def lengths(self) -> list[int]:
        """Valid positions of each row."""
        return list(self._row_lengths) if self.is_ragged else [self.get_seq_length()]

    def plan(self, is_real: torch.Tensor, num_real: Sequence[int]) -> torch.Tensor:
        """Slots [B, S], which are positions too, of the next forward's columns, of which is_real [B, S] join their rows.

        `num_real` are its row sums, as the host knows them.
        """
        host = torch.tensor([list(num_real), self._row_lengths])[..., None]
        counts, starts = to_device(host, is_real.device).unbind()  # [B, 1] each
        slots = starts + torch.where(is_real, is_real.cumsum(dim=1), counts + (~is_real).cumsum(dim=1)) - 1
        self.place(slots, max(self._row_lengths) + slots.shape[1])
        self._row_lengths = [held + count for held, count in zip(self._row_lengths, num_real, strict=True)]
        return slots

    def place(self, slots: torch.Tensor, num_keys: int) -> None:
        """Gives the next forward its columns' slots [B, S] and its number of keys; lengths stay as they are until `advance`."""
        for layer in self._storage():
            layer.slots, layer.length = slots, num_keys - slots.shape[1]

    def advance(self, counts: Sequence[int]) -> None:
        """Counts what a forward wrote into the storage after each row's end as part of the row."""
        self.set_lengths([held + count for held, count in zip(self.lengths, counts, strict=True)])

    @contextmanager
    def recording(self, num_columns: int) -> Iterator[None]:
        """Makes the forward inside the `with`, of `num_columns` columns, one that can be rolled back; 0: none of it can."""
        self._num_recorded = None
        handles = []
        for running in self._running.values():
            running.forget()
            if num_columns:
                running.keep()
                hook = partial(running.record, threading.get_ident())
                handles.append(running.mixer.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._num_recorded = num_columns

    def rollback(self, counts: int | Sequence[int]) -> None:
        """Forgets the last `counts` positions of each row or of all; ValueError for more than it holds or has recorded."""
        lengths, num_recorded = self.lengths, self._num_recorded or 0
        counts = [counts] * len(lengths) if isinstance(counts, int) else list(counts)
        if self._running and max(counts) > num_recorded:
            raise ValueError(f"Cannot roll back {counts} positions: linear layers recorded {num_recorded}.")
        if len(counts) != len(lengths) or not all(0 <= n <= held for n, held in zip(counts, lengths, strict=True)):
            raise ValueError(f"Cannot roll back {counts} of {lengths} positions: give each row a count up to that.")
        self.set_lengths([held - n for held, n in zip(lengths, counts, strict=True)])
        self._num_recorded = None
        for running in self._running.values():
            if any(counts):
                running.rewind([num_recorded - count for count in counts])
            running.forget()
        self._num_recorded = 0

    def storage(self, capacity: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of all layers, each with room for `capacity` positions at least."""
        for layer in self._storage():
            layer.reserve(capacity)
        return [layer.keys for layer in self._storage()], [layer.values for layer in self._storage()]

    def copy_rows(self, other: PreallocatedCache, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Takes `rows` of another cache, of which `lengths` positions each are in use, as all it holds."""
        used = slice(max(lengths))
        for layer, theirs in zip(self._storage(), other._storage(), strict=True):
            if not theirs.is_initialized:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(theirs.keys, theirs.values)
            for row, source in enumerate(rows):
                layer.keys[row, :, used] = theirs.keys[source, :, used]
                layer.values[row, :, used] = theirs.values[source, :, used]
        self.set_lengths(lengths)

    def keep_columns(self, width: int, columns: Sequence[int]) -> None:
        """Of the last `width` positions of a single row keeps those in `columns` (rising), moved together."""
        start = self.get_seq_length() - width
        index = torch.tensor([start + column for column in columns])
        kept = slice(start, start + len(columns))
        for layer in self._storage():
            if layer.is_initialized:  # else it reads another layer's
                index = to_device(index, layer.keys.device)
                layer.keys[:, :, kept] = layer.keys.index_select(2, index)
                layer.values[:, :, kept] = layer.values.index_select(2, index)
        self.rollback(width - len(columns))

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forgets all rows of the batch but `rows`; a single one goes on without slots or mask."""
        index = torch.tensor(rows)
        for layer in self._storage():
            if layer.is_initialized:
                index = to_device(index, layer.keys.device)
                layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)
        for running in self._running.values():
            running.forget()
            running.layer.reorder_cache(torch.tensor(rows))
        self._num_recorded = None if self._num_recorded is None else 0
        self.set_lengths([self.lengths[row] for row in rows])

    def reusable(self, length: int) -> int:
        """How many of a single row's first `length` positions `truncate` can go back to: all, but running states have none."""
        is_whole = self._num_recorded is not None and self.lengths == [length]
        return length if is_whole or not self._running else 0

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions of a single row, also after a failed forward; ValueError if not `reusable`."""
        if self.reusable(length) != length:
            raise ValueError(f"Running states of {self.lengths} positions cannot go back to {length}: use a new one.")
        self.set_lengths([length])


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. From memory that is not pinned CUDA would copy it once all else is done."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def chosen(tensor: torch.Tensor, dim: int, indices: Sequence[int]) -> torch.Tensor:
    """Some of a tensor's places, named by the host: a list as an index would be copied once all else is done."""
    return tensor.index_select(dim, to_device(torch.tensor(indices, dtype=torch.long), tensor.device))


def to_host(tensor: torch.Tensor) -> Callable[[], Any]:
    """Begins to copy a tensor to the host: `read()`, its numbers as lists, waits for them and for nothing launched since."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    copy = tensor.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> Any:
        arrived.synchronize()
        return copy.tolist()

    return read
