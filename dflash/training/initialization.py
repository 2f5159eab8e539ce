"""Makes a new drafter in the target's shape, with random or copied weights, and chooses its mask token."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from dflash.drafter import DFlashConfig, DFlashDraftModel
from dflash.model.configuration_dflash import default_target_layer_ids
from dflash.model.targets_dflash import decoder_layers, text_config

from .settings import Facts


# Config fields that a new drafter copies from its target by default.
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

# Size of the published drafters' attention heads. Smaller heads are initialised so that their scores
# can be as large as those of heads of this size.
HEAD_DIM = 128
# Default number of tokens in a block, anchor included.
BLOCK_SIZE = 16

# Initial standard deviation of the token table in Domino's head. With 0.1 it learned equally well.
TABLE_STD = 0.3

# Suffixes of the names of the weights that normalise queries and keys.
NORMS_OF_SCORES = ("q_norm.weight", "k_norm.weight")

# Usual texts of a mask token in a vocabulary.
MASK_TOKENS = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")


def spread_taps(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """Returns the indices of the target layers that a drafter reads (taps), spread as in the paper.

    If the paper's rule gives fewer than `num_taps`, they are spread over all layers but the last. Targets with few
    layers get fewer taps.

    Example:
        >>> spread_taps(36), spread_taps(5)
        ([1, 9, 17, 25, 33], [0, 1, 2, 3])
    """
    paper = default_target_layer_ids(num_target_layers, num_taps)
    last = num_target_layers - 2
    if len(paper) == num_taps or num_taps == 1:
        return paper
    stride = last / (num_taps - 1)
    return sorted({round(place * stride) for place in range(num_taps)})


def new_drafter(
    target: PreTrainedModel,
    *,
    mask_token_id: int,
    num_hidden_layers: int = 5,
    block_size: int = BLOCK_SIZE,
    num_taps: int = 5,
    sliding_window: int | None = None,
    from_target: bool = False,
    **fields: Any,
) -> DFlashDraftModel:
    """Returns a new drafter for `target`, with random weights or with copies of the weights of the target's layers.

    Args:
        target: The model to draft for.
        mask_token_id: An id of the target's vocabulary that never occurs in text.
        num_hidden_layers: Depth of the drafter.
        block_size: Tokens in a block, anchor included.
        num_taps: Number of target layers that the drafter reads, chosen by `spread_taps`.
        sliding_window: Attention window of every layer, in positions. Default: no window.
        from_target: Copy weights of the target's layers, as `copy_target_weights` does. Default: random weights.
        fields: Other fields of `DFlashConfig`: the `target_layer_ids` themselves, `is_causal`, or fields that differ
            from the target's, such as `intermediate_size`.

    Raises:
        ValueError: for a shape that no drafter can have.
    """
    config = text_config(target)
    shape = {name: getattr(config, name, None) for name in SHARED_FIELDS}
    shape = {name: value for name, value in shape.items() if value is not None}
    ropes = shape.get("rope_parameters") or {}
    if "full_attention" in ropes:  # one for each type of layer, as in Gemma 3
        shape["rope_parameters"] = ropes["full_attention"]
    shape |= {
        "num_hidden_layers": num_hidden_layers,
        "num_target_layers": config.num_hidden_layers,
        "target_layer_ids": spread_taps(config.num_hidden_layers, num_taps),
        "block_size": block_size,
        "mask_token_id": mask_token_id,
    }
    shape |= window_fields(num_hidden_layers, sliding_window) | fields
    drafter = DFlashDraftModel(DFlashConfig(**shape))
    initialize_head(drafter, target)
    if from_target:
        copy_target_weights(drafter, target)
    return drafter


def copy_target_weights(drafter: DFlashDraftModel, target: PreTrainedModel) -> None:
    """Copies weights of the target's layers into the drafter, in place, wherever name and shape agree.

    The copied layers are spread evenly from the first to the last, as in DistilBERT (arXiv 1910.01108): the input of a
    block consists of embeddings, which the first layer was trained to read. The mean over the tapped layers is added to
    the random `fc`, so that the copied projections of keys and values read the residual stream that they were trained
    on.

    If the target does not normalise queries and keys, heads smaller than `HEAD_DIM` get larger norm weights, so that
    their scores can be as large as those of heads of `HEAD_DIM` channels: with weights of 1 the largest score is the
    square root of the head's size.
    """
    config = drafter.config
    layers = decoder_layers(target)
    width_ratio = HEAD_DIM / config.head_dim
    gain = max(1.0, width_ratio**0.25)
    last = len(layers) - 1
    num_strides = max(1, len(drafter.layers) - 1)
    with torch.no_grad():
        for place, layer in enumerate(drafter.layers):
            index = round(place * last / num_strides)
            source = layers[index]
            for name, weight in layer.named_parameters():
                is_copied = _copy(source, name, weight)
                if not is_copied and name.endswith(NORMS_OF_SCORES):
                    weight.fill_(gain)
        _copy(target.get_decoder(), "norm.weight", drafter.norm.weight)
        _copy(layers[-1], "input_layernorm.weight", drafter.hidden_norm.weight)
        size = config.hidden_size
        taps = drafter.fc.weight.view(size, -1, size)  # [D, taps, D]
        num_taps = taps.shape[1]
        taps += torch.eye(size)[:, None] / num_taps


def _copy(source: nn.Module, name: str, weight: Tensor) -> bool:
    """Copies the weight `name` of `source` into `weight` if it exists in the same shape; returns whether it does."""
    value = _target_weight(source, name)
    if value is None or value.shape != weight.shape:
        return False
    weight.copy_(value)
    return True


def initialize_head(drafter: DFlashDraftModel, target: PreTrainedModel) -> None:
    """Initialises the drafter's Domino or DSpark head in place. A head of another kind keeps its random weights."""
    for name in drafter.head_names():
        if name in INITIALIZERS:
            INITIALIZERS[name](drafter, target)


@torch.no_grad()
def initialize_dspark(drafter: DFlashDraftModel, target: PreTrainedModel) -> None:
    """Initialises DSpark's head in place so that it has no effect: the bias of each pair of tokens is 0."""
    drafter.get_parameter("markov_head.markov_w2.weight").zero_()


@torch.no_grad()
def initialize_domino(drafter: DFlashDraftModel, target: PreTrainedModel) -> None:
    """Initialises Domino's head in place so that it has no effect, with a token table from the target's head.

    The rows of the table are the rows of the target's head, projected onto its strongest directions. Random rows would
    first have to learn these directions. If the target's head is quantised or has another shape, the rows stay random.
    """
    mix, _, table = drafter.get_submodule("embed_proj").children()
    mix.get_parameter("weight").zero_()
    rows = table.get_parameter("weight")
    num_tokens, size = rows.shape
    head = _target_weight(target.get_output_embeddings(), "weight")
    if head is None:
        return
    if len(head) != num_tokens or head.shape[1] < size:
        return
    head = head.float()
    directions = torch.linalg.eigh(head.T @ head).eigenvectors
    strongest = directions[:, -size:]
    # The sign of an eigenvector is arbitrary. A fixed sign gives all processes the same weights.
    largest = strongest.gather(0, strongest.abs().argmax(dim=0, keepdim=True))
    projections = head @ (strongest * largest.sign())
    rows.copy_(projections * (TABLE_STD / projections.std()))


# The function that initialises a head, by the name of the head's module.
INITIALIZERS: dict[str, Callable[[DFlashDraftModel, PreTrainedModel], None]] = {
    "embed_proj": initialize_domino,
    "markov_head": initialize_dspark,
}


def _target_weight(module: nn.Module, name: str) -> Tensor | None:
    """Returns a weight of a target's module by the drafter's `name` for it; `None` if it is missing or quantised.

    An offloaded weight is loaded. A vector is returned only for an RMSNorm, as the factor by which the norm multiplies.
    """
    path, _, leaf = name.rpartition(".")
    if path == "post_attention_layernorm" and hasattr(module, "pre_feedforward_layernorm"):
        path = "pre_feedforward_layernorm"  # Gemma's name of this norm
    try:
        owner = module.get_submodule(path)
        owner.get_parameter(leaf)
    except AttributeError:
        return None
    with align_module_device(owner):
        weight = owner.get_parameter(leaf)
        is_plain = type(weight.data) is Tensor and weight.is_floating_point()
        if not is_plain or weight.itemsize < 2:
            return None
        if weight.ndim > 1:
            return weight.clone()
        if "RMSNorm" not in type(owner).__name__:
            return None
        # The factor of the norm: some families store the factor minus 1.
        return owner(torch.ones_like(weight)[None])[0]


def window_fields(num_hidden_layers: int, sliding_window: int | None) -> Facts:
    """Returns the config fields that give all layers this sliding window, or full attention for `None`."""
    if sliding_window is None:
        return {"layer_types": ["full_attention"] * num_hidden_layers}
    types = ["sliding_attention"] * num_hidden_layers
    return {"layer_types": types, "use_sliding_window": True, "sliding_window": sliding_window}


def find_mask_token(tokenizer: Any, vocab_size: int) -> int:
    """Returns the id that fills blocks: the tokenizer's mask token, else the first unused id, else its unknown token.

    Raises:
        ValueError: if none of them exists.
    """
    vocabulary = tokenizer.get_vocab()
    names = (vocabulary.get(name) for name in MASK_TOKENS)
    unused = max(vocabulary.values()) + 1
    for token_id in (tokenizer.mask_token_id, *names, unused, tokenizer.unk_token_id):
        is_taken = token_id in (None, tokenizer.eos_token_id, tokenizer.pad_token_id)
        if not is_taken and token_id < vocab_size:
            return token_id
    raise ValueError(
        f"The tokenizer uses all {vocab_size} rows of the embedding and has no mask token: give mask_token_id "
        "(--mask-token-id), an id that never occurs in text."
    )
