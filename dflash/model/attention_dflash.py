"""Attention masks and functions, the same for decoding and training.

A mask is a predicate `(batch, head, query, key) -> bool` over index tensors. SDPA gets it as a dense tensor. Flex attention
evaluates it inside its kernel and reads the length of the context on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel


# `config._attn_implementation` during a step, in place of "sdpa". The names must not contain "flash": transformers would take
# them for kernels without masks.
GROUPED, CHUNK = "step_grouped", "step_chunk"
KEY_BLOCK = 128  # number of keys that flex attention reads or skips together
# Up to this number of keys, flex attention runs as one kernel per layer. Its default for few queries divides the keys among
# more processors and launches four kernels, which write partial sums in float32.
MOST_KEYS_UNDIVIDED = 4096
UNDIVIDED: Any = {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4}
# `(batch, head, query, key) -> bool` over index tensors that broadcast.
Predicate = Callable[[torch.Tensor, Any, torch.Tensor, torch.Tensor], torch.Tensor]

_lock = threading.Lock()
_inside: dict[int, list[str]] = {}  # by id of a config: the attention of the forwards that run on it


def sees(
    query: tuple[torch.Tensor, Any],  # position and block
    key: tuple[torch.Tensor, torch.Tensor],  # likewise; a negative block: context
    anchor: torch.Tensor | int,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Whether a query sees a key, for tensors that broadcast.

    A query sees the context strictly before its anchor and its own block (if `is_causal`, only positions up to its own), in
    both only keys less than `window` positions away (DFlash paper, section 4.2; the engines' rule `q - k < W`).
    """
    (query_position, query_block), (key_position, key_block) = query, key
    in_context = (key_block < 0) & (key_position < anchor)
    in_block = key_block == query_block
    if is_causal:
        in_block = in_block & (key_position <= query_position)
    visible = in_context | in_block
    return visible if window is None else visible & ((query_position - key_position).abs() < window)


def draft_sees(config: Any, layer_idx: int, starts: torch.Tensor, width: int) -> Predicate:
    """The mask in layer `layer_idx` of a block of `width` positions from starts [B]. Key k is at position k."""
    # The predicate reads no other tensor: the compiler cannot inline an expression of several tensors into the kernel.
    is_causal, window = config.is_layer_causal(layer_idx), config.layer_window(layer_idx)

    def predicate(batch: torch.Tensor, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        start = starts[batch]
        # -2: neither context nor block, but keys of an earlier forward after the block.
        key_block = torch.where(key < start, -1, torch.where(key < start + width, 0, -2))
        return sees((start + query, 0), (key, key_block), start, is_causal, window)

    return predicate


def target_sees(positions: torch.Tensor, ancestors: torch.Tensor | None, window: int | None) -> Predicate:
    """The mask of the target's columns at positions [B, S]: keys up to their own position, less than `window` away.

    Key k is at position k. Only the columns of a tree are stored in order from its anchor's position, whatever their own
    positions; each sees the text and its `ancestors`, bool [S, S], itself included.
    """
    starts, width = positions[:, 0], positions.shape[1]

    def predicate(batch: torch.Tensor, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        position, key_position = positions[batch, query], key
        if ancestors is None:
            visible = key <= position
        else:
            column = key - starts[batch]
            is_column = (column >= 0) & (column < width)
            index = column.clamp(0, width - 1)
            visible = (column < 0) | (is_column & ancestors[query, index])
            key_position = torch.where(is_column, positions[batch, index], key)
        return visible if window is None else visible & (position - key_position < window)

    return predicate


def written_out(mask: Predicate, batch_size: int, width: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """The predicate as a dense mask, bool [B, S, K]."""
    shape = batch_size, width, num_keys
    batch, query, key = (torch.arange(size, device=device) for size in shape)
    return mask(batch[:, None, None], None, query[:, None], key).expand(shape)


def step_mask(
    predicate: Predicate,
    starts: torch.Tensor,  # [B]
    width: int,
    num_keys: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The predicate as an additive mask [B, 1, S, K]."""
    visible = written_out(predicate, len(starts), width, num_keys, starts.device)
    return additive_mask(visible[:, None], dtype)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, the dtype's minimum elsewhere: a mask that both SDPA and eager attention accept."""
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(~visible, torch.finfo(dtype).min)


def chunk_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As "sdpa", but causal attention without a mask is aligned to the last keys, so later chunks of a prompt need no mask."""
    width, num_keys = query.shape[2], key.shape[2]
    if attention_mask is not None or width == num_keys or kwargs.get("is_causal") is False:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    is_shared, bias, scale = query.shape[1] != key.shape[1], causal_lower_right(width, num_keys), kwargs.get("scaling")
    output = functional.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=is_shared)
    return output.transpose(1, 2).contiguous(), None


def grouped_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As `chunk_attention`, but with a mask [B or 1, 1, S, K] keys and values are not repeated for each head of a group.

    The queries [B, H, S, E] of a group are stacked as queries of one head. With a block mask, flex attention is used.
    """
    if isinstance(attention_mask, BlockMask):
        return flex_step_attention(module, query, key, value, attention_mask, **kwargs)
    (batch, heads, width, size), num_shared = query.shape, query.shape[1] // key.shape[1]
    is_plain = attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[1] != 1
    if is_plain or num_shared == 1 or kwargs.get("position_bias") is not None:
        return chunk_attention(module, query, key, value, attention_mask, **kwargs)
    query, mask = query.reshape(batch, -1, num_shared * width, size), attention_mask.repeat(1, 1, num_shared, 1)
    dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    output = functional.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    return output.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def flex_step_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention with a block mask, which reads only the keys in use. To be compiled."""
    _, heads, width, size = query.shape
    # The output inherits the query's strides. Stored token by token, it needs no copy for the output projection.
    by_token = query.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    query = by_token.as_strided(query.shape, (width * heads * size, size, heads * size, 1))
    is_short = query.device.type == "cuda" and key.shape[2] <= MOST_KEYS_UNDIVIDED
    options, scale = UNDIVIDED if is_short else None, kwargs.get("scaling")
    output: Any = flex_attention(
        query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True, kernel_options=options
    )
    return output.transpose(1, 2).contiguous(), None


def _chunk_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """`None` where the mask would be only causal: without a window, padding or images."""
    is_causal_alone = kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", True)
    if local_size is None and is_causal_alone:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, local_size=local_size, **kwargs)


def attention_of(model: PreTrainedModel) -> str:
    """The attention that a model was loaded with, also during a step of another thread."""
    implementation = model.config._attn_implementation
    return "sdpa" if implementation in (GROUPED, CHUNK) else str(implementation)


@contextmanager
def step_attention(model: PreTrainedModel, name: str = CHUNK) -> Iterator[None]:
    """Replaces "sdpa" by `grouped_attention` in forwards inside, of any thread; `name` selects how masks are made."""
    config = model.config.get_text_config(decoder=True)
    if not model._supports_attention_backend or config._attn_implementation not in ("sdpa", GROUPED, CHUNK):
        yield
        return
    with _lock:
        _inside.setdefault(id(config), []).append(name)
        config._attn_implementation = name
    try:
        yield
    finally:
        with _lock:
            others = _inside[id(config)]
            others.remove(name)
            config._attn_implementation = others[-1] if others else "sdpa"
            if not others:
                del _inside[id(config)]


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
ALL_ATTENTION_FUNCTIONS.register(CHUNK, grouped_attention)
# An additive mask is made once per forward; SDPA would convert a boolean one in every layer.
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
ALL_MASK_ATTENTION_FUNCTIONS.register(CHUNK, _chunk_mask)
