"""Who sees whom, and how a block attends: one rule for decoding and training.

A mask is a predicate `(batch, head, query, key) -> bool` over tensors of indices. It is written out densely for SDPA, or
handed to flex attention, which evaluates it inside its kernel and takes the length of the context from the device.
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


# What `config._attn_implementation` says while a step of ours runs, in place of "sdpa". No name may hold the word "flash":
# transformers takes each one that does for a kernel without masks.
GROUPED, CHUNK = "step_grouped", "step_chunk"

# Keys that flex attention skips or reads together.
KEY_BLOCK = 128

# Over at most so many keys flex attention runs as one kernel a layer. Its own choice for few queries divides the keys among
# more processors, and then launches four kernels, which write partial sums in float32.
MOST_KEYS_UNDIVIDED = 4096
UNDIVIDED: Any = {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4}


# `(batch, head, query, key) -> bool`, of index tensors that broadcast.
Predicate = Callable[[torch.Tensor, Any, torch.Tensor, torch.Tensor], torch.Tensor]

_lock = threading.Lock()
_inside: dict[int, list[str]] = {}  # by a config's identity: the attention of the forwards that run on it


def sees(
    query: tuple[torch.Tensor, Any],  # position and block
    key: tuple[torch.Tensor, torch.Tensor],  # likewise; a negative block: context
    anchor: torch.Tensor | int,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Whether a row sees a key, of tensors that broadcast.

    A row sees the context strictly before its anchor and the rows of its own block (only those not after it, if
    `is_causal`), and of these the ones less than `window` positions away (DFlash paper, section 4.2; the per-row rule
    `q - k < W` of the engines).
    """
    (query_position, query_block), (key_position, key_block) = query, key
    in_context = (key_block < 0) & (key_position < anchor)
    in_block = key_block == query_block
    if is_causal:
        in_block = in_block & (key_position <= query_position)
    visible = in_context | in_block
    return visible if window is None else visible & ((query_position - key_position).abs() < window)


def draft_sees(config: Any, layer_idx: int, starts: torch.Tensor, width: int) -> Predicate:
    """What a block of `width` rows from positions `starts` [B] on sees in layer `layer_idx`: key k stands at position k.

    It asks of `starts` alone: the compiler cannot write what is put together of several tensors into the kernel.
    """
    is_causal, window = config.is_layer_causal(layer_idx), config.layer_window(layer_idx)

    def predicate(batch: torch.Tensor, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        start = starts[batch]
        # Neither context nor block: what an earlier forward left after the block.
        key_block = torch.where(key < start, -1, torch.where(key < start + width, 0, -2))
        return sees((start + query, 0), (key, key_block), start, is_causal, window)

    return predicate


def target_sees(positions: torch.Tensor, ancestors: torch.Tensor | None, window: int | None) -> Predicate:
    """What the target's columns at positions [B, S] see: key k at position k up to their own, less than `window` away.

    The columns of a tree lie at the keys from its anchor's position on, whatever their positions; each sees the text and,
    of the tree, its `ancestors`: bool [S, S], itself included.
    """
    starts, width = positions[:, 0], positions.shape[1]

    def predicate(batch: torch.Tensor, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        position = positions[batch, query]
        if ancestors is None:
            visible = key <= position
            return visible if window is None else visible & (position - key < window)
        start = starts[batch]
        column = key - start
        is_column = (column >= 0) & (column < width)
        column = column.clamp(0, width - 1)
        visible = (key < start) | (is_column & ancestors[query, column])
        if window is None:
            return visible
        return visible & (position - torch.where(is_column, positions[batch, column], key) < window)

    return predicate


def written_out(
    predicate: Predicate, batch_size: int, width: int, num_keys: int, device: torch.device
) -> torch.Tensor:
    """The predicate for every query and key, bool [B, S, K]."""
    shape = batch_size, width, num_keys
    batch, query, key = (torch.arange(size, device=device) for size in shape)
    return predicate(batch[:, None, None], None, query[:, None], key).expand(shape)


def step_mask(
    predicate: Predicate,
    starts: torch.Tensor,  # [B] keys before the first query
    width: int,
    num_keys: int,
    window: int | None,
    dtype: torch.dtype | None,
) -> Any:
    """The predicate as an additive mask [B, 1, S, K] of `dtype`; `None`: as flex attention's block mask."""
    if dtype is not None:
        return additive_mask(written_out(predicate, len(starts), width, num_keys, starts.device)[:, None], dtype)
    indices = torch.arange(-(-num_keys // KEY_BLOCK), device=starts.device, dtype=torch.int32)
    # Blocks of keys that every query sees whole, then those that ask the predicate. Others are not read.
    num_whole = starts // KEY_BLOCK if window is None else torch.zeros_like(starts)
    first = num_whole if window is None else (starts - window + 1).clamp(min=0) // KEY_BLOCK
    num_partial = (starts + width - 1) // KEY_BLOCK - first + 1
    partial = (first[:, None] + indices).clamp(max=len(indices) - 1)
    return BlockMask.from_kv_blocks(
        num_partial[:, None, None].int(),
        partial[:, None, None].int(),
        num_whole[:, None, None].int(),
        indices.expand(len(starts), 1, 1, -1).contiguous(),
        BLOCK_SIZE=KEY_BLOCK,
        mask_mod=predicate,
        seq_lengths=(width, num_keys),
        compute_q_blocks=False,  # they serve gradients alone
    )


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, the dtype's minimum elsewhere: the one form that SDPA and eager attention both read."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def chunk_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As "sdpa", but without a mask the last keys are the queries' own: a prompt's later chunk needs no mask then."""
    width, num_keys = query.shape[2], key.shape[2]
    if attention_mask is not None or width == num_keys or kwargs.get("is_causal") is False:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    is_shared, bias = query.shape[1] != key.shape[1], causal_lower_right(width, num_keys)
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=kwargs.get("scaling"), enable_gqa=is_shared
    )
    return output.transpose(1, 2).contiguous(), None


def grouped_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As `chunk_attention`, but under a mask [B or 1, 1, S, K] keys and values are not copied for each head of a group.

    The queries [B, H, S, E] of a group become more rows of one head of the keys [B, G, K, E]: [B, S, H, E], up to rounding.
    A block mask makes it flex attention.
    """
    if isinstance(attention_mask, BlockMask):
        return flex_step_attention(module, query, key, value, attention_mask, **kwargs)
    (batch, heads, width, size), num_shared = query.shape, query.shape[1] // key.shape[1]
    is_plain = attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[1] != 1
    if is_plain or num_shared == 1 or kwargs.get("position_bias") is not None:
        return chunk_attention(module, query, key, value, attention_mask, **kwargs)
    output = functional.scaled_dot_product_attention(
        query.reshape(batch, -1, num_shared * width, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, num_shared, 1),
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def flex_step_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention under a block mask, which reads the keys in use alone; to be compiled."""
    _, heads, width, size = query.shape
    # The output takes the query's strides: token by token, as the next product reads it, there is nothing to copy.
    rows = query.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    query = rows.as_strided(query.shape, (width * heads * size, size, heads * size, 1))
    is_short = query.device.type == "cuda" and key.shape[2] <= MOST_KEYS_UNDIVIDED
    options, scale = UNDIVIDED if is_short else None, kwargs.get("scaling")
    output: Any = flex_attention(
        query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True, kernel_options=options
    )
    return output.transpose(1, 2).contiguous(), None


def _chunk_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """No mask where it would be causal alone: without a window, padding or what an image adds."""
    is_causal_alone = kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", True)
    if local_size is None and is_causal_alone:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, local_size=local_size, **kwargs)


def attention_of(model: PreTrainedModel) -> str:
    """The attention that a model was loaded with, also while a step of another thread runs on it."""
    implementation = model.config._attn_implementation
    return "sdpa" if implementation in (GROUPED, CHUNK) else str(implementation)


@contextmanager
def step_attention(model: PreTrainedModel, name: str = GROUPED) -> Iterator[None]:
    """Forwards of `model` inside attend by `grouped_attention` if they would by "sdpa"; `name` says how masks are made.

    Threads may be inside at once, also with two names: under either a forward attends right by the mask that it has.
    """
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
# An additive mask, made once per forward: SDPA would make one of a bool mask in every layer.
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
ALL_MASK_ATTENTION_FUNCTIONS.register(CHUNK, _chunk_mask)
