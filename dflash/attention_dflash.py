"""Attention of a block to the keys and values behind it, which its heads share in groups.

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
