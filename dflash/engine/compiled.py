"""Compiled steps: one Inductor function for the whole step, for all lengths of text.

The first output of each function is compared with that of the same function run eagerly. What does not compile, or computes
something else, leaves the pair to eager steps, with one warning that says why.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.utils import logging

from dflash.model.attention_dflash import NUM_IN_STEPS, attention_of, step_attention
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.targets_dflash import MASKED_TYPES, Layout

from .whole import Drawn, Models, NotWholeError, Shape, State, Storage, WholeStep, agree, whole_step


logger = logging.get_logger(__name__)

BACKEND = "inductor"  # of torch.compile
# "auto" compiles a kind of step on a CPU once eager steps of that kind have taken so long: compiling takes about a minute there
# and saves about a third of a step.
AUTO_SECONDS = 200.0
# Names of the compiler's guards on the models: their modules, attributes and weights.
OF_MODELS = re.compile(r"\b(models|target|drafter|layout)\b")

try:
    from transformers.utils.output_capturing import _active_collector as collector
except ImportError:  # transformers 4
    collector = None  # type: ignore[assignment]


class CompiledStep:
    """The compiled whole steps of a target and a drafter, one function for each kind of step."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self.reason = why_not(target, drafter)  # why steps run eagerly; None: they may be compiled
        self._name = f"{type(target).__name__} and {type(drafter).__name__}"
        self._has_warned = False
        self._lock = threading.RLock()
        self._functions: dict[Any, Callable[..., WholeStep]] = {}
        self._eager_seconds: dict[Any, float] = {}  # by kind of step

    def note_eager(self, kind: Any, seconds: float) -> None:
        """Adds an eager step, which "auto" weighs."""
        self._eager_seconds[kind] = self._eager_seconds.get(kind, 0.0) + seconds

    def is_due(self, kind: Any) -> bool:
        """Whether "auto" runs this kind of step compiled."""
        return kind in self._functions or self._eager_seconds.get(kind, 0.0) >= AUTO_SECONDS

    def give_up(self, reason: str) -> None:
        """Runs eagerly from now on, and warns once with the reason."""
        self.reason = reason
        self.warn_of_reason()

    def warn_of_reason(self) -> None:
        """Warns once if steps run eagerly whatever is asked."""
        if self.reason is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(f"{self._name} run eagerly and compile has no effect: {self.reason}.")

    def run(
        self,
        models: Models,
        state: State,
        caches: tuple[PreallocatedCache, PreallocatedCache],
        shape: Shape,
        drawn: Drawn | None,
        kind: Any,
    ) -> WholeStep:
        """A whole step over the storage of the target's and the drafter's cache. NotWholeError: it has to run eagerly."""
        if self.reason is not None:
            raise NotWholeError
        width = 1 + shape.num_proposals
        num_columns = shape.block_size + state.features.shape[1]
        target_storage = open_storage(caches[0], max(caches[0].lengths) + width)
        draft_storage = open_storage(caches[1], max(caches[1].lengths) + num_columns)
        inputs = (models, state, target_storage, draft_storage, shape, drawn)
        if len(state.anchors) > 1:
            _open_batch(state, drawn)
        with self._lock, step_attention(models.target):
            is_first = kind not in self._functions
            try:
                output = self._function(kind, models.target)(*inputs)
            except Exception as error:  # of any type: a model, a quantiser or a missing C++ compiler raises it
                first_line = str(error).strip().partition("\n")[0]
                self.give_up(f"a step does not compile ({type(error).__name__}: {first_line})")
                raise NotWholeError from error
            finally:
                # Dynamo of torch 2.13 loses variables that are set in a graph, such as the collector's.
                if collector is not None:
                    collector.reset(None)
            if not is_first:
                return output
            expected = whole_step(*inputs)
        if not agree(output, expected):
            self.give_up("compiled, a step computes something else than eagerly")
        return expected

    def _function(self, kind: Any, target: Any) -> Callable[..., WholeStep]:
        """The compiled function of a kind of step."""
        if kind in self._functions:
            return self._functions[kind]
        logger.warning(f"{self._name} are being compiled, a minute once; compile=False avoids it.")
        _request_hidden_states(target)
        # Dynamo caches, and limits, compilations by code object, so each pair and kind gets its own.
        code = whole_step.__code__.replace()
        function: Any = FunctionType(code, whole_step.__globals__, whole_step.__name__)
        options: Any = {"guard_filter_fn": _chosen_guards}
        compiled = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=None, options=options)
        self._functions[kind] = compiled
        return compiled


def _request_hidden_states(target: Any) -> None:
    """Lets transformers 5 add its hooks, which it does in the first such forward, under a lock that cannot be traced."""
    some_id = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    target(input_ids=some_id, use_cache=False, output_hidden_states=True, logits_to_keep=1)


def _chosen_guards(guards: Any) -> list[bool]:
    """Not the thousands of guards on the models, which take as long as the step: `fingerprint` is compared once per text."""
    return [OF_MODELS.search(guard.name) is None for guard in guards]


def why_not(target: Any, drafter: Any) -> str | None:
    """Why whole steps of these models cannot be compiled or recorded; `None`: they can."""
    name = type(target).__name__
    layout = Layout.of(target, drafter.config.target_layer_ids)
    unmasked = set(layout.types) - MASKED_TYPES
    if unmasked:
        return f"{name} has layers of type {', '.join(sorted(unmasked))}"
    if layout.shares_keys:
        return f"{name} has layers that read the keys of others"
    for model in (target, drafter):
        implementation = attention_of(model)
        if implementation not in ("sdpa", "eager"):
            return f"attn_implementation={implementation!r} takes no 4-D mask; load with 'sdpa'"
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1 or target.device != drafter.device:
            names = ", ".join(sorted(map(str, devices | {target.device})))
            return f"the models lie on several devices ({names})"
    return f"{name} makes its own masks" if layout.makes_own_masks else None


def is_watched(target: Any, drafter: Any) -> bool:
    """Whether hooks or a dispatch mode observe every forward or operation."""
    is_hooked = any(model._forward_hooks or model._forward_pre_hooks for model in (target, drafter))
    return is_hooked or is_in_torch_dispatch_mode()


def open_storage(cache: PreallocatedCache, num_keys: int) -> Storage:
    """The storage of a cache for a step that reads `num_keys` keys, with the sizes that the compiler leaves open marked."""
    # One more than needed: the compiler unifies two sizes that are equal in the first call.
    keys, values = cache.storage(num_keys + 1)
    open_sizes = [0, 2] if len(cache.lengths) > 1 else [2]
    for tensor in (*keys, *values):
        torch._dynamo.mark_dynamic(tensor, open_sizes)
    index = keys[0].new_empty(1).expand(num_keys)
    torch._dynamo.mark_dynamic(index, 0)
    return Storage(keys, values, index)


def _open_batch(state: State, drawn: Drawn | None) -> None:
    """Leaves the number of sequences open."""
    tensors = list(vars(state).values())
    if drawn is not None:
        tensors.append(drawn.uniforms)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


def fingerprint(*models: Any) -> list[Any]:
    """The state of models that compiled and recorded steps depend on: modules and their attributes, not values of weights.

    Adapters that are loaded, enabled or merged, casts, moves, hooks and replaced methods all change it.
    """
    state: list[Any] = [attention_of(model) for model in models]
    for model in models:
        for module in model.modules():
            attributes = vars(module).copy()
            attributes.pop(NUM_IN_STEPS, None)  # of other threads
            state.append(_described(attributes))
    return state


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # The address, too: a graph that was recorded holds it.
        return (value.dtype, value.device, value.shape, value.requires_grad, value.data_ptr())
    if isinstance(value, dict):
        entries = list(value.items())  # other threads may add their taps
        return [(key, _described(entry)) for key, entry in entries if not hasattr(entry, "is_tap")]
    if isinstance(value, list | tuple):
        return [_described(entry) for entry in value]
    if isinstance(value, bool | float | str):  # no integers: they may be counters, and shapes show sizes
        return value
    if callable(value):
        return id(value)  # a module, a hook, a replaced method
    return type(value)
