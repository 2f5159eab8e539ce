"""The forward of the target and the forward of the drafter, run eagerly or compiled.

`verify` and `draft` are the two forwards. `Pair` runs them for a request. `CompiledPair` compiles them, and `whole_step`:
draft, verify and accept in one function whose lengths and anchors stay on the device.

On a device with a queue there are few shapes, and the pair lends the storage of both caches to one text after another, so a
second text records nothing. Elsewhere one compilation serves all lengths. A function that does not compile, or computes
something else than eagerly, runs eagerly, and one warning says why.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import __version__
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .attention_dflash import attention_of, step_attention, step_mask, target_sees
from .cache_dflash import (
    LINEAR_TYPES,
    LinearAttentionLayer,
    PreallocatedCache,
    PreallocatedLayer,
    cache_name,
    chosen,
    linear_mixers,
    to_device,
)
from .proposals_dflash import DraftTree, clock
from .verification_dflash import Sampler, Verdict, verify_match


logger = logging.get_logger(__name__)

BACKEND = "inductor"  # of torch.compile
# Kinds of device that compute while the host continues: few shapes, and steps launched before the last one is read.
ASYNCHRONOUS = ("cuda",)
FLEX_DEVICES = ("cuda",)  # kinds of device whose compiled steps use flex attention
# Numbers of sequences and columns of compiled steps on such devices, rounded up. Capacities double from the smallest.
SEQUENCE_CLASSES = (1, 2, 4, 8, 16)
WIDTH_CLASSES = (1, 4, 8, 16, 32, 64)
SMALLEST_CAPACITY = 2048
# Largest difference between outputs of compiled and eager forwards, relative to the largest output.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 5e-2
# Calls of a compiled function that are compared with eager: the first, and on CUDA the first replay of its graph.
COMPARED_CALLS = (1, 3)
# Assumed until a compilation was measured here: its seconds, and the share of an eager step's time that it saves.
EXPECTED_SECONDS, EXPECTED_SHARE = 60.0, 0.3
# Options of Inductor for CUDA: record graphs, fuse whenever it saves memory traffic, combine small independent kernels.
CUDA_OPTIONS = {"triton.cudagraphs": True, "score_fusion_memory_threshold": 1, "combo_kernels": True}
# Names of the compiler's guards on the models: their modules, attributes and weights.
_OF_MODELS = re.compile(r"\b(models|target|drafter|layout)\b")

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # transformers 4
    _collector = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Layout:
    """Properties of a target that a step depends on."""

    taps: tuple[int, ...]  # layers whose outputs the drafter reads
    types: tuple[str, ...]  # its layer types, each once
    window: int | None  # of sliding layers
    # Whether its forward does not accept 4-D masks: linear layers, attention kernels without masks, positions shifted by
    # images, or modelling code that makes its own.
    makes_own_masks: bool
    shares_keys: bool  # whether layers read the keys of earlier ones
    cache_name: str  # the name of the cache in its forward

    @classmethod
    def of(cls, target: PreTrainedModel, taps: Sequence[int]) -> Layout:
        """The layout of `target`, whose layers `taps` are read."""
        config = target.config.get_text_config(decoder=True)
        types = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        takes_masks = target._supports_attention_backend and attention_of(target) in ("sdpa", "eager")
        is_plain = takes_masks and set(types) <= {"full_attention", "sliding_attention"}
        makes_own_masks = not is_plain or _rope_of_images(target) is not None
        window, num_shared = getattr(config, "sliding_window", None), getattr(config, "num_kv_shared_layers", 0)
        return cls(tuple(taps), types, window, makes_own_masks, bool(num_shared), cache_name(target))

    def masks(
        self,
        positions: torch.Tensor,  # [B, S]
        num_keys: int,
        dtype: torch.dtype,
        ancestors: torch.Tensor | None = None,
        is_real: torch.Tensor | None = None,
    ) -> Any:
        """The additive mask of columns at `positions`, by layer type where types differ."""

        def mask(window: int | None) -> Any:
            sees = target_sees(positions, ancestors, window)
            return step_mask(sees, positions[:, 0], positions.shape[1], num_keys, dtype)

        def of_type(name: str) -> Any:
            # Linear layers skip only padding, which is on the left: columns of zeros do not change their state.
            return is_real if name in LINEAR_TYPES else mask(self.window if name == "sliding_attention" else None)

        if len(self.types) > 1:
            return {name: of_type(name) for name in self.types}
        return mask(None if self.types == ("full_attention",) else self.window)


def tapped_forward(target: Any, layout: Layout, cache: Cache, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target's forward, and the concatenated outputs of the layers that are tapped, [B, S, L * D]."""
    inputs |= {layout.cache_name: cache, "use_cache": True, "return_dict": True}
    if torch.compiler.is_compiling():  # hooks cannot be added there; the states of other layers are unused
        output = target(**inputs, output_hidden_states=True)
        return output.logits, torch.cat([output.hidden_states[tap + 1] for tap in layout.taps], dim=-1)
    # Hooks exist during this forward and record this thread, so several threads can generate on one target.
    thread, layers, states = threading.get_ident(), decoder_layers(target), list[torch.Tensor]()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            states.append(output[0] if isinstance(output, tuple) else output)

    hook.is_tap = True  # type: ignore[attr-defined]  # removed after this forward, so the model counts as unchanged
    handles = [layers[tap].register_forward_hook(hook) for tap in layout.taps]
    try:
        logits = target(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits, torch.cat([state.to(states[0].device) for state in states], dim=-1)


@dataclass(frozen=True)
class Place:
    """Positions of a forward's columns, and the cache of their keys and values."""

    positions: torch.Tensor  # [B, S]
    cache: Cache
    num_keys: int  # that the forward reads
    ancestors: torch.Tensor | None = None  # columns of a tree that each one sees, [S, S]; None: a chain
    is_flex: bool = False


def verify(target: Any, layout: Layout, token_ids: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, S, V] and context features [B, S, L * D] of token_ids [B, S]."""
    masks = layout.masks(place.positions, place.num_keys, target.dtype, place.ancestors)
    inputs = {"input_ids": token_ids, "position_ids": place.positions, "attention_mask": masks}
    return tapped_forward(target, layout, place.cache, **inputs)


def draft(
    drafter: Any, noise_embeds: torch.Tensor, features: torch.Tensor, starts: torch.Tensor | None, place: Place
) -> torch.Tensor:
    """Last hidden states [B, N, D] of blocks at starts [B], None: at the end, from noise_embeds [B, N, D] and new context."""
    shape = noise_embeds.shape[1], place.num_keys
    masks = None if starts is None else drafter.step_masks(starts, *shape)
    return drafter(
        noise_embeds=noise_embeds,
        context_hidden_states=features,
        position_ids=place.positions,
        attention_mask=masks,
        past_key_values=place.cache,
    ).last_hidden_state


def block_slots(starts: torch.Tensor, counts: torch.Tensor, num_columns: int, block_size: int) -> torch.Tensor:
    """Slots [B, C + N] in the drafter's cache: first `counts` of C context columns, the block, then (masked) the others."""
    columns = torch.arange(num_columns, device=starts.device)
    columns = torch.where(columns < counts[:, None], columns, columns + block_size)
    block = counts[:, None] + torch.arange(block_size, device=starts.device)
    return starts[:, None] + torch.cat([columns, block], dim=1)


def head(target: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The target's head over the drafter's hidden states [B, N, D]: logits [B, N, V]."""
    layer = target.get_output_embeddings()
    weight = next(layer.parameters(), None)
    device, dtype = hidden_states.device, target.dtype
    if weight is not None:  # a quantised head may have none, or one that is not floating point
        dtype = weight.dtype if weight.is_floating_point() else dtype
        # Offloaded weights are on "meta" between calls; their hooks fetch them and move the input.
        device = device if weight.device.type == "meta" else weight.device
    return layer(hidden_states.to(device, dtype))


def block_ids(drafter: Any, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Anchors [B, 1] and the masks after them, [B, N]."""
    masks = anchors.new_full((len(anchors), block_size - 1), drafter.config.mask_token_id)
    return torch.cat([anchors, masks], dim=1)


@dataclass(frozen=True)
class State:
    """The state of [R] sequences between steps, on the device. The host may not know their lengths yet."""

    anchors: torch.Tensor  # the last committed tokens, [R, 1]
    starts: torch.Tensor  # their positions, [R], which are the lengths of the target's cache
    features: torch.Tensor  # context features of the last step, [R, C, L * D]
    counts: torch.Tensor  # how many of their columns were accepted and are new to the drafter, [R]


@dataclass(frozen=True)
class Context:
    """Context features of committed text that the drafter's cache does not hold yet."""

    features: torch.Tensor  # [B, C, L * D]
    num_real: list[int]  # each sequence's number of valid columns, which are the first ones

    @property
    def counts(self) -> torch.Tensor:
        """`num_real` on the device, [B]."""
        return to_device(torch.tensor(self.num_real), self.features.device)

    @property
    def is_real(self) -> torch.Tensor:
        """Which columns are valid, [B, C]."""
        return torch.arange(self.features.shape[1], device=self.features.device) < self.counts[:, None]

    def part(self, begin: int, end: int) -> Context:
        """Columns `begin` to `end` of each sequence, as far as it has them."""
        return Context(self.features[:, begin:end], [max(min(end, real) - begin, 0) for real in self.num_real])

    def of_sequences(self, sequences: list[int]) -> Context:
        """The context of these sequences of the batch."""
        num_real = [self.num_real[i] for i in sequences]
        return Context(chosen(self.features[:, : max(num_real)], 0, sequences), num_real)

    def state(self, anchors: torch.Tensor, starts: list[int]) -> State:
        """The state of sequences whose anchors [B, 1] are at positions `starts`."""
        return State(anchors, to_device(torch.tensor(starts), anchors.device), self.features, self.counts)


@dataclass(frozen=True)
class Storage:
    """Keys and values of all layers of a model, as a compiled forward takes them."""

    keys: list[torch.Tensor]  # [R, G, capacity, E] each
    values: list[torch.Tensor]
    index: torch.Tensor  # its length is the number of keys to read: a size that the compiler can leave open
    is_flex: bool
    dropped: torch.Tensor | None = None  # positions that are not stored, [R]; None: all are

    def place(self, slots: torch.Tensor, positions: Any = None, ancestors: torch.Tensor | None = None) -> Place:
        """A `Place` for a forward at `positions`: a cache over this storage that writes new keys and values to `slots` [B, S]."""
        if positions is None:
            positions = slots if self.dropped is None else slots + self.dropped[:, None]
        num_keys, pairs = self.index.shape[0], zip(self.keys, self.values, strict=True)
        cache = Cache(layers=[PreallocatedLayer.lent(keys, values, slots, num_keys) for keys, values in pairs])
        return Place(positions, cache, num_keys, ancestors, self.is_flex)


def verify_lent(
    target: Any, layout: Layout, token_ids: torch.Tensor, starts: torch.Tensor, storage: Storage, tree: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`verify` after text of `starts` [B] tokens in lent storage; a `tree` is its ancestors [S, S] and depths [S]."""
    slots = starts[:, None] + torch.arange(token_ids.shape[1], device=starts.device)
    ancestors, depths = tree or (None, None)
    positions = slots if depths is None else starts[:, None] + depths
    return verify(target, layout, token_ids, storage.place(slots, positions, ancestors))


def draft_lent(drafter: Any, target: Any, block_size: int, state: State, storage: Storage) -> torch.Tensor:
    """`draft` of a block in lent storage, after the new context in `state`."""
    starts = state.starts if storage.dropped is None else state.starts - storage.dropped
    slots = block_slots(starts - state.counts, state.counts, state.features.shape[1], block_size)
    noise_embeds = drafter.embed(block_ids(drafter, state.anchors, block_size), target.get_input_embeddings())
    return draft(drafter, noise_embeds, state.features, starts, storage.place(slots))


@dataclass(frozen=True)
class Shape:
    """The static sizes of a whole step."""

    block_size: int  # anchor included
    num_proposals: int  # to verify
    num_candidates: int = 0  # of its `Sampler`


def whole_step(
    models: tuple[Any, Any, Layout],  # the target, the drafter, the layout
    state: State,
    storages: tuple[Storage, Storage],  # the target's and the drafter's
    shape: Shape,
    drawn: tuple[torch.Tensor, torch.Tensor] | None,  # uniforms [B, n + 1], settings of a `Sampler`; None: greedy
    compared: Sequence[torch.Tensor] | None = None,  # outputs of the compiled step
) -> tuple[torch.Tensor, ...]:
    """Drafts a block for each sequence, verifies and accepts it.

    Returns numbers of accepted proposals, choices, proposals, the drafter's hidden states, context features, and logits of the
    choices. With `compared` outputs, their proposals and choices are used: near-ties may be decided differently.
    """
    target, drafter, layout = models
    hidden_states = draft_lent(drafter, target, shape.block_size, state, storages[1])
    first = 0 if drafter.config.sample_from_anchor else 1
    proposing = slice(first, first + shape.num_proposals)
    embed = partial(drafter.embed, embedding=target.get_input_embeddings())
    # The head runs on the whole block: with 15 positions Inductor would also benchmark padded products.
    proposals = drafter.propose(
        hidden_states[:, proposing], state.anchors, lambda _: head(target, hidden_states)[:, proposing], embed=embed
    )
    if compared is not None:
        proposals = replace(proposals, token_ids=compared[2])
    verified_ids = torch.cat([state.anchors, proposals.token_ids], dim=1)
    logits, features = verify_lent(target, layout, verified_ids, state.starts, storages[0])
    choices = logits.argmax(dim=-1) if drawn is None else Sampler(drawn[1], shape.num_candidates)(logits, drawn[0])
    of_choices = logits.gather(-1, (choices if compared is None else compared[1])[..., None]).squeeze(-1)
    verdict = verify_match(proposals, choices, of_choices if drawn is None else logits.amax(dim=-1))
    return verdict.num_accepted, choices, proposals.token_ids, hidden_states, features.to(drafter.dtype), of_choices


@dataclass
class Loan:
    """Both caches of one (sequences, capacity) class, lent to one text at a time and returned to `shelf`."""

    num_sequences: int
    capacity: int
    target_cache: PreallocatedCache
    draft_cache: PreallocatedCache
    shelf: list[Loan]


class InexactError(ValueError):
    """A request that the loop cannot run exactly, and the target's own `generate` can."""


class NotCompiledError(Exception):
    """A step cannot run compiled and has to run eagerly."""


class CompiledPair:
    """The compiled functions and the storage of a target and a drafter, kept as long as both live (`of`)."""

    _pairs: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, CompiledPair]] = weakref.WeakKeyDictionary()
    _lock, _locks = threading.Lock(), dict[torch.device, threading.RLock]()
    # Of earlier compilations on a kind of machine: their seconds, and the share of a step's time that they saved.
    _measured: dict[str, tuple[float, float]] = {}

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        self.is_wanted = self.is_asked_for = False  # whether to compile, whether by `compile=True`
        # Held from the start of a compiled step until its outputs are copied: graphs share output buffers.
        self.lock = self._locks.setdefault(target.device, threading.RLock())
        self._name = f"{type(target).__name__} and {type(drafter).__name__}"
        self._device = target.device
        self._functions: dict[str, Callable[..., Any]] = {}
        self._num_calls: dict[Any, int] = {}
        self._num_eager: dict[Any, int] = defaultdict(int)  # of kinds that are not compiled yet, by key
        self._is_flex = target.device.type in FLEX_DEVICES and _may_flex(target, drafter)
        self._machine = f"{target.device.type} {torch.get_num_threads()} {target.dtype}"
        self._shelf: dict[tuple[int, int], list[Loan]] = {}
        self._eager_seconds = self._lost_seconds = self._compile_seconds = 0.0
        self.reason = _why_not(target, drafter)  # why the pair cannot be compiled; None: it can
        self._models: list[Any] | None = None  # their state when they were first compiled

    @classmethod
    def of(cls, target: PreTrainedModel, drafter: PreTrainedModel) -> CompiledPair:
        """The pair of these two models, up to date with their current state."""
        with cls._lock:
            of_target = cls._pairs.setdefault(target, weakref.WeakKeyDictionary())
            pair = of_target.get(drafter)
            if pair is None or pair._device != target.device:
                pair = of_target[drafter] = cls(target, drafter)
            # Changed models drop everything compiled. Checked once per text: it takes as long as a small forward.
            if pair._models is not None and not _is_watched(target, drafter):
                models = _state_of(target, drafter)
                if models != pair._models:
                    pair._models, pair.reason = models, _why_not(target, drafter)
                    for of_before in (pair._functions, pair._num_calls, pair._shelf):
                        of_before.clear()
            return pair

    # -- whether to compile

    @property
    def is_active(self) -> bool:
        """Whether steps run compiled."""
        return self.reason is None and (self.is_wanted or self._models is not None)

    @property
    def is_static(self) -> bool:
        """Whether steps run compiled in few shapes, on storage that is lent."""
        return self.is_active and self._device.type in ASYNCHRONOUS

    def weigh(self, seconds: float | None = None, num_left: float | None = None) -> None:
        """Starts compiling under "auto" once compiling would have saved what it costs: at most twice the optimal time.

        `seconds` is the duration of a step; `None`: a text begins. Within a text, `num_left` steps have to pay, too.
        """
        cost, share = self._measured.get(self._machine, (EXPECTED_SECONDS, EXPECTED_SHARE))
        if seconds is not None and self.is_active:  # the measured saving, for the next pair on this kind of machine
            if self._machine in self._measured and seconds < self._eager_seconds:
                self._measured[self._machine] = cost, 0.9 * share + 0.1 * (1 - seconds / self._eager_seconds)
        elif seconds is not None:
            self._eager_seconds = seconds if not self._eager_seconds else 0.9 * self._eager_seconds + 0.1 * seconds
            self._lost_seconds += share * seconds
        if self.is_active or self.reason is not None or self._lost_seconds < cost:
            return
        if num_left is None or num_left * share * self._eager_seconds >= cost:
            self.is_wanted = True

    def _is_due(self, key: Any) -> bool:
        """Whether to compile a further kind of step: under "auto" once eager ones have lost what compiling has cost so far."""
        if self.is_asked_for or self.is_static or not self._num_calls:
            return True
        self._num_eager[key] += 1
        cost, share = self._measured.get(self._machine, (EXPECTED_SECONDS, EXPECTED_SHARE))
        return self._num_eager[key] * share * self._eager_seconds >= cost

    def give_up(self, reason: str) -> None:
        """Runs eagerly from now on, and warns once with the reason."""
        self.reason = reason
        logger.warning(f"{self._name} run eagerly and compile has no effect: {reason}.")

    # -- storage

    def lend(self, pair: Pair, num_sequences: int, capacity: int) -> Loan:
        """Both caches, empty, for at most `SEQUENCE_CLASSES[-1]` sequences of `capacity` tokens."""
        size = next(size for size in SEQUENCE_CLASSES if size >= num_sequences)
        room = max(SMALLEST_CAPACITY, 1 << (capacity - 1).bit_length())
        with self.lock:
            if not (shelf := self._shelf.setdefault((size, room), [])):
                draft_cache = PreallocatedCache(pair.drafter.config.num_hidden_layers, room, num_sequences, size)
                shelf.append(Loan(size, room, pair.new_cache(room, num_sequences, size), draft_cache, shelf))
            loan = shelf.pop()
        for cache in (loan.target_cache, loan.draft_cache):
            cache.window, cache.dropped = None, [0] * num_sequences
            cache.set_lengths([0] * num_sequences)
        return loan

    def take_back(self, loan: Loan) -> None:
        """Returns a loan to its shelf, unless eager steps have changed the size of its storage."""
        layers: list[Any] = [*loan.target_cache.layers, *loan.draft_cache.layers]
        with self.lock:
            used = [layer for layer in layers if layer.is_initialized]
            has_room = all(layer.capacity == loan.capacity for layer in layers)
            if has_room and all(len(layer.keys) == loan.num_sequences for layer in used):
                loan.shelf.append(loan)

    # -- what runs compiled

    def run(self, models: Any, key: Any, function: Callable[..., Any], given: Callable[[Any], Sequence[Any]]) -> Any:
        """The output of `function`, compiled, for arguments `given(None)`; NotCompiledError if it can only run eagerly.

        `key` names function and shapes. If `COMPARED_CALLS` differ from eager ones, the pair runs eagerly from then on.
        """
        is_first = key not in self._num_calls
        if not self.is_active or _is_watched(*models) or (is_first and not self._is_due(key)):
            raise NotCompiledError(key)
        if is_first and not self._num_calls:
            # transformers 5 adds hooks when hidden states are first requested, under a lock that cannot be captured.
            some_id = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            models[0](input_ids=some_id, use_cache=False, output_hidden_states=True, logits_to_keep=1)
            self._models = _state_of(*models)
            cost = self._measured.get(self._machine, (EXPECTED_SECONDS,))[0]
            logger.warning(
                f"{self._name} are being compiled, about {cost:.0f} s once; in spec_generate compile=False avoids it."
            )
        bar = logging.tqdm(total=1, desc=f"Compiling {key[0]} (once)", leave=False, disable=None if is_first else True)
        began = clock()
        try:
            with self.lock, step_attention(models[0]):
                if self._device.type == "cuda":
                    torch.compiler.cudagraph_mark_step_begin()
                output = self.function(key, function)(*given(None))
                if self.is_static:  # the next run of the graph overwrites its outputs
                    output = tree_map(torch.clone, output)
        except Exception as error:  # of any type: a model, a quantiser or a missing C++ compiler raises it
            if isinstance(error, torch.OutOfMemoryError) or re.search("CUDA error|device-side assert", str(error)):
                raise
            first_line = str(error).strip().partition("\n")[0]
            self.give_up(f"{key[0]} does not compile ({type(error).__name__}: {first_line})")
            raise NotCompiledError(key) from error
        finally:
            bar.close()
            # Dynamo of torch 2.13 loses variables that are set after flex attention, such as the collector's.
            if _collector is not None:
                _collector.reset(None)
        num_calls = self._num_calls[key] = self._num_calls.get(key, 0) + 1
        if is_first:
            self._compile_seconds += clock() - began
            share = self._measured.get(self._machine, (0.0, EXPECTED_SHARE))[1]
            self._measured[self._machine] = max(1.0, self._compile_seconds), share
        if num_calls not in (COMPARED_CALLS if self.is_static else COMPARED_CALLS[:1]):
            return output
        with self.lock, step_attention(models[0]):
            expected = function(*given(output))
        if not all(map(_agree, tree_leaves(output), tree_leaves(expected))):
            self.give_up(f"compiled, {key[0]} computes something else than eagerly")
        return expected

    def function(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function of `key`."""
        kind = str(key)
        if kind not in self._functions:
            # Dynamo caches, and limits, compilations by code object, so each pair and kind gets its own.
            code = function.__code__.replace()
            own: Any = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
            # Not the thousands of guards on the models: their state is compared once per text.
            guards = {"guard_filter_fn": lambda found: [not _OF_MODELS.search(guard.name) for guard in found]}
            options = {**guards, **(CUDA_OPTIONS if self._device.type == "cuda" else {})}
            settings: Any = {"fullgraph": True, "dynamic": False if self.is_static else None, "options": options}
            self._functions[kind] = torch.compile(own, backend=BACKEND, **settings)
        return self._functions[kind]

    def storage(self, cache: PreallocatedCache, num_keys: int, is_eager: bool = False) -> Storage:
        """The storage of a cache for a forward over the keys of the first `num_keys` positions."""
        dropped: Any = None
        if cache.window is not None:  # one more, for the same reason as below
            num_keys += max(cache.lengths) - max(cache.text_lengths) + 1
            dropped = self.inputs(cache, to_device(torch.tensor(cache.dropped), self._device))[0]
        if self.is_static:
            keys, values = cache.storage(num_keys)
            for tensor in (*keys, *values):
                torch._dynamo.mark_static_address(tensor, guard=False)
            index = keys[0].new_empty(1).expand(keys[0].shape[2])
        else:
            # One more than needed: the compiler unifies two sizes that are equal in the first call.
            keys, values = cache.storage(num_keys + 1)
            for tensor in (*keys, *values):
                torch._dynamo.mark_dynamic(tensor, [0, 2] if len(cache.lengths) > 1 else [2])
            index = keys[0].new_empty(1).expand(num_keys)
            torch._dynamo.mark_dynamic(index, 0)
        return Storage(keys, values, index, self._is_flex and not is_eager, dropped)

    def inputs(self, cache: PreallocatedCache, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors [B, ...] padded to the sequences of the storage, [R, ...], with varying sizes marked."""
        size = len(cache.storage(0)[0][0]) if self.is_static else len(cache.lengths)
        taken = []
        for tensor in tensors:
            padded = functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, size - len(tensor)])
            # With the strides of a fresh tensor, also for a slice.
            taken.append(padded.flatten().view(padded.shape))
            if size > 1 and not self.is_static:
                torch._dynamo.mark_dynamic(taken[-1], 0)
        return taken

    def taken(self, cache: PreallocatedCache, state: State, num_columns: int) -> State:
        """A state padded to the sequences of the storage and to `num_columns` columns."""
        features = functional.pad(state.features, (0, 0, 0, num_columns - state.features.shape[1]))
        return State(*self.inputs(cache, state.anchors, state.starts, features, state.counts))


class Pair:
    """The two forwards of a target and its drafter for one request; ValueError if `check_pair` refuses the models.

    `prompt_inputs` are further inputs of a single prompt's forward, such as images. Without `compiled` steps run eagerly.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        prompt_inputs: Mapping[str, Any] | None = None,
        compiled: CompiledPair | None = None,
    ) -> None:
        check_pair(target, drafter)
        self.target, self.compiled = target, compiled
        self.drafter: Any = drafter  # of this class or of remote code
        self._layers = decoder_layers(target)
        self.layout = Layout.of(target, drafter.config.target_layer_ids)
        config = target.config.get_text_config(decoder=True)
        self._mixers = linear_mixers(self._layers, getattr(config, "layer_types", None) or ())
        self._prompt_inputs = dict(prompt_inputs or {})
        self._rope: Any = _rope_of_images(target)
        self.head = partial(head, target)  # takes the drafter's hidden states
        self._lag = 0  # number of tokens minus position, after an image

    def new_cache(self, capacity: int, num_sequences: int = 1, num_allocated: int | None = None) -> PreallocatedCache:
        """An empty cache for the target, with initial room for `capacity` positions."""
        return PreallocatedCache(len(self._layers), capacity, num_sequences, num_allocated, self._mixers)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., D] of token_ids [...] by the target, on the drafter's device."""
        embedding = self.target.get_input_embeddings()
        device = embedding.get_parameter("weight").device
        token_ids = token_ids if device.type == "meta" else token_ids.to(device)  # "meta": accelerate moves them
        return self.drafter.embed(token_ids, embedding).to(self.drafter.device)  # may scale them

    def forward(
        self,
        token_ids: torch.Tensor,
        cache: PreallocatedCache,
        num_logits: int,
        is_real: torch.Tensor | None = None,
        num_real: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the last `num_logits` columns of token_ids [B, S], and context features of all, on the drafter's device.

        In a ragged cache is_real [B, S] marks the columns that are tokens, and `num_real` counts them; default: all. Linear
        layers can roll the columns back only if all logits are requested.
        """
        width, start = token_ids.shape[1], cache.get_seq_length()
        placed: dict[str, Any] = {}
        if start == 0 and self._prompt_inputs:
            placed = self._prompt_inputs
        elif cache.is_ragged:
            columns = torch.ones_like(token_ids, dtype=torch.bool) if is_real is None else is_real
            slots = cache.plan(columns, [width] * len(token_ids) if num_real is None else num_real)
            masks = self.layout.masks(slots, cache.get_seq_length() + width, self.target.dtype, None, is_real)
            placed = {"position_ids": slots, "attention_mask": masks}
        elif self._rope is not None:  # explicit: the model would use the offset of the prompt it saw last
            columns = torch.arange(start, start + width, device=token_ids.device)[None]
            placed = {"position_ids": columns + self._lag}
        to_keep: Any = num_logits
        if self.layout.shares_keys:  # a number would make Gemma 4 skip the other columns in layers that share keys
            to_keep = torch.arange(width - num_logits, width, device=token_ids.device)
        # A later chunk needs no mask. All forwards run inside, so that another thread's chunk does not change them.
        with cache.recording(width if num_logits == width else 0), step_attention(self.target):
            inputs = {"input_ids": token_ids, "logits_to_keep": to_keep, **placed}
            logits, features = tapped_forward(self.target, self.layout, cache, **inputs)
        if placed is self._prompt_inputs and self._rope is not None:
            # `generate` of transformers 5 has prepared positions, [3, 1, S], or [4, 1, S] with the text's own first. Otherwise
            # the model has computed them.
            given = self._prompt_inputs.get("position_ids")
            self._lag = int(self._rope.rope_deltas if given is None else given[-3:].max() + 1 - width)
        return logits[:, -num_logits:], features.to(self.drafter.device, self.drafter.dtype)

    def verify(
        self, token_ids: torch.Tensor, cache: PreallocatedCache, tree: DraftTree | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and context features of columns token_ids [B, S], of a single sequence's `tree` if given; can be rolled back."""
        if self.layout.makes_own_masks and tree is None and not cache.is_ragged:
            return self.forward(token_ids, cache, token_ids.shape[1])
        if self.compiled is not None:
            with suppress(NotCompiledError):
                return self._verify_compiled(self.compiled, token_ids, cache, tree)
        width, device = token_ids.shape[1], token_ids.device
        ancestors, depths = _tree_tensors(tree, width, device) if tree else (None, torch.arange(width, device=device))
        positions = to_device(torch.tensor(cache.lengths), device)[:, None] + depths
        place = Place(positions, cache, max(cache.lengths) + width, ancestors)
        ends = [held + width for held in cache.lengths]
        cache.place(positions, place.num_keys)
        with cache.recording(width, tree), step_attention(self.target):
            logits, features = verify(self.target, self.layout, token_ids, place)
        cache.set_lengths(ends)
        return logits, features.to(self.drafter.device, self.drafter.dtype)

    def _verify_compiled(
        self, compiled: CompiledPair, token_ids: torch.Tensor, cache: PreallocatedCache, tree: DraftTree | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, lengths, device = token_ids.shape[1], cache.lengths, token_ids.device
        size = next((size for size in WIDTH_CLASSES if size >= width), width) if compiled.is_static else width
        # Without classes of shapes, chains and trees share one compilation.
        has_shape = tree is not None or (size > 1 and not compiled.is_static)

        def given(output: Any) -> tuple[Any, ...]:
            shape = _tree_tensors(tree, size, device) if has_shape else None
            storage = compiled.storage(cache, max(lengths) + size, output is not None)
            starts = to_device(torch.tensor(lengths), device)
            ids, starts = compiled.inputs(cache, functional.pad(token_ids, (0, size - width)), starts)
            if shape is not None and not compiled.is_static:
                for tensor, dims in ((ids, [1]), (shape[0], [0, 1]), (shape[1], [0])):
                    torch._dynamo.mark_dynamic(tensor, dims)
            return self.target, self.layout, ids, starts, storage, shape

        kind = "a forward over " + ("one column" if width == 1 else "columns")
        key = self._key(kind, cache, (size, tree is not None))
        logits, features = compiled.run((self.target, self.drafter), key, verify_lent, given)
        cache.advance([width] * len(lengths))
        features = features[: len(lengths), :width].to(self.drafter.device, self.drafter.dtype)
        return logits[: len(lengths), :width], features

    def draft(
        self, anchors: torch.Tensor, context: Context, cache: PreallocatedCache, block_size: int
    ) -> torch.Tensor:
        """The drafter's last hidden states [B, N, D] after anchors [B, 1]. Its cache then holds the context, but no block."""
        if self.compiled is not None and self.compiled.is_active:
            starts = [held + waiting for held, waiting in zip(cache.text_lengths, context.num_real, strict=True)]
            with suppress(NotCompiledError):
                hidden_states = self.draft_compiled(context.state(anchors, starts), cache, block_size)
                cache.advance(context.num_real)
                return hidden_states
        noise_embeds, features = self.embed(block_ids(self.drafter, anchors, block_size)), context.features
        lengths, counts = to_device(torch.tensor(cache.lengths), features.device), context.counts
        slots = block_slots(lengths, counts, features.shape[1], block_size)
        place = Place(cache.positions(slots), cache, max(cache.lengths) + slots.shape[1])
        ends = [held + new for held, new in zip(cache.lengths, context.num_real, strict=True)]
        cache.place(slots, place.num_keys)
        block_starts = lengths + counts if cache.is_ragged else None  # the drafter takes the mask from its cache
        hidden_states = draft(self.drafter, noise_embeds, features, block_starts, place)
        cache.set_lengths(ends)
        return hidden_states

    def draft_compiled(self, state: State, cache: PreallocatedCache, block_size: int) -> torch.Tensor:
        """`draft`, compiled. The cache does not advance. NotCompiledError: it has to run eagerly."""
        compiled, columns = self.compiled, self.num_columns(block_size)
        # The last two: another thread has started compiling after this one's context was made.
        if compiled is None or state.features.shape[1] > columns or not any(cache.lengths):
            raise NotCompiledError

        def given(output: Any) -> tuple[Any, ...]:
            num_keys = max(cache.text_lengths) + 2 * columns
            storage = compiled.storage(cache, num_keys, output is not None)
            return self.drafter, self.target, block_size, compiled.taken(cache, state, columns), storage

        key = self._key("a draft", cache, block_size)
        hidden_states: torch.Tensor = compiled.run((self.target, self.drafter), key, draft_lent, given)
        return hidden_states[: len(state.anchors)]

    def absorb(self, context: Context, cache: PreallocatedCache) -> None:
        """Adds context to the drafter's cache, without a block."""
        columns = torch.arange(context.features.shape[1], device=context.features.device)
        # Invalid columns are overwritten by the next ones.
        slots = to_device(torch.tensor(cache.lengths), columns.device)[:, None] + columns
        ends = [held + new for held, new in zip(cache.lengths, context.num_real, strict=True)]
        cache.place(slots, max(cache.lengths) + len(columns))
        self.drafter.absorb(context.features, cache.positions(slots), cache)
        cache.set_lengths(ends)

    def step(
        self,
        state: State,
        caches: tuple[PreallocatedCache, PreallocatedCache],
        shape: Shape,
        drawn: tuple[torch.Tensor, torch.Tensor] | None,
        num_unread: int,
    ) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
        """The verdict, proposals and features of `whole_step`, or NotCompiledError. Lengths of caches do not change."""
        compiled: Any = self.compiled
        columns = self.num_columns(shape.block_size)

        def given(output: Any) -> tuple[Any, ...]:
            num_keys, is_eager = max(caches[0].lengths) + (2 + num_unread) * columns, output is not None
            storages = tuple(compiled.storage(cache, num_keys, is_eager) for cache in caches)
            taken = compiled.taken(caches[0], state, columns)
            numbers = None if drawn is None else (compiled.inputs(caches[0], drawn[0])[0], drawn[1])
            models = self.target, self.drafter, self.layout
            return models, taken, storages, shape, numbers, output

        key = self._key("a step" if drawn is None else "a sampled step", caches[1], shape)
        outputs = compiled.run((self.target, self.drafter), key, whole_step, given)
        num_accepted, choices, proposed_ids, _, features, _ = (output[: len(state.anchors)] for output in outputs)
        return Verdict(num_accepted, choices), proposed_ids, features

    def num_columns(self, block_size: int) -> int:
        """Columns of a whole step: the anchor and the proposals of a block."""
        return block_size + bool(self.drafter.config.sample_from_anchor)

    def _key(self, kind: str, cache: PreallocatedCache, shape: Any) -> tuple[Any, ...]:
        """The key of a compiled function; on devices with few shapes it includes them."""
        compiled: Any = self.compiled
        name = f"{kind} of {'one sequence' if len(cache.lengths) == 1 else 'sequences'}"
        name += "" if cache.window is None else " in a window"
        if not compiled.is_static:
            return name, shape if isinstance(shape, Shape) else None
        keys = cache.storage(0)[0]
        return name, shape, tuple(keys[0].shape[:3]) if keys else None


def compiled_pair(target: PreTrainedModel, drafter: PreTrainedModel, compile: bool | str) -> CompiledPair | None:
    """The compiled pair under the setting `compile`; `None`: run eagerly. "auto" compiles once that is expected to pay."""
    if compile is False:
        return None
    pair = CompiledPair.of(target, drafter)
    if compile is True and not pair.is_asked_for:
        pair.is_wanted = pair.is_asked_for = True
        if pair.reason is not None:
            pair.give_up(pair.reason)
    if compile == "auto":
        pair.weigh()
    return pair


def _why_not(target: Any, drafter: Any) -> str | None:
    """Why the pair cannot be compiled; `None`: it can."""
    name, layout = type(target).__name__, Layout.of(target, drafter.config.target_layer_ids)
    if others := set(layout.types) - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of type {', '.join(sorted(others))}"
    if layout.shares_keys:
        return f"{name} has layers that read the keys of others"
    for model in (target, drafter):
        implementation = attention_of(model)
        if implementation not in ("sdpa", "eager"):
            return f"attn_implementation={implementation!r} takes no 4-D mask; load with 'sdpa'"
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1 or target.device != drafter.device:
            return f"the models lie on several devices ({', '.join(sorted(map(str, devices | {target.device})))})"
    return f"{name} makes its own masks" if layout.makes_own_masks else None


def _may_flex(target: Any, drafter: Any) -> bool:
    """Whether flex attention gives the same result as the attention of both models."""
    is_plain = getattr(target.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is None
    # transformers 4 has no collector: it replaces forwards of layers, and Dynamo would lose their restoration.
    return _collector is not None and is_plain and attention_of(target) == attention_of(drafter) == "sdpa"


def _state_of(*models: PreTrainedModel) -> list[Any]:
    """The state of models that graphs depend on: modules and their attributes, without the values of weights."""
    state: list[Any] = [attention_of(model) for model in models]
    for model in models:
        for module in model.modules():
            # Without dicts that are empty except for taps, which other threads may be adding: most dicts of a module are.
            held = [
                (name, of)
                for name, of in vars(module).items()
                if not isinstance(of, dict) or not all(hasattr(entry, "is_tap") for entry in list(of.values()))
            ]
            state.append([(name, _kind_of(of)) for name, of in held])
    return state


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.shape, value.requires_grad
    if isinstance(value, (dict, list, tuple)):
        entries = list(value.items() if isinstance(value, dict) else enumerate(value))
        return [(key, _kind_of(entry)) for key, entry in entries if not hasattr(entry, "is_tap")]
    if isinstance(value, (bool, float, str)):  # no integers: they may be counters, and shapes show sizes
        return value
    return id(value) if callable(value) else type(value)  # a module, a hook, a replaced method


def _is_watched(target: Any, drafter: Any) -> bool:
    """Whether hooks or a dispatch mode observe every forward or operation."""
    is_hooked = any(model._forward_hooks or model._forward_pre_hooks for model in (target, drafter))
    return is_hooked or is_in_torch_dispatch_mode()


def _agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not theirs.is_floating_point():  # token ids, which may differ at near-ties
        return True
    tolerance = TOLERANCES.get(theirs.dtype, LOW_PRECISION_TOLERANCE)
    return bool((mine - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0))


def _tree_tensors(tree: DraftTree | None, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestors [S, S] and depths [S] of a tree's columns, or of a chain's. Padding columns see only themselves."""
    if tree is None:
        return torch.ones(size, size, dtype=torch.bool, device=device).tril(), torch.arange(size, device=device)
    ancestors, width = torch.eye(size, dtype=torch.bool), len(tree.depths)
    ancestors[:width, :width] = tree.ancestors()
    depths = torch.tensor([*tree.depths, *[0] * (size - width)])
    return to_device(ancestors, device), to_device(depths, device)


def _rope_of_images(target: PreTrainedModel) -> Any:
    """The module of an image model that keeps the offset of positions after images; `None`: there is none."""
    return next((module for module in target.modules() if hasattr(module, "rope_deltas")), None)


# Layer types of transformers whose keys and values can be rolled back by a length.
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Model types with attention and linear layers whose running states are known to replay exactly.
HYBRID_FAMILIES = {"kimi_linear", "lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
# Rotary embeddings that change with the length of the text.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    for owner in (decoder, getattr(decoder, "model", None), getattr(target, "model", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(f"{type(target).__name__} has no list of decoder layers to tap: load a decoder-only model.")


def check_pair(target: Any, drafter: PreTrainedModel) -> None:
    """Raises ValueError, with the value and the remedy, unless `drafter` can draft for `target`."""
    if target is drafter:
        raise ValueError("drafter and target are the same object: load the target by AutoModelForCausalLM.")
    name = type(target).__name__
    if getattr(getattr(target, "config", None), "is_encoder_decoder", False):
        raise InexactError(f"{name} is an encoder-decoder model: DFlash drafts for decoder-only causal models.")
    head = target.get_output_embeddings() if hasattr(target, "get_output_embeddings") else None
    if head is None or not hasattr(target, "generate"):
        raise ValueError(f"{name} is not a causal language model: load the target by AutoModelForCausalLM.")
    if (reason := _why_not_lossless(target)) is not None:
        raise InexactError(f"{name} {reason}, so DFlash would not be lossless on it. Use target.generate.")
    if getattr(getattr(target, "active_peft_config", None), "is_prompt_learning", False):
        raise InexactError(f"{name} has a prompt-learning adapter, whose tokens only its generate adds: unload it.")
    # The property that says so has two names, one of which warns.
    if target.training and any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        raise InexactError(f"{name} uses gradient checkpointing, which keeps no cache: call its eval() first.")
    own, config, num_layers = drafter.config, target.config.get_text_config(decoder=True), len(decoder_layers(target))
    for what, mine, theirs in (
        ("hidden_size", own.hidden_size, config.hidden_size),
        ("vocab_size", own.vocab_size or config.vocab_size, config.vocab_size),  # one dialect does not say it
        ("num_target_layers", own.num_target_layers or num_layers, num_layers),
    ):
        if mine != theirs:
            raise ValueError(f"The drafter's {what} is {mine} and the target's is {theirs}: load its own target.")
    if own.target_layer_ids[-1] >= num_layers - 1:
        ids, last = own.target_layer_ids, num_layers - 2
        raise ValueError(f"target_layer_ids={ids} reaches the last of {num_layers} layers: tap up to layer {last}.")


def _why_not_lossless(target: PreTrainedModel) -> str | None:
    """Why a forward over a block would differ from single tokens, or could not be rolled back exactly; `None`: neither."""
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaling in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            return f"has rope_type={kind!r}, whose rotation depends on the longest position of a forward"
    types = set(getattr(config, "layer_types", None) or ())
    others = types - ATTENTION_TYPES
    if config.model_type in HYBRID_FAMILIES and others <= set(LINEAR_TYPES) and types & ATTENTION_TYPES:
        reason = f"keeps a recurrent state that transformers {__version__} cannot roll back (install transformers 5)"
        return reason if LinearAttentionLayer is None else None
    others |= set(getattr(config, "layers_block_type", None) or ()) - {"attention"}  # an older name
    if others or getattr(target, "_is_stateful", False):
        state = ", ".join(sorted(others)) or "stateful"
        return f"keeps a state of its text ({state}) that cannot be rolled back exactly after rejected tokens"
    supports_caches = getattr(target, "_supports_default_dynamic_cache", None)
    if supports_caches is not None and not supports_caches():
        return "keeps its text in a cache of its own, which cannot be rolled back after rejected tokens"
    streams, keys = getattr(config, "altup_num_inputs", None), getattr(config, "index_topk", None)
    if streams is not None:
        return f"carries altup_num_inputs={streams} streams of hidden states between layers, and a drafter reads one"
    return None if keys is None else f"attends to the index_topk={keys} keys that an indexer picks, others for a block"
