"""What a run will take, said before it begins. It owns no clock: whoever measures steps hands the seconds over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .anchors import fixed_anchors, valid_anchors
from .batches import epoch_rows
from .block_attention import MOST_SCORES
from .losses import rows_of_chunk
from .sharding import is_sharded
from .trainer import Trainer


@dataclass(frozen=True)
class Plan:
    """The size of a run.

    Attributes:
        steps: Optimiser steps.
        batches_per_epoch: Batches that hold all data once.
        sequences: Of the data.
        tokens: Of the data, in one epoch.
        supervised_tokens: Of these, what the drafter learns from.
        drafter_parameters: Trained.
        target_parameters: Frozen.
        memory: Estimated bytes per process by what holds them.
        feature_bytes: What the target's features of the data would take on disk.
    """

    steps: int
    batches_per_epoch: int
    sequences: int
    tokens: int
    supervised_tokens: int
    drafter_parameters: int
    target_parameters: int
    memory: dict[str, int]
    feature_bytes: int

    @property
    def epochs(self) -> float:
        """How often the data is passed over."""
        return self.steps / self.batches_per_epoch


def plan(trainer: Trainer) -> Plan:
    """The plan of a trainer that has not begun."""
    examples, drafter, target = trainer.examples, trainer.drafter, trainer.target
    return Plan(
        steps=trainer.num_steps,
        batches_per_epoch=trainer.batches_per_epoch,
        sequences=len(examples),
        tokens=sum(map(len, examples)),
        supervised_tokens=sum(sum(example.loss_mask) for example in examples),
        drafter_parameters=_count(drafter),
        target_parameters=_count(target),
        memory=estimate_memory(trainer),
        feature_bytes=trainer.feature_bytes(),
    )


def estimate_memory(trainer: Trainer) -> dict[str, int]:
    """Bytes per process by what holds them; an estimate of what is large, from shapes alone.

    Weights, gradients and AdamW's two moments are fp32 (Muon keeps one moment for a matrix). The rows are those of the
    widest batch of the first epoch: per layer about 12 tensors of a row's width and 3 of the MLP's are kept for the
    backward pass, one of them where layers are computed again.
    """
    settings, config = trainer.settings, trainer.drafter.config
    processes = trainer.accelerator.num_processes
    share = processes if is_sharded(trainer.drafter) else 1
    weights = sum(parameter.numel() for parameter in trainer.drafter.parameters()) * 4 // share
    matrices = sum(parameter.numel() for parameter in trainer.drafter.parameters() if parameter.ndim == 2) * 4 // share
    moments = 2 * weights - (matrices if settings.muon_learning_rate is not None else 0)

    tokens, rows, scored = widest(trainer)
    width = 2 if settings.mixed_precision == "bf16" else 4
    kept = 1 if settings.gradient_checkpointing else 12
    inner = 0 if settings.gradient_checkpointing else 3 * config.intermediate_size
    layers = config.num_hidden_layers * rows * (kept * config.hidden_size + inner) * width
    context = tokens * config.hidden_size * (len(config.target_layer_ids or ()) + 2 * config.num_hidden_layers) * width
    # Flex attention holds no scores and no mask; the other one those of all layers, or of some blocks of the one at work.
    of_layer = scored * config.num_attention_heads
    is_whole = of_layer <= MOST_SCORES and not settings.gradient_checkpointing
    held = scored + (of_layer * config.num_hidden_layers if is_whole else min(of_layer, MOST_SCORES))
    scores = 0 if trainer.attention == "flex_attention" else held * width
    vocab_size = trainer.target.config.get_text_config(decoder=True).vocab_size
    logits = 3 * min(settings.chunk_rows or rows_of_chunk(vocab_size), rows) * vocab_size * 4
    return {
        "target": sum(parameter.numel() * parameter.element_size() for parameter in trainer.target.parameters())
        // (processes if settings.shard_target else 1),
        "drafter": weights,
        "gradients": weights,
        "optimiser": moments,
        "features of the target": context,
        "activations of the drafter": layers + scores,
        "logits of a chunk": logits,
    }


def widest(trainer: Trainer) -> tuple[int, int, int]:
    """The most columns, rows of blocks, and pairs of a row and a key that a part of a batch has in the first epoch."""
    settings, block_size = trainer.settings, trainer.drafter.config.block_size
    parts = trainer.accelerator.num_processes * settings.gradient_accumulation_steps
    lengths = [len(example) for example in trainer.examples]
    blocks = [
        len(fixed_anchors(example.loss_mask, block_size))
        if settings.anchors == "fixed"
        else min(settings.num_anchors, len(valid_anchors(example.loss_mask)))
        for example in trainer.examples
    ]
    sizes = []
    for batch in epoch_rows(lengths, 0, **trainer.cut()):
        share = -(-len(batch) // parts)
        width = max(sum(lengths[i] for i in row) for row in batch)
        rows = share * max(sum(blocks[i] for i in row) for row in batch) * block_size
        sizes.append((share * width, rows, rows * (width + block_size)))
    columns, all_rows, pairs = zip(*sizes, strict=True)
    return max(columns), max(all_rows), max(pairs)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that this process has had allocated on an accelerator, `None` on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
