"""What a target is: its layers, its taps, the masks that it takes, what its family needs, and which targets are refused.

`Target` runs its two forwards: over a prompt, and over a block to verify. Nothing else in the loop calls the target.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import __version__
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from .attention_dflash import additive_mask, attention_of, step_attention, target_sees
from .cache_dflash import CACHE_NAME, CACHE_NAMES, LinearAttentionLayer, PreallocatedCache, in_this_thread, to_device


# Layer types of transformers whose keys and values can be rolled back by a length.
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Those of them whose mask this loop can make for several sequences or a tree.
MASKED_TYPES = {"full_attention", "sliding_attention"}
# Layer types whose running states can be replayed.
LINEAR_TYPES = ("linear_attention", "conv")
# Model types with attention and linear layers whose running states are known to replay exactly.
HYBRID_FAMILIES = {
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
# Multimodal targets whose text after an image is known to be exact, by model_type.
IMAGE_FAMILIES = {
    "gemma3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
}
# Rotary embeddings that change with the length of the text.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}


class InexactError(ValueError):
    """A request that the loop cannot run exactly, and the target's own `generate` can."""


# -- what a target consists of


def text_config(target: Any) -> Any:
    """The config of the target's text decoder."""
    return target.config.get_text_config(decoder=True)


def layer_types(target: Any) -> list[str]:
    """The type of each layer; empty if the config does not name them."""
    return list(getattr(text_config(target), "layer_types", None) or ())


def counts_hidden_tokens(target: Any) -> bool:
    """Whether tokens that the mask hides change the target's text: they fill its windows, or pass through its states."""
    types = layer_types(target)
    if not types:
        return getattr(text_config(target), "sliding_window", None) is not None
    return set(types) != {"full_attention"}


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    for owner in (decoder, getattr(decoder, "model", None), getattr(target, "model", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    name = type(target).__name__
    raise ValueError(f"{name} has no list of decoder layers to tap: load a decoder-only model.")


def linear_mixers(target: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules with a running state, by layer. Raises ValueError if a linear layer does not have exactly one."""
    mixers = {}
    for index, (layer, layer_type) in enumerate(zip(decoder_layers(target), layer_types(target), strict=False)):
        if layer_type not in LINEAR_TYPES:
            continue
        stateful = [child for child in layer.children() if getattr(child, "layer_idx", None) == index]
        if len(stateful) != 1:
            given = f"Layer {index}, a {layer_type}, shows {len(stateful)} states, not 1"
            raise ValueError(f"{given}: use target.generate.")
        mixers[index] = stateful[0]
    return mixers


def cache_name(target: nn.Module) -> str:
    """The name of the cache in the target's forward. Code that a checkpoint carries may know the older name only."""
    parameters = inspect.signature(target.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAME)


def max_positions(target: PreTrainedModel) -> int | None:
    """The target's number of positions, including rope scaling; `None` if its config does not say."""
    config = text_config(target)
    limit = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor = scaling.get("factor")
    if limit is None or not isinstance(factor, (int, float)):
        return limit
    original = scaling.get("original_max_position_embeddings") or limit
    return max(limit, int(original * factor))


@dataclass(frozen=True)
class Layout:
    """Properties of a target that a forward depends on."""

    taps: tuple[int, ...]  # layers whose outputs the drafter reads
    tapped_layers: tuple[nn.Module, ...]
    types: tuple[str, ...]  # its layer types, each once
    window: int | None  # of sliding layers
    # Whether its forward does not accept 4-D masks: linear layers, attention kernels without masks, positions shifted by
    # images, or modelling code that makes its own.
    makes_own_masks: bool
    shares_keys: bool  # whether layers read the keys of earlier ones
    cache_name: str  # the name of the cache in its forward
    rope: Any  # the module of an image model that keeps the offset of positions after images; None: there is none

    @classmethod
    def of(cls, target: PreTrainedModel, taps: Sequence[int]) -> Layout:
        """The layout of `target`, whose layers `taps` are read."""
        config = text_config(target)
        types = tuple(dict.fromkeys(layer_types(target)))
        takes_masks = target._supports_attention_backend and attention_of(target) in ("sdpa", "eager")
        is_plain = takes_masks and set(types) <= MASKED_TYPES
        is_text_alone = config is target.config  # its modules need no search, which takes a millisecond
        parts = () if is_text_alone else target.modules()
        rope = next((module for module in parts if hasattr(module, "rope_deltas")), None)
        return cls(
            taps=tuple(taps),
            tapped_layers=tuple(decoder_layers(target)[tap] for tap in taps),
            types=types,
            window=getattr(config, "sliding_window", None),
            makes_own_masks=not is_plain or rope is not None,
            shares_keys=bool(getattr(config, "num_kv_shared_layers", 0)),
            cache_name=cache_name(target),
            rope=rope,
        )

    def masks(
        self,
        positions: torch.Tensor,  # [B, S]
        num_keys: int,
        dtype: torch.dtype,
        ancestors: torch.Tensor | None = None,
    ) -> Any:
        """The additive mask of columns at `positions`, by layer type where types differ.

        `ancestors` [B, S, S] are the columns of a tree that each column sees; `None`: a chain.
        """

        def of_window(window: int | None) -> torch.Tensor:
            visible = target_sees(positions, num_keys, ancestors, window)
            return additive_mask(visible[:, None], dtype)

        def of_type(name: str) -> torch.Tensor | None:
            if name in LINEAR_TYPES:
                return None
            return of_window(self.window if name == "sliding_attention" else None)

        if len(self.types) > 1:
            return {name: of_type(name) for name in self.types}
        if self.types == ("full_attention",):
            return of_window(None)
        return of_window(self.window)


# -- its forwards


@contextmanager
def tapped(layers: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The outputs of `layers`, filled by the forward of this thread inside the `with`.

    Hooks exist during this forward alone and record this thread, so several threads can generate on one target.
    """
    states: list[torch.Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output if isinstance(output, torch.Tensor) else output[0])

    hook: Any = in_this_thread(record)
    hook.is_tap = True  # gone after this forward, so the model counts as unchanged
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def tapped_forward(target: Any, layout: Layout, cache: Cache, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target's forward, and the concatenated outputs of the layers that are tapped, [B, S, L * D]."""
    inputs |= {layout.cache_name: cache, "use_cache": True, "return_dict": True}
    if torch.compiler.is_compiling():  # hooks cannot be added there; the states of other layers are unused
        output = target(**inputs, output_hidden_states=True)
        states = [output.hidden_states[tap + 1] for tap in layout.taps]
    else:
        with tapped(layout.tapped_layers) as states:
            output = target(**inputs)
    device = states[0].device
    features = [state.to(device) for state in states]
    return output.logits, torch.cat(features, dim=-1)


def masked_forward(
    target: Any,
    layout: Layout,
    cache: Cache,
    token_ids: torch.Tensor,  # [B, S]
    positions: torch.Tensor,  # [B, S]
    num_keys: int,
    ancestors: torch.Tensor | None = None,
    **inputs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tapped_forward` of columns at `positions`, with this loop's own masks over `num_keys` keys."""
    masks = layout.masks(positions, num_keys, target.dtype, ancestors)
    inputs |= {"input_ids": token_ids, "position_ids": positions, "attention_mask": masks}
    return tapped_forward(target, layout, cache, **inputs)


def head(target: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The target's head over the drafter's hidden states [B, N, D]: logits [B, N, V]."""
    layer = target.get_output_embeddings()
    weight = next(layer.parameters(), None)
    if weight is None or not weight.is_floating_point():  # quantised
        hidden_states = hidden_states.to(target.dtype)
    else:
        hidden_states = hidden_states.to(weight.dtype)
    # Offloaded weights are on "meta" between calls; their hooks fetch them and move the input.
    if weight is not None and not weight.is_meta:
        hidden_states = hidden_states.to(weight.device)
    return layer(hidden_states)


def _last_logits(logits: torch.Tensor, last_columns: list[int], width: int) -> torch.Tensor:
    """Logits [B, 1, V] of each sequence's last column, of those of all of them that a forward of `width` columns has kept."""
    columns = sorted(set(last_columns))
    if logits.shape[1] == width:  # some forwards ignore `logits_to_keep`
        columns = list(range(width))
    last_logits = []
    for place, column in enumerate(last_columns):
        index = columns.index(column)
        last_logits.append(logits[place, index : index + 1])
    return torch.stack(last_logits)


class Target:
    """The forwards of a target for one request. `prompt_inputs` are further inputs of a single prompt, such as images.

    Each returns logits and context features [B, S, L * D] of its columns, and appends them to the cache.
    """

    def __init__(
        self, model: PreTrainedModel, taps: Sequence[int], prompt_inputs: Mapping[str, Any] | None = None
    ) -> None:
        self.model: Any = model
        self.layout = Layout.of(model, taps)
        self.mixers = linear_mixers(model)
        self.num_layers = len(decoder_layers(model))
        self._prompt_inputs = dict(prompt_inputs or {})
        self._offset = 0  # position of a token minus the number of tokens before it, after an image

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [B, N, V] of the drafter's hidden states [B, N, D]."""
        return head(self.model, hidden_states)

    def read(
        self,
        token_ids: torch.Tensor,  # [B, S]
        cache: PreallocatedCache,
        num_real: Sequence[int],  # columns of each sequence before its padding; 0: its text has ended
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads a chunk of the prompts; logits of each sequence's last token only, [B, 1, V].

        Padding is rolled back; the chunk cannot be.
        """
        width = token_ids.shape[1]
        inputs: dict[str, Any] = self._positions(token_ids, cache)
        is_image_prompt = cache.get_seq_length() == 0 and bool(self._prompt_inputs)
        if is_image_prompt:
            inputs = dict(self._prompt_inputs)
        last_columns = [max(count, 1) - 1 for count in num_real]
        num_padding = [width - count for count in num_real]
        has_padding = any(num_padding)
        # As a number, which a checkpoint's own code may require. With a number Gemma 4 skips columns in layers that share keys.
        inputs["logits_to_keep"] = 1
        if has_padding or self.layout.shares_keys:
            columns = torch.tensor(sorted(set(last_columns)))
            inputs["logits_to_keep"] = to_device(columns, token_ids.device)
        num_recorded = width if has_padding else 0
        num_appended = [width] * len(num_real)
        with cache.recording(num_recorded), cache.appending(None, num_appended):
            logits, features = self._forward(token_ids, cache, inputs)
        if has_padding:
            cache.rollback(num_padding)
        if is_image_prompt and self.layout.rope is not None:
            self._offset = self._offset_after(width)
        return _last_logits(logits, last_columns, width), features

    def verify(self, token_ids: torch.Tensor, cache: PreallocatedCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, S, V] of anchors and proposals, token_ids [B, S]. All of its columns can be rolled back."""
        width = token_ids.shape[1]
        with cache.recording(width):
            if cache.is_ragged:
                return self.verify_columns(token_ids, cache)
            return self._forward(token_ids, cache, self._positions(token_ids, cache))

    def verify_columns(
        self,
        token_ids: torch.Tensor,  # [B, S]
        cache: PreallocatedCache,
        depths: torch.Tensor | None = None,  # [B, S]
        ancestors: torch.Tensor | None = None,  # bool [B, S, S]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `verify`, inside `recording`, with masks of its own: for a batch, or for trees, whose columns are at `depths`."""
        num_sequences, width = token_ids.shape
        device = token_ids.device
        starts = cache.lengths_on(device)[:, None]
        columns = torch.arange(width, device=device)
        slots = starts + columns
        positions = slots if depths is None else starts + depths
        num_keys = max(cache.lengths) + width
        masks = self.layout.masks(positions, num_keys, self.model.dtype, ancestors)
        inputs = {"position_ids": positions, "attention_mask": masks}
        counts = [width] * num_sequences
        with cache.appending(slots, counts):
            return self._forward(token_ids, cache, inputs)

    def _forward(
        self, token_ids: torch.Tensor, cache: PreallocatedCache, inputs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # On a CPU a single column attends in the same way without the attention of a step.
        is_plain = token_ids.numel() == 1 and token_ids.device.type == "cpu"
        with nullcontext() if is_plain else step_attention(self.model):
            return tapped_forward(self.model, self.layout, cache, input_ids=token_ids, **inputs)

    def _positions(self, token_ids: torch.Tensor, cache: PreallocatedCache) -> dict[str, torch.Tensor]:
        """Explicit positions after an image, where the model would use the offset of the prompt that it saw last."""
        if self.layout.rope is None:
            return {}
        start = cache.get_seq_length()
        columns = torch.arange(start, start + token_ids.shape[1], device=token_ids.device)
        return {"position_ids": columns[None] + self._offset}

    def _offset_after(self, width: int) -> int:
        """The offset of positions after a prompt of `width` tokens with images."""
        # `generate` of transformers 5 has prepared positions, [3, 1, S], or [4, 1, S] with the text's own first.
        prepared = self._prompt_inputs.get("position_ids")
        if prepared is None:  # the model has computed them
            return int(self.layout.rope.rope_deltas)
        return int(prepared[-3:].max() + 1 - width)


# -- which targets are refused


def check_pair(target: Any, drafter: PreTrainedModel) -> None:
    """Raises ValueError, with the value and the remedy, unless `drafter` can draft for `target`."""
    if target is drafter:
        raise ValueError("drafter and target are the same object: load the target by AutoModelForCausalLM.")
    name = type(target).__name__
    if getattr(getattr(target, "config", None), "is_encoder_decoder", False):
        raise InexactError(f"{name} is an encoder-decoder model: DFlash drafts for decoder-only causal models.")
    has_head = hasattr(target, "get_output_embeddings") and target.get_output_embeddings() is not None
    if not has_head or not hasattr(target, "generate"):
        raise ValueError(f"{name} is not a causal language model: load the target by AutoModelForCausalLM.")
    reason = _why_not_lossless(target)
    if reason is not None:
        raise InexactError(f"{name} {reason}, so DFlash would not be lossless on it. Use target.generate.")
    if getattr(getattr(target, "active_peft_config", None), "is_prompt_learning", False):
        raise InexactError(f"{name} has a prompt-learning adapter, whose tokens only its generate adds: unload it.")
    # The property that says so has two names, one of which warns.
    if target.training and any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        raise InexactError(f"{name} uses gradient checkpointing, which keeps no cache: call its eval() first.")
    _check_sizes(target, drafter.config)


def _check_sizes(target: Any, drafter_config: Any) -> None:
    """Raises ValueError unless the drafter was made for a target of this size."""
    config = text_config(target)
    num_layers = len(decoder_layers(target))
    sizes = {
        "hidden_size": (drafter_config.hidden_size, config.hidden_size),
        # One dialect names no vocabulary.
        "vocab_size": (drafter_config.vocab_size or config.vocab_size, config.vocab_size),
        "num_target_layers": (drafter_config.num_target_layers or num_layers, num_layers),
    }
    for name, (own, of_target) in sizes.items():
        if own != of_target:
            raise ValueError(f"The drafter's {name} is {own} and the target's is {of_target}: load its own target.")
    taps = drafter_config.target_layer_ids
    if taps[-1] >= num_layers - 1:
        given = f"target_layer_ids={taps} reaches the last of {num_layers} layers"
        raise ValueError(f"{given}: tap up to layer {num_layers - 2}.")


def _why_not_lossless(target: PreTrainedModel) -> str | None:
    """Why a forward over a block would differ from single tokens, or could not be rolled back exactly; `None`: neither."""
    config = text_config(target)
    rope_type = _length_dependent_rope(config)
    if rope_type is not None:
        return f"has rope_type={rope_type!r}, whose rotation depends on the longest position of a forward"
    types = set(layer_types(target))
    unknown = types - ATTENTION_TYPES
    if config.model_type in HYBRID_FAMILIES and unknown <= set(LINEAR_TYPES) and types & ATTENTION_TYPES:
        if LinearAttentionLayer is not None:
            return None
        return f"keeps a recurrent state that transformers {__version__} cannot roll back (install transformers 5)"
    unknown |= set(getattr(config, "layers_block_type", None) or ()) - {"attention"}  # an older name
    if unknown or getattr(target, "_is_stateful", False):
        state = ", ".join(sorted(unknown)) or "stateful"
        return f"keeps a state of its text ({state}) that cannot be rolled back exactly after rejected tokens"
    supports_caches = getattr(target, "_supports_default_dynamic_cache", None)
    if supports_caches is not None and not supports_caches():
        return "keeps its text in a cache of its own, which cannot be rolled back after rejected tokens"
    num_streams = getattr(config, "altup_num_inputs", None)
    if num_streams is not None:
        return (
            f"carries altup_num_inputs={num_streams} streams of hidden states between layers, and a drafter reads one"
        )
    num_indexed = getattr(config, "index_topk", None)
    if num_indexed is not None:
        return f"attends to the index_topk={num_indexed} keys that an indexer picks, others for a block"
    return None


def _length_dependent_rope(config: Any) -> str | None:
    """The `rope_type` of a target whose rotation depends on the length of a forward."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for scaling in (parameters, *by_layer_type):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            return str(kind)
    return None
