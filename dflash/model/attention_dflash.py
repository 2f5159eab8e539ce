"""Who sees whom, in one place for decoding and training, for the target and the drafter.

Functions of positions that return masks. They know no model and no cache.

Attention of a block to the keys and values behind it, which its heads share in groups.

Under a 4-D mask transformers copies keys and values once per query head of a group (`repeat_kv`), so a step behind a long
text moves all of it several times. The queries of a group are few: here they stand one behind the other, as more rows of
one head, and every key is read where it lies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel


def block_visibility(
    query_positions: torch.Tensor,  # [B, Q]
    key_positions: torch.Tensor,  # [B, K]
    query_blocks: torch.Tensor,  # [B, Q] which block a row belongs to
    key_blocks: torch.Tensor,  # [B, K] likewise, -1 for a context key
    anchors: torch.Tensor,  # [B, Q] position of the row's anchor
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:  # bool [B, Q, K]
    """What the drafter's rows see: `sees` for each pair of a row and a key."""
    return sees(
        query_positions[:, :, None],
        query_blocks[:, :, None],
        anchors[:, :, None],
        key_positions[:, None],
        key_blocks[:, None],
        is_causal,
        window,
    )


def sees(
    query_position: torch.Tensor,
    query_block: torch.Tensor,
    anchor: torch.Tensor,
    key_position: torch.Tensor,
    key_block: torch.Tensor,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Whether a row sees a key, as numbers or as tensors that broadcast.

    A row sees the context strictly before its anchor and the rows of its own block (only those not after it, if
    `is_causal`), and of these the ones less than `window` positions away (DFlash paper, section 4.2; the per-row rule
    `q - k < W` of the engines).
    """
    in_context = (key_block < 0) & (key_position < anchor)
    in_block = key_block == query_block
    if is_causal:
        in_block = in_block & (key_position <= query_position)
    visible = in_context | in_block
    return visible if window is None else visible & ((query_position - key_position).abs() < window)


def decoding_visibility(
    config: Any,  # DFlashConfig
    row_positions: torch.Tensor,  # [B, N] of one block per row of the batch
    num_keys: int,
) -> dict[str, torch.Tensor]:  # bool [B, 1, N, K] by layer type
    """What the rows of one block see where every key stands at its position: all context before it, and the block."""
    keys = torch.arange(num_keys, device=row_positions.device).expand(len(row_positions), -1)  # [B, K]
    anchors = row_positions[:, :1]
    is_block = (keys >= anchors) & (keys < anchors + row_positions.shape[1])
    # Neither context nor block: what an earlier forward left behind the row's end.
    key_blocks = torch.where(is_block, 0, torch.where(keys < anchors, -1, -2))
    return {
        layer_type: block_visibility(
            row_positions,
            keys,
            torch.zeros_like(row_positions),
            key_blocks,
            anchors.expand_as(row_positions),
            config.is_layer_causal(layer),
            config.layer_window(layer),
        )[:, None]
        for layer, layer_type in enumerate(config.layer_types)
    }


def causal_visibility(
    query_positions: torch.Tensor,  # [B, Q]
    key_positions: torch.Tensor,  # [B, K]
    window: int | None,
) -> torch.Tensor:  # bool [B, Q, K]
    """What the target's rows see: what is not after them, and less than `window` positions away."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def tree_visibility(
    starts: torch.Tensor,  # [B] keys of each row that are text
    ancestors: torch.Tensor,  # bool [S, S] which columns of the tree each one sees
    depths: torch.Tensor,  # [S] how far each stands behind the first
    num_keys: int,
    window: int | None,
) -> torch.Tensor:  # bool [B, S, K]
    """What the target's rows see of a draft tree at keys `starts .. starts + S - 1`: the text, and their own ancestors.

    Distances are those of positions: a column stands as many tokens behind the text as its path is long.
    """
    keys = torch.arange(num_keys, device=starts.device)[None]  # [1, K]
    columns = keys - starts[:, None]  # [B, K] of the tree, where they are one
    in_tree = (columns >= 0) & (columns < len(depths))
    columns = columns.clamp(0, len(depths) - 1)
    visible = (keys < starts[:, None])[:, None] | (in_tree[:, None] & ancestors[:, columns].transpose(0, 1))
    if window is None:
        return visible
    key_positions = torch.where(in_tree, starts[:, None] + depths[columns], keys)
    return visible & ((starts[:, None] + depths)[:, :, None] - key_positions[:, None] < window)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, the dtype's minimum elsewhere: the one form that SDPA and eager attention both read."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


# What `config._attn_implementation` says while a step of ours runs, in place of "sdpa".
GROUPED = "dflash_grouped"

_lock = threading.Lock()
_num_inside: dict[int, int] = {}  # by a config's identity: forwards that run on it as GROUPED


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, S, E]
    key: torch.Tensor,  # [B, G, K, E], G divides H
    value: torch.Tensor,  # likewise
    attention_mask: torch.Tensor | None,  # [B or 1, 1, S, K]
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [B, S, H, E]
    """What transformers' "sdpa" gives, up to rounding: exactly that where there is no mask or no group to share."""
    num_shared = query.shape[1] // key.shape[1]
    is_plain = attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[1] != 1
    if is_plain or num_shared == 1 or kwargs.get("position_bias") is not None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    assert attention_mask is not None
    batch, heads, width, size = query.shape
    output = functional.scaled_dot_product_attention(
        query.reshape(batch, -1, num_shared * width, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, num_shared, 1),
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def attention_of(model: PreTrainedModel) -> str:
    """The attention a model was loaded with, also while a step of another thread runs on it."""
    implementation = model.config._attn_implementation
    return "sdpa" if implementation == GROUPED else str(implementation)


@contextmanager
def sharing_keys(model: PreTrainedModel) -> Iterator[None]:
    """Forwards of `model` inside attend by `grouped_attention`, if they would by "sdpa"; threads may be inside at once."""
    config = model.config.get_text_config(decoder=True)
    if not model._supports_attention_backend or config._attn_implementation not in ("sdpa", GROUPED):
        yield
        return
    with _lock:
        _num_inside[id(config)] = _num_inside.get(id(config), 0) + 1
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        with _lock:
            _num_inside[id(config)] -= 1
            if not _num_inside[id(config)]:
                del _num_inside[id(config)]
                config._attn_implementation = "sdpa"


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
# An additive mask, made once per forward: SDPA would make one of a bool mask in every layer.
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
