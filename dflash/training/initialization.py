"""A new drafter in the target's shape, with the taps, the block and the rope that the target asks for."""

from __future__ import annotations

from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.configuration_dflash import DFlashConfig, default_target_layer_ids
from dflash.modeling_dflash import DFlashDraftModel


# What a drafter takes over from its target unless told otherwise.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def new_drafter(
    target: PreTrainedModel,
    *,
    mask_token_id: int,
    num_hidden_layers: int = 5,
    block_size: int = 16,
    num_taps: int = 5,
    **fields: Any,
) -> DFlashDraftModel:
    """A drafter with random weights for `target`, tapping `num_taps` of its layers by the paper's spread.

    Args:
        target: The model to draft for.
        mask_token_id: An id of the target's vocabulary that never occurs in text.
        num_hidden_layers: Depth of the drafter.
        block_size: Tokens in a block, anchor included.
        num_taps: How many layers of the target it reads; a shallow target gives as many as it has.
        fields: Fields of `DFlashConfig` that differ from the target's, such as `intermediate_size`.
    """
    config = target.config.get_text_config(decoder=True)
    shared = {name: getattr(config, name) for name in SHARED_FIELDS if getattr(config, name, None) is not None}
    rope = {
        name: getattr(config, name)
        for name in ("rope_theta", "rope_scaling", "rope_parameters")
        if getattr(config, name, None) is not None
    }
    layers = config.num_hidden_layers
    return DFlashDraftModel(
        DFlashConfig(
            **(
                shared
                | rope
                | {
                    "num_hidden_layers": num_hidden_layers,
                    "num_target_layers": layers,
                    "target_layer_ids": default_target_layer_ids(layers, num_taps),
                    "block_size": block_size,
                    "mask_token_id": mask_token_id,
                }
                | fields
            )
        )
    )
