"""The layers of a drafter: attention of a block over its context and itself, convolutions inside a block, and the norm.

Dimensions are those of `modeling_dflash`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from .attention_dflash import grouped_attention
from .configuration_dflash import DFlashConfig


def rotation_of(cos_and_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The rotary embedding of positions, as `rotated` reads it, [2, B, S, 1, E] of cos and sin [B, S, E].

    It is cos, and sin that is negative in the first half of a head.
    """
    cos, sin = cos_and_sin
    first, second = sin.chunk(2, dim=-1)
    signed_sin = torch.cat([-first, second], dim=-1)
    return torch.stack([cos, signed_sin]).unsqueeze(3)


def rotated(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Heads [B, S, H, E], each rotated by its position."""
    cos, signed_sin = rotation
    other_halves = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, other_halves, signed_sin)


class DFlashRMSNorm(qwen3.Qwen3RMSNorm):
    """Qwen3's norm, as one operation of torch where input and weight have the same dtype."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The normed states, in the weight's dtype."""
        if hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return functional.rms_norm(
            hidden_states,
            normalized_shape=self.weight.shape,
            weight=self.weight,
            eps=self.variance_epsilon,
        )


class DFlashAttn(qwen3.Qwen3Attention):
    """Attention of the block over [context, block]. Context positions enter only as keys and values."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # Attention functions read causality from this attribute when there is no mask. Causal or windowed blocks always
        # have a mask, so it is False.
        self.is_causal = False
        self.is_block_causal = config.is_layer_causal(layer_idx)
        eps = config.rms_norm_eps
        self.q_norm = DFlashRMSNorm(self.head_dim, eps=eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, eps=eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, D]
        context: torch.Tensor,  # [B, C, D]
        rotation: torch.Tensor,  # of C + N positions
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        implementation: str,
    ) -> torch.Tensor:  # [B, N, D]
        """Attends from the block to [cached context, new context, block]."""
        states = torch.cat([context, hidden_states], dim=1)
        key, value = self.keys_and_values(states, rotation, cache)
        width = hidden_states.shape[1]
        query = self._rotated(
            self.q_norm,
            self.q_proj(hidden_states),
            rotation[:, :, -width:],
        )
        query = query.to(value.dtype)
        if cache is not None and attention_mask is not None:
            # Some caches of transformers keep the last keys alone, as many as a window holds.
            num_keys = key.shape[2]
            attention_mask = attention_mask[..., -num_keys:]
        own: dict[str, Any] = {
            "eager": qwen3.eager_attention_forward,
            "sdpa": grouped_attention,
        }
        attend = own.get(implementation) or ALL_ATTENTION_FUNCTIONS[implementation]
        output, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            # Flash kernels take causality and window as arguments, others in the mask.
            is_causal=self.is_block_causal and "flash" in implementation,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(output.flatten(2))

    def keys_and_values(
        self, states: torch.Tensor, rotation: torch.Tensor, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, G, S, E] of states [B, S, D] of context and block, after those in the cache, which gets them."""
        key = self._rotated(
            self.k_norm,
            self.k_proj(states),
            rotation,
        )
        value = self.v_proj(states).unflatten(-1, (-1, self.head_dim))
        value = value.transpose(1, 2)
        # Under autocast norms return their weights' dtype, and some attention functions need one dtype.
        key = key.to(value.dtype)
        return (key, value) if cache is None else cache.update(key, value, self.layer_idx)

    def _rotated(self, norm: nn.Module, projected: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Heads [B, H, S, E] of projected [B, S, H * E], normed and rotated by their positions."""
        heads = projected.unflatten(-1, (-1, self.head_dim))  # [B, S, H, E]
        turned = rotated(norm(heads), rotation)
        return turned.transpose(1, 2)


class GroupedDynamicCausalConv(nn.Module):
    """DFlash2: mixes each position of a block with the positions before it, once before a sublayer and once after it.

    Position i becomes the sum over taps t of (base[t] + delta[i, t]) * position i - t, channel by channel, with zeros before
    a block. The deltas of both convolutions come from the sublayer's input and are shared by the channels of a group.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.kernel_size = int(config.conv_kernel_size or 1)
        self.group_size = int(config.conv_group_size or 1)
        size = config.hidden_size
        num_deltas = 2 * self.kernel_size * (size // self.group_size)
        base = torch.zeros(2, self.kernel_size, size)
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(
            size,
            num_deltas,
            bias=False,
        )

    def forward(self, hidden: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Mixes hidden [B, N, D], applies `sublayer`, and mixes its output."""
        deltas = self.kernel_projection(hidden)
        deltas = deltas.unflatten(-1, (2, self.kernel_size, -1))
        deltas = deltas.repeat_interleave(self.group_size, dim=-1)
        kernels = self.base_kernel + deltas
        before, after = kernels.unbind(dim=2)
        mixed = self._mixed(hidden, before)
        output = sublayer(mixed)
        return self._mixed(output, after)

    def _mixed(self, hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """The sum over taps of shifted hidden [B, N, D] times kernel [B, N, taps, D], block by block."""
        width = min(hidden.shape[1], self.block_size)
        blocks = hidden.unflatten(1, (-1, width))  # [B, blocks, N, D]
        num_before = self.kernel_size - 1
        padded = functional.pad(blocks, (0, 0, num_before, 0))
        taps = []
        for tap in range(self.kernel_size):
            taps.append(padded.narrow(2, num_before - tap, width))
        stacked = torch.stack(taps, dim=3).flatten(1, 2)
        return (stacked * kernel).sum(dim=2)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """A Qwen3 layer over the block. The context is already normed by `hidden_norm` and skips `input_layernorm`."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        has_convs = config.conv_kernel_size is not None
        self.attention_conv = GroupedDynamicCausalConv(config) if has_convs else None
        self.mlp_conv = GroupedDynamicCausalConv(config) if has_convs else None
        self.self_attn = DFlashAttn(config, layer_idx)
        self.mlp = qwen3.Qwen3MLP(config)
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = DFlashRMSNorm(size, eps=eps)
        self.post_attention_layernorm = DFlashRMSNorm(size, eps=eps)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """Attention and MLP over the block [B, N, D], each with its residual. `inputs` are further ones of the attention."""

        def attend(hidden: torch.Tensor) -> torch.Tensor:
            return self.self_attn(
                hidden,
                context,
                *inputs,
            )

        hidden = self.input_layernorm(hidden_states)
        hidden = attend(hidden) if self.attention_conv is None else self.attention_conv(hidden, attend)
        hidden_states = hidden_states + hidden
        hidden = self.post_attention_layernorm(hidden_states)
        hidden = self.mlp(hidden) if self.mlp_conv is None else self.mlp_conv(hidden, self.mlp)
        return hidden_states + hidden
