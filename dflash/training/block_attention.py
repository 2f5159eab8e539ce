"""Attention of many blocks to one context, each block to its own rows besides: what dense scores would mostly mask away.

All blocks of a sequence stand in one forward, and a row sees the context and its own block alone. Scores against every
block's rows grow with the square of the blocks; these grow with their number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# What a forward calls it; its masks are [B, 1, R, S + N]: the context's keys, then those of the row's own block.
BLOCKWISE = "blockwise"


def blockwise_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, R, E], R = A * N rows of A blocks
    key: torch.Tensor,  # [B, G, S + R, E], G divides H
    value: torch.Tensor,  # likewise
    attention_mask: torch.Tensor,  # additive [B, 1, R, S + N]
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [B, R, H, E]
    """What attention under the mask of all keys, [B, 1, R, S + R], gives, up to rounding."""
    (batch, heads, num_rows, size), groups = query.shape, key.shape[1]
    length = key.shape[2] - num_rows
    block_size = attention_mask.shape[-1] - length
    blocks, shared = num_rows // block_size, heads // groups
    query = query * (size**-0.5 if scaling is None else scaling)
    # The queries that share a head's keys stand below one another, block by block: [B, G, A, H / G * N, E].
    rows = query.view(batch, groups, shared, blocks, block_size, size).transpose(2, 3).flatten(3, 4)
    context_key, block_key = key.split([length, num_rows], dim=2)
    context_value, block_value = value.split([length, num_rows], dim=2)

    scores = torch.cat(
        [
            (rows.flatten(2, 3) @ context_key.transpose(2, 3)).view(*rows.shape[:4], length),
            rows @ block_key.unflatten(2, (blocks, block_size)).transpose(3, 4),
        ],
        dim=-1,
    )  # [B, G, A, H / G * N, S + N]
    mask = attention_mask.view(batch, 1, blocks, 1, block_size, -1).expand(-1, -1, -1, shared, -1, -1)
    weights = (scores.unflatten(3, (shared, block_size)) + mask.to(scores.dtype)).flatten(3, 4)
    weights = functional.dropout(weights.softmax(dim=-1).to(value.dtype), dropout)
    seen, own = weights.split([length, block_size], dim=-1)
    output = (seen.flatten(2, 3) @ context_value).view_as(rows) + own @ block_value.unflatten(2, (blocks, block_size))
    # [B, G, A, H / G, N, E] -> [B, A, N, G, H / G, E]
    output = output.unflatten(3, (shared, block_size)).permute(0, 2, 4, 1, 3, 5)
    return output.reshape(batch, num_rows, heads, size), None


ALL_ATTENTION_FUNCTIONS.register(BLOCKWISE, blockwise_attention)
