"""Every family of targets that is proven, and how a tiny one is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny_models import (
    DIMENSIONS,
    HIDDEN_SIZE,
    LLAMA3_ROPE,
    NO_SPECIAL_TOKENS,
    NUM_TARGET_LAYERS,
    VOCAB_SIZE,
    make_prompt,
)
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    """How to build a tiny target of one family.

    Attributes:
        kind: What the names of its classes in transformers begin with.
        fields: What the config needs beyond `DIMENSIONS`; `ABSENT` leaves one of those out.
        window: Positions that its narrowest layers see; `None`: all.
        versions: Major versions of transformers on which it is served; on others it is refused by name.
        attention: The implementation it has to be run with, if not sdpa.
        seed: One whose text is varied on every version.
        images: What the config of a multimodal wrapper needs around the text's.
        config: The class of its config, if that is not `kind` and "Config".
    """

    kind: str
    fields: Any = field(default_factory=dict)
    window: int | None = None
    versions: tuple[int, ...] = (4, 5)
    attention: str = "sdpa"
    seed: int = 0
    images: Any = None
    config: str = ""

    @property
    def model(self) -> str:
        """The class of the model; a version of transformers without it does not have the family."""
        return self.kind + ("ForCausalLM" if self.images is None else "ForConditionalGeneration")

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
        target = (
            getattr(transformers, self.model)(getattr(transformers, self.config or f"{self.kind}Config")(**fields))
            .float()
            .eval()
        )
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
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
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
GEMMA_4 = {
    "sliding_window": 8,
    "layer_types": ALTERNATING,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

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
    "qwen3": Family("Qwen3", seed=3),
    "qwen3_windows": Family(
        "Qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ALTERNATING}, window=8, seed=2
    ),
    "qwen2": Family("Qwen2"),
    "qwen3_moe": Family("Qwen3Moe", EXPERTS, seed=4),
    "qwen2_moe": Family("Qwen2Moe", SHARED_EXPERT, seed=1),
    "llama2": Family("Llama", {"num_key_value_heads": 4}, seed=1),
    "llama3.1": Family("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}, seed=7),
    "gpt_oss": Family(
        "GptOss",
        {
            **LOCAL_EXPERTS,
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        window=8,
        attention="eager",
        seed=8,
    ),
    "gemma": Family("Gemma", seed=1),
    "gemma2": Family(
        "Gemma2",
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
        "Gemma3",
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING},
        window=8,
        config="Gemma3TextConfig",
    ),
    "gemma4": Family(
        "Gemma4",
        {**GEMMA_4, "final_logit_softcapping": 4.0, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        window=8,
        seed=4,
        versions=(5,),
        config="Gemma4TextConfig",
    ),
    "gemma4_shared_kv": Family(
        "Gemma4",
        {**GEMMA_4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
        window=8,
        seed=9,
        versions=(5,),
        config="Gemma4TextConfig",
    ),
    "glm": Family("Glm"),
    "glm4": Family("Glm4"),
    "glm4_moe": Family(
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        seed=6,
    ),
    "glm4_moe_lite": Family("Glm4MoeLite", LATENT, seed=5, versions=(5,)),
    "minimax_m2": Family("MiniMaxM2", {**LOCAL_EXPERTS, "rotary_dim": 8}, seed=5, versions=(5,)),
    "deepseek_v2": Family("DeepseekV2", LATENT, seed=5),
    "deepseek_v3": Family("DeepseekV3", LATENT, seed=4),
    "phi": Family("Phi", {"head_dim": ABSENT}, seed=2),
    "phi3": Family("Phi3", {"head_dim": ABSENT}, seed=4),
    "phi3_window": Family("Phi3", {"head_dim": ABSENT, "sliding_window": 8}, window=8, seed=3),
    "phimoe": Family("Phimoe", {"head_dim": ABSENT, **LOCAL_EXPERTS, "sliding_window": None}, seed=8),
    "mistral": Family("Mistral", {"sliding_window": 8}, window=8, seed=5),
    "ministral": Family("Ministral", {"sliding_window": 8, "layer_types": ALTERNATING}, window=8, seed=7),
    "ministral3": Family("Ministral3", {"sliding_window": None}, seed=3, versions=(5,)),
    "mixtral": Family("Mixtral", {**LOCAL_EXPERTS, "sliding_window": 8}, window=8, seed=6),
    "granite": Family(
        "Granite",
        {
            "head_dim": ABSENT,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
        seed=7,
    ),
    "granitemoe": Family("GraniteMoe", {"head_dim": ABSENT, **LOCAL_EXPERTS, "embedding_multiplier": 3.0}, seed=8),
    "cohere": Family("Cohere", {"head_dim": ABSENT, "logit_scale": 0.25}, seed=5),
    "cohere2": Family(
        "Cohere2", {"sliding_window": 8, "layer_types": ALTERNATING, "logit_scale": 0.25}, window=8, seed=7
    ),
    "smollm3": Family("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}, seed=7),
    "olmo": Family("Olmo", {"head_dim": ABSENT}, seed=2),
    "olmo2": Family("Olmo2", {"head_dim": ABSENT}, seed=3),
    "olmo3": Family("Olmo3", {"head_dim": ABSENT, "sliding_window": 8, "layer_types": ALTERNATING}, window=8, seed=8),
    "olmoe": Family("Olmoe", {"head_dim": ABSENT, "num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4.5": Family("Ernie4_5", seed=3),
    "ernie4.5_moe": Family(
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
        seed=8,
    ),
    "seed_oss": Family("SeedOss"),
    "exaone4": Family("Exaone4", {"sliding_window": 8, "layer_types": ALTERNATING}, window=8, seed=2),
    "hunyuan": Family("HunYuanDenseV1", seed=3),
    "starcoder2": Family("Starcoder2", {"head_dim": ABSENT, "sliding_window": 8}, window=8, seed=8),
    "stablelm": Family("StableLm", {"head_dim": ABSENT}),
    "nemotron": Family("Nemotron", seed=6),
    "apertus": Family("Apertus", {"head_dim": ABSENT}, seed=1),
    "mimo_v2_flash": Family(
        "MiMoV2Flash",
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
    "qwen3_next": Family("Qwen3Next", {**DELTA_NET, **SHARED_EXPERT}, versions=(5,), seed=3),
    "qwen3.5": Family("Qwen3_5", DELTA_NET, versions=(5,), seed=4, config="Qwen3_5TextConfig"),
    "qwen3.5_moe": Family(
        "Qwen3_5Moe", {**DELTA_NET, **SHARED_EXPERT}, versions=(5,), seed=1, config="Qwen3_5MoeTextConfig"
    ),
    "kimi_linear": Family(
        "KimiLinear",
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
    "olmo_hybrid": Family("OlmoHybrid", {**DELTA_NET, "head_dim": ABSENT}, versions=(5,), seed=1),
    "lfm2": Family(
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "head_dim": ABSENT},
        versions=(5,),
        seed=2,
    ),
    "lfm2_moe": Family(
        "Lfm2Moe",
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
        "Qwen2VL", THREE_AXES, images={**QWEN_IMAGES, "vision_config": {**VISION, "embed_dim": 32}}, seed=3
    ),
    "qwen2.5_vl": Family(
        "Qwen2_5_VL",
        THREE_AXES,
        images={**QWEN_IMAGES, "vision_config": {**VISION_3, "window_size": 16, "fullatt_block_indexes": [1]}},
        seed=3,
    ),
    "qwen3_vl": Family("Qwen3VL", INTERLEAVED, images={**QWEN_IMAGES, "vision_config": DEEPSTACK}, seed=3),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoe", {**EXPERTS, **INTERLEAVED}, images={**QWEN_IMAGES, "vision_config": DEEPSTACK}, seed=3
    ),
    "qwen3.5_images": Family(
        "Qwen3_5", DELTA_NET, images={**QWEN_IMAGES, "vision_config": VISION_3}, versions=(5,), seed=3
    ),
    "qwen3.5_moe_images": Family(
        "Qwen3_5Moe",
        {**DELTA_NET, **SHARED_EXPERT},
        images={**QWEN_IMAGES, "vision_config": VISION_3},
        versions=(5,),
        seed=3,
    ),
    "gemma3_images": Family(
        "Gemma3",
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING},
        window=8,
        images=GEMMA_IMAGES,
        seed=3,
    ),
}
