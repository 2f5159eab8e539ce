"""Blockwise attention on a CPU with torch's fused kernel, which never stores the scores of the context.

The kernel computes the attention to the context. The few scores of a block to itself are computed separately. The two
results are merged by the logarithms of their softmax denominators, as in ring attention (arXiv 2310.01889). With the
merged output and denominator, the kernel's own backward pass returns the gradients of the joint softmax.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FusedBlocks(torch.autograd.Function):
    """Softmax attention of the scaled `query` over the keys of the context and of its own block; no dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        context_key: Tensor,  # [B, H, S, E]
        context_value: Tensor,  # likewise
        context_mask: Tensor,  # additive [B, 1, A * N, S], in fp32 or of query's dtype
        query: Tensor,  # [B, H, A, N, E]
        block_key: Tensor,  # likewise
        block_value: Tensor,  # likewise
        block_mask: Tensor,  # additive [B, 1, A, N, N]
    ) -> Tensor:  # of the shape of query
        """Returns the attention output: one softmax over the keys of the context and of the block."""
        flat = query.flatten(2, 3)
        output, context_logsumexp = _forward(
            flat,
            context_key,
            context_value,
            0.0,
            False,
            attn_mask=context_mask,
            scale=1.0,
        )
        context_logsumexp = context_logsumexp.view(*query.shape[:4], 1)  # of the scores of the context's keys, fp32
        scores = _own_scores(query, block_key, block_mask)
        own_logsumexp = scores.logsumexp(dim=-1, keepdim=True)
        joint = torch.logaddexp(context_logsumexp, own_logsumexp)
        weights = (scores - joint).exp()
        own = weights.to(query.dtype) @ block_value
        context_share = (context_logsumexp - joint).exp().to(query.dtype)
        output = output.view_as(query) * context_share + own
        ctx.save_for_backward(
            context_key, context_value, context_mask, query, block_key, block_value, block_mask, output, joint
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of queries, keys and values, and `None` for the masks."""
        (context_key, context_value, context_mask, query, block_key, block_value, block_mask, output, joint) = (
            ctx.saved_tensors
        )
        query_gradient, context_key_gradient, context_value_gradient = _backward(
            output_gradient.flatten(2, 3),
            query.flatten(2, 3),
            context_key,
            context_value,
            output.flatten(2, 3),
            joint.flatten(2),
            0.0,
            False,
            attn_mask=context_mask,
            scale=1.0,
        )
        scores = _own_scores(query, block_key, block_mask)
        weights = (scores - joint).exp()
        mean = _wide(output_gradient * output).sum(dim=-1, keepdim=True)
        weights_gradient = _wide(output_gradient @ block_value.mT)
        scores_gradient = (weights * (weights_gradient - mean)).to(query.dtype)
        query_gradient = query_gradient.view_as(query) + scores_gradient @ block_key
        block_key_gradient = scores_gradient.mT @ query
        block_value_gradient = weights.to(query.dtype).mT @ output_gradient
        return (
            context_key_gradient,
            context_value_gradient,
            None,
            query_gradient,
            block_key_gradient,
            block_value_gradient,
            None,
        )


def _own_scores(query: Tensor, block_key: Tensor, block_mask: Tensor) -> Tensor:
    """Returns the masked attention scores of each block to itself, [B, H, A, N, N], in fp32 or a wider dtype."""
    return _wide(query @ block_key.mT) + block_mask


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
