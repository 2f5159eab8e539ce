"""MLPs that keep only their gate and up projections for the backward pass, and recompute what follows."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


@contextmanager
def lean_mlps(drafter: Any) -> Iterator[None]:
    """Inside the `with`, the drafter's MLPs keep two tensors of their width for the backward pass, not four.

    The other two, the activation and the product, are recomputed elementwise. The down projection is not recomputed. If
    its weight has a low-rank update, the updated weight is recomputed. Layers with gradient checkpointing and MLPs
    whose forward was replaced are not changed.
    """
    layers = [layer for layer in drafter.layers if not layer.gradient_checkpointing]
    mlps: list[Any] = [layer.mlp for layer in layers if "forward" not in vars(layer.mlp)]
    for mlp in mlps:
        mlp.forward = partial(_forward, mlp)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward  # the forward of the class applies again


def _forward(mlp: Any, hidden_states: Tensor) -> Tensor:
    def joined(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(gate) * up)

    # `joined` is not random, and saving the random state of a GPU is slow.
    gate, up = mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)
    return checkpoint(joined, gate, up, use_reentrant=False, preserve_rng_state=False)
