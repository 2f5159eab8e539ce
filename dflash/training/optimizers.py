"""Makes the optimisers of a drafter's weights and the schedule of their learning rates: warm-up, then a cosine."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .device import computes_in_bf16


# Suffixes of the names of matrices whose rows are looked up by token.
TABLES = ("codebook", "embed_proj.2.weight", "markov_w1.weight", "markov_w2.weight")


def build_optimizers(
    drafter: nn.Module, learning_rate: float, weight_decay: float, muon_learning_rate: float | None = None
) -> list[Optimizer]:
    """Returns the optimisers of all trainable weights: Muon for the matrices if it has a learning rate, and AdamW.

    - Matrices: Muon, scaled so that its updates are as large as AdamW's, or AdamW at `learning_rate`.
    - Codebooks and the tables of Domino and DSpark, whose rows are looked up by token: AdamW at the learning rate of
      the matrices. Muon would mix the rows of unrelated tokens, and AdamW at a tenth
      of the rate learns less
      (vllm-project/speculators, 866 and 1066).
    - Norms, biases and kernels: AdamW at `learning_rate`, without `weight_decay`.
    """
    matrices, tables, vectors = [], [], []
    for name, parameter in drafter.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim != 2:
            vectors.append(parameter)
        elif name.endswith(TABLES):
            tables.append(parameter)
        else:
            matrices.append(parameter)
    optimizers: list[Optimizer] = []
    decayed = matrices + tables
    if muon_learning_rate:
        decayed = tables
    if muon_learning_rate and matrices:  # DSpark's head alone has tables and no matrix
        make_muon = torch.optim.Muon if computes_in_bf16() else Muon
        muon = make_muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    groups = [
        {"params": decayed, "lr": muon_learning_rate or learning_rate, "weight_decay": weight_decay},
        {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # a low-rank update consists of matrices only
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    return optimizers


class Muon(torch.optim.Muon):
    """Muon that orthogonalises in the dtype of the gradients: torch's does it in bf16.

    An x86 CPU without bf16 products emulates them, and then most of a small drafter's training step would be these. The
    state is that of torch's class. Of its options, `adjust_lr_fn` has to be "match_rms_adamw".
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        rate = group["lr"]
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(mean, momentum)  # Nesterov's
        update = orthogonalized(
            ahead,
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        scale = 0.2 * math.sqrt(max(weight.shape))  # the updates are as large as AdamW's
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(update, alpha=-rate * scale)


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_iterations: int, eps: float
) -> torch.Tensor:
    """Returns nearly the matrix [A, B] with its singular values set to 1, by a Newton-Schulz iteration in its own dtype.

    Each singular value is divided by the Frobenius norm, at least `eps`, and then goes through an odd polynomial with
    `coefficients` as often as said; it ends between 0.7 and 1.2 (Jordan et al., Muon, 2024).
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    value = matrix.T if is_tall else matrix
    value = value / value.norm().clamp(min=eps)
    for _ in range(num_iterations):
        square = value @ value.T
        factor = torch.addmm(square, square, square, beta=b, alpha=c)
        value = torch.addmm(value, factor, value, beta=a)
    return value.T if is_tall else value


def group_names(optimizers: Sequence[Optimizer]) -> list[str]:
    """Returns a name for each parameter group of `build_optimizers`, such as `muon_matrices` or `adamw_norms`.

    The names are not stored in the groups, because training states hold the groups and their format must not change.
    """
    names = []
    for optimizer in optimizers:
        method = type(optimizer).__name__.lower()
        kind = "tables" if method == "adamw" and len(optimizers) > 1 else "matrices"
        for group in optimizer.param_groups:
            names.append(f"{method}_{kind if group['params'][0].ndim == 2 else 'norms'}")
    return names


def rate_factor(step: int, steps: int, warmup_ratio: float) -> float:
    """Returns the factor on the peak learning rate at `step`, from 1 to `steps`.

    It rises linearly in the warm-up, then falls along a cosine to 0 at `steps + 1`.
    """
    warmup = round(warmup_ratio * steps)
    if step <= warmup:
        return step / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - 1 - warmup) / (steps - warmup)))
