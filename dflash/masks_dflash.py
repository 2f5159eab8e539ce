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
