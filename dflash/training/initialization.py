"""A new drafter in the target's shape, with the taps, the block and the rope that the target asks for."""

from collections.abc import Sequence
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.model.configuration_dflash import DFlashConfig, default_target_layer_ids
from dflash.model.modeling_dflash import DFlashDraftModel


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
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)

# What a mask token is called in vocabularies that have one.
MASK_TOKENS = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")


def spread_taps(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """The paper's spread of tapped layers; over all layers but the last where that gives fewer than `num_taps`.

    A target with fewer layers than `num_taps` gives as many as it has.

    Example:
        >>> spread_taps(36), spread_taps(5)
        ([1, 9, 17, 25, 33], [0, 1, 2, 3])
    """
    paper = default_target_layer_ids(num_target_layers, num_taps)
    last = num_target_layers - 2
    if len(paper) == num_taps or num_taps == 1:
        return paper
    return sorted({round(i * last / (num_taps - 1)) for i in range(num_taps)})


def new_drafter(
    target: PreTrainedModel,
    *,
    mask_token_id: int,
    num_hidden_layers: int = 5,
    block_size: int = 16,
    num_taps: int = 5,
    target_layer_ids: Sequence[int] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **fields: Any,
) -> DFlashDraftModel:
    """A drafter with random weights for `target`.

    Args:
        target: The model to draft for.
        mask_token_id: An id of the target's vocabulary that never occurs in text.
        num_hidden_layers: Depth of the drafter.
        block_size: Tokens in a block, anchor included.
        num_taps: How many layers of the target it reads, as `spread_taps` chooses them.
        target_layer_ids: The very layers instead.
        sliding_window: Every layer sees so many positions. Default: all.
        is_causal: Whether rows see only what is before them in the block. Default: full layers are not causal, sliding ones
            are.
        fields: Fields of `DFlashConfig` that differ from the target's, such as `intermediate_size`.

    Raises:
        ValueError: for a shape that no drafter can have.
    """
    config = target.config.get_text_config(decoder=True)
    shared = {name: getattr(config, name) for name in SHARED_FIELDS if getattr(config, name, None) is not None}
    layers = config.num_hidden_layers
    shape = {
        "num_hidden_layers": num_hidden_layers,
        "num_target_layers": layers,
        "target_layer_ids": list(spread_taps(layers, num_taps) if target_layer_ids is None else target_layer_ids),
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "is_causal": is_causal,
    } | window_fields(num_hidden_layers, sliding_window)
    return DFlashDraftModel(DFlashConfig(**(shared | shape | fields)))


def window_fields(num_hidden_layers: int, sliding_window: int | None) -> dict[str, Any]:
    """The config's fields for a window over all layers, or for none."""
    if sliding_window is None:
        return {"layer_types": ["full_attention"] * num_hidden_layers}
    types = ["sliding_attention"] * num_hidden_layers
    return {"layer_types": types, "use_sliding_window": True, "sliding_window": sliding_window}


def find_mask_token(tokenizer: Any, vocab_size: int) -> int:
    """An id that fills blocks: the tokenizer's mask token, else the first row that no token has, else its unknown token.

    Raises:
        ValueError: if there is none of them.
    """
    known = tokenizer.get_vocab()
    named = next((known[name] for name in MASK_TOKENS if name in known), None)
    taken = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    unused = max(known.values()) + 1
    for token_id in (tokenizer.mask_token_id, named, unused, tokenizer.unk_token_id):
        if token_id is not None and token_id < vocab_size and token_id not in taken:
            return token_id
    raise ValueError(
        f"The tokenizer uses all {vocab_size} rows of the embedding and has no mask token: give mask_token_id "
        "(--mask-token-id), an id that never occurs in text."
    )
