"""Computes the attention of many blocks to one context and of each block to itself, and no scores of unseen keys.

All blocks of a sequence run in one forward, in which a query sees only the context and its own block. The memory of
dense scores grows with the square of the number of blocks. Here it grows linearly, and on a CPU the context's scores
are never stored.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .fused_attention import FusedBlocks


# The name of this attention as `attn_implementation`. Its masks are [B, 1, R, S + N]: a query's mask over the context's
# keys, then over the keys of its own block.
BLOCKWISE = "blockwise"
# The name of flex attention over many blocks. Its masks are `BlockMask`s.
FLEX = "flex_blocks"

# Largest number of attention scores in memory at a time: 64 MiB in fp32. If all blocks have more, they are computed in
# chunks.
MOST_SCORES = 2**24

# Types of devices with a fused kernel whose output can be merged with a block's attention to itself.
FUSED = ("cpu",)


class Blocks(NamedTuple):
    """Queries of A blocks, and the keys and values that they see: the context's, and those of each query's own block.

    There are G heads of keys and values. The third dimension of `query` holds the H / G query heads that share a key
    head. A block has N positions, the context S. A head has E channels.
    """

    query: Tensor  # [B, G, H / G, A, N, E]
    context_key: Tensor  # [B, G, S, E]
    context_value: Tensor  # likewise
    block_key: Tensor  # [B, G, A, N, E]
    block_value: Tensor  # likewise
    attention_mask: Tensor  # [B, 1, A * N, S + N]


def blockwise_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, R, E], R = A * N queries of A blocks
    key: Tensor,  # [B, G, S + R, E], G divides H
    value: Tensor,  # likewise
    attention_mask: Tensor,  # additive [B, 1, R, S + N], finite, in fp32 or of query's dtype
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, R, H, E]
    """Returns the output and `None`, as transformers expects.

    The output equals that of dense attention with the mask [B, 1, R, S + R], up to rounding.
    """
    batch, heads, num_queries, size = query.shape
    groups = key.shape[1]
    length = key.shape[2] - num_queries
    block_size = attention_mask.shape[-1] - length
    if scaling is None:
        scaling = size**-0.5
    query = query * scaling
    query = query.unflatten(1, (groups, -1))
    query = query.unflatten(3, (-1, block_size))  # [B, G, H / G, A, N, E]
    sizes = [length, num_queries]
    context_key, block_key = key.split(sizes, dim=2)
    context_value, block_value = value.split(sizes, dim=2)
    blocks = Blocks(
        query,
        context_key,
        context_value,
        block_key.unflatten(2, (-1, block_size)),
        block_value.unflatten(2, (-1, block_size)),
        attention_mask,
    )
    output = _fused(blocks) if is_fused(query.device, dropout) else _in_chunks(blocks, dropout)
    output = output.permute(0, 3, 4, 1, 2, 5)  # [B, A, N, G, H / G, E]
    return output.reshape(batch, num_queries, heads, size), None


def _fused(blocks: Blocks) -> Tensor:  # of the shape of query
    """Computes the attention of all blocks with a fused kernel, which never stores the scores of the context.

    The heads that share keys run one after another, so that keys and values need not be repeated.
    """
    length = blocks.context_key.shape[2]
    block_size = blocks.block_key.shape[3]
    context_mask, block_mask = blocks.attention_mask.split([length, block_size], dim=-1)
    block_mask = block_mask.unflatten(2, (-1, block_size))
    outputs = []
    for query_group in blocks.query.unbind(2):
        output = FusedBlocks.apply(
            blocks.context_key,
            blocks.context_value,
            context_mask,
            # Inductor compiles the strides of strided queries as constants; another number of blocks would then raise.
            query_group.contiguous(),
            blocks.block_key,
            blocks.block_value,
            block_mask,
        )
        outputs.append(output)
    return torch.stack(outputs, dim=2)


def _in_chunks(blocks: Blocks, dropout: float) -> Tensor:  # of the shape of query
    """Computes the attention of all blocks at once, or in chunks of blocks if there are more than `MOST_SCORES` scores.

    The backward pass recomputes the scores of each chunk, so that the scores of two chunks are never in memory
    together.
    """
    # Queries that share a head's keys are adjacent, block by block: [B, G, A, H / G * N, E].
    shared, num_blocks, block_size = blocks.query.shape[2:5]
    queries = blocks.query.transpose(2, 3).flatten(3, 4)
    mask = blocks.attention_mask.unflatten(2, (-1, block_size))
    tensors = (queries, blocks.block_key, blocks.block_value, mask)
    attend = partial(
        _attend,
        context_key=blocks.context_key,
        context_value=blocks.context_value,
        dropout=dropout,
    )
    num_scores = queries[..., 0].numel() * mask.shape[-1]
    scores_of_block = num_scores // num_blocks
    at_a_time = max(1, MOST_SCORES // scores_of_block)
    if at_a_time >= num_blocks:
        output = attend(*tensors)
    else:
        split_tensors = [tensor.split(at_a_time, dim=2) for tensor in tensors]
        outputs = []
        for part in zip(*split_tensors, strict=True):
            outputs.append(checkpoint(attend, *part, use_reentrant=False))
        output = torch.cat(outputs, dim=2)
    output = output.unflatten(3, (shared, block_size))
    return output.transpose(2, 3)


def is_fused(device: torch.device, dropout: float) -> bool:
    """Whether blockwise attention on `device` uses the fused kernel, which stores no scores of the context."""
    return device.type in FUSED and not dropout


def _attend(
    queries: Tensor,  # [B, G, A, H / G * N, E]
    block_key: Tensor,  # [B, G, A, N, E]
    block_value: Tensor,  # likewise
    attention_mask: Tensor,  # [B, 1, A, N, S + N]
    context_key: Tensor,  # [B, G, S, E]
    context_value: Tensor,  # likewise
    dropout: float,
) -> Tensor:  # of the shape of queries
    """Computes the attention of some blocks to the context and to themselves, with all scores in memory."""
    length = context_key.shape[2]
    block_size = block_key.shape[3]
    blocks_and_queries = queries.shape[2:4]
    flat = queries.flatten(2, 3)
    context_scores = flat @ context_key.mT
    context_scores = context_scores.unflatten(2, blocks_and_queries)
    own_scores = queries @ block_key.mT
    scores = torch.cat([context_scores, own_scores], dim=-1)  # [B, G, A, H / G * N, S + N]
    mask = attention_mask.to(scores.dtype).unsqueeze(3)
    by_head = scores.unflatten(3, (-1, block_size))
    by_head = by_head + mask
    scores = by_head.flatten(3, 4)
    weights = scores.softmax(dim=-1)
    weights = weights.to(block_value.dtype)
    if dropout:
        weights = functional.dropout(weights, dropout)
    context_weights, own_weights = weights.split([length, block_size], dim=-1)
    from_context = context_weights.flatten(2, 3) @ context_value
    return from_context.view_as(queries) + own_weights @ block_value


def flex_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Runs transformers' flex attention by the kernel for any number of queries.

    The kernel that torch takes for fewer than 128 queries does not compile for all numbers of them.
    """
    attend = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    return attend(*args, kernel_options={"FORCE_USE_FLEX_ATTENTION": True}, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(BLOCKWISE, blockwise_attention)
ALL_ATTENTION_FUNCTIONS.register(FLEX, flex_attention)
