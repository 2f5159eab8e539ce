"""MLPs that keep less for the backward pass: their two projections, not the activation and the product made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


@contextmanager
def lean_mlps(drafter: Any) -> Iterator[None]:
    """Inside the `with`, the drafter's MLPs keep two tensors of their width for the backward pass, not four.

    It computes the other two again, elementwise: recomputation stops before the matrix product that follows, whose weight is
    made again too if it has a change of low rank. Layers that are computed again as a whole are left alone, and so are MLPs
    whose forward something else has replaced.
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
