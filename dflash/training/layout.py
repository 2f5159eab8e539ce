"""Lays out all blocks of a batch as the queries of one drafter forward: ids, labels, positions, masks.

Dimensions: B sequences, S their (padded) length, A anchors each, N block size, R = A * N queries. It runs no model.
Decoding uses the same predicate (`attention_dflash.sees`), so a training forward computes what many decoding forwards
would.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash.drafter import DFlashConfig
from dflash.model.attention_dflash import additive_mask, sees, target_sees

from .block_attention import BLOCKWISE, FLEX
from .settings import Facts


# The document id of queries without an anchor. It differs from those of tokens and of padding.
NO_DOCUMENT = -2

# A mask function of flex attention, `visible(b, h, q, k)`: whether query q of sequence b sees key k, in every head h.
Visibility = Callable[[Any, Any, Any, Any], Tensor]


@dataclass(frozen=True)
class BlockLayout:
    """The queries of a forward, and what the drafter should propose at each.

    Query r is position `r % N` of block `r // N`.
    """

    token_ids: Tensor  # [B, R], the anchor's token, then mask tokens
    # [B, R], the token at the query's own position, or the next one if `sample_from_anchor`; undefined where it is
    # not trained.
    labels: Tensor
    is_trained: Tensor  # bool [B, R], whether the query's proposal is trained: up to the end of the anchor's response
    # [B, R], columns of the tokens before the labels; the target's logits there predict the labels
    previous: Tensor
    position_ids: Tensor  # [B, S + R], of the context, then of the queries
    # By layer type, whether a query sees a key: bool [B, 1, R, S + R]; for "blockwise" the context's keys and those of
    # the query's own block, [B, 1, R, S + N]; for `FLEX` its `BlockMask`.
    attention_mask: Facts


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Returns each token's position in its document, from 0, [B, S]. document_ids are [B, S]."""
    columns = torch.arange(document_ids.shape[1], device=document_ids.device)
    columns = columns.expand_as(document_ids)  # [B, S]
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    before = document_ids[:, :-1]
    begins[:, 1:] = document_ids[:, 1:] != before
    firsts = torch.where(begins, columns, 0)
    firsts = firsts.cummax(dim=1).values  # the first column of each token's document
    return columns - firsts


def packed_causal_mask(document_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Returns an additive causal mask [B, 1, S, S] in which a token sees its own document only.

    With `window`, keys must be less than `window` positions away. Padding counts as a document, so that every token
    sees a key.
    """
    length = document_ids.shape[1]
    positions = torch.arange(length, device=document_ids.device)
    visible = target_sees(positions[None], length, None, window)
    is_same_document = document_ids[:, :, None] == document_ids[:, None, :]
    visible = visible & is_same_document
    return additive_mask(visible[:, None], dtype)


def lay_out_blocks(
    input_ids: Tensor,  # [B, S]
    loss_mask: Tensor,  # bool [B, S]
    document_ids: Tensor,  # [B, S], negative for padding
    anchors: Tensor,  # [B, A] columns, negative for none
    config: DFlashConfig,
    attention: str,
) -> BlockLayout:
    """Returns the layout of the blocks that begin at `anchors`, with masks in the form that `attention` takes.

    A query sees the context of its own document strictly before its anchor, and its own block. It sees no other block,
    even one that overlaps its own. An absent anchor has queries too, to keep the shape; these are not
    trained, and no other query sees them.
    """
    length, block_size = input_ids.shape[1], config.block_size
    ahead = int(config.sample_from_anchor)  # distance from a query's position to its label's
    offsets = torch.arange(block_size, device=input_ids.device)  # [N]
    exists = anchors >= 0  # [B, A]
    first = anchors.clamp(min=0)
    columns = first[:, :, None] + offsets + ahead  # [B, A, N] of the labels
    in_sequence = columns < length
    columns = columns.clamp(max=length - 1)

    def at(values: Tensor) -> Tensor:  # [B, S] -> [B, A, N]
        return values.gather(1, columns.flatten(1)).view_as(columns)

    # A block ends with its anchor's response: tokens after that belong to a next turn or a next document.
    anchor_documents = document_ids.gather(1, first)  # [B, A]
    is_same_document = at(document_ids) == anchor_documents[:, :, None]
    is_response = at(loss_mask) & is_same_document
    is_response &= in_sequence & exists[:, :, None]
    is_trained = is_response.long().cumprod(dim=2).bool()
    if not ahead:
        is_trained[:, :, 0] = False  # the anchor is known

    token_ids = torch.full_like(columns, config.mask_token_id)
    token_ids[:, :, 0] = input_ids.gather(1, first)
    positions = positions_in_documents(document_ids)  # [B, S]
    context = _Places(positions, torch.full_like(document_ids, -1), document_ids)
    anchor_places = _Places(
        positions.gather(1, first),
        torch.arange(anchors.shape[1], device=anchors.device).expand_as(anchors),
        torch.where(exists, anchor_documents, NO_DOCUMENT),
    )
    position_ids, masks = _masks(context, anchor_places, config, attention)
    return BlockLayout(
        token_ids.flatten(1),
        at(input_ids).flatten(1),
        is_trained.flatten(1),
        (columns - 1).clamp(min=0).flatten(1),
        position_ids,
        masks,
    )


class _Places(NamedTuple):
    """Where tokens are: tensors [B, A] for anchors, [B, S] for the context, [B, R] for queries, [B, S + R] for keys."""

    positions: Tensor  # the token's position in its document
    blocks: Tensor  # the index of its block, -1 for the context
    documents: Tensor  # the id of its document


def _masks(context: _Places, anchors: _Places, config: DFlashConfig, attention: str) -> tuple[Tensor, Facts]:
    """Returns the positions [B, S + R] of all keys, and the mask of each layer type in the form for `attention`."""
    block_size = config.block_size
    places = [values.repeat_interleave(block_size, 1) for values in anchors]
    anchor_positions, blocks, documents = places  # [B, R]
    offsets = torch.arange(block_size, device=blocks.device)
    num_anchors = anchors.blocks.shape[1]
    positions = anchor_positions + offsets.repeat(num_anchors)
    queries = _Places(positions, blocks, documents)
    joined = [torch.cat(pair, dim=1) for pair in zip(context, queries, strict=True)]
    keys = _Places(*joined)
    masks: Facts = {}
    for layer, layer_type in enumerate(config.layer_types):
        if layer_type in masks:
            continue
        visible = _visibility(
            queries,
            keys,
            anchor_positions,
            config.is_layer_causal(layer),
            config.layer_window(layer),
        )
        masks[layer_type] = _mask(visible, queries, keys, block_size, attention)
    return keys.positions, masks


def _visibility(
    queries: _Places, keys: _Places, anchor_positions: Tensor, is_causal: bool, window: int | None
) -> Visibility:
    query_positions, query_blocks, query_documents = queries
    key_positions, key_blocks, key_documents = keys

    def visible(b: Any, h: Any, q: Any, k: Any) -> Tensor:
        query = (query_positions[b, q], query_blocks[b, q])
        key = (key_positions[b, k], key_blocks[b, k])
        seen = sees(
            query,
            key,
            anchor_positions[b, q],
            is_causal,
            window,
        )
        is_same_document = query_documents[b, q] == key_documents[b, k]
        return seen & is_same_document

    return visible


def _mask(visible: Visibility, queries: _Places, keys: _Places, block_size: int, attention: str) -> Any:
    """Evaluates `visible` to a mask in the form that `attention` takes: a `BlockMask`, blockwise, or dense."""
    batch, num_queries = queries.positions.shape
    shape = batch, num_queries, keys.positions.shape[1]
    device = queries.positions.device
    if attention == FLEX:
        return _block_mask(visible, shape, device)
    if attention == BLOCKWISE:
        return _blockwise_mask(visible, shape, device, block_size)
    return _dense_mask(visible, shape, device)


def _dense_mask(
    visible: Visibility, shape: tuple[int, int, int], device: torch.device, keys: Tensor | None = None
) -> Tensor:
    """Evaluates `visible` to a bool mask [B, 1, R, K].

    `keys`, [1, K] or [R, K], holds the indices of the keys of each query. Default: all keys.
    """
    batch, queries, num_keys = shape
    b = torch.arange(batch, device=device)[:, None, None]
    q = torch.arange(queries, device=device)[:, None]
    if keys is None:
        keys = torch.arange(num_keys, device=device)[None]
    return visible(b, None, q, keys)[:, None]


def _blockwise_mask(visible: Visibility, shape: tuple[int, int, int], device: torch.device, block_size: int) -> Tensor:
    """Returns a bool mask [B, 1, R, S + N]: each query's mask over the context, then over its own block."""
    _, queries, keys = shape
    length = keys - queries
    own_keys = torch.arange(length, keys, device=device).view(-1, 1, block_size)  # [A, 1, N]
    own_keys = own_keys.expand(-1, block_size, -1).flatten(0, 1)  # [R, N]
    context = _dense_mask(
        visible,
        shape,
        device,
        torch.arange(length, device=device)[None],
    )
    own = _dense_mask(visible, shape, device, own_keys)
    return torch.cat([context, own], dim=-1)


def _block_mask(visible: Visibility, shape: tuple[int, int, int], device: torch.device) -> Any:
    """Returns the `BlockMask` of flex attention, which skips unseen tiles.

    On other devices than CUDA it is made from a mask [R, K].
    """
    from torch.nn.attention.flex_attention import create_block_mask

    batch, queries, keys = shape
    make: Any = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(visible, batch, None, queries, keys, device=device)
