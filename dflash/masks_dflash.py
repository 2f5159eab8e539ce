"""Who sees whom, in one place for decoding and training, for the target and the drafter.

Functions of positions that return masks. They know no model and no cache.
"""

from __future__ import annotations

from typing import Any

import torch


def block_visibility(
    query_positions: torch.Tensor,  # [B, Q]
    key_positions: torch.Tensor,  # [B, K]
    query_blocks: torch.Tensor,  # [B, Q] which block a row belongs to
    key_blocks: torch.Tensor,  # [B, K] likewise, -1 for a context key
    anchors: torch.Tensor,  # [B, Q] position of the row's anchor
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:  # bool [B, Q, K]
    """What the drafter's rows see.

    A row sees the context strictly before its anchor and the rows of its own block (only those not after it, if
    `is_causal`), and of these the ones less than `window` positions away (DFlash paper, section 4.2; the per-row rule
    `q - k < W` of the engines).
    """
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    in_context = (key_blocks[:, None, :] < 0) & (key_positions[:, None, :] < anchors[:, :, None])
    in_block = key_blocks[:, None, :] == query_blocks[:, :, None]
    if is_causal:
        in_block = in_block & (distance >= 0)
    visible = in_context | in_block
    return visible if window is None else visible & (distance.abs() < window)


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


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, the dtype's minimum elsewhere: the one form that SDPA and eager attention both read."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )
