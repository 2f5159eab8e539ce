"""Estimates, before a run begins, how much memory it needs, and whether the drafter is too large for its target."""

import math
from typing import NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import decoder_layers, text_config

from .adaptation_lora import has_low_rank_updates
from .batches import epoch_sequences, valid_anchors
from .block_attention import FLEX, MOST_SCORES, is_fused
from .distributed import is_sharded
from .examples import lengths_of
from .losses import rows_of_chunk
from .trainer import Trainer


class BatchSize(NamedTuple):
    """The largest number of columns, of drafter queries and of (query, key) pairs in any micro-batch."""

    columns: int
    queries: int
    pairs: int


# Numbers of tensors that a layer keeps for its backward pass, counted in the drafter's forward: tensors of the hidden
# size (inputs and outputs of norms, projections and additions) and of the MLP's width (its two projections).
HIDDEN_TENSORS, MLP_TENSORS = 14, 2
# Number of tensors of the width of Domino's GRU that its steps keep for each query.
GRU_TENSORS = 8
# Number of copies of a chunk's logits: the logits, their softmax and their gradient.
LOGIT_COPIES = 3


def estimate_memory(trainer: Trainer) -> dict[str, int]:
    """Returns the estimated bytes per process, by purpose. Only large parts are counted, from their shapes.

    Weights, gradients and AdamW's two moments are fp32; Muon keeps one moment for a matrix. Activations are those of
    the largest batch of the first epoch.
    """
    settings, drafter = trainer.settings, trainer.drafter
    processes = trainer.accelerator.num_processes
    num_shards = processes if is_sharded(drafter) else 1
    target = sum(parameter.nbytes for parameter in trainer.target.parameters())
    trained = drafter.num_parameters(only_trainable=True) * 4 // num_shards
    by_muon = sum(
        parameter.numel()
        for optimizer in trainer.optimizers
        if isinstance(optimizer, torch.optim.Muon)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    size = widest(trainer)
    vocab_size = text_config(trainer.target).vocab_size
    chunk_rows = settings.chunk_rows or rows_of_chunk(vocab_size)
    rows = min(chunk_rows, size.queries)
    return {
        "target": target // (processes if settings.shard_target else 1),
        "drafter": drafter.num_parameters() * 4 // num_shards,
        "gradients": trained,
        "optimiser": 2 * trained - by_muon * 4 // num_shards,
        "features of the target": _context_bytes(trainer, size),
        "weight copies for the forward": _copied_bytes(trainer) // num_shards,
        "activations of the drafter": _layer_bytes(trainer, size) + _score_bytes(trainer, size),
        "logits of a chunk": LOGIT_COPIES * rows * vocab_size * 4,
    }


def _value_bytes(trainer: Trainer) -> int:
    return 2 if trainer.precision == "bf16" else 4


def _layers_at_once(trainer: Trainer) -> int:
    """Returns the number of layers whose tensors are in memory together: all, or 1 with gradient checkpointing."""
    return 1 if trainer.settings.gradient_checkpointing else trainer.drafter.config.num_hidden_layers


def _context_bytes(trainer: Trainer, size: BatchSize) -> int:
    """Returns the bytes of the context in the widest micro-batch.

    They are those of the target's features and of what each layer keeps of the context: its input and four tensors of
    the width of the keys.
    """
    config = trainer.drafter.config
    features = len(config.target_layer_ids or ()) * config.hidden_size
    key_width = config.num_key_value_heads * config.head_dim
    keys = config.hidden_size + 4 * key_width
    width = features + _layers_at_once(trainer) * keys
    return size.columns * width * _value_bytes(trainer)


def _copied_bytes(trainer: Trainer) -> int:
    """Returns the bytes of the copies of weight matrices that a forward uses: in bf16, or with a low-rank update.

    No copies are kept if all layers are frozen, because no gradient passes through them.
    """
    drafter = trainer.drafter
    requires_grad = [parameter.requires_grad for parameter in drafter.layers.parameters()]
    if not any(requires_grad):
        return 0
    value_bytes = 4 * has_low_rank_updates(drafter)
    if trainer.precision == "bf16":
        value_bytes += 2
    matrices = [
        module.weight.numel()
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("down_proj")  # the copy of this weight is recomputed
    ]
    copied = sum(matrices) * value_bytes
    return copied * _layers_at_once(trainer) // drafter.config.num_hidden_layers


def _layer_bytes(trainer: Trainer, size: BatchSize) -> int:
    """Returns the bytes that layers and Domino's GRU keep for the backward pass.

    A layer with gradient checkpointing keeps its input only.
    """
    config = trainer.drafter.config
    width = config.hidden_size
    if not trainer.settings.gradient_checkpointing:
        width = HIDDEN_TENSORS * config.hidden_size + MLP_TENSORS * config.intermediate_size
    gru_width = config.gru_hidden_dim or 0
    values = config.num_hidden_layers * width + GRU_TENSORS * gru_width
    return size.queries * values * _value_bytes(trainer)


def _score_bytes(trainer: Trainer, size: BatchSize) -> int:
    """Returns the bytes of the fp32 masks, one per layer type, plus the scores if there is no fused kernel.

    Flex attention has neither: 0 bytes. Blockwise attention keeps the scores of all layers or, if a layer has more than
    `MOST_SCORES`, those of one chunk of blocks.
    """
    config = trainer.drafter.config
    if trainer.attention == FLEX:
        return 0
    num_types = len(set(config.layer_types))
    masks = 4 * size.pairs * num_types
    if is_fused(trainer.accelerator.device, config.attention_dropout):
        return masks
    scores = size.pairs * config.num_attention_heads
    if scores > MOST_SCORES or trainer.settings.gradient_checkpointing:
        scores = min(scores, MOST_SCORES)
    else:
        scores *= config.num_hidden_layers
    return masks + scores * _value_bytes(trainer)


def oversize(drafter: DFlashDraftModel, target: PreTrainedModel, has_init: bool) -> str | None:
    """Returns a warning if the drafter has more parameters than the target's layers, else `None`.

    The target's embedding and head are not counted, because both models use them. `has_init` says that the drafter
    was loaded from `init`. Its shape is then fixed, so the warning proposes another drafter.
    """
    own = drafter.num_parameters()
    layers = sum(parameter.numel() for parameter in decoder_layers(target).parameters())
    if own <= layers:
        return None
    remedy = "give fewer --num-hidden-layers or a smaller --intermediate-size"
    if has_init:
        remedy = "start from a smaller drafter"
    return (
        f"The drafter has {own:,} parameters and the target's layers have {layers:,}, so a step of the drafter costs "
        f"more than one of the target, and decoding is faster only at a high tau: {remedy}."
    )


def widest(trainer: Trainer) -> BatchSize:
    """Returns the largest sizes that a micro-batch of one process has in the first epoch."""
    block_size = trainer.drafter.config.block_size
    plan = trainer.plan
    lengths = lengths_of(trainer.examples)
    blocks = []
    for example in trainer.examples:
        anchors = valid_anchors(example.mask_array)
        blocks.append(min(plan.num_anchors, len(anchors)))
    sizes = []
    for batch in epoch_sequences(lengths, 0, plan):
        num_sequences = math.ceil(len(batch) / trainer.num_micro_batches)
        width = _largest_sum(lengths, batch)
        num_blocks = num_sequences * _largest_sum(blocks, batch)
        queries = num_blocks * block_size
        pairs = queries * (width + block_size)
        sizes.append((num_sequences * width, queries, pairs))
    largest = map(max, zip(*sizes, strict=True))
    return BatchSize(*largest)


def _largest_sum(values: list[int], batch: list[list[int]]) -> int:
    """Sums `values` over the documents of each sequence in `batch`, and returns the largest sum."""
    sums = [sum(values[index] for index in sequence) for sequence in batch]
    return max(sums)
