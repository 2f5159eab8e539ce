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
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from .acceptance_dflash import Proposals
from .attention_dflash import additive_mask, draft_sees
from .configuration_dflash import DFlashConfig
from .heads_dflash import CausalHead, Embed, HeadWeights, head_of
from .layers_dflash import DFlashDecoderLayer, DFlashRMSNorm, GroupedDynamicCausalConv, rotation_of
from .targets_dflash import InexactError, check_pair


class DFlashDraftModel(PreTrainedModel):
    """The DFlash drafter (arXiv 2602.06036). One forward turns an anchor and mask tokens into a block of proposals.

    The model uses the target's embedding and head; only checkpoints with a reduced vocabulary have a head of their own. Names
    and shapes of its tensors are those of the published `z-lab/*-DFlash` checkpoints.

    `config` needs `mask_token_id` and `target_layer_ids`; an invalid field raises ValueError.

    Example:
        >>> drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
        >>> text_ids = drafter.spec_generate(input_ids, target=target, max_new_tokens=256, temperature=0.0)
    """

    # A request that only plain `generate` can serve exactly.
    InexactError: ClassVar[type[ValueError]] = InexactError

    # `dflash.engine`, which makes the loop faster; `None` in a shipped copy.
    engine: ClassVar[Any] = None

    # The head of a subclass that tries a new one; `None`: the one that the config describes.
    head_class: ClassVar[type[CausalHead] | None] = None

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
        eps = config.rms_norm_eps
        num_taps = len(config.target_layer_ids or ())
        self.fc = nn.Linear(num_taps * size, size, bias=False)
        self.hidden_norm = DFlashRMSNorm(size, eps=eps)
        self.layers = nn.ModuleList()
        for layer_idx in range(config.num_hidden_layers):
            self.layers.append(DFlashDecoderLayer(config, layer_idx))
        self.norm = DFlashRMSNorm(size, eps=eps)
        self.rotary_emb = qwen3.Qwen3RotaryEmbedding(config)
        self._head = self.head_class or head_of(config)
        if self._head is not None:
            for name, module in self._head.weights(config).items():
                self.add_module(name, module)
        num_own = config.draft_vocab_size  # tokens of an own head
        self.lm_head = None if num_own is None else nn.Linear(size, num_own, bias=False)
        # Token i of the own head is token i + d2t[i] of the target.
        offsets = None if num_own is None else torch.zeros(num_own, dtype=torch.long)
        self.register_buffer("d2t", offsets)
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
        if isinstance(module, HeadWeights):
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
        if noise_embeds is None:
            noise_embeds = noise_embedding
        if context_hidden_states is None:
            context_hidden_states = target_hidden
        if noise_embeds is None or context_hidden_states is None:
            raise ValueError("forward needs noise_embeds and context_hidden_states; for text, call spec_generate.")
        if cache is not None and past_key_values is not None:
            raise ValueError(
                "forward was given cache and past_key_values, which are the same thing: pass one of them."
            )
        if not use_cache or is_causal:
            raise ValueError(
                f"forward was given use_cache={use_cache!r} and is_causal={is_causal!r}: leave them out, cache and config decide."
            )
        cache = past_key_values if cache is None else cache
        # The target may run in another dtype; norms keep the drafter's own, also when its matrices are quantised.
        hidden_states = noise_embeds.to(self.hidden_norm.weight.dtype)
        context = self._context(context_hidden_states)
        num_cached = 0 if cache is None else cache.get_seq_length()
        start = num_cached + context.shape[1]
        width = hidden_states.shape[1]
        if position_ids is None:
            positions = torch.arange(
                num_cached,
                start + width,
                device=hidden_states.device,
            )
            position_ids = positions[None]
        rotation = rotation_of(self.rotary_emb(hidden_states, position_ids))
        implementation = attn_implementation or self.config._attn_implementation
        masks = self._masks_by_layer_type(
            attention_mask,
            start,
            width,
            implementation,
        )
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            mask = masks[layer_type]
            hidden_states = layer(
                hidden_states,
                context,
                rotation,
                mask,
                cache,
                implementation,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(hidden_states, cache)  # by position: transformers 5.24 renamed the cache

    def _context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's states [B, C, L * D] as the layers read them, [B, C, D]."""
        projected = self.fc(context_hidden_states.to(self.hidden_norm.weight.dtype))
        return self.hidden_norm(projected)

    def _masks_by_layer_type(self, attention_mask: Any, start: int, width: int, implementation: str) -> dict[str, Any]:
        """The masks that attention takes: 4-D ones as given, else those of a block of `width` positions after `start` keys."""
        masks = {}
        for layer, layer_type in enumerate(self.config.layer_types):
            if layer_type in masks:
                continue
            mask = attention_mask
            if isinstance(attention_mask, dict):
                mask = attention_mask[layer_type]
            is_whole = mask is not None and len(mask.shape) == 4  # a tensor, or flex attention's block mask
            sees_part = self.config.is_layer_causal(layer) or self.config.layer_window(layer) is not None
            if "flash" in implementation:
                if is_whole:
                    raise ValueError(f"attn_implementation={implementation!r} takes no 4-D mask: load it with 'sdpa'.")
            elif is_whole:
                if getattr(mask, "dtype", None) == torch.bool:
                    mask = additive_mask(mask, self.hidden_norm.weight.dtype)
            elif sees_part or mask is not None:
                starts = torch.full(
                    (1,),
                    start,
                    device=self.hidden_norm.weight.device,
                )
                mask = self._block_mask(
                    layer,
                    starts,
                    width,
                    start + width,
                    mask,
                )
            masks[layer_type] = mask
        return masks

    def _block_mask(
        self, layer: int, starts: torch.Tensor, width: int, num_keys: int, is_token: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The additive mask [B, 1, N, K] of a layer. Of a 2-D `is_token`, the last columns are those of the keys."""
        visible = draft_sees(self.config, layer, starts, width, num_keys)
        if is_token is not None:
            visible = visible & is_token[:, None, -num_keys:].bool()
        return additive_mask(visible[:, None], self.hidden_norm.weight.dtype)

    def step_masks(self, starts: torch.Tensor, width: int, num_keys: int) -> dict[str, Any]:
        """The additive masks of a block of `width` positions from starts [B], by layer type. Key k is at position k."""
        masks = {}
        for layer, layer_type in enumerate(self.config.layer_types):
            if layer_type not in masks:
                masks[layer_type] = self._block_mask(layer, starts, width, num_keys)
        return masks

    def absorb(self, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Adds keys and values of new context [B, C, L * D] at positions [B, C] to the cache, without a block."""
        context = self._context(context_hidden_states)
        rotation = rotation_of(self.rotary_emb(context, position_ids))
        layer: Any
        for layer in self.layers:
            layer.self_attn.keys_and_values(context, rotation, cache)

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
        weight = embedding.get_parameter("weight")
        embeddings = functional.embedding(token_ids, weight) * scale
        if hook is not None:
            embeddings = hook.post_forward(embedding, embeddings)
        return embeddings

    def compute_logits(
        self, hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Logits [B, R, V] of hidden_states [B, R, D] by the target's `head` or the drafter's own, with -inf where it has none."""
        if self.lm_head is not None:
            head = self.lm_head
        logits = head(hidden_states)
        if self.config.output_multiplier is not None:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * (logits / cap).tanh()
        if self.d2t is None:
            return logits
        own_ids = torch.arange(len(self.d2t), device=self.d2t.device)
        everywhere = logits.new_full(
            (*logits.shape[:-1], self.config.vocab_size),
            -torch.inf,
        )
        return everywhere.index_copy(
            -1,
            own_ids + self.d2t,
            logits,
        )

    def head_names(self) -> list[str]:
        """The names of the modules that belong to the head, in the order in which it adds them."""
        return [] if self._head is None else list(self._head.weights(self.config))

    def causal_head(self, embed: Embed | None) -> CausalHead | None:
        """The head, which may read the target's embeddings by `embed`; `None`: a position proposes its argmax."""
        return None if self._head is None else self._head(self, embed)

    @torch.no_grad()
    def propose(
        self,
        hidden_states: torch.Tensor,  # [B, R, D]
        anchors: torch.Tensor,  # [B, 1]
        head: Callable[[torch.Tensor], torch.Tensor],
        drawn: tuple[float | torch.Tensor, torch.Tensor] | None = None,  # temperature, and uniforms [B, R]
        embed: Embed | None = None,
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
            best, token_ids = logits.max(dim=-1)
        else:
            path = causal_head.choose_path(
                hidden_states,
                logits,
                anchors,
                drawn,
            )
            best = path.scores.amax(dim=-1)
            token_ids = path.token_ids
        is_finite = best.isfinite().all(dim=-1)
        proposals = Proposals(token_ids.to(device), is_finite=is_finite)
        if causal_head is None:
            return proposals
        previous_ids = torch.cat([anchors.to(token_ids.device), token_ids[:, :-1]], dim=1)
        confidences = causal_head.confidences(hidden_states, previous_ids)
        if confidences is not None:
            confidences = confidences.float().sigmoid().to(device)
            proposals = replace(proposals, confidences=confidences)
        if path.probabilities is None:
            return proposals
        return replace(
            proposals,
            candidate_ids=path.candidate_ids.to(device),
            probabilities=path.probabilities.to(device),
        )

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
        from .sampling_dflash import Sampler  # noqa: F401
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
        load: Any = super().from_pretrained
        if cls.config_class.reader is not None:
            load = partial(cls.config_class.reader.load, load)
        model, info = load(pretrained_model_name_or_path, *args, **kwargs)
        faults = []
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(map(str, info[kind]))
            if names:
                first = ", ".join(names[:3])
                faults.append(f"{len(names)} {kind.replace('_', ' ')}: {first}")
        if faults:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not fill a DFlash drafter exactly ({'; '.join(faults)}): it is another "
                "kind of checkpoint, or its config.json is not that of its weights."
            )
        return (model, info) if wants_info else model


# Also in remote code, so that a model loaded from a checkpoint ships its code again when saved.
DFlashDraftModel.register_for_auto_class("AutoModel")
