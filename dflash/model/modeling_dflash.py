"""The DFlash drafter: a few Qwen3 layers whose keys and values also hold the target's own hidden states.

Dimensions: B batch, C new context positions, N block positions (anchor included), K visible keys, S positions, L tapped
layers, D hidden size, H/G heads and key/value heads, E head size, W window, V vocabulary, R positions that propose. In
training, N counts the positions of all blocks of a sequence and `attention_mask` separates them; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from .acceptance_dflash import Proposals
from .attention_dflash import additive_mask, draft_sees, grouped_attention, sees, step_mask
from .configuration_dflash import DFlashConfig
from .heads_dflash import CandidateSelector, CausalHead, DominoHead, PrefixGRU, SelectorHead
from .sampling_dflash import pick
from .targets_dflash import InexactError, check_pair


# Cosines and sines of positions, each [B, S, 1, E]; the sines of the first half of a head are negative.
Rotation = tuple[torch.Tensor, torch.Tensor]


class DFlashRMSNorm(qwen3.Qwen3RMSNorm):
    """Qwen3's norm, as one operation of torch where input and weight have the same dtype."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The normed states, in the weight's dtype."""
        if hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class DFlashAttn(qwen3.Qwen3Attention):
    """Attention of the block over [context, block]. Context positions enter only as keys and values."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # Attention functions read causality from this attribute when there is no mask. Causal or windowed blocks always
        # have a mask, so it is False.
        self.is_causal = False
        self.is_block_causal = config.is_layer_causal(layer_idx)
        self.q_norm = DFlashRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, D]
        context: torch.Tensor,  # [B, C, D]
        rotation: Rotation,  # of C + N positions
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        implementation: str,
    ) -> torch.Tensor:  # [B, N, D]
        """Attends from the block to [cached context, new context, block]."""
        width = hidden_states.shape[1]
        key, value = self.keys_and_values(torch.cat([context, hidden_states], dim=1), rotation)
        cos, sin = rotation
        query = self._rotated(self.q_norm, self.q_proj(hidden_states), (cos[:, -width:], sin[:, -width:]))
        query = query.to(value.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        options: dict[str, Any] = {"is_causal": False}
        if "flash" in implementation:  # these kernels take causality and window as arguments, not a 4-D mask
            options = {"is_causal": self.is_block_causal, "sliding_window": self.sliding_window}
        else:
            attention_mask = self._decoding_mask(attention_mask, query, key)
        attend = self._attention_function(implementation, is_decoding=cache is not None)
        output, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **options,
        )
        return self.o_proj(output.flatten(2))

    def keys_and_values(self, states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, G, S, E] of states [B, S, D] of context and block."""
        value = self.v_proj(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key = self._rotated(self.k_norm, self.k_proj(states), rotation)
        # Under autocast norms return their weights' dtype, and some attention functions need one dtype.
        return key.to(value.dtype), value

    def _rotated(self, norm: nn.Module, projected: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Heads [B, H, S, E] of projected [B, S, H * E], normed and rotated by their positions."""
        heads = norm(projected.unflatten(-1, (-1, self.head_dim)))
        cos, sin = rotation
        other_halves = heads.roll(self.head_dim // 2, dims=-1)
        return torch.addcmul(heads * cos, other_halves, sin).transpose(1, 2)

    def _attention_function(self, implementation: str, is_decoding: bool) -> Any:
        if implementation == "eager":
            return qwen3.eager_attention_forward
        if implementation == "sdpa" and is_decoding:  # one block after its cached context
            return grouped_attention
        return ALL_ATTENTION_FUNCTIONS[implementation]

    def _decoding_mask(self, attention_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
        """The additive mask of a block after its context, within a 2-D `attention_mask` of its last keys; a 4-D one stays."""
        if attention_mask is not None and len(attention_mask.shape) == 4:  # a tensor, or flex attention's block mask
            return attention_mask
        if attention_mask is None and self.sliding_window is None and not self.is_block_causal:
            return None
        # Slots replace positions: the block follows its context without a gap, so distances are equal.
        num_keys = key.shape[2]
        start = num_keys - query.shape[2]
        slots = torch.arange(num_keys, device=key.device)
        keys = (slots, torch.where(slots < start, -1, 0))
        queries = (slots[start:, None], 0)
        visible = sees(queries, keys, start, self.is_block_causal, self.sliding_window)
        if attention_mask is not None:
            of_keys = attention_mask[:, -num_keys:].bool()
            visible = visible & of_keys[:, None]
        else:
            visible = visible[None]
        return additive_mask(visible[:, None], query.dtype)  # [B or 1, 1, N, K]


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
        num_groups = config.hidden_size // self.group_size
        num_deltas = 2 * self.kernel_size * num_groups
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, num_deltas, bias=False)

    def forward(self, hidden: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Mixes hidden [B, N, D], applies `sublayer`, and mixes its output."""
        deltas = self.kernel_projection(hidden).unflatten(-1, (2, self.kernel_size, -1))
        kernels = self.base_kernel + deltas.repeat_interleave(self.group_size, dim=-1)
        before, after = kernels.unbind(dim=2)
        output = sublayer(self._mixed(hidden, before))
        return self._mixed(output, after)

    def _mixed(self, hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """The sum over taps of shifted hidden [B, N, D] times kernel [B, N, taps, D], block by block."""
        width = min(hidden.shape[1], self.block_size)
        blocks = hidden.unflatten(1, (-1, width))  # [B, blocks, N, D]
        taps = []
        for tap in range(self.kernel_size):
            shifted = functional.pad(blocks, (0, 0, tap, 0))
            taps.append(shifted[:, :, :width].flatten(1, 2))
        products = torch.stack(taps, dim=2) * kernel
        return products.sum(dim=2)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """A Qwen3 layer over the block. The context is already normed by `hidden_norm` and skips `input_layernorm`."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        has_conv = config.conv_kernel_size is not None
        self.attention_conv = GroupedDynamicCausalConv(config) if has_conv else None
        self.mlp_conv = GroupedDynamicCausalConv(config) if has_conv else None
        self.self_attn = DFlashAttn(config, layer_idx)
        self.mlp = qwen3.Qwen3MLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """Attention and MLP over the block [B, N, D], each with its residual. `inputs` are further ones of the attention."""

        def attend(hidden: torch.Tensor) -> torch.Tensor:
            return self.self_attn(hidden, context, *inputs)

        hidden = self.input_layernorm(hidden_states)
        hidden = attend(hidden) if self.attention_conv is None else self.attention_conv(hidden, attend)
        hidden_states = hidden_states + hidden
        hidden = self.post_attention_layernorm(hidden_states)
        hidden = self.mlp(hidden) if self.mlp_conv is None else self.mlp_conv(hidden, self.mlp)
        return hidden_states + hidden


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
        size = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids or ()) * size, size, bias=False)
        self.hidden_norm = DFlashRMSNorm(size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = DFlashRMSNorm(size, eps=config.rms_norm_eps)
        self.rotary_emb = qwen3.Qwen3RotaryEmbedding(config)
        self.candidate_selector = None if config.selector_rank is None else CandidateSelector(config)
        self.prefix_gru: Any = None  # with the next one Domino's head
        self.embed_proj: Any = None
        if config.gru_hidden_dim is not None and config.emb_dim is not None:
            self.prefix_gru = PrefixGRU(size, config.gru_hidden_dim)
            mix = nn.Linear(size + config.gru_hidden_dim, config.emb_dim, bias=False)
            table = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
            self.embed_proj = nn.Sequential(mix, nn.SiLU(), table)
        self.lm_head: nn.Linear | None = None
        self.register_buffer("d2t", None)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            # Token i of the own head is token i + d2t[i] of the target.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
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
            arguments = f"use_cache={use_cache!r} and is_causal={is_causal!r}"
            raise ValueError(f"forward was given {arguments}: leave them out, cache and config decide.")
        cache = past_key_values if cache is None else cache
        # The target may run in another dtype; norms keep the drafter's own, also when its matrices are quantised.
        hidden_states = noise_embeds.to(self.hidden_norm.weight.dtype)
        context = self._context(context_hidden_states)
        if position_ids is None:
            start = 0 if cache is None else int(cache.get_seq_length())
            length = context.shape[1] + hidden_states.shape[1]
            position_ids = torch.arange(start, start + length, device=hidden_states.device)[None]
        rotation = self._rotation(hidden_states, position_ids)
        implementation = attn_implementation or self.config._attn_implementation
        masks = self._masks_by_layer_type(attention_mask, hidden_states.dtype, implementation)
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(hidden_states, context, rotation, masks[layer_type], cache, implementation)
        # By position: transformers 5.24 renamed the cache.
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)

    def _context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's states [B, C, L * D] as the layers read them, [B, C, D]."""
        dtype = self.hidden_norm.weight.dtype
        return self.hidden_norm(self.fc(context_hidden_states.to(dtype)))

    def _rotation(self, states: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        cos, sin = self.rotary_emb(states, position_ids)  # each [B, S, E]
        first, second = sin.chunk(2, dim=-1)
        signed_sin = torch.cat([-first, second], dim=-1)
        return cos.unsqueeze(2), signed_sin.unsqueeze(2)

    def _masks_by_layer_type(self, attention_mask: Any, dtype: torch.dtype, implementation: str) -> dict[str, Any]:
        masks: dict[str, Any] = {}
        for layer_type in self.config.layer_types:
            mask = attention_mask[layer_type] if isinstance(attention_mask, dict) else attention_mask
            is_dense = mask is not None and len(mask.shape) == 4
            if is_dense and "flash" in implementation:
                raise ValueError(f"attn_implementation={implementation!r} takes no 4-D mask: load it with 'sdpa'.")
            if isinstance(mask, torch.Tensor) and is_dense and mask.dtype == torch.bool:
                mask = additive_mask(mask, dtype)
            masks[layer_type] = mask
        return masks

    def step_masks(self, starts: torch.Tensor, width: int, num_keys: int) -> dict[str, Any]:
        """The additive masks of a block of `width` positions from starts [B], by layer type. Key k is at position k."""
        dtype = self.hidden_norm.weight.dtype
        masks: dict[str, Any] = {}
        for layer, layer_type in enumerate(self.config.layer_types):
            if layer_type not in masks:
                visible = draft_sees(self.config, layer, starts, width)
                masks[layer_type] = step_mask(visible, starts, width, num_keys, dtype)
        return masks

    def absorb(self, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Adds keys and values of new context [B, C, L * D] at positions [B, C] to the cache, without a block."""
        context = self._context(context_hidden_states)
        rotation = self._rotation(context, position_ids)
        for layer_idx, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            key, value = attention.keys_and_values(context, rotation)
            cache.update(key, value, layer_idx)

    def get_input_embeddings(self) -> Any:
        """`None`: the embedding is the target's."""
        return None

    def embed(self, token_ids: torch.Tensor, embedding: nn.Module) -> torch.Tensor:
        """Embeddings [..., D] of token_ids [...] by the target's `embedding`, scaled if the config says so."""
        scale = self.config.input_embedding_scale
        if scale is None:
            return embedding(token_ids)
        # The weight itself, because some modules scale. If it is offloaded, accelerate's hook loads it, and drops it again.
        hook: Any = getattr(embedding, "_hf_hook", None)
        if hook is not None:
            (token_ids,), _ = hook.pre_forward(embedding, token_ids)
        embeddings = functional.embedding(token_ids, embedding.get_parameter("weight")) * scale
        return embeddings if hook is None else hook.post_forward(embedding, embeddings)

    def compute_logits(
        self, hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Logits [B, R, V] of hidden_states [B, R, D] by the target's `head` or the drafter's own, with -inf where it has none."""
        logits = head(hidden_states) if self.lm_head is None else self.lm_head(hidden_states)
        if self.config.output_multiplier is not None:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        if self.d2t is None:
            return logits
        token_ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        shape = (*logits.shape[:-1], self.config.vocab_size)
        everywhere = logits.new_full(shape, -torch.inf)
        return everywhere.index_copy(-1, token_ids, logits)

    def causal_head(self, embed: Callable[[torch.Tensor], torch.Tensor] | None) -> CausalHead | None:
        """DFlash2's or Domino's head, which reads the target's embeddings by `embed`; `None`: a position proposes its argmax."""
        config: Any = self.config
        if self.candidate_selector is not None:
            return SelectorHead(self.candidate_selector, config.selector_top_k)
        if self.embed_proj is None:
            return None
        if embed is None:
            raise ValueError("Domino's head reads the tokens chosen before: pass the target's embedding as `embed`.")
        return DominoHead(self.prefix_gru, self.embed_proj, embed, config.pure_draft_prefix_len)

    @torch.no_grad()
    def propose(
        self,
        hidden_states: torch.Tensor,  # [B, R, D]
        anchors: torch.Tensor,  # [B, 1]
        head: Callable[[torch.Tensor], torch.Tensor],
        drawn: tuple[float, torch.Tensor] | None = None,  # temperature, and uniforms [B, R]
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Proposals:
        """The tokens that a block's hidden states propose after the anchor.

        hidden_states [B, R, D] exclude the anchor's position unless `config.sample_from_anchor`. Without a causal head, each
        position proposes its argmax, also when sampling. Such a head, which may read the target's embeddings of tokens by
        `embed`, chooses greedily or, with `drawn` (uniforms are float64, in [0, 1)), draws each token from softmax(scores /
        temperature) of its candidates, which is returned too.
        """
        device = anchors.device
        logits = self.compute_logits(hidden_states, head)
        causal_head = self.causal_head(embed)
        if causal_head is None:
            token_ids = logits.argmax(dim=-1)
            best = logits.gather(-1, token_ids[..., None])
            is_finite = best.isfinite().all(dim=-1).all(dim=-1)
            return Proposals(token_ids.to(device), is_finite=is_finite)

        def probabilities(scores: torch.Tensor) -> torch.Tensor:
            return (scores.float() / (drawn[0] if drawn else 1.0)).softmax(dim=-1)

        def choose(scores: torch.Tensor, i: int) -> torch.Tensor:
            return scores.argmax(-1) if drawn is None else pick(probabilities(scores), drawn[1][:, i])

        path = causal_head.choose_path(hidden_states, logits, anchors, choose)
        is_finite = path.scores.amax(dim=-1).isfinite().all(dim=-1)
        proposals = Proposals(path.token_ids.to(device), is_finite=is_finite)
        if drawn is None:
            return proposals
        candidates = path.candidate_ids.to(device)
        return replace(proposals, candidate_ids=candidates, probabilities=probabilities(path.scores).to(device))

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
        causal_head = self.causal_head(embed)
        if causal_head is not None:
            scores, token_ids = causal_head.after_each(hidden_states, logits, anchors)
            return (scores.float() / temperature).log_softmax(dim=-1), token_ids
        logits = logits[0]
        values, token_ids = logits.topk(min(most, logits.shape[-1]), dim=-1)  # [n, K]
        largest = values[:, :1]
        total = ((logits - largest) / temperature).exp().sum(dim=-1, keepdim=True, dtype=torch.float32)
        best = (values - largest).float() / temperature - total.log()
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
        if not kwargs.get("weights_only"):
            kwargs["use_safetensors"] = True
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # listed and refused below
        load = super().from_pretrained
        if cls.config_class.reader is not None:
            load = partial(cls.config_class.reader.load, load)
        model, info = load(pretrained_model_name_or_path, *args, **kwargs)
        faults = []
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(map(str, info[kind]))
            if names:
                faults.append(f"{len(names)} {kind.replace('_', ' ')}: {', '.join(names[:3])}")
        if faults:
            fault = f"{pretrained_model_name_or_path} does not fill a DFlash drafter exactly ({'; '.join(faults)})"
            remedy = "it is another kind of checkpoint, or its config.json is not that of its weights"
            raise ValueError(f"{fault}: {remedy}.")
        return (model, info) if wants_info else model


# Also in remote code, so that a model loaded from a checkpoint ships its code again when saved.
DFlashDraftModel.register_for_auto_class("AutoModel")
