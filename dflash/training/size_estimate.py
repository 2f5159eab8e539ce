"""The memory that a run will take, and a drafter that is too large for its target: said before it begins."""

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import decoder_layers

from .adaptation_lora import is_changed
from .batches import epoch_sequences, valid_anchors
from .block_attention import MOST_SCORES, is_fused
from .distributed import is_sharded
from .lazy_sequences import lengths_of
from .losses import rows_of_chunk
from .trainer import Trainer


def estimate_memory(trainer: Trainer) -> dict[str, int]:
    """Bytes per process by what holds them: an estimate of the large parts from shapes alone.

    Weights, gradients and AdamW's two moments are fp32 (Muon keeps one moment for a matrix). Activations are those of the
    largest batch of the first epoch: per layer and query about 14 tensors of the hidden size and 2 of the MLP's width are kept
    for the backward pass, or one where layers are computed again, and per query 8 of the width of Domino's GRU. It also keeps
    each matrix as it was multiplied, if that is not the weight itself: in bf16, or with its change of low rank.
    """
    settings, config = trainer.settings, trainer.drafter.config
    processes = trainer.accelerator.num_processes
    share = processes if is_sharded(trainer.drafter) else 1
    weights, trained = (trainer.drafter.num_parameters(only_trainable=only) * 4 // share for only in (False, True))
    muon = [group for one in trainer.optimizers if isinstance(one, torch.optim.Muon) for group in one.param_groups]
    moments = 2 * trained - sum(matrix.numel() for group in muon for matrix in group["params"]) * 4 // share

    tokens, queries, scored = widest(trainer)
    width = 2 if trainer.precision == "bf16" else 4
    # Where layers are computed again, each keeps its input, and one at a time the rest.
    is_again = settings.gradient_checkpointing
    kept, inner = (1, 0) if is_again else (14, 2 * config.intermediate_size)
    num_layers = 1 if is_again else config.num_hidden_layers
    layers = config.num_hidden_layers * queries * (kept * config.hidden_size + inner) * width
    states = 8 * queries * (config.gru_hidden_dim or 0) * width
    of_keys = config.hidden_size + 4 * config.num_key_value_heads * config.head_dim
    context = tokens * (len(config.target_layer_ids or ()) * config.hidden_size + num_layers * of_keys) * width
    linear = ((name, one) for name, one in trainer.drafter.named_modules() if isinstance(one, nn.Linear))
    matrices = sum(one.weight.numel() for name, one in linear if not name.endswith("down_proj"))  # it is made again
    bytes_kept = 2 * (width == 2) + 4 * is_changed(trainer.drafter)
    is_crossed = any(parameter.requires_grad for parameter in trainer.drafter.layers.parameters())
    multiplied = is_crossed * matrices * bytes_kept * num_layers // config.num_hidden_layers // share
    # Flex attention holds no scores and no mask. Others hold a mask for each type of layer, in fp32, and without a fused kernel
    # blockwise attention also holds the scores of all layers, or of some blocks of one layer.
    masks, of_layer = 4 * scored * len(set(config.layer_types)), scored * config.num_attention_heads
    is_whole = of_layer <= MOST_SCORES and not is_again
    held = (of_layer * config.num_hidden_layers if is_whole else min(of_layer, MOST_SCORES)) * width
    has_scores = not is_fused(trainer.accelerator.device, config.attention_dropout)
    scores = 0 if trainer.attention == "flex_attention" else masks + has_scores * held
    vocab_size = trainer.target.config.get_text_config(decoder=True).vocab_size
    logits = 3 * min(settings.chunk_rows or rows_of_chunk(vocab_size), queries) * vocab_size * 4
    target = sum(parameter.nbytes for parameter in trainer.target.parameters())
    return {
        "target": target // (processes if settings.shard_target else 1),
        "drafter": weights,
        "gradients": trained,
        "optimiser": moments,
        "features of the target": context,
        "weights as they are multiplied": multiplied,
        "activations of the drafter": layers + scores + states,
        "logits of a chunk": logits,
    }


def oversize(drafter: DFlashDraftModel, target: PreTrainedModel, is_begun: bool) -> str | None:
    """A sentence on a drafter that is larger than its target's layers, whose embedding and head both use; else `None`.

    One that `is_begun`, of `init`, has a shape that cannot be changed.
    """
    own = drafter.num_parameters()
    its = sum(parameter.numel() for parameter in decoder_layers(target).parameters())
    if own <= its:
        return None
    smaller = "--num-hidden-layers or a smaller --intermediate-size"
    return (
        f"The drafter has {own:,} parameters and the target's layers {its:,}, so a step of the drafter costs more than one of the "
        f"target, and decoding is faster only at a high tau: {'begin with a smaller one' if is_begun else f'give fewer {smaller}'}."
    )


def widest(trainer: Trainer) -> tuple[int, int, int]:
    """The most columns, queries, and pairs of a query and a key that a part of a batch has in the first epoch."""
    settings, block_size = trainer.settings, trainer.drafter.config.block_size
    parts = trainer.accelerator.num_processes * settings.gradient_accumulation_steps
    lengths = lengths_of(trainer.examples)
    blocks = [min(settings.num_anchors, len(valid_anchors(example.mask_array))) for example in trainer.examples]
    sizes = []
    for batch in epoch_sequences(lengths, 0, **trainer.cut()):
        share = -(-len(batch) // parts)
        width = max(sum(lengths[i] for i in sequence) for sequence in batch)
        queries = share * max(sum(blocks[i] for i in sequence) for sequence in batch) * block_size
        sizes.append((share * width, queries, queries * (width + block_size)))
    most_columns, most_queries, most_pairs = map(max, zip(*sizes, strict=True))
    return most_columns, most_queries, most_pairs
