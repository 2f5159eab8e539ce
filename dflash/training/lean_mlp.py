"""MLPs that keep less for the backward pass: their two projections, not the activation and the product made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP


@contextmanager
def lean_mlps(drafter: nn.Module) -> Iterator[None]:
    """Inside the `with`, the forward of the drafter's gated MLPs keeps two tensors of their width, not four.

    The backward pass computes the other two again, elementwise: recomputation stops before the matrix product that follows.
    """
    mlps: list[Any] = [module for module in drafter.modules() if isinstance(module, Qwen3MLP)]
    for mlp in mlps:
        mlp.forward = partial(_forward, mlp)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward  # the class's is there again


def _forward(mlp: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    def joined(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return mlp.down_proj(mlp.act_fn(gate) * up)

    gate, up = mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)
    return checkpoint(joined, gate, up, use_reentrant=False, determinism_check="none", preserve_rng_state=False)
