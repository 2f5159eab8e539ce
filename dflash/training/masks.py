"""All blocks of a batch as rows of one forward of the drafter: ids, labels, positions, and who sees whom.

Dimensions: B sequences, S their (padded) length, A anchors each, N block size, R = A * N rows. It knows no model; the
visibility is the predicate that decoding uses (`block_visibility`), so a training forward is many decoding forwards at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash.configuration_dflash import DFlashConfig
from dflash.masks_dflash import block_visibility


# The document of an absent anchor: no token's, and not that of padding.
NO_DOCUMENT = -2


@dataclass(frozen=True)
class BlockLayout:
    """What the drafter reads and what it should say, row by row; row r is offset `r % N` of block `r // N`.

    Attributes:
        token_ids: The anchor's token, then mask tokens, [B, R].
        labels: The token at the row's own position, [B, R]; undefined where `is_learned` is False.
        is_learned: Rows that are trained, bool [B, R]: behind the anchor, up to the end of the anchor's response.
        position_ids: Positions of the context, then of the rows, [B, S + R].
        attention_mask: Per layer type, True where a row sees a key, bool [B, 1, R, S + R].
    """

    token_ids: torch.Tensor
    labels: torch.Tensor
    is_learned: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: dict[str, torch.Tensor]


def positions_in_documents(document_ids: torch.Tensor) -> torch.Tensor:
    """Each token's distance to the first token of its document, [B, S] of document_ids [B, S]."""
    columns = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)  # [B, S]
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return columns - torch.where(begins, columns, 0).cummax(dim=1).values


def lay_out_blocks(
    input_ids: torch.Tensor,  # [B, S]
    loss_mask: torch.Tensor,  # bool [B, S]
    document_ids: torch.Tensor,  # [B, S], negative for padding
    anchors: torch.Tensor,  # [B, A] columns, negative for none
    config: DFlashConfig,
) -> BlockLayout:
    """The rows of all blocks that begin at `anchors`.

    A row sees the context of its own document strictly before its anchor, and its own block; never another block, which
    may overlap it. Rows of an absent anchor are there to keep the shape: they are not learned and nobody sees them.
    """
    (batch, length), block_size = input_ids.shape, config.block_size
    offsets = torch.arange(block_size, device=input_ids.device)  # [N]
    exists = anchors >= 0  # [B, A]
    first = anchors.clamp(min=0)
    columns = first[:, :, None] + offsets  # [B, A, N]
    in_sequence = columns < length
    columns = columns.clamp(max=length - 1)

    def at(values: torch.Tensor) -> torch.Tensor:  # [B, S] -> [B, A, N]
        return values.gather(1, columns.flatten(1)).view_as(columns)

    labels, documents = at(input_ids), at(document_ids)
    # Past the first token that is not this response's, later ones are not either, be it a next turn or a next document.
    is_response = in_sequence & at(loss_mask) & (documents == documents[:, :, :1]) & exists[:, :, None]
    is_learned = is_response.long().cumprod(dim=2).bool()
    is_learned[:, :, 0] = False  # the anchor is given

    token_ids = torch.full_like(columns, config.mask_token_id)
    token_ids[:, :, 0] = labels[:, :, 0]

    positions = positions_in_documents(document_ids)  # [B, S]
    anchor_positions = positions.gather(1, first)[:, :, None].expand_as(columns).flatten(1)  # [B, R]
    row_positions = anchor_positions + offsets.repeat(anchors.shape[1])
    row_blocks = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    row_blocks = row_blocks.expand(batch, -1)  # [B, R]
    row_documents = torch.where(exists, document_ids.gather(1, first), NO_DOCUMENT).repeat_interleave(block_size, 1)

    position_ids = torch.cat([positions, row_positions], dim=1)
    key_blocks = torch.cat([torch.full_like(document_ids, -1), row_blocks], dim=1)
    key_documents = torch.cat([document_ids, row_documents], dim=1)
    same_document = row_documents[:, :, None] == key_documents[:, None, :]  # [B, R, S + R]
    masks: dict[str, torch.Tensor] = {}
    for layer, layer_type in enumerate(config.layer_types):
        if layer_type not in masks:
            visible = block_visibility(
                row_positions,
                position_ids,
                row_blocks,
                key_blocks,
                anchor_positions,
                config.is_layer_causal(layer),
                config.layer_window(layer),
            )
            masks[layer_type] = (visible & same_document)[:, None]
    return BlockLayout(token_ids.flatten(1), labels.flatten(1), is_learned.flatten(1), position_ids, masks)
