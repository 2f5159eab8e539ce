"""AdamW as in the paper or, for the matrices, Muon; both along the same warm-up and cosine."""

import math

import torch
from torch import nn


def build_optimizers(
    drafter: nn.Module, learning_rate: float, weight_decay: float, muon_learning_rate: float | None
) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon over the matrices and AdamW over the rest if `muon_learning_rate` is given."""
    parameters = list(drafter.parameters())
    if muon_learning_rate is None:
        return [torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, betas=(0.9, 0.95))]
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    return [
        # Scaled so that its updates are as large as AdamW's, whose rates then fit.
        torch.optim.Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def rate_factor(step: int, steps: int, warmup_ratio: float) -> float:
    """The factor of the peak rate at `step` of 1..`steps`: linear warm-up, then a cosine that would reach 0 a step later."""
    warmup = round(warmup_ratio * steps)
    if step <= warmup:
        return step / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - 1 - warmup) / (steps - warmup)))
