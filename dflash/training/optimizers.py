"""Which optimiser trains which weights, and the warm-up and cosine that all their rates follow."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def build_optimizers(
    drafter: nn.Module, learning_rate: float, weight_decay: float, muon_learning_rate: float | None = None
) -> list[torch.optim.Optimizer]:
    """The optimisers of all weights: Muon for the matrices if it has a rate, and AdamW for the rest, with groups of their own.

    - Matrices: Muon, scaled so that its updates are as large as AdamW's, or AdamW at `learning_rate`.
    - Codebooks and Domino's table, which are looked up by token: AdamW at the matrices' rate. Muon would mix the rows of unrelated tokens, and a
      tenth of its rate learns less (vllm-project/speculators, 866 and 1066).
    - Norms, biases and kernels: AdamW at `learning_rate`, without `weight_decay`.
    """
    matrices: list[nn.Parameter] = []
    codebooks: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        is_table = name.endswith(("codebook", "embed_proj.2.weight"))
        kind = others if parameter.ndim != 2 else codebooks if is_table else matrices
        if parameter.requires_grad:
            kind.append(parameter)
    decayed = codebooks if muon_learning_rate else matrices + codebooks
    groups = [
        {"params": decayed, "lr": muon_learning_rate or learning_rate, "weight_decay": weight_decay},
        {"params": others, "lr": learning_rate, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # of a change of low rank there are matrices alone
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95))] if groups else []
    if muon_learning_rate:
        how: dict[str, Any] = {"lr": muon_learning_rate, "weight_decay": weight_decay}
        optimizers.insert(0, torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **how))
    return optimizers


def group_names(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """What each group of `build_optimizers` trains, in their order: `muon_matrices`, `adamw_tables`, `adamw_norms`.

    They are not written into the groups, because a saved state holds these.
    """
    names = []
    for optimizer in optimizers:
        method = type(optimizer).__name__.lower()
        of_matrices = "tables" if method == "adamw" and len(optimizers) > 1 else "matrices"
        is_matrix = (group["params"][0].ndim == 2 for group in optimizer.param_groups)
        names += [f"{method}_{of_matrices if is_one else 'norms'}" for is_one in is_matrix]
    return names


def rate_factor(step: int, steps: int, warmup_ratio: float) -> float:
    """The factor of the peak rate at `step` of 1..`steps`: linear warm-up, then a cosine that would reach 0 a step later."""
    warmup = round(warmup_ratio * steps)
    if step <= warmup:
        return step / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - 1 - warmup) / (steps - warmup)))
