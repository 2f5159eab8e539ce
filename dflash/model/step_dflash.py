"""The target's forward and the drafter's: each one function, run eagerly or compiled.

`verify` and `draft` are the two forwards. Layers are tapped in `tapped_forward`, masks by layer type are made in
`Layout.masks` and `DFlashDraftModel.step_masks`, and nowhere else. `Pair` runs them for a request. `CompiledPair` compiles
them, and `whole_step`: draft, head, choice, verify and accept in one function whose lengths and anchors stay on the device.

On a device with a queue every shape is one of few, and the pair lends the storage of both caches to one text after another,
so a second text records nothing. Elsewhere one compilation serves all lengths. What cannot be compiled, or computes something
else than eagerly, runs eagerly, and one warning says why.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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

from .attention_dflash import CHUNK, attention_of, step_attention, step_mask, target_sees
from .cache_dflash import (
    LINEAR_TYPES,
    PreallocatedCache,
    PreallocatedLayer,
    chosen,
    is_supported,
    linear_mixers,
    to_device,
)
from .proposals_dflash import DraftTree, LatencyCurve, clock, measured_curve
from .verification_dflash import Sampler, Verdict, choose_greedy, verify_match


logger = logging.get_logger(__name__)

BACKEND = "inductor"  # what torch.compile hands the graphs to

# Kinds of device that compute while the host goes on. There shapes are few, and steps are launched before the last is read.
ASYNCHRONOUS = ("cuda",)

FLEX_DEVICES = ("cuda",)  # kinds of device whose compiled steps attend by flex attention

# Sequences and columns of compiled steps on such devices: the next larger is taken. Capacities double from the smallest.
ROW_CLASSES = (1, 2, 4, 8, 16)
WIDTH_CLASSES = (1, 4, 8, 16, 32, 64)
SMALLEST_CAPACITY = 2048

# How far what compiled forwards give may be from what eager ones do, relative to the largest.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 5e-2

# Calls of a compiled function after which it is compared with eager: the first, and on CUDA the first replay of its graph.
COMPARED_CALLS = (1, 3)

# Before a compilation was measured here: the seconds that it takes, and the share of an eager step's time that it saves.
EXPECTED_SECONDS, EXPECTED_SHARE = 60.0, 0.3

# What Inductor is told for CUDA: record graphs, fuse whatever saves a byte, launch small kernels that stand side by side as one.
CUDA_OPTIONS = {"triton.cudagraphs": True, "score_fusion_memory_threshold": 1, "combo_kernels": True}

# Names of what the compiler watches of the models: their modules, attributes and weights.
_OF_MODELS = re.compile(r"\b(models|target|drafter|layout)\b")

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # transformers 4
    _collector = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Layout:
    """What a step has to know of a target."""

    taps: tuple[int, ...]  # the layers whose outputs the drafter reads
    types: tuple[str, ...]  # the kinds of its layers, each once
    window: int | None  # of its sliding layers
    # Whether its forward takes no 4-D mask in place of its own: linear layers, attention kernels without masks, positions
    # that an image has shifted, or modelling code that masks by itself.
    makes_own_masks: bool
    shares_keys: bool  # whether some layers read the keys of earlier ones

    @classmethod
    def of(cls, target: PreTrainedModel, taps: Sequence[int]) -> Layout:
        """That of a target whose layers `taps` are read."""
        config = target.config.get_text_config(decoder=True)
        types = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        takes_masks = target._supports_attention_backend and attention_of(target) in ("sdpa", "eager")
        is_plain = takes_masks and set(types) <= {"full_attention", "sliding_attention"}
        return cls(
            tuple(taps),
            types,
            getattr(config, "sliding_window", None),
            not is_plain or _rope_of_images(target) is not None,
            bool(getattr(config, "num_kv_shared_layers", 0)),
        )

    def masks(
        self,
        positions: torch.Tensor,  # [B, S]
        num_keys: int,
        dtype: torch.dtype | None,
        ancestors: torch.Tensor | None = None,
        is_real: torch.Tensor | None = None,
    ) -> Any:
        """The mask of columns at `positions`, by layer type where types differ; `dtype` `None`: for flex attention."""
        if dtype is None:  # stored: what is computed of several tensors cannot be written into flex attention's kernel
            positions = positions.as_strided(positions.shape, positions.stride())

        def mask(window: int | None) -> Any:
            sees = target_sees(positions, ancestors, window)
            return step_mask(sees, positions[:, 0], positions.shape[1], num_keys, window, dtype)

        def of_type(name: str) -> Any:
            # Linear layers see all but padding: left of a text, where a column of zeros leaves their state as it is.
            return is_real if name in LINEAR_TYPES else mask(self.window if name == "sliding_attention" else None)

        if len(self.types) > 1:
            return {name: of_type(name) for name in self.types}
        return mask(None if self.types == ("full_attention",) else self.window)


def tapped_forward(target: Any, taps: Sequence[int], **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target's forward, and the outputs of its layers `taps` side by side, [B, S, L * D].

    Hooks stand for this forward alone and listen to this thread alone, so two threads may generate on one target.
    """
    inputs |= {"use_cache": True, "return_dict": True}
    if torch.compiler.is_compiling():  # no hook may come and go there; the states of other layers are unused
        output = target(**inputs, output_hidden_states=True)
        return output.logits, torch.cat([output.hidden_states[tap + 1] for tap in taps], dim=-1)
    thread, layers, states = threading.get_ident(), decoder_layers(target), list[torch.Tensor]()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            states.append(output[0] if isinstance(output, tuple) else output)

    hook.is_tap = True  # type: ignore[attr-defined]  # gone before another forward: no change of the model
    handles = [layers[tap].register_forward_hook(hook) for tap in taps]
    try:
        logits = target(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits, torch.cat([state.to(states[0].device) for state in states], dim=-1)


@dataclass(frozen=True)
class Place:
    """Where the columns of a forward stand, and what takes their keys and values."""

    positions: torch.Tensor  # [B, S]
    cache: Cache
    num_keys: int  # to compute with
    ancestors: torch.Tensor | None = None  # which columns of a tree each one sees, [S, S]; None: a chain
    is_flex: bool = False


def verify(target: Any, layout: Layout, token_ids: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, S, V] and context features [B, S, L * D] of token_ids [B, S]."""
    dtype = None if place.is_flex else target.dtype
    return tapped_forward(
        target,
        layout.taps,
        input_ids=token_ids,
        position_ids=place.positions,
        attention_mask=layout.masks(place.positions, place.num_keys, dtype, place.ancestors),
        past_key_values=place.cache,
    )


def draft(
    drafter: Any, noise_embeds: torch.Tensor, features: torch.Tensor, starts: torch.Tensor, place: Place
) -> torch.Tensor:
    """The drafter's last hidden states [B, N, D] of the rows [B, N, D] of a block at `starts` [B], after new context [B, C, L * D]."""
    return drafter(
        noise_embeds=noise_embeds,
        context_hidden_states=features,
        position_ids=place.positions,
        attention_mask=drafter.step_masks(starts, noise_embeds.shape[1], place.num_keys, place.is_flex),
        past_key_values=place.cache,
    ).last_hidden_state


def block_slots(starts: torch.Tensor, counts: torch.Tensor, num_columns: int, block_size: int) -> torch.Tensor:
    """Where the drafter's cache takes each row's first `counts` of C context columns and then its block, [B, C + N].

    The other columns go behind the block, where nothing looks and the next step overwrites them.
    """
    columns = torch.arange(num_columns, device=starts.device)
    columns = torch.where(columns < counts[:, None], columns, columns + block_size)
    block = counts[:, None] + torch.arange(block_size, device=starts.device)
    return starts[:, None] + torch.cat([columns, block], dim=1)


def head(target: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The target's head over the drafter's hidden states [B, N, D]: logits [B, N, V]."""
    layer = target.get_output_embeddings()
    weight = next(layer.parameters(), None)
    device, dtype = hidden_states.device, target.dtype
    if weight is not None:  # a quantised head may show none, or one that is not floating point
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
    """What a step needs of the text, on the device: [R] sequences, of which the host may not know the lengths."""

    anchors: torch.Tensor  # the last committed tokens, [R, 1]
    starts: torch.Tensor  # their positions, [R]: how much text lies in the target's cache
    features: torch.Tensor  # what the target computed in its last step, [R, C, L * D]
    counts: torch.Tensor  # how many columns of it stand and wait for the drafter, [R]


@dataclass(frozen=True)
class Context:
    """What the target computed for text that stands, and the drafter's cache does not hold yet."""

    features: torch.Tensor  # [B, C, L * D]
    num_real: list[int]  # how many of each row's columns, its first ones, stand

    @property
    def counts(self) -> torch.Tensor:
        """`num_real` on the device, [B]."""
        return to_device(torch.tensor(self.num_real), self.features.device)

    @property
    def is_real(self) -> torch.Tensor:
        """Which columns stand, [B, C]."""
        return torch.arange(self.features.shape[1], device=self.features.device) < self.counts[:, None]

    def first(self, count: int) -> Context:
        """Each row's first `count` columns at most."""
        return Context(self.features[:, :count], [min(count, real) for real in self.num_real])

    def of_rows(self, rows: list[int]) -> Context:
        """Without the other rows of the batch."""
        num_real = [self.num_real[row] for row in rows]
        return Context(chosen(self.features[:, : max(num_real)], 0, rows), num_real)

    def state(self, anchors: torch.Tensor, starts: list[int]) -> State:
        """Where sequences stand whose anchors [B, 1] have these positions."""
        return State(anchors, to_device(torch.tensor(starts), anchors.device), self.features, self.counts)


@dataclass(frozen=True)
class Storage:
    """Keys and values of all layers of a model as a compiled forward sees them."""

    keys: list[torch.Tensor]  # [R, G, capacity, E] each
    values: list[torch.Tensor]
    index: torch.Tensor  # its length is the number of keys to compute with: a size that the compiler can leave open
    is_flex: bool

    def place(self, slots: torch.Tensor, positions: torch.Tensor, ancestors: torch.Tensor | None = None) -> Place:
        """Columns whose keys and values go to `slots` [B, S]."""
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
    """`draft` of a block in lent storage, after the context that waits in `state`."""
    slots = block_slots(state.starts - state.counts, state.counts, state.features.shape[1], block_size)
    noise_embeds = drafter.embed(block_ids(drafter, state.anchors, block_size), target.get_input_embeddings())
    return draft(drafter, noise_embeds, state.features, state.starts, storage.place(slots, slots))


@dataclass(frozen=True)
class Shape:
    """What is fixed of a whole step."""

    block_size: int  # rows of a block, anchor included
    num_proposals: int  # to verify
    num_candidates: int = 0  # of its `Sampler`


def whole_step(
    models: tuple[Any, Any, Layout],  # the target, a drafter whose proposals need nothing but its logits, the layout
    state: State,
    storages: tuple[Storage, Storage],  # the target's and the drafter's
    shape: Shape,
    drawn: tuple[torch.Tensor, torch.Tensor] | None,  # uniforms [B, n + 1] and a `Sampler`'s settings; None: greedy
    compared: Sequence[torch.Tensor] | None = None,  # what the step gave before
) -> tuple[torch.Tensor, ...]:
    """Drafts a block for each sequence, verifies and accepts it.

    Gives how many proposals stand, the target's choices, the proposals, the drafter's hidden states, the context features
    and the logits of the choices. The proposals that are `compared` are verified, and the logits of the choices beside them
    given, because others may be equally likely.
    """
    target, drafter, layout = models
    hidden_states = draft_lent(drafter, target, shape.block_size, state, storages[1])
    first = 0 if drafter.config.sample_from_anchor else 1
    proposing = slice(first, first + shape.num_proposals)
    # The head runs on the whole block: the compiler would time a product of 15 rows, padded and not.
    proposals = drafter.propose(
        hidden_states[:, proposing], state.anchors, lambda rows: head(target, hidden_states)[:, proposing]
    )
    if compared is not None:
        proposals = replace(proposals, token_ids=compared[2])
    verified_ids = torch.cat([state.anchors, proposals.token_ids], dim=1)
    logits, features = verify_lent(target, layout, verified_ids, state.starts, storages[0])
    choices = choose_greedy(logits) if drawn is None else Sampler(drawn[1], shape.num_candidates)(logits, drawn[0])
    of_choices = logits.gather(-1, (choices if compared is None else compared[1])[..., None]).squeeze(-1)
    verdict = verify_match(proposals, choices, of_choices if drawn is None else logits.amax(dim=-1))
    return verdict.num_accepted, choices, proposals.token_ids, hidden_states, features.to(drafter.dtype), of_choices


@dataclass
class Loan:
    """Both caches of one (sequences, capacity) class, which the pair lends to one text at a time, from a shelf of such."""

    num_rows: int
    capacity: int
    target_cache: PreallocatedCache
    draft_cache: PreallocatedCache
    shelf: list[Loan]


class NotCompiledError(Exception):
    """What was to run compiled can run only eagerly."""


class CompiledPair:
    """A target and a drafter with their compiled functions and storage: made once, kept as long as both live (`of`).

    Nothing is compiled, and torch's compiler is not even imported, before it is wanted.
    """

    _pairs: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, CompiledPair]] = weakref.WeakKeyDictionary()
    _lock, _locks = threading.Lock(), dict[torch.device, threading.RLock]()
    # Of earlier compilations on a kind of machine: the seconds they took, and the share of a step's time that they save.
    _measured: dict[str, tuple[float, float]] = {}

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        self.is_wanted = False  # whether to compile, whatever eager steps have cost so far
        # Held from a compiled step's beginning until its outputs are copied: graphs write into the same buffers.
        self.lock = self._locks.setdefault(target.device, threading.RLock())
        self._name = f"{type(target).__name__} and {type(drafter).__name__}"
        self._device = target.device
        self._functions: dict[str, Callable[..., Any]] = {}
        self._num_calls: dict[Any, int] = {}
        self._is_flex = target.device.type in FLEX_DEVICES and _may_flex(target, drafter)
        self._machine = f"{target.device.type} {torch.get_num_threads()} {target.dtype}"
        self._shelf: dict[tuple[int, int], list[Loan]] = {}
        self._eager_seconds = self._lost_seconds = self._compile_seconds = 0.0
        self.reason = _why_not(target, drafter)  # why it runs eagerly all the same; None: it does not
        self._models: list[Any] | None = None  # as they were when they were first compiled

    @classmethod
    def of(cls, target: PreTrainedModel, drafter: PreTrainedModel) -> CompiledPair:
        """The one of these two models, as they are now."""
        with cls._lock:
            of_target = cls._pairs.setdefault(target, weakref.WeakKeyDictionary())
            pair = of_target.get(drafter)
            if pair is None or pair._device != target.device:
                pair = of_target[drafter] = cls(target, drafter)
            pair._look_again(target, drafter)
            return pair

    def _look_again(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        """Drops what was compiled for models that are no longer as they were. Once per text: it takes a small forward's time."""
        if self._models is None or _is_watched(target, drafter):
            return
        models = _state_of(target, drafter)
        if models != self._models:
            self._models, self.reason = models, _why_not(target, drafter)
            for of_before in (self._functions, self._num_calls, self._shelf):
                of_before.clear()

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
        """Begins to compile under "auto" once eager steps have lost as much time as compiling is expected to take.

        So it costs at most twice what it would if the future were known ("ski rental"). `seconds` is what an eager step took;
        `None`: a text begins. In mid-text the `num_left` steps that it may still take have to pay by themselves.
        """
        cost, share = self._measured.get(self._machine, (EXPECTED_SECONDS, EXPECTED_SHARE))
        if seconds is not None:
            self._eager_seconds = seconds if not self._eager_seconds else 0.9 * self._eager_seconds + 0.1 * seconds
            self._lost_seconds += share * seconds
        if self.is_active or self.reason is not None or self._lost_seconds < cost:
            return
        if num_left is None or num_left * share * self._eager_seconds >= cost:
            self.is_wanted = True
            logger.info(f"{self._name} are compiled, which takes about {cost:.0f} s once, because they go on running.")

    def note_compiled_step(self, seconds: float) -> None:
        """Takes note of what a compiled step took, for the next pair on this kind of machine."""
        if self._eager_seconds and self._machine in self._measured and seconds < self._eager_seconds:
            cost, share = self._measured[self._machine]
            self._measured[self._machine] = cost, 0.9 * share + 0.1 * (1 - seconds / self._eager_seconds)

    def give_up(self, reason: str) -> None:
        """Runs eagerly from now on and says why, once."""
        self.reason = reason
        logger.warning(f"{self._name} run eagerly and compile has no effect: {reason}.")

    # -- storage

    def lend(self, pair: Pair, num_rows: int, capacity: int) -> Loan:
        """Both caches, empty, for `num_rows` sequences (at most the largest class) of `capacity` tokens."""
        size = next(size for size in ROW_CLASSES if size >= num_rows)
        room = max(SMALLEST_CAPACITY, 1 << (capacity - 1).bit_length())
        with self.lock:
            shelf = self._shelf.setdefault((size, room), [])
            if not shelf:
                draft_cache = PreallocatedCache(pair.drafter.config.num_hidden_layers, room, num_rows, size)
                shelf.append(Loan(size, room, pair.new_cache(room, num_rows, size), draft_cache, shelf))
            loan = shelf.pop()
        for cache in (loan.target_cache, loan.draft_cache):
            cache.set_lengths([0] * num_rows)
        return loan

    def take_back(self, loan: Loan) -> None:
        """For the next text, unless eager steps have let it grow or kept fewer rows. Changed models have another shelf."""
        layers: list[Any] = [*loan.target_cache.layers, *loan.draft_cache.layers]
        with self.lock:
            if all(
                layer.capacity == loan.capacity and (not layer.is_initialized or len(layer.keys) == loan.num_rows)
                for layer in layers
            ):
                loan.shelf.append(loan)

    # -- what runs compiled

    def run(self, models: Any, key: Any, function: Callable[..., Any], given: Callable[[Any], Sequence[Any]]) -> Any:
        """What `function`, compiled, gives for the arguments `given(None)`, or NotCompiledError if it can run only eagerly.

        The first time, and on CUDA once more when its graph is replayed, it is compared with what the function gives eagerly
        for `given(output)`: it writes into lent storage, so to run it twice is to run it once. `key` names it and its shapes.
        """
        if not self.is_active or _is_watched(*models):
            raise NotCompiledError(key)
        is_first = key not in self._num_calls
        if is_first and not self._num_calls:
            # transformers 5 hooks its layers when hidden states are first asked for, under a lock that cannot be captured.
            some_id = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            models[0](input_ids=some_id, use_cache=False, output_hidden_states=True, logits_to_keep=1)
            self._models = _state_of(*models)
        bar = logging.tqdm(total=1, desc=f"Compiling {key[0]} (once)", leave=False, disable=None if is_first else True)
        began = clock()
        try:
            with self.lock, self.attending(models[0]):
                if self._device.type == "cuda":
                    torch.compiler.cudagraph_mark_step_begin()
                output = self.function(key, function)(*given(None))
                if self.is_static:  # the next run of the graph overwrites them
                    output = tree_map(torch.clone, output)
        except Exception as error:  # whatever a model, a quantiser or a missing C++ compiler raises
            if isinstance(error, torch.OutOfMemoryError) or re.search("CUDA error|device-side assert", str(error)):
                raise
            first_line = str(error).strip().partition("\n")[0]
            self.give_up(f"{key[0]} does not compile ({type(error).__name__}: {first_line})")
            raise NotCompiledError(key) from error
        finally:
            bar.close()
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
        """The function, compiled, for what `key` names."""
        kind = str(key)
        if kind not in self._functions:
            # Compilations are kept, and counted against a limit, by code object: each pair and kind has its own.
            code = function.__code__.replace()
            own: Any = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
            options = {"guard_filter_fn": _guards_on_inputs, **(CUDA_OPTIONS if self._device.type == "cuda" else {})}
            settings: Any = {"fullgraph": True, "dynamic": False if self.is_static else None, "options": options}
            self._functions[kind] = torch.compile(own, backend=BACKEND, **settings)
        return self._functions[kind]

    @contextmanager
    def attending(self, target: PreTrainedModel) -> Iterator[None]:
        """Makes the target's forwards attend as compiled steps do."""
        try:
            with step_attention(target):
                yield
        finally:
            # Dynamo of torch 2.13 drops what is set after flex attention: that nothing collects hidden states any more.
            if _collector is not None:
                _collector.reset(None)

    def storage(self, cache: PreallocatedCache, num_keys: int, is_eager: bool = False) -> Storage:
        """What a forward over `num_keys` keys is lent of a cache."""
        if self.is_static:
            keys, values = cache.storage(num_keys)
            for tensor in (*keys, *values):
                torch._dynamo.mark_static_address(tensor, guard=False)
            index = keys[0].new_empty(1).expand(keys[0].shape[2])
        else:
            # Room for one more: the compiler takes two sizes for the same one if they are equal when it first sees them.
            keys, values = cache.storage(num_keys + 1)
            for tensor in (*keys, *values):
                torch._dynamo.mark_dynamic(tensor, [0, 2] if len(cache.lengths) > 1 else [2])
            index = keys[0].new_empty(1).expand(num_keys)
            torch._dynamo.mark_dynamic(index, 0)
        return Storage(keys, values, index, self._is_flex and not is_eager)

    def inputs(self, cache: PreallocatedCache, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of the cache's sequences [B, ...] as a compiled function takes them: [R, ...], marked as they may vary."""
        rows = len(cache.storage(0)[0][0]) if self.is_static else len(cache.lengths)
        taken = []
        for tensor in tensors:
            padded = functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, rows - len(tensor)])
            # Strides of a fresh tensor, also of one that was cut out.
            taken.append(padded.flatten().view(padded.shape))
            if rows > 1 and not self.is_static:
                torch._dynamo.mark_dynamic(taken[-1], 0)
        return taken

    def taken(self, cache: PreallocatedCache, state: State, num_columns: int) -> State:
        """A state as a compiled function takes it."""
        features = functional.pad(state.features, (0, 0, 0, num_columns - state.features.shape[1]))
        return State(*self.inputs(cache, state.anchors, state.starts, features, state.counts))


class Pair:
    """A target and its drafter for one request: the two forwards and what they are placed by.

    `prompt_inputs` is what the forward of a single prompt gets beside its ids: images. Without `compiled` steps run eagerly.

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
        self.target, self.drafter, self.compiled = target, drafter, compiled
        layers = decoder_layers(target)
        self.num_layers = len(layers)
        self.layout = Layout.of(target, drafter.config.target_layer_ids)
        config = target.config.get_text_config(decoder=True)
        self._mixers = linear_mixers(layers, getattr(config, "layer_types", None) or ())
        self._prompt_inputs = dict(prompt_inputs or {})
        self._rope: Any = _rope_of_images(target)
        self._lag = 0  # how far positions after an image lag behind the number of tokens

    def new_cache(self, capacity: int, num_rows: int = 1, num_allocated: int | None = None) -> PreallocatedCache:
        """An empty cache of the kind that the target needs, with room for `capacity` positions at first."""
        return PreallocatedCache(self.num_layers, capacity, num_rows, num_allocated, self._mixers)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embedding rows of token_ids [B, N], on the drafter's device: [B, N, D]."""
        embed: Any = self.drafter.embed  # a drafter may scale them
        return embed(token_ids, self.target.get_input_embeddings()).to(self.drafter.device)

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's head over the drafter's hidden states [B, N, D]: logits [B, N, V]."""
        return head(self.target, hidden_states)

    def forward(
        self,
        token_ids: torch.Tensor,
        cache: PreallocatedCache,
        num_logits: int,
        is_real: torch.Tensor | None = None,
        num_real: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the last `num_logits` columns of token_ids [B, S], and context features of all, where the drafter is.

        The masks are the target's own where the sequences have one length. In a ragged cache is_real [B, S] says which columns
        are tokens and `num_real` how many each row has; default: all. A target with linear layers can roll the columns back
        only if all logits are asked for.
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
        elif self._rope is not None:  # said, because the model would take the lag of whatever prompt it saw last
            places = torch.arange(start, start + width, device=token_ids.device)[None]
            placed = {"position_ids": places + self._lag}
        # Given as a number, Gemma 4 skips the other columns in the layers that share keys and values of earlier ones, and the
        # drafter reads all columns of every tapped layer.
        to_keep = (
            torch.arange(width - num_logits, width, device=token_ids.device) if self.layout.shares_keys else num_logits
        )
        # A later chunk needs no mask. Other forwards are inside too, so that no thread's chunk changes them half-way.
        with cache.recording(width if num_logits == width else 0), step_attention(self.target, CHUNK):
            logits, features = tapped_forward(
                self.target,
                self.layout.taps,
                input_ids=token_ids,
                past_key_values=cache,
                logits_to_keep=to_keep,
                **placed,
            )
        if placed is self._prompt_inputs and self._rope is not None:
            # Where `generate` has prepared positions (transformers 5) they are given: [3, 1, S], or [4, 1, S] with the text's
            # own first. Else the model has found them itself.
            given = self._prompt_inputs.get("position_ids")
            self._lag = int(self._rope.rope_deltas if given is None else given[-3:].max() + 1 - width)
        return logits[:, -num_logits:], features.to(self.drafter.device, self.drafter.dtype)

    def verify(
        self, token_ids: torch.Tensor, cache: PreallocatedCache, tree: DraftTree | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, S, V] and context features [B, S, L * D] of the columns token_ids [B, S], which can be rolled back.

        With a `tree` the columns of the single row are its anchor and nodes.
        """
        if self.layout.makes_own_masks and tree is None and not cache.is_ragged:
            return self.forward(token_ids, cache, token_ids.shape[1])
        if self.compiled is not None:
            with suppress(NotCompiledError):
                return self._verify_compiled(self.compiled, token_ids, cache, tree)
        (num_rows, width), device = token_ids.shape, token_ids.device
        start, num_keys, ancestors = cache.get_seq_length(), max(cache.lengths) + width, None
        if cache.is_ragged:
            starts = to_device(torch.tensor(cache.lengths), device)
            positions = starts[:, None] + torch.arange(width, device=device)
            cache.place(positions, num_keys)
        elif tree is None:
            positions = torch.arange(start, start + width, device=device)[None]
        else:
            ancestors, depths = _tree_tensors(tree, width, device)
            positions = (start + depths)[None]
        with cache.recording(width), step_attention(self.target):
            place = Place(positions, cache, num_keys, ancestors)
            logits, features = verify(self.target, self.layout, token_ids, place)
        if cache.is_ragged:
            cache.advance([width] * num_rows)
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
        """The drafter's last hidden states [B, N, D] after anchors [B, 1]; its cache holds the context then, and no block."""
        if self.compiled is not None and self.compiled.is_active:
            starts = [held + waiting for held, waiting in zip(cache.lengths, context.num_real, strict=True)]
            with suppress(NotCompiledError):
                hidden_states = self.draft_compiled(context.state(anchors, starts), cache, block_size)
                cache.advance(context.num_real)
                return hidden_states
        drafter: Any = self.drafter
        noise_embeds, features = self.embed(block_ids(drafter, anchors, block_size)), context.features
        if not cache.is_ragged:  # the drafter takes positions and mask from its cache
            output = drafter(noise_embeds=noise_embeds, context_hidden_states=features, past_key_values=cache)
            cache.rollback(block_size)
            return output.last_hidden_state
        lengths, counts = to_device(torch.tensor(cache.lengths), features.device), context.counts
        slots = block_slots(lengths, counts, features.shape[1], block_size)
        num_keys = max(cache.lengths) + slots.shape[1]
        cache.place(slots, num_keys)
        hidden_states = draft(drafter, noise_embeds, features, lengths + counts, Place(slots, cache, num_keys))
        cache.advance(context.num_real)
        return hidden_states

    def draft_compiled(
        self, state: State, cache: PreallocatedCache, block_size: int, num_unread: int = 0
    ) -> torch.Tensor:
        """As `draft`, or NotCompiledError, also after `num_unread` steps that the host has not read; no length changes."""
        compiled, columns = self.compiled, self.num_columns(block_size)
        # The second and third: another thread has begun to compile since this one's context was made.
        if compiled is None or state.features.shape[1] > columns or not any(cache.lengths):
            raise NotCompiledError

        def given(output: Any) -> tuple[Any, ...]:
            storage = compiled.storage(cache, max(cache.lengths) + (2 + num_unread) * columns, output is not None)
            return self.drafter, self.target, block_size, compiled.taken(cache, state, columns), storage

        key = self._key("a draft", cache, block_size)
        hidden_states: torch.Tensor = compiled.run((self.target, self.drafter), key, draft_lent, given)
        return hidden_states[: len(state.anchors)]

    def absorb(self, context: Context, cache: PreallocatedCache) -> None:
        """Puts context into the drafter's cache without a block after it."""
        drafter: Any = self.drafter
        columns = torch.arange(context.features.shape[1], device=context.features.device)
        # What is not real is overwritten by what comes next.
        slots = to_device(torch.tensor(cache.lengths), columns.device)[:, None] + columns
        if cache.is_ragged:
            cache.place(slots, max(cache.lengths) + len(columns))
        drafter.absorb(context.features, slots, cache)
        if cache.is_ragged:
            cache.advance(context.num_real)

    def step(
        self,
        state: State,
        caches: tuple[PreallocatedCache, PreallocatedCache],
        shape: Shape,
        drawn: tuple[torch.Tensor, torch.Tensor] | None,
        num_unread: int,
    ) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
        """The verdict, proposals and features of `whole_step`, compiled, or NotCompiledError; no cache's length changes."""
        compiled: Any = self.compiled
        columns = self.num_columns(shape.block_size)

        def given(output: Any) -> tuple[Any, ...]:
            num_keys, is_eager = max(caches[0].lengths) + (2 + num_unread) * columns, output is not None
            storages = tuple(compiled.storage(cache, num_keys, is_eager) for cache in caches)
            taken = compiled.taken(caches[0], state, columns)
            numbers = None if drawn is None else (compiled.inputs(caches[0], drawn[0])[0], drawn[1])
            models = self.target, self.drafter, self.layout
            return models, taken, storages, shape, numbers, output

        key = self._key("a step" if drawn is None else "a sampled step", caches[0], shape)
        outputs = compiled.run((self.target, self.drafter), key, whole_step, given)
        num_accepted, choices, proposed_ids, _, features, _ = (output[: len(state.anchors)] for output in outputs)
        return Verdict(num_accepted, choices), proposed_ids, features

    def num_columns(self, block_size: int) -> int:
        """Columns of a whole step: the anchor and what a block of the drafter proposes."""
        return block_size + bool(self.drafter.config.sample_from_anchor)

    def measured_curve(
        self,
        anchors: torch.Tensor,
        caches: tuple[PreallocatedCache, PreallocatedCache],
        widths: Sequence[int],
        block_size: int,
        grow: Callable[[int], DraftTree] | None,
    ) -> LatencyCurve:
        """The pair's latency curve over `widths` after this text; `grow` makes a tree of so many columns, `None`: no trees."""
        (target_cache, draft_cache), num_rows = caches, len(anchors)
        length = max(target_cache.lengths)

        def run(width: int) -> torch.Tensor:
            logits, _ = self.verify(anchors.expand(-1, width), target_cache)
            target_cache.rollback([width] * num_rows)
            return logits.argmax(dim=-1)

        def run_tree(width: int) -> torch.Tensor:
            assert grow is not None
            tree = grow(width)
            ids = torch.cat([anchors, anchors.new_tensor([tree.token_ids])], dim=1)
            logits, _ = self.verify(ids, target_cache, tree)
            columns = [0, *range(2, ids.shape[1], 2)]
            target_cache.keep_columns(ids.shape[1], columns)
            target_cache.rollback(len(columns))
            return logits.argmax(dim=-1)

        def run_draft() -> torch.Tensor:
            count = min(block_size // 2 + 1, max(1, length))
            size = len(self.drafter.config.target_layer_ids) * self.drafter.config.hidden_size
            weight = self.drafter.get_parameter("norm.weight")
            context = Context(weight.new_zeros(num_rows, count, size), [count] * num_rows)
            hidden_states = self.draft(anchors, context, draft_cache, block_size)
            draft_cache.rollback([count] * num_rows)
            return self.head(hidden_states).argmax(dim=-1)

        is_compiled = self.compiled is not None and self.compiled.is_active
        setting = (num_rows, (length - 1).bit_length(), block_size, is_compiled, grow is not None)
        trees = None if grow is None else run_tree
        return measured_curve((self.target, self.drafter), setting, widths, run, run_draft, trees)

    def _key(self, kind: str, cache: PreallocatedCache, shape: Any) -> tuple[Any, ...]:
        """What a compiled function is kept under: on devices of few shapes with all of them."""
        compiled: Any = self.compiled
        rows = "one sequence" if len(cache.lengths) == 1 else "sequences"
        if not compiled.is_static:
            return f"{kind} of {rows}", shape if isinstance(shape, Shape) else None
        keys = cache.storage(0)[0]
        return f"{kind} of {rows}", shape, tuple(keys[0].shape[:3]) if keys else None


def compiled_pair(target: PreTrainedModel, drafter: PreTrainedModel, compile: bool | str) -> CompiledPair | None:
    """The pair to run by, under `compile`; `None`: eagerly. "auto" compiles once that is expected to pay (`weigh`)."""
    if compile is False:
        return None
    pair = CompiledPair.of(target, drafter)
    if compile is True and not pair.is_wanted:
        pair.is_wanted = True
        if pair.reason is not None:
            pair.give_up(pair.reason)
    if compile == "auto":
        pair.weigh()
    return pair


def _why_not(target: Any, drafter: Any) -> str | None:
    """What of the pair is known not to compile."""
    name, layout = type(target).__name__, Layout.of(target, drafter.config.target_layer_ids)
    others = set(layout.types) - {"full_attention", "sliding_attention"}
    if others:
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
    """Whether flex attention computes what both models' own attention does."""
    is_plain = getattr(target.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is None
    # transformers 4 has no collector: it sets its layers' forwards, and Dynamo would drop that they are set back.
    return _collector is not None and is_plain and attention_of(target) == attention_of(drafter) == "sdpa"


def _guards_on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which guards each step evaluates: not the thousands on the models, which `CompiledPair` looks after."""
    return [not _OF_MODELS.search(guard.name) for guard in guards]


def _state_of(*models: PreTrainedModel) -> list[Any]:
    """What graphs take for granted of models: their modules, with all that decides how these run, but no weight's values."""
    state: list[Any] = [attention_of(model) for model in models]
    for model in models:
        for module in model.modules():
            # Before each text, so without what is empty but for taps, as most of a module is; threads may be setting these.
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
    if isinstance(value, (bool, float, str)):  # an integer may count something, and shapes show what sizes are
        return value
    return id(value) if callable(value) else type(value)  # a module, a hook, a method put over another one


def _is_watched(target: Any, drafter: Any) -> bool:
    """Whether somebody wants to see every forward or every operation: by hooks, or by a dispatch mode."""
    is_hooked = any(model._forward_hooks or model._forward_pre_hooks for model in (target, drafter))
    return is_hooked or is_in_torch_dispatch_mode()


def _agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not theirs.is_floating_point():  # token ids, which may differ where two are equally likely
        return True
    tolerance = TOLERANCES.get(theirs.dtype, LOW_PRECISION_TOLERANCE)
    return bool((mine - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0))


def _tree_tensors(tree: DraftTree | None, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestors [S, S] and depths [S] of a tree's columns, or of a chain's; columns that are no nodes see themselves alone."""
    if tree is None:
        return torch.ones(size, size, dtype=torch.bool, device=device).tril(), torch.arange(size, device=device)
    ancestors, width = torch.eye(size, dtype=torch.bool), len(tree.depths)
    ancestors[:width, :width] = tree.ancestors()
    depths = torch.tensor([*tree.depths, *[0] * (size - width)])
    return to_device(ancestors, device), to_device(depths, device)


def _rope_of_images(target: PreTrainedModel) -> Any:
    """Where a model of images keeps how far the positions after them lag behind the number of tokens; `None`: nowhere."""
    return next((module for module in target.modules() if hasattr(module, "rope_deltas")), None)


# Layer types of transformers whose keys and values can be rolled back by a length.
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

# Targets that mix them with linear layers, and whose linear layers are known to replay exactly.
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
    raise ValueError(f"{type(target).__name__} shows no list of decoder layers to tap: use target.generate.")


def check_pair(target: Any, drafter: PreTrainedModel) -> None:
    """Raises ValueError, with the value and the remedy, unless `drafter` can draft for `target`."""
    if target is drafter:
        raise ValueError("drafter and target are the same object: load the target by AutoModelForCausalLM.")
    name = type(target).__name__
    if getattr(getattr(target, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: DFlash drafts for decoder-only causal models.")
    head = target.get_output_embeddings() if hasattr(target, "get_output_embeddings") else None
    if head is None or not hasattr(target, "generate"):
        raise ValueError(f"{name} is not a causal language model: load the target by AutoModelForCausalLM.")
    reason = _why_not_lossless(target)
    if reason is not None:
        raise ValueError(f"{name} {reason}, so DFlash would not be lossless on it. Use target.generate.")
    if getattr(getattr(target, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(f"{name} has a prompt-learning adapter, whose tokens only its own generate adds: unload it.")
    # The property that says so has two names, one of which warns.
    if target.training and any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        raise ValueError(f"{name} uses gradient checkpointing, which keeps no cache: call its eval() first.")
    own, config, num_layers = drafter.config, target.config.get_text_config(decoder=True), len(decoder_layers(target))
    for what, mine, theirs in (
        ("hidden_size", own.hidden_size, config.hidden_size),
        ("vocab_size", own.vocab_size or config.vocab_size, config.vocab_size),  # one dialect does not say it
        ("num_target_layers", own.num_target_layers or num_layers, num_layers),
    ):
        if mine != theirs:
            raise ValueError(f"The drafter's {what} is {mine} and the target's is {theirs}: it is of another target.")
    if own.target_layer_ids[-1] >= num_layers - 1:
        ids, last = own.target_layer_ids, num_layers - 2
        raise ValueError(f"target_layer_ids={ids} reaches the last of {num_layers} layers: tap up to layer {last}.")


def _why_not_lossless(target: PreTrainedModel) -> str | None:
    """What of the target makes a block another text than its single tokens, or cannot be rolled back exactly."""
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
        return None if is_supported() else reason
    others |= set(getattr(config, "layers_block_type", None) or ()) - {"attention"}  # an older name
    if others or getattr(target, "_is_stateful", False):
        state = ", ".join(sorted(others)) or "stateful"
        return f"keeps a state of its text ({state}) that cannot be rolled back exactly behind rejected tokens"
    supports_caches = getattr(target, "_supports_default_dynamic_cache", None)
    if supports_caches is not None and not supports_caches():
        return "keeps its text in a cache of its own, which cannot be rolled back behind rejected tokens"
    streams, keys = getattr(config, "altup_num_inputs", None), getattr(config, "index_topk", None)
    if streams is not None:
        return f"carries altup_num_inputs={streams} streams of hidden states between layers, and a drafter reads one"
    return None if keys is None else f"attends to the index_topk={keys} keys that an indexer picks, others for a block"
