"""A change of low rank to each matrix of a drafter (LoRA, https://arxiv.org/abs/2106.09685).

It is a parametrisation of torch, so compiled forwards and optimisers read the changed `weight`. It is merged into the weights
where the drafter decodes or is saved.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class LowRankChange(nn.Module):
    """The weight and a matrix of low rank, which is 0 at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        height, width = weight.shape
        noise = torch.randn(rank, width, generator=generator)
        down = noise / math.sqrt(width)
        self.down = nn.Parameter(down.to(weight))  # [R, in]
        self.up = nn.Parameter(weight.new_zeros(height, rank))  # [out, R]

    def forward(self, weight: Tensor) -> Tensor:
        """The changed weight, [out, in]."""
        return weight + self.up @ self.down


def change_in_low_rank(drafter: nn.Module, rank: int, seed: int) -> None:
    """Freezes all weights and adds a trainable change of at most `rank` to the matrix of each linear layer (LoRA).

    Raises:
        ValueError: for a rank that saves nothing in any matrix.
    """
    linear = [module for module in drafter.modules() if isinstance(module, nn.Linear)]
    ranks = [min(module.weight.shape) for module in linear]
    largest = max(ranks)
    if rank >= largest:
        raise ValueError(
            f"lora_rank={rank} and the largest matrix has rank {largest}: give less, or train all weights."
        )
    drafter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module, whole_rank in zip(linear, ranks, strict=True):
        change = LowRankChange(module.weight, min(rank, whole_rank), generator)
        parametrize.register_parametrization(module, "weight", change)


def is_changed(drafter: nn.Module) -> bool:
    """Whether `drafter` has changes of low rank."""
    return any(isinstance(module, LowRankChange) for module in drafter.modules())


def merged(drafter: Any) -> Any:
    """A copy in which the changes are part of the weights."""
    state = drafter.state_dict()
    for name in [name for name in state if ".parametrizations." in name]:
        del state[name]
    for name, module in drafter.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            state[f"{name}.weight"] = module.weight
    # Not a deep copy, which would share the classes that torch made: without their parametrisation both would lose it.
    whole = type(drafter)(copy.deepcopy(drafter.config))
    whole.load_state_dict(state)
    return whole.to(drafter.device).eval()
