"""What the engine has made and learned of a drafter and a target. It ends with either model."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from dflash.model.attention_dflash import NUM_IN_STEPS, attention_of
from dflash.model.decoding_dflash import Block
from dflash.model.sequences_dflash import TextSequence

from .whole import WholeFunction


logger = logging.get_logger(__name__)

COUNTERS = {"max_seq_len_cached", NUM_IN_STEPS}  # attributes of modules that forwards change

_lock = threading.Lock()
_states: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, PairState]] = weakref.WeakKeyDictionary()


class PairState:
    """Compiled and recorded steps, and the statistics of widths, of one drafter and one target. It refers to neither.

    Attributes:
        lock (`threading.RLock`): Held while a whole step runs.
        reasons (`dict[str, str]`): Why steps run eagerly, by the keyword that asks for something else.
        functions (`dict[Kind, WholeFunction]`): Compiled functions by the kind of step.
        recordings (`OrderedDict[Any, Recording]`): Recordings that no text runs on, the last used one last.
        eager_seconds (`defaultdict[Any, float]`): What eager steps have taken, by the kind of step.
        widths (`dict[Any, Any]`): What `WidthProposer` has learned, by the kind of step.
        watchers (`list[Callable]`): Called after each step with its sequences and their blocks.
    """

    def __init__(self, drafter: Any, target: Any) -> None:
        self._models = (weakref.ref(target), weakref.ref(drafter))
        self.lock = threading.RLock()
        self.widths: dict[Any, Any] = {}
        self.watchers: list[Callable[[Sequence[TextSequence], Sequence[Block]], None]] = []
        self._forget()

    @classmethod
    def of(cls, drafter: Any, target: Any) -> PairState:
        """The state of these two models. A copy of a model begins without any."""
        with _lock:
            by_target = _states.setdefault(drafter, weakref.WeakKeyDictionary())
            if target not in by_target:
                by_target[target] = cls(drafter, target)
            return by_target[target]

    def _forget(self) -> None:
        self.reasons: dict[str, str] = {}
        self.functions: dict[Any, WholeFunction] = {}
        self.recordings = OrderedDict[Any, Any]()
        self.eager_seconds = defaultdict[Any, float](float)
        self._fingerprint: Any = None

    def refresh(self) -> None:
        """Drops what was compiled or recorded if a model has changed since: cast, moved, hooked, or given an adapter."""
        with self.lock:
            if self._fingerprint is not None and self._fingerprint != self._current():
                self._forget()

    def remember_models(self) -> None:
        """Keeps the state of the models that the first compiled or recorded step was made of."""
        if self._fingerprint is None:
            self._fingerprint = self._current()

    def _current(self) -> list[Any]:
        return fingerprint(*[model() for model in self._models])

    def watch(self, watcher: Callable[[Sequence[TextSequence], Sequence[Block]], None]) -> None:
        """Adds a watcher, whose training gets the memory of recordings."""
        with self.lock:
            self.watchers.append(watcher)
            self.recordings.clear()

    def give_up(self, keyword: str, reason: str) -> None:
        """Makes `keyword` mean eager steps from now on, and warns once with the reason."""
        with self.lock:
            if keyword in self.reasons:
                return
            self.reasons[keyword] = reason
            self.recordings = OrderedDict()  # they hold much memory
            self.remember_models()
        logger.warning(f"Steps run eagerly and {keyword} has no effect: {reason}.")


def fingerprint(*models: Any) -> list[Any]:
    """The state of models that compiled and recorded steps depend on: modules and their attributes, not values of weights.

    Adapters that are loaded, enabled or merged, casts, moves, hooks, replaced methods and settings of modules all change it. What
    the forwards themselves count does not, nor do what a pair drafts with and the figures of its last request.
    """
    state: list[Any] = []
    for model in models:
        state += [attention_of(model), *state_of_modules(model)]
    return state


def state_of_modules(model: Any) -> list[Any]:
    """The part of `fingerprint` that its modules hold."""
    state: list[Any] = []
    for module in model.modules():
        attributes = dict(vars(module))  # at once: steps of other threads add and remove some
        names = [name for name in attributes if "dflash" not in name and name not in COUNTERS]
        for leaf in tree_leaves([attributes[name] for name in names]):
            # Other threads may be about to remove their taps.
            if not hasattr(leaf, "is_tap"):
                state.append(_described(leaf))
    return state


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """What this process holds of a weight that processes share, else the weight."""
    part: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return part


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # The address, too: a graph that was recorded holds it.
        return (value.dtype, value.device, value.shape, value.requires_grad, own_part(value).data_ptr())
    if isinstance(value, int | float | str):
        return value
    return id(value) if callable(value) else type(value)
