"""Targets some of whose layers keep a running state instead of keys and values: how a verify step is taken back.

A linear mixer (gated delta net, delta attention, short convolution) folds every column it reads into a state of fixed
size, from which the rejected ones cannot be taken out again. So the state before a verify step is kept, and the columns
that stand are read once more: by the linear mixers alone, whose inputs for those columns are the ones they had. Nothing
else of the model runs again, because a column's input depends only on columns before it, which stand too. (Running the
whole model over the accepted prefix would give the same states for the price of a second forward.)

It knows nothing about drafters. transformers 4 has no common form of such states; `is_supported` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import cache_utils

from .cache_dflash import PreallocatedCache


LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)  # transformers 4 has none

# What an element of `layer_types` calls a layer with a running state of a kind that is replayed here.
LINEAR_TYPES = ("linear_attention", "conv")


def is_supported() -> bool:
    """Whether this transformers keeps running states in its caches."""
    return LinearAttentionLayer is not None


def linear_mixers(layers: nn.ModuleList, layer_types: Sequence[str]) -> dict[int, nn.Module]:
    """The modules with a running state, by index of the decoder layer they are in.

    Raises:
        ValueError: if a layer shows none, or more than one candidate.
    """
    mixers = {}
    for index, layer_type in enumerate(layer_types):
        if layer_type not in LINEAR_TYPES:
            continue
        found = [child for child in layers[index].children() if getattr(child, "layer_idx", None) == index]
        if len(found) != 1:
            raise ValueError(
                f"Layer {index} is of type {layer_type!r} and shows {len(found)} modules with layer_idx={index}, so its "
                "state cannot be replayed: use target.generate."
            )
        mixers[index] = found[0]
    return mixers


class RunningState:
    """The state of one linear mixer before and after a verify step, and what the mixer was called with in it."""

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer
        self.layer: Any = LinearAttentionLayer()  # where the model reads and writes the state
        self._before: list[dict[int, torch.Tensor | None]] = []
        self._call: dict[str, Any] = {}

    def _states(self) -> list[dict[int, torch.Tensor | None]]:
        return [self.layer.conv_states, self.layer.recurrent_states]

    def keep(self) -> None:
        """Keeps the state as it is now. Copies, because mixers write some of it in place."""
        self._call = {}
        self._before = [{i: None if s is None else s.clone() for i, s in held.items()} for held in self._states()]

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: keeps what the mixer is called with."""
        self._call = {**kwargs, "hidden_states": args[0] if args else kwargs["hidden_states"]}

    def forget_call(self) -> None:
        """Lets go of what was recorded."""
        self._call, self._before = {}, []

    @torch.no_grad()
    def rewind(self, num_kept: Sequence[int]) -> None:
        """As if each row had been given only its first `num_kept` columns in the recorded step.

        Rows that keep equally many are replayed together; a row that keeps all of them is right already.
        """
        inputs = self._call["hidden_states"]  # [B, S, D]
        after = [dict(held) for held in self._states()]
        for count in sorted(set(num_kept) - {inputs.shape[1]}):
            rows = [row for row, kept in enumerate(num_kept) if kept == count]
            for held, before in zip(self._states(), self._before, strict=True):
                held.update({i: None if s is None else s[rows] for i, s in before.items()})
            if count:
                self.mixer(**{**self._call, "hidden_states": inputs[rows, :count]})
            for whole, held in zip(after, self._states(), strict=True):
                for i, state in held.items():
                    if state is not None:
                        index = torch.tensor(rows, device=state.device)
                        whole[i] = cast(torch.Tensor, whole[i]).index_copy(0, index, state)
        for held, whole in zip(self._states(), after, strict=True):
            held.update(whole)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forgets all rows of the batch but `rows`."""
        self.forget_call()
        for held in self._states():
            held.update({i: None if s is None else s[list(rows)] for i, s in held.items()})


class HybridCache(PreallocatedCache):
    """A `PreallocatedCache` for a model some of whose layers are linear mixers.

    A forward that may be rolled back runs inside `recording()`; a rollback right behind it takes back any number of its
    columns, of each row.

    Args:
        mixers: The model's linear mixers by layer index, from `linear_mixers`.
        num_layers: Decoder layers of the model.
        capacity: Positions to allocate at first.
        batch_size: Rows that each have a length of their own.
    """

    def __init__(self, mixers: Mapping[int, nn.Module], num_layers: int, capacity: int, batch_size: int = 1) -> None:
        super().__init__(num_layers, capacity, batch_size)
        self._running = {index: RunningState(mixer) for index, mixer in mixers.items()}
        for index, running in self._running.items():
            self.layers[index] = running.layer
        self._num_recorded = 0
        self._is_whole = True

    @contextmanager
    def recording(self, num_columns: int) -> Iterator[None]:
        """Makes the forward inside the `with`, of `num_columns` columns, one that can be rolled back; 0: none of it can.

        Hooks listen to this thread alone, so two threads may generate on one model.
        """
        thread = threading.get_ident()
        self._num_recorded, self._is_whole = 0, False
        handles = []

        def recorder(running: RunningState) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if threading.get_ident() == thread:
                    running.record(module, args, kwargs)

            return hook

        for running in self._running.values():
            running.forget_call()
            if num_columns:
                running.keep()
                handles.append(running.mixer.register_forward_pre_hook(recorder(running), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._num_recorded, self._is_whole = num_columns, True

    def rollback(self, counts: int | Sequence[int]) -> None:
        """Forgets the last `counts` positions, of each row or of all.

        Raises:
            ValueError: if a count is negative, more than the row holds, or more than the last recorded forward gave.
        """
        lengths = self.lengths
        counts = [counts] * len(lengths) if isinstance(counts, int) else list(counts)
        if max(counts) > self._num_recorded:
            raise ValueError(
                f"Cannot roll back {counts} positions: the linear layers' state was kept for the last "
                f"{self._num_recorded} columns."
            )
        super().rollback(counts)
        self._is_whole = False
        for running in self._running.values():
            if any(counts):
                running.rewind([self._num_recorded - count for count in counts])
            running.forget_call()  # it holds this cache, which would keep itself alive
        self._num_recorded, self._is_whole = 0, True

    def reusable(self, length: int) -> int:
        """`length` if that is all it holds, else 0: a running state has no earlier positions."""
        return length if self._is_whole and self.lengths == [length] else 0

    def truncate(self, length: int) -> None:
        """Keeps `length` positions, which must be all.

        Raises:
            ValueError: if it is not what `reusable` allows.
        """
        if self.reusable(length) != length:
            raise ValueError(
                f"A cache with running states holds {self.lengths} positions and cannot go back to {length}: start a new one."
            )
        super().truncate(length)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forgets all rows of the batch but `rows`; a single one goes on without plan or mask."""
        super().keep_rows(rows)
        self._num_recorded = 0
        for running in self._running.values():
            running.keep_rows(rows)
