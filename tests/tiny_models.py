"""Tiny random targets and drafters, and a drafter whose acceptance lengths are written in advance.

A random drafter is never right, so a test of losslessness that uses one never exercises acceptance. `ScriptedDrafter` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import BaseModelOutput

from dflash import DFlashConfig, DFlashDraftModel


VOCAB_SIZE = 96
HIDDEN_SIZE = 32
NUM_TARGET_LAYERS = 4
BLOCK_SIZE = 6
MASK_TOKEN_ID = VOCAB_SIZE - 1
PAD_TOKEN_ID = 0
WRONG_OFFSET = 5  # a wrong proposal is the right one plus this

DIMENSIONS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
# Qwen3's defaults name ids far outside a tiny vocabulary; a test that wants one sets it.
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# Fields of a drafter of one layer, for a target of two: half the time where many steps are run or captured.
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_target_layers": 2, "target_layer_ids": [0]}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Kind of target, and a seed whose text is varied: one that repeats a token would hide a wrong rollback.
TARGET_SEEDS = {"qwen3": 4, "qwen3_tied": 2, "qwen3_sliding": 4, "llama": 22, "llama_tied": 22}
TARGET_KINDS = tuple(TARGET_SEEDS)


def make_target(kind: str = "qwen3", seed: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A random fp32 target of one of `TARGET_KINDS`, in eval mode; its layers are large enough for varied text."""
    fields = {**DIMENSIONS, **NO_SPECIAL_TOKENS, "num_hidden_layers": NUM_TARGET_LAYERS}
    fields["tie_word_embeddings"] = kind.endswith("_tied")
    if kind == "qwen3_sliding":
        kinds = ["sliding_attention", "full_attention"]
        fields.update(
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=0,
            layer_types=kinds * (NUM_TARGET_LAYERS // 2),
        )
    if kind.startswith("llama"):
        fields.update(rope_theta=500000.0, rope_scaling=dict(LLAMA3_ROPE))
    fields.update(overrides)
    torch.manual_seed(TARGET_SEEDS[kind] if seed is None else seed)
    config_class, model_class = (
        (LlamaConfig, LlamaForCausalLM) if kind.startswith("llama") else (Qwen3Config, Qwen3ForCausalLM)
    )
    return model_class(config_class(**fields)).float().eval()


@dataclass(frozen=True)
class Family:
    """How to build a tiny target of one family: names of its classes in transformers, and what its config needs.

    Attributes:
        model: The class of the model; a version of transformers without it does not have the family.
        config: The class of its (text) config.
        fields: What the config needs beyond `DIMENSIONS`; `None` leaves one of those out.
        window: Positions that its narrowest layers see; `None`: all.
        versions: Major versions of transformers on which it is served; on others it is refused by name.
        attention: The implementation it has to be run with, if not sdpa.
        seed: One whose text is varied on every version.
        images: What the config of a multimodal wrapper needs around the text's.
    """

    model: str
    config: str
    fields: Any = field(default_factory=dict)
    window: int | None = None
    versions: tuple[int, ...] = (4, 5)
    attention: str = "sdpa"
    seed: int = 0
    images: Any = None

    @property
    def exists(self) -> bool:
        """Whether the installed transformers has it."""
        return hasattr(transformers, self.model)

    @property
    def is_served(self) -> bool:
        """Whether it is to be served, and not refused, on the installed transformers."""
        return int(transformers.__version__.split(".")[0]) in self.versions

    def make(self, **overrides: Any) -> PreTrainedModel:
        """A random fp32 target, in eval mode; its layers are large enough for varied text."""
        fields = {**DIMENSIONS, **NO_SPECIAL_TOKENS, "num_hidden_layers": NUM_TARGET_LAYERS}
        # A tied head of random weights likes to repeat the token that came in.
        fields.update({"tie_word_embeddings": False, **self.fields, **overrides})
        fields = {name: value for name, value in fields.items() if value is not ABSENT}
        if self.images is not None:
            fields = {"text_config": fields, "tie_word_embeddings": False, **self.images}
        torch.manual_seed(self.seed)
        target = getattr(transformers, self.model)(getattr(transformers, self.config)(**fields)).float().eval()
        for name, parameter in target.named_parameters():
            if "mm_input_projection" in name:  # Gemma 3 begins with zeros, and would see nothing
                torch.nn.init.normal_(parameter, std=0.3)
        target.generation_config.eos_token_id = None
        target.set_attn_implementation(self.attention)
        return target

    def image_prompt(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Ids [1, 20] with an image of four tokens among them, and what goes with them."""
        text, image = make_prompt(14, seed=3, vocab_size=IMAGE_TOKEN_ID - 2), [IMAGE_TOKEN_ID] * 4
        image = torch.tensor([[IMAGE_TOKEN_ID - 2, *image, IMAGE_TOKEN_ID - 1]])
        ids = torch.cat([text[:, :5], image, text[:, 5:]], dim=1)
        is_image = (ids == IMAGE_TOKEN_ID).long()
        noise = torch.Generator().manual_seed(1)
        if self.images is GEMMA_IMAGES:
            return ids, {"pixel_values": torch.randn(1, 3, 16, 16, generator=noise), "token_type_ids": is_image}
        inputs = {
            "pixel_values": torch.randn(16, 96, generator=noise),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": is_image,
        }
        if transformers.__version__.startswith("4"):
            del inputs["mm_token_type_ids"]
        return ids, inputs


ABSENT = object()  # leaves a field of `DIMENSIONS` out
ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_TARGET_LAYERS // 2)
LINEAR_THEN_FULL = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "head_dim": ABSENT,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
DELTA_NET = {
    "layer_types": LINEAR_THEN_FULL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}

IMAGE_TOKEN_ID = 90
VISION = {
    "depth": 2,
    "hidden_size": HIDDEN_SIZE,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VISION_3 = {**VISION, "intermediate_size": 32, "out_hidden_size": HIDDEN_SIZE, "num_position_embeddings": 16}
DEEPSTACK = {**VISION_3, "deepstack_visual_indexes": [0, 1]}
QWEN_IMAGES = {
    "image_token_id": IMAGE_TOKEN_ID,
    "video_token_id": IMAGE_TOKEN_ID + 1,
    "vision_start_token_id": IMAGE_TOKEN_ID - 2,
    "vision_end_token_id": IMAGE_TOKEN_ID - 1,
}
GEMMA_IMAGES = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE_TOKEN_ID,
    "boi_token_index": IMAGE_TOKEN_ID - 2,
    "eoi_token_index": IMAGE_TOKEN_ID - 1,
}
THREE_AXES = {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}}
INTERLEAVED = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}}

# Every family that is proven, and how it is built.
FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", seed=3),
    "qwen3_windows": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ALTERNATING},
        window=8,
        seed=2,
    ),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS, seed=4),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", "Qwen2MoeConfig", SHARED_EXPERT, seed=1),
    "llama2": Family("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 4}, seed=1),
    "llama3.1": Family(
        "LlamaForCausalLM", "LlamaConfig", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}, seed=7
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        window=8,
        attention="eager",
        seed=8,
    ),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", seed=1),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 4.0,
            "attn_logit_softcapping": 4.0,
        },
        window=8,
        attention="eager",
        seed=8,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING},
        window=8,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "final_logit_softcapping": 4.0,
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        window=8,
        seed=4,
        versions=(5,),
    ),
    "gemma4_shared_kv": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        window=8,
        seed=9,
        versions=(5,),
    ),
    "glm": Family("GlmForCausalLM", "GlmConfig"),
    "glm4": Family("Glm4ForCausalLM", "Glm4Config"),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        seed=6,
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT, seed=5, versions=(5,)),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        seed=5,
        versions=(5,),
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT, seed=5),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT, seed=4),
    "phi": Family("PhiForCausalLM", "PhiConfig", {"head_dim": ABSENT}, seed=2),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {"head_dim": ABSENT}, seed=4),
    "phi3_window": Family(
        "Phi3ForCausalLM", "Phi3Config", {"head_dim": ABSENT, "sliding_window": 8}, window=8, seed=3
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {"head_dim": ABSENT, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        seed=8,
    ),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": 8}, window=8, seed=5),
    "ministral": Family(
        "MinistralForCausalLM", "MinistralConfig", {"sliding_window": 8, "layer_types": ALTERNATING}, window=8, seed=7
    ),
    "ministral3": Family("Ministral3ForCausalLM", "Ministral3Config", {"sliding_window": None}, seed=3, versions=(5,)),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        window=8,
        seed=6,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "head_dim": ABSENT,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
        seed=7,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {"head_dim": ABSENT, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0},
        seed=8,
    ),
    "cohere": Family("CohereForCausalLM", "CohereConfig", {"head_dim": ABSENT, "logit_scale": 0.25}, seed=5),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"sliding_window": 8, "layer_types": ALTERNATING, "logit_scale": 0.25},
        window=8,
        seed=7,
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layers": [1, 0, 1, 0]}, seed=7),
    "olmo": Family("OlmoForCausalLM", "OlmoConfig", {"head_dim": ABSENT}, seed=2),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", {"head_dim": ABSENT}, seed=3),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {"head_dim": ABSENT, "sliding_window": 8, "layer_types": ALTERNATING},
        window=8,
        seed=8,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM", "OlmoeConfig", {"head_dim": ABSENT, "num_experts": 4, "num_experts_per_tok": 2}
    ),
    "ernie4.5": Family("Ernie4_5ForCausalLM", "Ernie4_5Config", seed=3),
    "ernie4.5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
        seed=8,
    ),
    "seed_oss": Family("SeedOssForCausalLM", "SeedOssConfig"),
    "exaone4": Family(
        "Exaone4ForCausalLM", "Exaone4Config", {"sliding_window": 8, "layer_types": ALTERNATING}, window=8, seed=2
    ),
    "hunyuan": Family("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", seed=3),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", "Starcoder2Config", {"head_dim": ABSENT, "sliding_window": 8}, window=8, seed=8
    ),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", {"head_dim": ABSENT}),
    "nemotron": Family("NemotronForCausalLM", "NemotronConfig", seed=6),
    "apertus": Family("ApertusForCausalLM", "ApertusConfig", {"head_dim": ABSENT}, seed=1),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "v_head_dim": 8,
        },
        window=8,
        attention="eager",
        seed=4,
        versions=(5,),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", {**DELTA_NET, **SHARED_EXPERT}, versions=(5,), seed=3
    ),
    "qwen3.5": Family("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA_NET, versions=(5,), seed=4),
    "qwen3.5_moe": Family(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**DELTA_NET, **SHARED_EXPERT}, versions=(5,), seed=1
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **{
                name: value
                for name, value in LATENT.items()
                if name not in ("n_routed_experts", "first_k_dense_replace")
            },
            "q_lora_rank": None,
            "num_local_experts": 4,
            "layer_types": LINEAR_THEN_FULL,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
        versions=(5,),
        seed=1,
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM", "OlmoHybridConfig", {**DELTA_NET, "head_dim": ABSENT}, versions=(5,), seed=1
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "head_dim": ABSENT},
        versions=(5,),
        seed=2,
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "head_dim": ABSENT,
            "num_dense_layers": 1,
        },
        versions=(5,),
        seed=9,
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        THREE_AXES,
        images={**QWEN_IMAGES, "vision_config": {**VISION, "embed_dim": 32}},
        seed=3,
    ),
    "qwen2.5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        THREE_AXES,
        images={**QWEN_IMAGES, "vision_config": {**VISION_3, "window_size": 16, "fullatt_block_indexes": [1]}},
        seed=3,
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        INTERLEAVED,
        images={**QWEN_IMAGES, "vision_config": DEEPSTACK},
        seed=3,
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {**EXPERTS, **INTERLEAVED},
        images={**QWEN_IMAGES, "vision_config": DEEPSTACK},
        seed=3,
    ),
    "qwen3.5_images": Family(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        DELTA_NET,
        images={**QWEN_IMAGES, "vision_config": VISION_3},
        versions=(5,),
        seed=3,
    ),
    "qwen3.5_moe_images": Family(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {**DELTA_NET, **SHARED_EXPERT},
        images={**QWEN_IMAGES, "vision_config": VISION_3},
        versions=(5,),
        seed=3,
    ),
    "gemma3_images": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING},
        window=8,
        images=GEMMA_IMAGES,
        seed=3,
    ),
}


def drafter_config(**overrides: Any) -> DFlashConfig:
    """The configuration of a two-layer drafter for `make_target()`."""
    fields = {
        **DIMENSIONS,
        "num_hidden_layers": 2,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "num_target_layers": NUM_TARGET_LAYERS,
        "target_layer_ids": [0, 2],
        **overrides,
    }
    return DFlashConfig(**fields)


def make_drafter(seed: int = 1, **overrides: Any) -> DFlashDraftModel:
    """A random fp32 drafter for `make_target()`, in eval mode."""
    torch.manual_seed(seed)
    return DFlashDraftModel(drafter_config(**overrides)).float().eval()


def make_prompt(length: int = 9, seed: int = 2, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Random ids [1, length] without pad and mask id.

    A pad id inside a prompt makes `generate` infer an attention mask, and a correct loop then looks wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(PAD_TOKEN_ID + 1, vocab_size - 1, (1, length), generator=generator)


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [1, S] as one batch [B, longest] and its attention mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD_TOKEN_ID)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return ids, mask


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% if enable_thinking is defined and not enable_thinking %}"
    "[] {% endif %}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, `VOCAB_SIZE` in all, with a chat template that knows `enable_thinking`."""
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    characters = [chr(code) for code in range(32, 32 + VOCAB_SIZE - len(specials) - 1)]
    vocabulary = {token: index for index, token in enumerate([*specials, *characters, "<mask>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens={"start": "<|im_start|>", "mask": "<mask>"},
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def greedy(target: PreTrainedModel, prompt_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Plain greedy decoding by transformers: the oracle."""
    kwargs.setdefault("max_new_tokens", 30)
    return target.generate(prompt_ids, do_sample=False, **kwargs)


_remembered: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


def remembered_greedy(target: PreTrainedModel, prompt_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`greedy` of a read-only target that tests share, computed once; `kwargs` are numbers and lists of them.

    Two thirds of the time of a test of the loop went into writing its reference again.
    """
    texts = _remembered.setdefault(target, {})
    asked = repr((prompt_ids.tolist(), sorted(kwargs.items())))
    assert "tensor" not in asked, "a tensor is printed in part"
    assert " at 0x" not in asked, "an object is printed without what it holds"
    if asked not in texts:
        texts[asked] = greedy(target, prompt_ids, **kwargs)
    return texts[asked].clone()


class ScriptedDrafter(DFlashDraftModel):
    """A drafter that proposes `truth` and goes wrong after `script[i]` tokens of block i (the script repeats).

    The real forward runs and fills the cache; then the rows it returns are replaced by ones that the target's head maps
    to the wanted token. Behind the wrong token the proposals are right again, so that a loop that counts
    matches instead of the matching prefix fails.

    Args:
        target: The target, whose head must be able to say every wanted token (asserted).
        truth: The text that the target will write, prompt included and padding left out: [S], [1, S], or a list of such.
        script: Numbers of right proposals per block; row r of a batch starts at its r-th entry.
        overrides: Fields of the configuration.
    """

    def __init__(self, target: PreTrainedModel, truth: Any, script: list[int], **overrides: Any) -> None:
        config = target.config.get_text_config(decoder=True)
        shape = {name: getattr(config, name) for name in ("vocab_size", "hidden_size")}
        torch.manual_seed(3)
        super().__init__(drafter_config(**{**shape, "num_target_layers": config.num_hidden_layers, **overrides}))
        self.eval()
        rows = truth if isinstance(truth, list) else [truth]
        self.truths = [torch.as_tensor(row).flatten().tolist() for row in rows]
        self.live = list(range(len(rows)))
        self.script = list(script)
        self.num_blocks = 0
        weight = target.get_output_embeddings().weight.detach().float()
        embedding = target.get_input_embeddings()
        with torch.no_grad():  # as its forward gives them: some families scale them
            self.embeddings = embedding(torch.arange(len(weight))).clone()
        weight = weight * (4.0 / weight.norm(dim=1, keepdim=True))
        self.sayings = weight  # row t is the hidden state that says token t
        self.can_say = (weight @ target.get_output_embeddings().weight.detach().float().T).argmax(dim=1)

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        """The real forward, with the scripted rows in place of its own."""
        num_rows, width = noise_embeds.shape[:2]
        cache, position_ids = kwargs.get("past_key_values"), kwargs.get("position_ids")
        held = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            anchors = [held + context_hidden_states.shape[1]] * num_rows
        else:  # given for batches, and by native decoding, which counts padding in its cache
            anchors = position_ids[:, -width].tolist()
        output = super().forward(noise_embeds, context_hidden_states, **kwargs)
        if held == 0:
            self.live, self.num_blocks = list(range(len(self.truths))), 0
        self._find_live(anchors, noise_embeds[:, 0])
        states = output.last_hidden_state.clone()
        for place, (row, anchor) in enumerate(zip(self.live, anchors, strict=True)):
            num_right = self.script[(self.num_blocks + row) % len(self.script)]
            first = 0 if self.config.sample_from_anchor else 1
            for i in range(first, width):
                offset = i + 1 - first
                token = self.truths[row][anchor + offset] if anchor + offset < len(self.truths[row]) else 1
                if offset == num_right + 1:
                    token = (token + WRONG_OFFSET) % self.config.vocab_size
                assert int(self.can_say[token]) == token, f"the head cannot say {token}: choose another seed"
                states[place, i] = self.sayings[token].to(states.dtype)
        self.num_blocks += 1
        output.last_hidden_state = states
        return output

    def _find_live(self, anchors: list[int], embeds: torch.Tensor) -> None:
        """Drops rows that are done: those whose text does not hold the anchor that comes next in their place."""
        if len(anchors) == len(self.live):
            return
        left, self.live = self.live, []
        for anchor, embed in zip(anchors, embeds, strict=True):
            while True:
                row = left.pop(0)
                text = self.truths[row]
                if anchor < len(text) and torch.equal(self.embeddings[text[anchor]].to(embed.dtype), embed):
                    break
            self.live.append(row)


class PlacedDrafter(ScriptedDrafter):
    """Proposes texts that it knows, and goes wrong behind as many tokens as its script says of the anchor's position.

    It asks nothing but positions and computes on the device alone: it can be compiled, run ahead, and run again at the
    same place. Rows of a batch are told apart by where they stand (`follow`).

    Args:
        target: The target, whose head must be able to say every token.
        overrides: Fields of the configuration.
    """

    def __init__(self, target: PreTrainedModel, **overrides: Any) -> None:
        super().__init__(target, [0], [0], **overrides)
        assert torch.equal(self.can_say, torch.arange(len(self.can_say))), "choose another seed"
        self.follow([], [0])

    def follow(self, texts: list[torch.Tensor], script: list[int], starts: Sequence[int] = ()) -> None:
        """Takes what is to be proposed, and how many tokens of it in a row are right.

        Args:
            texts: Of each row [1, S], or one whose beginnings all rows are.
            script: Numbers of right proposals, by the position of the anchor; it repeats.
            starts: From where on each row's text counts; two rows may not count at the same place.
        """
        length = self.config.max_position_embeddings + 2 * BLOCK_SIZE  # a block may reach beyond the last position
        known = torch.ones(length, dtype=torch.long)
        for text, start in zip(texts, starts or [0], strict=bool(starts)):
            known[start : text.shape[1]] = text[0, start:]
        self.text, self.sayings = known.to(self.device), self.sayings.to(self.device)
        self.rights = torch.tensor(script).repeat(length)[:length].to(self.device)

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        """The real forward, whose states are replaced by those that say the text."""
        width, positions = noise_embeds.shape[1], kwargs.get("position_ids")
        if positions is None:
            end = kwargs["past_key_values"].get_seq_length() + context_hidden_states.shape[1] + width
            positions = torch.arange(end, device=noise_embeds.device)[None]
        super(ScriptedDrafter, self).forward(noise_embeds, context_hidden_states, **kwargs)
        positions = positions[:, -width:]
        anchors = positions[:, :1]
        said = positions + 1 if self.config.sample_from_anchor else positions
        is_wrong = said - anchors == self.rights[anchors] + 1
        token_ids = (self.text[said] + is_wrong * WRONG_OFFSET) % self.config.vocab_size
        return BaseModelOutput(last_hidden_state=self.sayings[token_ids])


def expected_lengths(script: list[int], num_new_tokens: int, block_size: int = BLOCK_SIZE) -> list[int]:
    """What a script gives: acceptance lengths per verify step until `num_new_tokens` are written, the prefill's first.

    Blocks are whole: the last one counts as it was verified, before the text's limit cuts it.
    """
    lengths: list[int] = []
    written = 1
    while written < num_new_tokens:
        is_last_token = num_new_tokens - written == 1  # for which nothing is drafted
        lengths.append(1 if is_last_token else min(script[len(lengths) % len(script)], block_size - 1) + 1)
        written += lengths[-1]
    return lengths


@contextmanager
def counted_forwards(model: torch.nn.Module) -> Iterator[list[int]]:
    """A list that grows by one entry per forward of `model` inside the `with`."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def num_hooks(model: torch.nn.Module) -> int:
    """Forward hooks that stand on any module of `model`."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def plain_loop(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    max_new_tokens: int,
    pick: Callable[[torch.Tensor, torch.Tensor, int], int],
) -> torch.Tensor:
    """One token per full forward, no cache: `pick(scores [1, V], text [1, S], index)` chooses. The naive twin of the loop."""
    text = prompt_ids
    with torch.no_grad():
        for index in range(max_new_tokens):
            scores = target(text, use_cache=False).logits[:, -1].float()
            text = torch.cat([text, text.new_tensor([[pick(scores, text, index)]])], dim=1)
    return text
