"""LoRA (arXiv 2106.09685) for drafters: a trainable low-rank update of the weight of each linear layer.

The update is a parametrisation of torch, so all code that reads `weight`, compiled forwards included, reads the updated
weight. The update is merged into the weights before the drafter decodes or is saved.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class LowRankUpdate(nn.Module):
    """A parametrisation that adds `up @ down`, a matrix of rank R, to a weight. `up` is 0 at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        height, width = weight.shape
        noise = torch.randn(rank, width, generator=generator)
        down = noise / math.sqrt(width)
        self.down = nn.Parameter(down.to(weight))  # [R, in]
        self.up = nn.Parameter(weight.new_zeros(height, rank))  # [out, R]

    def forward(self, weight: Tensor) -> Tensor:
        """Returns `weight` [out, in] with the low-rank update added."""
        return weight + self.up @ self.down


def add_low_rank_updates(drafter: nn.Module, rank: int, seed: int) -> None:
    """Freezes all weights in place, and adds a trainable update of at most `rank` to each linear layer (LoRA).

    Raises:
        ValueError: if no weight has a rank above `rank`, so that an update would not be smaller than the weights.
    """
    linear = [module for module in drafter.modules() if isinstance(module, nn.Linear)]
    ranks = [min(module.weight.shape) for module in linear]
    largest = max(ranks)
    if rank >= largest:
        raise ValueError(
            f"lora_rank={rank} and the largest matrix has rank {largest}: give a smaller rank, or train all weights."
        )
    drafter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module, whole_rank in zip(linear, ranks, strict=True):
        update = LowRankUpdate(module.weight, min(rank, whole_rank), generator)
        parametrize.register_parametrization(module, "weight", update)


def has_low_rank_updates(drafter: nn.Module) -> bool:
    """Whether `drafter` has low-rank updates from `add_low_rank_updates`."""
    return any(isinstance(module, LowRankUpdate) for module in drafter.modules())


def merged(drafter: Any) -> Any:
    """Returns a copy of `drafter` in eval mode, with the low-rank updates added to its weights."""
    state = drafter.state_dict()
    for name in [name for name in state if ".parametrizations." in name]:
        del state[name]
    for name, module in drafter.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            state[f"{name}.weight"] = module.weight
    # Not a deep copy: torch gives a parametrised module a class of its own, which a deep copy shares. Removing the
    # parametrisation from the copy would remove it from the original too.
    whole = type(drafter)(copy.deepcopy(drafter.config))
    whole.load_state_dict(state)
    return whole.to(drafter.device).eval()
