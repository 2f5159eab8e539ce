"""The DFlash drafter: a few Qwen3 layers whose keys and values also hold the target's own hidden states.

Dimensions: B batch, C new context positions, N block positions (anchor included), K visible keys, S positions, L tapped
layers, D hidden size, H/G heads and key/value heads, E head size, W window, V vocabulary, R positions that propose. In
training, N counts the positions of all blocks of a sequence and `attention_mask` separates them; nothing else differs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from .attention_dflash import additive_mask, draft_sees, grouped_attention, sees, step_mask
from .configuration_dflash import DFlashConfig
from .targets_dflash import InexactError, check_pair


class DFlashAttn(qwen3.Qwen3Attention):
    """Attention of the block over [context, block]. Context positions enter only as keys and values."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # Attention functions read causality from this attribute when there is no mask. Causal or windowed blocks always
        # have a mask, so it is False.
        self.is_causal = False
        self.is_block_causal = config.is_layer_causal(layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, D]
        context: torch.Tensor,  # [B, C, D]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # each [B, C + N, E]
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        implementation: str,
    ) -> torch.Tensor:  # [B, N, D]
        """Attends from the block to [cached context, new context, block]."""
        width = hidden_states.shape[1]
        key, value = self.keys_and_values(torch.cat([context, hidden_states], dim=1), position_embeddings)
        cos, sin = position_embeddings
        query = self._rotated(self.q_norm, self.q_proj(hidden_states), (cos[:, -width:], sin[:, -width:]))
        query = query.to(value.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend: Any = qwen3.eager_attention_forward
        if implementation == "sdpa" and cache is not None:  # one block after its cached context
            attend = grouped_attention
        elif implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[implementation]
        options: dict[str, Any] = {"is_causal": False}
        if "flash" in implementation:  # these kernels take causality and window as arguments, not a 4-D mask
            options = {"is_causal": self.is_block_causal, "sliding_window": self.sliding_window}
        else:
            attention_mask = self._decoding_mask(attention_mask, query, key)
        dropout = self.attention_dropout if self.training else 0.0
        output, _ = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **options)
        return self.o_proj(output.flatten(2))

    def keys_and_values(
        self, states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, G, S, E] of states [B, S, D] of context and block."""
        value = self.v_proj(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        # Under autocast norms return their weights' dtype, and some attention functions need one dtype.
        return self._rotated(self.k_norm, self.k_proj(states), position_embeddings).to(value.dtype), value

    def _rotated(
        self, norm: nn.Module, projected: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Heads [B, H, S, E] of projected [B, S, H * E], normed and rotated by their positions."""
        heads = norm(projected.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)  # [B, 1, S, E]
        return heads * cos + qwen3.rotate_half(heads) * sin

    def _decoding_mask(self, attention_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
        """The additive mask of a block after its context, within a 2-D `attention_mask` of its last keys; a 4-D one stays."""
        if attention_mask is not None and len(attention_mask.shape) == 4:  # a tensor, or flex attention's block mask
            return attention_mask
        if attention_mask is None and self.sliding_window is None and not self.is_block_causal:
            return None
        # Slots replace positions: the block follows its context without a gap, so distances are equal.
        slots, start = torch.arange(key.shape[2], device=key.device), key.shape[2] - query.shape[2]
        blocks = torch.where(slots < start, -1, 0)
        queries = slots[start:, None], blocks[start:, None]
        visible = sees(queries, (slots, blocks), start, self.is_block_causal, self.sliding_window)[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, -len(slots) :].bool()
        return additive_mask(visible, query.dtype)  # [B or 1, 1, N, K]


class GroupedDynamicCausalConv(nn.Module):
    """DFlash2: mixes each position of a block with the positions before it, once before a sublayer and once after it.

    Position i becomes the sum over taps t of (base[t] + delta[i, t]) * position i - t, channel by channel, with zeros before
    a block. The deltas of both convolutions come from the sublayer's input and are shared by the channels of a group.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.kernel_size, self.group_size = int(config.conv_kernel_size or 1), int(config.conv_group_size or 1)
        num_deltas = 2 * self.kernel_size * (config.hidden_size // self.group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, num_deltas, bias=False)

    def forward(self, hidden: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Mixes hidden [B, N, D], applies `sublayer`, and mixes its output."""
        deltas = self.kernel_projection(hidden).unflatten(-1, (2, self.kernel_size, -1))
        before, after = (self.base_kernel + deltas.repeat_interleave(self.group_size, dim=-1)).unbind(dim=2)
        return self._mixed(sublayer(self._mixed(hidden, before)), after)

    def _mixed(self, hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """The sum over taps of shifted hidden [B, N, D] times kernel [B, N, taps, D], block by block."""
        blocks = hidden.unflatten(1, (-1, min(hidden.shape[1], self.block_size)))  # [B, blocks, N, D]
        width = blocks.shape[2]
        taps = [F.pad(blocks, (0, 0, tap, 0))[:, :, :width].flatten(1, 2) for tap in range(self.kernel_size)]
        return (torch.stack(taps, dim=2) * kernel).sum(dim=2)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """A Qwen3 layer over the block. The context is already normed by `hidden_norm` and skips `input_layernorm`."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        has_conv = config.conv_kernel_size is not None
        self.attention_conv = GroupedDynamicCausalConv(config) if has_conv else None
        self.mlp_conv = GroupedDynamicCausalConv(config) if has_conv else None
        self.self_attn = DFlashAttn(config, layer_idx)
        self.mlp = qwen3.Qwen3MLP(config)
        self.input_layernorm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """Attention and MLP over the block [B, N, D], each with its residual. `inputs` are further ones of the attention."""

        def attend(hidden: torch.Tensor) -> torch.Tensor:
            return self.self_attn(hidden, context, *inputs)

        hidden = self.input_layernorm(hidden_states)
        hidden = attend(hidden) if self.attention_conv is None else self.attention_conv(hidden, attend)
        hidden_states = hidden_states + hidden
        hidden = self.post_attention_layernorm(hidden_states)
        return hidden_states + (self.mlp(hidden) if self.mlp_conv is None else self.mlp_conv(hidden, self.mlp))


DOMINO_TOP_K = 16  # candidates of Domino's head, as many as DFlash2's; the published form scores the whole vocabulary


class CandidateSelector(nn.Module):
    """The weights of DFlash2's head: predecessor[previous token] * projected(hidden state) is scored with successor[candidate]."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank = int(config.selector_rank or 0)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))


class PrefixGRU(nn.Module):
    """Domino's GRU, a step at a time. Its weights are those of torch's module without biases, which does not compile."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * hidden_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * hidden_size, hidden_size))

    def forward(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The next state [..., H], of inputs [..., D]."""
        reset, update, new = F.linear(inputs, self.weight_ih_l0).chunk(3, dim=-1)
        reset_, update_, new_ = F.linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        new = (new + (reset + reset_).sigmoid() * new_).tanh()
        return new + (update + update_).sigmoid() * (state - new)


@dataclass(frozen=True)
class CausalHead:
    """Chooses a path from the anchor through the most probable tokens of each position, token by token.

    A candidate's score is its logit plus the dot product of its row and a vector of the position and the tokens before it.
    """

    rows: torch.Tensor  # [V, E]
    top_k: int  # candidates of a position
    state_size: int  # H
    features: Callable[[torch.Tensor], torch.Tensor]  # of hidden states [..., D], for all positions at once
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens [...] and a state [..., H] to the next state
    vector: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # features and a state to a vector [..., E]
    num_plain: int = 0  # positions at the beginning whose scores are their logits

    def scores(self, position: Any, features: Any, logits: Any, candidate_ids: Any, state: Any) -> torch.Tensor:
        """Scores [..., K] of candidates at a position of the block, with logits [..., K], after the token in the state."""
        vector = self.vector(features, state) * (position >= self.num_plain)
        return logits + (self.rows[candidate_ids] * vector[..., None, :]).sum(dim=-1)

    def choose_path(
        self,
        hidden_states: torch.Tensor,  # [B, R, D]
        logits: torch.Tensor,  # [B, R, V]
        anchors: torch.Tensor,  # [B, 1]
        choose: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """The path's tokens [B, R], candidates, their logits and scores [B, R, K], and states before the previous tokens.

        `choose` takes scores [B, K] and the index of the position.
        """
        logits, candidate_ids = (part.to(hidden_states.device) for part in logits.topk(self.top_k, dim=-1))
        features, state = self.features(hidden_states), hidden_states.new_zeros(len(hidden_states), self.state_size)
        previous, path, scores, states = anchors[:, 0].to(hidden_states.device), [], [], []
        for i, candidates in enumerate(candidate_ids.unbind(dim=1)):  # [B, K]
            states.append(state)
            state = self.read(previous, state)
            scores.append(self.scores(i, features[:, i], logits[:, i], candidates, state))
            previous = candidates.gather(1, choose(scores[-1], i)[:, None])[:, 0]
            path.append(previous)
        return torch.stack(path, 1), candidate_ids, logits, torch.stack(scores, 1), torch.stack(states, 1)

    def after_each(
        self, hidden_states: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [n, K, K] of a single block's candidates [n, K] after each one of the position before, or the anchor [1, 1].

        Of the tokens before that one, the state knows those of the best path.
        """
        _, ids, best, _, states = self.choose_path(hidden_states, logits, anchors, lambda scores, _: scores.argmax(-1))
        first = anchors.to(ids.device).expand(1, self.top_k)
        state = self.read(torch.cat([first, ids[0, :-1]]), states[0][:, None].expand(-1, self.top_k, -1))  # [n, K, H]
        positions = torch.arange(ids.shape[1], device=ids.device)[:, None, None]
        features = self.features(hidden_states[0])[:, None]
        return self.scores(positions, features, best[0][:, None], ids[0][:, None], state), ids[0]


class DFlashDraftModel(PreTrainedModel):
    """The DFlash drafter (arXiv 2602.06036). One forward turns an anchor and mask tokens into a block of proposals.

    The model uses the target's embedding and head; only checkpoints with a reduced vocabulary have a head of their own. Names
    and shapes of its tensors are those of the published `z-lab/*-DFlash` checkpoints.

    `config` needs `mask_token_id` and `target_layer_ids`; an invalid field raises ValueError.

    Example:
        >>> drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
        >>> text_ids = drafter.spec_generate(input_ids, target=target, max_new_tokens=256, temperature=0.0)
    """

    # Keywords of `spec_generate`, in the loop's own spelling too, that plain `generate` does not know.
    KEYWORDS: ClassVar[tuple[str, ...]] = (
        "adaptive",
        "as_blocks",
        "block_size",
        "compile",
        "conversation",
        "cuda_graph",
        "draft_tree",
        "draft_window",
        "drafter",
        "max_draft_tokens",
        "ngram_size",
        "num_looked_up",
        "stop_token_ids",
        "token_streamer",
        "uniforms_generator",
        "verification",
    )
    # A request that only plain `generate` can serve exactly.
    InexactError: ClassVar[type[ValueError]] = InexactError

    # `dflash.engine`, which makes the loop faster; `None` in a shipped copy.
    engine: ClassVar[Any] = None

    config: DFlashConfig
    d2t: torch.Tensor | None
    config_class = DFlashConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True  # with a block mask, as in training; decoding is not measured with it
    _supports_attention_backend = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        config.check()  # fields may have been set after the config was created
        for name in ("mask_token_id", "target_layer_ids"):
            if getattr(config, name) is None:
                raise ValueError(f"The drafter's config holds no {name}: write that of its training run.")
        self.fc = nn.Linear(len(config.target_layer_ids or ()) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = qwen3.Qwen3RotaryEmbedding(config)
        self.candidate_selector = None if config.selector_rank is None else CandidateSelector(config)
        self.prefix_gru: Any = None  # with the next one Domino's head
        self.embed_proj: Any = None
        if config.gru_hidden_dim is not None and config.emb_dim is not None:
            self.prefix_gru = PrefixGRU(config.hidden_size, config.gru_hidden_dim)
            mix = nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False)
            self.embed_proj = nn.Sequential(mix, nn.SiLU(), nn.Linear(config.emb_dim, config.vocab_size, bias=False))
        size = config.draft_vocab_size
        self.lm_head = None if size is None else nn.Linear(config.hidden_size, size, bias=False)
        # Token i of the own head is token i + d2t[i] of the target.
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.long))
        self.gradient_checkpointing = False
        if config.reader is not None:
            self._keys_to_ignore_on_load_unexpected = config.reader.COPIES_OF_THE_TARGET.get(config.dialect)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises convolutions as the identity, so that DFlash2 starts as DFlash, and the rest as transformers does."""
        super()._init_weights(module)
        if isinstance(module, GroupedDynamicCausalConv):
            module.base_kernel.zero_()[:, 0] = 1.0
            module.kernel_projection.weight.zero_()
        if isinstance(module, (CandidateSelector, PrefixGRU)):
            for weight in module.parameters(recurse=False):
                weight.normal_(std=self.config.initializer_range)

    def forward(
        self,
        noise_embeds: torch.Tensor | None = None,  # [B, N, D]
        context_hidden_states: torch.Tensor | None = None,  # [B, C, L * D]
        position_ids: torch.Tensor | None = None,  # [B, C + N]
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        *,
        cache: Cache | None = None,
        attn_implementation: str | None = None,
        noise_embedding: torch.Tensor | None = None,
        target_hidden: torch.Tensor | None = None,
        use_cache: bool = True,
        is_causal: bool = False,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the block. Those of position i, through the target's head, propose the token at that position.

        Args:
            noise_embeds (`torch.Tensor` of shape `(B, N, D)`): The target's embeddings of [anchor, mask, mask, …].
            context_hidden_states (`torch.Tensor` of shape `(B, C, L * D)`): The target's tapped hidden states of the positions
                that `past_key_values` does not hold yet, concatenated in the order of `target_layer_ids`.
            position_ids (`torch.Tensor` of shape `(B, C + N)`, *optional*): Positions of the new context, then of the block.
                By default they follow the cache.
            attention_mask (`torch.Tensor` or `dict[str, torch.Tensor]`, *optional*): `None`: one block that sees all keys
                that its layer allows; 2-D `(B, keys)`, 1 for a token; or 4-D `(B, 1, N, keys)`, boolean or additive, alone or
                by layer type, used as it is.
            past_key_values (`Cache`, *optional*): Grows by C + N; the caller rolls the block's N positions back.
            cache: The name of `past_key_values` since transformers 5.24.
            attn_implementation (`str`, *optional*): For this forward only. Default: that of the model.
            noise_embedding: z-lab's name of `noise_embeds`.
            target_hidden: z-lab's name of `context_hidden_states`.
            use_cache: z-lab's loop passes `True`. A cache is used if one is given.
            is_causal: z-lab's loop passes `False`. Causality inside a block is that of the config.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` of shape `(B, N, D)` and the cache.

        Raises:
            ValueError: if block or context are missing, if there are two caches, for another `use_cache` or `is_causal`, or if
                the attention does not support a 4-D mask.
        """
        noise_embeds = noise_embedding if noise_embeds is None else noise_embeds
        context_hidden_states = target_hidden if context_hidden_states is None else context_hidden_states
        if noise_embeds is None or context_hidden_states is None:
            raise ValueError("forward needs noise_embeds and context_hidden_states; for text, call spec_generate.")
        if cache is not None and past_key_values is not None:
            raise ValueError(
                "forward was given cache and past_key_values, which are the same thing: pass one of them."
            )
        if not use_cache or is_causal:
            given = f"use_cache={use_cache!r} and is_causal={is_causal!r}"
            raise ValueError(f"forward was given {given}: leave them out, cache and config decide.")
        cache = past_key_values if cache is None else cache
        # The target may run in another dtype; norms keep the drafter's own, also when its matrices are quantised.
        dtype = self.hidden_norm.weight.dtype
        hidden_states = noise_embeds.to(dtype)
        context = self.hidden_norm(self.fc(context_hidden_states.to(dtype)))  # [B, C, D]
        if position_ids is None:
            start = 0 if cache is None else int(cache.get_seq_length())
            length = context.shape[1] + hidden_states.shape[1]
            position_ids = torch.arange(start, start + length, device=hidden_states.device)[None]
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        implementation = attn_implementation or self.config._attn_implementation
        masks = self._masks_by_layer_type(attention_mask, hidden_states.dtype, implementation)
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            inputs = context, position_embeddings, masks[layer_type], cache, implementation
            hidden_states = layer(hidden_states, *inputs)
        return BaseModelOutputWithPast(
            self.norm(hidden_states), cache
        )  # by position: transformers 5.24 renamed the cache

    def _masks_by_layer_type(self, attention_mask: Any, dtype: torch.dtype, implementation: str) -> dict[str, Any]:
        masks = dict.fromkeys(self.config.layer_types, attention_mask)
        for layer_type in masks:
            mask = attention_mask[layer_type] if isinstance(attention_mask, dict) else attention_mask
            is_dense = mask is not None and len(mask.shape) == 4
            if is_dense and "flash" in implementation:
                raise ValueError(f"attn_implementation={implementation!r} takes no 4-D mask: load it with 'sdpa'.")
            is_boolean = is_dense and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
            masks[layer_type] = additive_mask(mask, dtype) if is_boolean else mask
        return masks

    def step_masks(self, starts: torch.Tensor, width: int, num_keys: int, is_flex: bool = False) -> dict[str, Any]:
        """The masks of a block of `width` positions from starts [B], by layer type. Key k is at position k."""
        config, dtype = self.config, None if is_flex else self.hidden_norm.weight.dtype
        masks: dict[str, Any] = {}
        for layer, layer_type in enumerate(config.layer_types):
            if layer_type not in masks:
                visible = draft_sees(config, layer, starts, width)
                masks[layer_type] = step_mask(visible, starts, width, num_keys, self.hidden_norm.weight.dtype)
        return masks

    def absorb(self, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Adds keys and values of new context [B, C, L * D] at positions [B, C] to the cache, without a block."""
        context = self.hidden_norm(self.fc(context_hidden_states.to(self.hidden_norm.weight.dtype)))
        position_embeddings = self.rotary_emb(context, position_ids)
        for layer_idx, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            cache.update(*attention.keys_and_values(context, position_embeddings), layer_idx)

    def get_input_embeddings(self) -> Any:
        """`None`: the embedding is the target's."""
        return None

    def embed(self, token_ids: torch.Tensor, embedding: nn.Module) -> torch.Tensor:
        """Embeddings [..., D] of token_ids [...] by the target's `embedding`, scaled if the config says so."""
        if (scale := self.config.input_embedding_scale) is None:
            return embedding(token_ids)
        # The weight itself, because some modules scale. If it is offloaded, accelerate's hook loads it, and drops it again.
        hook: Any = getattr(embedding, "_hf_hook", None)
        if hook is not None:
            (token_ids,), _ = hook.pre_forward(embedding, token_ids)
        embeddings = F.embedding(token_ids, embedding.get_parameter("weight")) * scale
        return embeddings if hook is None else hook.post_forward(embedding, embeddings)

    def compute_logits(
        self, hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Logits [B, R, V] of hidden_states [B, R, D] by the target's `head` or the drafter's own, with -inf where it has none."""
        logits = head(hidden_states) if self.lm_head is None else self.lm_head(hidden_states)
        if self.config.output_multiplier is not None:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        if self.d2t is None:
            return logits
        token_ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        everywhere = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return everywhere.index_copy(-1, token_ids, logits)

    def causal_head(self, embed: Callable[[torch.Tensor], torch.Tensor] | None) -> CausalHead | None:
        """DFlash2's or Domino's head, which reads the target's embeddings by `embed`; `None`: a position proposes its argmax."""
        config: Any = self.config
        if (selector := self.candidate_selector) is not None:
            before, rows = selector.predecessor_codebook, selector.successor_codebook
            parts: Any = (selector.hidden_projection, lambda token_ids, _: before[token_ids], torch.mul)
            return CausalHead(rows, config.selector_top_k, config.selector_rank, *parts)
        if self.embed_proj is None:
            return None
        if embed is None:
            raise ValueError("Domino's head reads the tokens chosen before: pass the target's embedding as `embed`.")
        gru, mix, rows = self.prefix_gru, self.embed_proj[0].weight, self.embed_proj[2].weight
        of_hidden, of_state = mix.split([config.hidden_size, config.gru_hidden_dim], dim=1)
        parts = (
            lambda hidden_states: F.linear(hidden_states, of_hidden),
            lambda token_ids, state: gru(embed(token_ids).to(state), state),
            lambda features, state: F.silu(features + F.linear(state, of_state)),
            config.pure_draft_prefix_len,
        )
        return CausalHead(rows, min(DOMINO_TOP_K, len(rows)), config.gru_hidden_dim, *parts)

    @torch.no_grad()
    def propose(
        self,
        hidden_states: torch.Tensor,  # [B, R, D]
        anchors: torch.Tensor,  # [B, 1]
        head: Callable[[torch.Tensor], torch.Tensor],
        drawn: tuple[float, torch.Tensor] | None = None,  # temperature, and uniforms [B, R]
        with_confidences: bool = False,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Any:
        """The tokens that a block's hidden states propose after the anchor, as `verification_dflash.Proposals`.

        hidden_states [B, R, D] exclude the anchor's position unless `config.sample_from_anchor`. Without a causal head, each
        position proposes its argmax, also when sampling. Such a head, which may read the target's embeddings of tokens by
        `embed`, chooses greedily or, with `drawn` (uniforms are float64, in [0, 1)), draws each token from softmax(scores /
        temperature) of its candidates, which is returned too. `with_confidences` adds the probability of each token.
        """
        from .acceptance_dflash import Proposals
        from .sampling_dflash import pick

        logits, device, confidences = self.compute_logits(hidden_states, head), anchors.device, None
        if (causal_head := self.causal_head(embed)) is None:
            token_ids = logits.argmax(dim=-1)
            best = logits.gather(-1, token_ids[..., None])
            if with_confidences:  # the argmax's probability, without a float32 copy of the logits
                confidences = (logits - best).exp().sum(dim=-1, dtype=torch.float32).reciprocal()
            is_finite = best.isfinite().all(dim=-1).all(dim=-1)
            return Proposals(token_ids.to(device), is_finite=is_finite)

        def chances(scores: torch.Tensor) -> torch.Tensor:
            return (scores.float() / (drawn[0] if drawn else 1.0)).softmax(dim=-1)

        def choose(scores: torch.Tensor, i: int) -> torch.Tensor:
            return scores.argmax(-1) if drawn is None else pick(chances(scores), drawn[1][:, i])

        path, candidate_ids, _, scores, _ = causal_head.choose_path(hidden_states, logits, anchors, choose)
        if with_confidences:
            confidences = (scores.float().softmax(dim=-1) * (candidate_ids == path[..., None])).sum(dim=-1)
        is_finite = scores.amax(dim=-1).isfinite().all(dim=-1)
        proposals = Proposals(path.to(device), is_finite=is_finite)
        if drawn is None:
            return proposals
        return replace(proposals, candidate_ids=candidate_ids.to(device), probabilities=chances(scores).to(device))

    @torch.no_grad()
    def branches(
        self,
        hidden_states: torch.Tensor,  # [1, n, D]
        anchors: torch.Tensor,  # [1, 1]
        head: Callable[[torch.Tensor], torch.Tensor],
        temperature: float,
        most: int,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [n, K or 1, K] and tokens [n, K] of which `DraftTree.grown` makes a single sequence's tree.

        A causal head has a row for each candidate of the position before. Without one there is one row for all, and the `most`
        probable tokens are taken. `head` and `embed` are as in `propose`.
        """
        logits = self.compute_logits(hidden_states, head)  # too large for a float32 copy
        if (causal_head := self.causal_head(embed)) is not None:
            scores, token_ids = causal_head.after_each(hidden_states, logits, anchors)
            return (scores.float() / temperature).log_softmax(dim=-1), token_ids
        values, token_ids = (logits := logits[0]).topk(min(most, logits.shape[-1]), dim=-1)  # [n, K]
        total = ((logits - values[:, :1]) / temperature).exp().sum(dim=-1, keepdim=True, dtype=torch.float32)
        best = (values - values[:, :1]).float() / temperature - total.log()
        return best[:, None], token_ids

    def check_target(self, target: PreTrainedModel) -> None:
        """Raises ValueError, with the value and the remedy, unless this model can draft for `target`.

        The class is `InexactError` where only the loop cannot decode the target exactly, and its own `generate` can.
        """
        check_pair(target, self)

    def spec_generate(self, input_ids: Any, target: PreTrainedModel, **kwargs: Any) -> Any:
        """The target's continuation of `input_ids`, drafted by this model: see `generation_dflash.spec_generate`."""
        # From a local folder, transformers 4.57 copies only the files that this one imports.
        from .cache_dflash import PreallocatedCache  # noqa: F401
        from .decoding_dflash import Block  # noqa: F401
        from .drafting_dflash import Context  # noqa: F401
        from .generation_dflash import spec_generate
        from .requests_dflash import Request  # noqa: F401
        from .sampling_dflash import pick  # noqa: F401
        from .sequences_dflash import TextSequence  # noqa: F401

        return spec_generate(self, target, input_ids, **kwargs)

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """Adds `custom_generate/generate.py` to the upload of `push_to_hub`, and a card if the package has loaded the model."""
        from .generation_dflash import write_custom_generate

        write_custom_generate(working_dir)
        if self.config.reader is not None:
            self.config.reader.complete_card(working_dir, self.config, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter as `PreTrainedModel.from_pretrained` does. Pickles are read only with `weights_only=True`.

        Raises:
            ValueError: for missing, unexpected or misshapen tensors, because a drafter with random tensors would run and
                propose nothing useful, and for a file that cannot be read.
            OSError: for a folder without a checkpoint.
        """
        name = str(pretrained_model_name_or_path)
        if not kwargs.get("weights_only"):
            kwargs["use_safetensors"] = True
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # listed and refused below
        if cls.config_class.reader is not None:
            cls.config_class.reader.check_folder(name, kwargs.get("subfolder") or "", kwargs.get("weights_only"))
            kwargs.setdefault("key_mapping", dict(cls.config_class.reader.TENSOR_NAMES))
        try:
            loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except Exception as error:
            kind, reason = type(error).__name__, str(error).strip().partition("\n")[0]
            # Errors of transformers that a malformed checkpoint causes.
            malformed = (AttributeError, LookupError, TypeError, ArithmeticError, pickle.UnpicklingError)
            is_malformed = isinstance(error, malformed) or "Only Tensors of floating point" in str(error)
            if not is_malformed and not kind.startswith(("StrictDataclass", "SafetensorError")):
                raise
            given = f"{name} cannot be read ({kind}: {reason}): its config.json is wrong or its weights are truncated"
            raise ValueError(f"{given}; correct or fetch it again. `dflash check` says what is wrong.") from error
        model, info = loaded
        if getattr(model, "_weight_conversions", None):  # else transformers 5 saves under the names that it read
            kept = [step for step in model._weight_conversions if type(step).__name__ == "WeightConverter"]
            model._weight_conversions = kept
        if keys := [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]:
            named = ((key, sorted(map(str, info[key]))) for key in keys)
            listed = "; ".join(f"{len(names)} {key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in named)
            remedy = "it is another kind of checkpoint, or its config.json is not that of its weights"
            raise ValueError(f"{name} does not fill a DFlash drafter exactly ({listed}): {remedy}.")
        weight = model.fc.weight
        is_plain = weight.device.type != "meta" and getattr(model.config, "quantization_config", None) is None
        if is_plain and bool((weight == weight.round()).all()) and bool((weight.abs() > 1).any()):
            remedy = "load the weights that were trained, or the checkpoint with its quantization_config"
            raise ValueError(f"{name} holds integers as weights (fc.weight), so it is quantised: {remedy}.")
        return (model, info) if wants_info else model


# Also in remote code, so that a model loaded from a checkpoint ships its code again when saved.
DFlashDraftModel.register_for_auto_class("AutoModel")
