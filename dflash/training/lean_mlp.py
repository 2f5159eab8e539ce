"""MLPs that keep two tensors for the backward pass, their projections, and compute the activation and the product again."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


@contextmanager
def lean_mlps(drafter: Any) -> Iterator[None]:
    """Inside the `with`, the drafter's MLPs keep two tensors of their width for the backward pass, not four.

    The other two are computed again, elementwise. Recomputation stops before the matrix product that follows, but makes its
    weight again if that has a change of low rank. Layers with gradient checkpointing are left alone, and so are MLPs whose
    forward was replaced already.
    """
    layers = [layer for layer in drafter.layers if not layer.gradient_checkpointing]
    mlps: list[Any] = [layer.mlp for layer in layers if "forward" not in vars(layer.mlp)]
    for mlp in mlps:
        mlp.forward = partial(_forward, mlp)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward  # the class's is there again


def _forward(mlp: Any, hidden_states: Tensor) -> Tensor:
    def joined(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(gate) * up)

    # Nothing in it is random, and on a GPU the state of random numbers is slow to read.
    gate, up = mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)
    return checkpoint(joined, gate, up, use_reentrant=False, preserve_rng_state=False)
