"""Tensors on their way between host and device, without waiting for what the device still has to do.

A pair's two forwards, compiled: the target over a block, and the drafter behind its context.

Eager forwards spend much of a small step on launching operations one by one. Compiled ones have shapes that a text's
growth does not change: keys and values are a part of the preallocated storage, of which a mask hides what is no text, and
the drafter's new context is padded to a block. So one column, several columns, and the drafter's block are compiled once
each (and once more for several rows), whatever the lengths; on CUDA, where the part is a whole bucket, each width and
bucket is recorded as a graph.

What cannot be compiled, or computes something else than eager does, runs eagerly, and one warning says why.

The target as the loop sees it: embedding rows, a forward that also gives the tapped layers' states, and the head.

Works on decoder-only `AutoModelForCausalLM`s of transformers 4.57 and 5.x whose attention is softmax over cached keys,
on 5.x also on those that mix it with linear layers, whole or spread over devices.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers import __version__
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .attention_dflash import (
    additive_mask,
    attention_of,
    causal_visibility,
    decoding_visibility,
    sharing_keys,
    tree_visibility,
)
from .cache_dflash import (
    LINEAR_TYPES,
    HybridCache,
    PreallocatedCache,
    compiled_length,
    is_supported,
    linear_mixers,
    to_device,
)
from .proposals_dflash import DraftTree
from .verification_dflash import Verdict


logger = logging.get_logger(__name__)

# Verify steps that a pair runs eagerly under compile="auto" before it is compiled: whatever runs that long runs on.
AUTO_STEPS = 2048

# Steps over a single column that a pair runs eagerly before they are compiled: many a text has just one, its last.
SINGLE_STEPS = 8

# What torch.compile hands the graphs to.
BACKEND = "inductor"

# Kinds of device that compute while the host goes on: there the next step is launched before the last one is read.
ASYNCHRONOUS = ("cuda",)

# How far logits and features of compiled forwards may be from eager ones, relative to the largest.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 5e-2

# Names of what the compiler watches of the models: their modules, attributes and weights.
_OF_MODELS = re.compile(r"\b(target|drafter)\b")


class _Bucket(CacheLayerMixin):
    """One layer's storage as a compiled forward sees it: new columns go to their slots, the first `num_keys` come out."""

    keys: torch.Tensor
    values: torch.Tensor

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, num_keys: int) -> None:
        super().__init__()
        self.keys, self.values, self.slots, self.num_keys = keys, values, slots, num_keys
        self.is_initialized = True

    def lazy_initialization(self, *args: Any) -> None:
        """The storage is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Writes [B, G, S, E] to the slots [B, S] and returns [B, G, num_keys, E]."""
        # Assigned, which compiled code does in place: of `scatter_` it makes a copy of the storage, there and back.
        rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
        self.keys.transpose(1, 2)[rows, self.slots] = key_states.transpose(1, 2)
        self.values.transpose(1, 2)[rows, self.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.num_keys], self.values[:, :, : self.num_keys]

    def get_seq_length(self, *args: Any) -> int:
        """Whatever: masks and positions are given, and nothing else rests on it."""
        return 0

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """As `get_seq_length`."""
        return self.num_keys, 0

    def get_max_length(self) -> int:
        """`num_keys`."""
        return self.num_keys

    def get_max_cache_shape(self) -> int:
        """`num_keys` (the name of transformers 4)."""
        return self.num_keys


class NotCompiledError(Exception):
    """What was to run compiled can run only eagerly."""


class CompiledPair:
    """A target and a drafter with their compiled forwards: made once, and kept as long as both live (`of`).

    Nothing is compiled, and torch's compiler is not even imported, before it is wanted.

    Attributes:
        is_wanted: Whether to compile, however few steps the pair has run.
        num_steps: Verify steps that the pair has run, in any way.
        num_single_steps: Those among them over a single column.
        reason: Why it runs eagerly all the same; `None`: it does not.
    """

    _pairs: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, CompiledPair]] = weakref.WeakKeyDictionary()

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        self.is_wanted = False
        self.num_steps = self.num_single_steps = 0
        self._name = f"{type(target).__name__} and {type(drafter).__name__}"
        self._is_cuda = target.device.type == "cuda"
        self._is_asynchronous = target.device.type in ASYNCHRONOUS
        self._functions: dict[str, Callable[..., Any]] = {}
        self._checked: set[str] = set()
        config = target.config.get_text_config(decoder=True)
        self._types = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        self._window = getattr(config, "sliding_window", None)
        self.reason = _why_not(target, drafter, self._types)
        self._state: list[Any] | None = None  # of the models when they were first compiled

    @classmethod
    def of(cls, target: PreTrainedModel, drafter: PreTrainedModel) -> CompiledPair:
        """The one of these two models, as they are now."""
        of_target = cls._pairs.setdefault(target, weakref.WeakKeyDictionary())
        if drafter in of_target:
            of_target[drafter]._look_again(target, drafter)
        else:
            of_target[drafter] = cls(target, drafter)
        return of_target[drafter]

    def _look_again(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        """Drops what was compiled for models that are no longer as they were.

        Once per text: to look at all of their modules in each step would take as long as a small forward.
        """
        if self._state is None or _is_watched(target, drafter):
            return
        state = _state_of(target, drafter)
        if state != self._state:
            self._state, self.reason = state, _why_not(target, drafter, self._types)
            self._functions.clear()
            self._checked.clear()

    @property
    def is_active(self) -> bool:
        """Whether forwards run compiled."""
        return self.reason is None and (self.is_wanted or self.num_steps >= AUTO_STEPS)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched from lengths that the device alone knows, and gains by it."""
        return self.is_active and self._is_asynchronous

    def give_up(self, reason: str) -> None:
        """Runs eagerly from now on and says why, once."""
        self.reason = reason
        logger.warning(f"{self._name} run eagerly and compile has no effect: {reason}.")

    def _function(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if kind not in self._functions:
            # Compilations are kept, and counted against a limit, by code object: each pair and kind has its own.
            code = function.__code__.replace()
            own: Any = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
            options: dict[str, Any] = {"triton.cudagraphs": True} if self._is_cuda else {}
            if hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe"):  # torch that knows the option
                options["guard_filter_fn"] = _guards_on_inputs
            self._functions[kind] = torch.compile(own, fullgraph=True, backend=BACKEND, options=options or None)
        return self._functions[kind]

    def either(
        self,
        kind: str,
        target: Any,
        drafter: Any,
        compiled: Callable[[], Any],
        eagerly: Callable[[], Any],
        advance: Callable[[], None],
    ) -> Any:
        """What `compiled` gives, and behind it `advance`; or `eagerly`, which advances the cache itself.

        The first time both run, the eager one last, and what is compiled stays in use if they agree.
        """
        if not self.is_active or _is_watched(target, drafter):
            return eagerly()
        is_new = kind not in self._checked
        if not self._checked:
            self._prepare(target, drafter)
        bar = logging.tqdm(total=1, desc=f"Compiling {kind} (once)", leave=False, disable=None if is_new else True)
        try:
            output = self._attempt(kind, compiled)
        except NotCompiledError:
            return eagerly()
        finally:
            bar.close()
        if not is_new:
            advance()
            return output
        expected = eagerly()
        pairs = zip(output, expected, strict=True) if isinstance(expected, tuple) else [(output, expected)]
        if all(_agree(mine, theirs) for mine, theirs in pairs):
            self._checked.add(kind)
        else:
            self.give_up(f"compiled, {kind} computes something else than eagerly")
        return expected

    def ahead(self, kind: str, target: Any, drafter: Any, compiled: Callable[[], Any]) -> Any:
        """What `compiled` gives behind lengths that the device alone knows; the cache's stay as they are.

        Raises:
            NotCompiledError: where `either` would have run eagerly, which needs those lengths.
        """
        if kind not in self._checked or not self.is_active or _is_watched(target, drafter):
            raise NotCompiledError(kind)
        return self._attempt(kind, compiled)

    def _attempt(self, kind: str, compiled: Callable[[], Any]) -> Any:
        try:
            return compiled()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model, a quantiser or a missing C++ compiler raises
            self.give_up(f"{kind} does not compile ({type(error).__name__}: {_first_line(error)})")
            raise NotCompiledError(kind) from error

    def _prepare(self, target: Any, drafter: Any) -> None:
        # transformers 5 installs what gives hidden states in the first forward that asks for them, under a lock that
        # cannot be captured.
        some_id = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        target(input_ids=some_id, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        self._state = _state_of(target, drafter)

    def verify(
        self,
        target: Any,
        drafter: Any,
        token_ids: torch.Tensor,
        cache: PreallocatedCache,
        tree: Any = None,
        num_rejected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, S, V] and context features [B, S, L * D] of token_ids [B, S] behind a cache that holds text.

        Their keys and values stand in the storage then; the cache's lengths are the caller's to advance.

        Args:
            target: The target.
            drafter: The drafter, which says what is tapped.
            token_ids: The columns.
            cache: The target's.
            tree: `(ancestors, depths)` as in `tree_visibility`; `None`: a chain.
            num_rejected: How many of each row's last columns are counted as text and are none, [B].
        """
        width, device = token_ids.shape[1], token_ids.device
        ancestors, depths = tree or (torch.ones(width, width, dtype=torch.bool, device=device).tril(), None)
        depths = torch.arange(width, device=device) if depths is None else depths
        keys, values, index, starts = self._storage(cache, width, device, num_rejected)
        token_ids = _dense(token_ids)
        if width > 1:
            for tensor, dims in ((token_ids, [1]), (ancestors, [0, 1]), (depths, [0])):
                torch._dynamo.mark_dynamic(tensor, dims)
        self._begin_step(token_ids)
        # One column is no special case of several, whose number is dynamic.
        verify = self._function("verify one" if width == 1 else "verify", _verify)
        taps = tuple(drafter.config.target_layer_ids)
        with sharing_keys(target):
            logits, features = verify(
                target, token_ids, starts, ancestors, depths, index, keys, values, taps, self._types, self._window
            )
        # A graph's outputs are overwritten by its next run, and the drafter may read these after that.
        features = features.clone() if self._is_cuda else features
        return logits, features.to(drafter.dtype)

    def draft(
        self,
        target: Any,
        drafter: Any,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        num_real: list[int] | torch.Tensor,
        cache: PreallocatedCache,
    ) -> torch.Tensor:
        """The drafter's last hidden states [B, N, D] of the block token_ids [B, N] behind new context [B, C, L * D].

        Of each row's context columns the first `num_real` are real. C is at most a block.
        """
        block_size, device = token_ids.shape[1], token_ids.device
        features = functional.pad(features, (0, 0, 0, block_size - features.shape[1]))
        keys, values, index, starts = self._storage(cache, 2 * block_size, device)
        counts = num_real if isinstance(num_real, torch.Tensor) else to_device(torch.tensor(num_real), device)
        token_ids, features = _dense(token_ids), _dense(features)
        self._begin_step(token_ids, features, counts)
        return self._function("draft", _draft)(
            drafter, target, token_ids, features, starts, counts, index, keys, values
        )

    def _storage(
        self, cache: PreallocatedCache, width: int, device: torch.device, num_rejected: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Keys and values of all layers with room for `width` more, the indices of the keys to compute with, and each row's length."""
        lengths = cache.lengths
        num_keys = compiled_length(max(lengths) + width, device)
        # Room for one more: the compiler takes two sizes for the same one if they are equal when it first sees them.
        keys, values = cache.storage(num_keys + 1)
        index, starts = torch.arange(num_keys, device=device), to_device(torch.tensor(lengths), device)
        if num_rejected is not None:
            starts = starts - num_rejected
        torch._dynamo.mark_dynamic(index, 0)
        for tensor in (*keys, *values):
            if self._is_cuda:
                torch._dynamo.mark_static_address(tensor)
            else:
                torch._dynamo.mark_dynamic(tensor, [2] if len(lengths) == 1 else [0, 2])
        if len(lengths) > 1:
            torch._dynamo.mark_dynamic(starts, 0)
        return keys, values, index, starts

    def _begin_step(self, *of_rows: torch.Tensor) -> None:
        if self._is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        for tensor in of_rows:
            if len(tensor) > 1:
                torch._dynamo.mark_dynamic(tensor, 0)


def compiled_pair(target: PreTrainedModel, drafter: PreTrainedModel, compile: bool | str) -> CompiledPair | None:
    """The pair to run by, under `compile`; `None`: eagerly.

    "auto" compiles a pair that has run `AUTO_STEPS` verify steps in this process, or was compiled before.
    """
    if compile is False:
        return None
    pair = CompiledPair.of(target, drafter)
    if compile is True and not pair.is_wanted:
        pair.is_wanted = True
        if pair.reason is not None:
            pair.give_up(pair.reason)
    return pair


def _verify(
    target: Any,
    token_ids: torch.Tensor,  # [B, S]
    starts: torch.Tensor,  # [B]
    ancestors: torch.Tensor,  # [S, S]
    depths: torch.Tensor,  # [S]
    index: torch.Tensor,  # [K]
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    taps: tuple[int, ...],
    types: tuple[str, ...],
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_keys = index.shape[0]
    slots = starts[:, None] + torch.arange(token_ids.shape[1], device=starts.device)

    def mask(width: int | None) -> torch.Tensor:
        return additive_mask(tree_visibility(starts, ancestors, depths, num_keys, width)[:, None], target.dtype)

    masks: Any = mask(None if types == ("full_attention",) else window)
    if len(types) > 1:
        masks = {name: mask(window if name == "sliding_attention" else None) for name in types}
    output = target(
        input_ids=token_ids,
        position_ids=starts[:, None] + depths,
        attention_mask=masks,
        past_key_values=Cache(layers=[_Bucket(k, v, slots, num_keys) for k, v in zip(keys, values, strict=True)]),
        use_cache=True,
        output_hidden_states=True,
        return_dict=True,
    )
    return output.logits, torch.cat([output.hidden_states[tap + 1] for tap in taps], dim=-1)


def _draft(
    drafter: Any,
    target: Any,
    token_ids: torch.Tensor,  # [B, N]
    features: torch.Tensor,  # [B, C, L * D]
    starts: torch.Tensor,  # [B]
    counts: torch.Tensor,  # [B]
    index: torch.Tensor,  # [K]
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    num_keys, block_size = index.shape[0], token_ids.shape[1]
    columns = torch.arange(features.shape[1], device=starts.device)
    # Columns that are not real stand behind the block, where nobody looks and the next step overwrites them.
    columns = torch.where(columns < counts[:, None], columns, columns + block_size)
    rows = (starts + counts)[:, None] + torch.arange(block_size, device=starts.device)
    slots = torch.cat([starts[:, None] + columns, rows], dim=1)
    return drafter(
        noise_embeds=drafter.embed(token_ids, target.get_input_embeddings()),
        context_hidden_states=features,
        position_ids=slots,
        attention_mask=decoding_visibility(drafter.config, rows, num_keys),
        past_key_values=Cache(layers=[_Bucket(k, v, slots, num_keys) for k, v in zip(keys, values, strict=True)]),
    ).last_hidden_state


def _why_not(target: Any, drafter: Any, types: tuple[str, ...]) -> str | None:
    """What of the pair is known not to compile."""
    name = type(target).__name__
    others = set(types) - {"full_attention", "sliding_attention"}
    if others:
        return f"{name} has layers of type {', '.join(sorted(others))}"
    if getattr(target.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        return f"{name} has layers that read the keys of others"
    for model in (target, drafter):
        implementation = attention_of(model)
        if implementation not in ("sdpa", "eager"):
            return f"attn_implementation={implementation!r} takes no 4-D mask; load with 'sdpa'"
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1 or target.device != drafter.device:
            return f"the models lie on several devices ({', '.join(sorted(map(str, devices | {target.device})))})"
    return None


def _guards_on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which guards each step evaluates: not the thousands on the models, which `CompiledPair` looks after."""
    return [not _OF_MODELS.search(guard.name) for guard in guards]


def _state_of(*models: PreTrainedModel) -> list[Any]:
    """What graphs take for granted of models: their modules, with all that decides how these run, but no weight's values."""
    of_modules = [_kind_of(vars(module)) for model in models for module in model.modules()]
    return [*of_modules, *map(attention_of, models)]


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.shape, value.requires_grad
    if isinstance(value, dict):
        return {key: _kind_of(of_key) for key, of_key in value.items() if not hasattr(of_key, "is_tap")}
    if isinstance(value, (list, tuple)):
        return [_kind_of(entry) for entry in value]
    if isinstance(value, (bool, float, str)):  # an integer may count something, and shapes show what sizes are
        return value
    return id(value) if callable(value) else type(value)  # a module, a hook, a method put over another one


def _is_watched(target: Any, drafter: Any) -> bool:
    """Whether somebody wants to see every forward or every operation: by hooks, or by a dispatch mode."""
    is_hooked = any(model._forward_hooks or model._forward_pre_hooks for model in (target, drafter))
    return is_hooked or is_in_torch_dispatch_mode()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With the strides of a fresh tensor: also a row that was cut out of a longer one."""
    return tensor.flatten().view(tensor.shape)


def _agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    tolerance = TOLERANCES.get(theirs.dtype, LOW_PRECISION_TOLERANCE)
    return bool((mine - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


class TappedTarget:
    """A target and the layers of it that a drafter reads.

    Args:
        target: The model whose text is wanted.
        drafter: A `DFlashDraftModel` trained for it.
        prompt_inputs: What the forward of a single prompt gets beside its ids: images.
        compiled: Runs verify steps; `None`: they run eagerly.

    Raises:
        ValueError: if the two do not belong together, or the target is of a kind that cannot be verified exactly.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        prompt_inputs: Mapping[str, Any] | None = None,
        compiled: CompiledPair | None = None,
    ) -> None:
        check_pair(target, drafter)
        self.compiled = compiled
        self.target = target
        self.drafter = drafter
        self.num_layers = len(decoder_layers(target))
        self._taps = [decoder_layers(target)[i] for i in drafter.config.target_layer_ids]
        self._mixers = linear_mixers(decoder_layers(target), self._layer_types())
        self._prompt_inputs = dict(prompt_inputs or {})
        # Where a model of images keeps how far the positions behind them lag behind the number of tokens.
        self._rope: Any = next((module for module in target.modules() if hasattr(module, "rope_deltas")), None)
        self._lag = 0
        self._shares_keys = bool(getattr(target.config.get_text_config(decoder=True), "num_kv_shared_layers", 0))
        self._drafter_device = drafter.device
        self._drafter_dtype = drafter.dtype

    def _layer_types(self) -> list[str]:
        return list(getattr(self.target.config.get_text_config(decoder=True), "layer_types", None) or ())

    def new_cache(self, capacity: int, num_rows: int = 1) -> PreallocatedCache:
        """An empty cache of the kind that the target needs, with room for `capacity` positions at first."""
        if self._mixers:
            return HybridCache(self._mixers, self.num_layers, capacity, num_rows)
        return PreallocatedCache(self.num_layers, capacity, num_rows)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embedding rows of token_ids [B, N], on the drafter's device: [B, N, D]."""
        embed: Any = self.drafter.embed  # a drafter may scale them
        return embed(token_ids, self.target.get_input_embeddings()).to(self._drafter_device)

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's head over the drafter's hidden states [B, N, D]: logits [B, N, V]."""
        head = self.target.get_output_embeddings()
        weight = next(head.parameters(), None)
        device, dtype = hidden_states.device, self.target.dtype
        if weight is not None:  # a quantised head may show none, or one that is not floating point
            dtype = weight.dtype if weight.is_floating_point() else dtype
            # Offloaded weights are on "meta" between calls; their hooks fetch them and move the input.
            device = device if weight.device.type == "meta" else weight.device
        return head(hidden_states.to(device, dtype))

    def forward(
        self,
        token_ids: torch.Tensor,
        cache: PreallocatedCache,
        num_logits: int,
        is_real: torch.Tensor | None = None,
        num_real: Sequence[int] | None = None,
        tree: DraftTree | None = None,
        unread: Verdict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs token_ids [B, S] behind `cache`; their keys and values are appended to it.

        In a ragged cache, is_real [B, S] says which columns are tokens and `num_real` how many there are in each row;
        default: all. With a `tree` the columns of the single row are its anchor and nodes.

        With an `unread` verdict on the last columns in `cache` these run behind what of them stands, and the cache's
        lengths stay as they are; raises NotCompiledError where that cannot be done.

        Returns the logits of the last `num_logits` columns [B, num_logits, V] and the context features of all
        [B, S, L * D], on the drafter's device and in its dtype. If it asks for all logits, all columns can be rolled
        back; else none, on a target with linear layers.
        """
        width, device = token_ids.shape[1], token_ids.device
        shape = None if tree is None else (tree.ancestors().to(device), torch.tensor(tree.depths, device=device))
        # A prompt's forward, which says what is padding, has a width of its own; it also gives the cache its storage.
        if self.compiled is None or is_real is not None or not cache.get_seq_length():
            return self._forward_eagerly(token_ids, cache, num_logits, is_real, num_real, shape)
        pair = self.compiled
        pair.num_steps += 1
        pair.num_single_steps += width == 1
        kind = f"a forward over {'one column' if width == 1 else 'columns'} of {'one row' if len(token_ids) == 1 else 'rows'}"

        def compiled() -> tuple[torch.Tensor, torch.Tensor]:
            num_rejected = None if unread is None else unread.num_rejected
            return pair.verify(self.target, self.drafter, token_ids, cache, shape, num_rejected)

        def eagerly() -> tuple[torch.Tensor, torch.Tensor]:
            return self._forward_eagerly(token_ids, cache, num_logits, None, None, shape)

        if unread is not None:
            return pair.ahead(kind, self.target, self.drafter, compiled)
        if width == 1 and pair.num_single_steps <= SINGLE_STEPS:
            return eagerly()
        return pair.either(
            kind, self.target, self.drafter, compiled, eagerly, lambda: cache.advance([width] * len(token_ids))
        )

    def _forward_eagerly(
        self,
        token_ids: torch.Tensor,
        cache: PreallocatedCache,
        num_logits: int,
        is_real: torch.Tensor | None,
        num_real: Sequence[int] | None,
        tree: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, start = token_ids.shape[1], cache.get_seq_length()
        placed: dict[str, Any] = {}
        if start == 0 and self._prompt_inputs:
            placed = self._prompt_inputs
        elif tree is not None:
            ancestors, depths = tree
            starts = torch.tensor([start], device=token_ids.device)

            def of_tree(window: int | None) -> torch.Tensor:
                return tree_visibility(starts, ancestors, depths, start + width, window)

            placed = {"position_ids": (start + depths)[None], "attention_mask": self._masks(of_tree)}
        elif cache.is_ragged:
            columns = torch.ones_like(token_ids, dtype=torch.bool) if is_real is None else is_real
            slots = cache.plan(columns, [token_ids.shape[1]] * len(token_ids) if num_real is None else num_real)
            keys = torch.arange(cache.get_seq_length() + width, device=slots.device)[None]  # [1, K]

            def of_rows(window: int | None) -> torch.Tensor:
                return causal_visibility(slots, keys, window)

            placed = {"position_ids": slots, "attention_mask": self._masks(of_rows, is_real)}
        elif self._rope is not None:  # said, because the model would take the lag of whatever prompt it saw last
            places = torch.arange(start, start + width, device=token_ids.device)[None]
            placed = {"position_ids": places + self._lag}
        recording: Any = nullcontext()
        if isinstance(cache, HybridCache):
            recording = cache.recording(width if num_logits == width else 0)
        # A prompt is long itself: its mask would be repeated instead, and that is longer than the keys.
        attending: Any = sharing_keys(self.target) if start and num_logits == width > 1 else nullcontext()
        with recording, attending, _Taps(self._taps, self._drafter_device, self._drafter_dtype) as taps:
            output = self.target(
                input_ids=token_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=self._logits_to_keep(num_logits, width),
                return_dict=True,
                **placed,
            )
        if placed is self._prompt_inputs and self._rope is not None:
            self._lag = self._find_lag(width)
        return output.logits[:, -num_logits:], taps.features

    def _find_lag(self, width: int) -> int:
        # Positions are given where `generate` has prepared them (transformers 5), else the model has found them itself.
        position_ids = self._prompt_inputs.get("position_ids")  # [3, 1, S], or [4, 1, S] with the text's own first
        if position_ids is None:
            return int(self._rope.rope_deltas)
        return int(position_ids[-3:].max()) + 1 - width

    def _logits_to_keep(self, num_logits: int, width: int) -> int | torch.Tensor:
        # Given as a number, Gemma 4 skips the other columns in the layers that share keys and values of earlier ones,
        # and the drafter reads all columns of every tapped layer.
        if self._shares_keys:
            return torch.arange(width - num_logits, width)
        return num_logits

    def _masks(
        self, visible: Callable[[int | None], torch.Tensor], is_real: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """`visible(window)` [B, S, keys] as an additive mask [B, 1, S, keys], by layer type where they differ.

        Linear layers see all that came before, but no padding: it stands on the left, of an empty cache, where a column
        of zeros leaves their state as it is.
        """
        window = getattr(self.target.config.get_text_config(decoder=True), "sliding_window", None)
        types = set(self._layer_types())

        def mask(width: int | None) -> torch.Tensor:
            return additive_mask(visible(width)[:, None], self.target.dtype)

        if len(types) > 1:
            masks: dict[str, torch.Tensor | None] = dict.fromkeys(types & set(LINEAR_TYPES), is_real)
            attention = types - set(LINEAR_TYPES)
            return masks | {name: mask(window if name == "sliding_attention" else None) for name in attention}
        return mask(None if types == {"full_attention"} else window)


class _Taps:
    """What `layers` put out in the one forward that this thread runs inside the `with`, side by side in `features`.

    A layer's output is copied as it comes and not held, so that a long prompt holds the tapped states once. Hooks stand for
    that forward alone, so a generator that is dropped half-way leaves none behind, and they listen to this thread alone,
    so two threads may generate on one target.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
        self.layers = layers
        self.device, self.dtype = device, dtype
        self.features = torch.empty(0)  # [B, S, L * D] once the forward has run

    def __enter__(self) -> _Taps:
        thread = threading.get_ident()

        def keep(slot: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if threading.get_ident() == thread:
                    self._keep(slot, output[0] if isinstance(output, tuple) else output)

            hook.is_tap = True  # type: ignore[attr-defined]  # gone before another forward: no change of the model
            return hook

        self._handles = [layer.register_forward_hook(keep(slot)) for slot, layer in enumerate(self.layers)]
        return self

    def _keep(self, slot: int, states: torch.Tensor) -> None:
        *shape, size = states.shape
        if not slot:  # the first layer of them, so the first to run
            self.features = torch.empty(*shape, len(self.layers) * size, device=self.device, dtype=self.dtype)
        self.features[..., slot * size : (slot + 1) * size] = states

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()


# Layer types of transformers whose keys and values can be rolled back by a length.
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


# Targets that mix them with linear layers, and whose linear layers are known to replay exactly (`recurrent_dflash`).
HYBRID_FAMILIES = {
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}


# Rotary embeddings that change with the length of the text.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    for owner in (decoder, getattr(decoder, "model", None), getattr(target, "model", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(
        f"{type(target).__name__} shows no list of decoder layers, so its hidden states cannot be tapped. Use target.generate."
    )


def check_pair(target: Any, drafter: PreTrainedModel) -> None:
    """Raises ValueError, with the value and the remedy, unless `drafter` can draft for `target`."""
    if target is drafter:
        raise ValueError(
            "drafter and target are the same object: pass the drafter's target, loaded by "
            "AutoModelForCausalLM.from_pretrained, as target."
        )
    name = type(target).__name__
    if getattr(getattr(target, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: DFlash drafts for decoder-only causal models.")
    head = target.get_output_embeddings() if hasattr(target, "get_output_embeddings") else None
    if head is None or not hasattr(target, "generate"):
        raise ValueError(
            f"{name} is not a causal language model (it has no language-model head to generate with): load the target by "
            "AutoModelForCausalLM.from_pretrained."
        )
    config = target.config.get_text_config(decoder=True)
    _check_layers(target)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaling in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise ValueError(
                f"{name} has rope_type={kind!r}, whose rotation depends on the longest position of a forward: a block and "
                "single tokens would be rotated differently and the text could differ. Use target.generate."
            )
    if getattr(getattr(target, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{name} has a prompt-learning adapter, whose virtual tokens only its own generate adds: merge or unload it."
        )

    # The property that says so has two names, one of which warns.
    if target.training and any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        raise ValueError(
            f"{name} is being trained with gradient checkpointing, which keeps no cache: call its eval() first."
        )

    own = drafter.config
    if own.hidden_size != config.hidden_size:
        raise ValueError(
            f"The drafter's hidden_size is {own.hidden_size} and the target's is {config.hidden_size}: this drafter was "
            "trained for another target."
        )
    if own.vocab_size and own.vocab_size != config.vocab_size:  # one dialect does not say it
        raise ValueError(
            f"The drafter's vocab_size is {own.vocab_size} and the target's is {config.vocab_size}: this drafter was "
            "trained for another target, or the target's embedding was resized."
        )
    num_layers = len(decoder_layers(target))
    if own.num_target_layers is not None and own.num_target_layers != num_layers:
        raise ValueError(
            f"The drafter was trained for a target of {own.num_target_layers} layers and this one has {num_layers}: use "
            "the target that the drafter's card names."
        )
    if own.target_layer_ids[-1] >= num_layers - 1:
        raise ValueError(
            f"target_layer_ids={own.target_layer_ids} reaches the last of the target's {num_layers} layers or beyond: "
            f"taps go up to layer {num_layers - 2}."
        )


def _check_layers(target: PreTrainedModel) -> None:
    """Raises ValueError if what the target keeps of its text cannot be rolled back exactly."""
    name = type(target).__name__
    config = target.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or ())
    others = types - ATTENTION_TYPES
    if config.model_type in HYBRID_FAMILIES and others <= set(LINEAR_TYPES) and types & ATTENTION_TYPES:
        if not is_supported():
            raise ValueError(
                f"{name} keeps a recurrent state ({', '.join(sorted(others))}) that transformers {__version__} cannot roll back "
                "behind rejected tokens: install transformers 5, or use target.generate."
            )
        return
    others |= set(getattr(config, "layers_block_type", None) or ()) - {"attention"}  # an older name
    if others or getattr(target, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a state of its text ({', '.join(sorted(others)) or 'stateful'}) that cannot be rolled back "
            "exactly behind rejected tokens: DFlash would not be lossless on it. Use target.generate."
        )
    supports_caches = getattr(target, "_supports_default_dynamic_cache", None)
    if supports_caches is not None and not supports_caches():
        raise ValueError(
            f"{name} keeps its text in a cache of its own, which cannot be rolled back behind rejected tokens. Use "
            "target.generate."
        )
    if getattr(config, "altup_num_inputs", None) is not None:
        raise ValueError(
            f"{name} carries altup_num_inputs={config.altup_num_inputs} streams of hidden states from layer to layer, and a "
            "drafter reads one. Use target.generate."
        )
    if getattr(config, "index_topk", None) is not None:
        raise ValueError(
            f"{name} attends to the index_topk={config.index_topk} keys that an indexer picks, and may pick others for a "
            "block than for single tokens: DFlash would not be lossless on it. Use target.generate."
        )
