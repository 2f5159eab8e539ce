"""A drafter over several processes: whole in each, or in pieces (FSDP2), and its state as one process would have it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from dflash.modeling_dflash import DFlashDraftModel


def shard_drafter(drafter: DFlashDraftModel) -> None:
    """Spreads a drafter over the processes in place: each layer is gathered when it runs, the rest when the forward begins."""
    from torch.distributed.fsdp import fully_shard

    for layer in drafter.layers:
        fully_shard(layer)
    fully_shard(drafter)


def shard_layers(target: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Spreads a target's layers over the processes; its embedding and head, which others call too, stay whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer)


def is_sharded(model: nn.Module) -> bool:
    """Whether some weights of `model` are spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def full_state(drafter: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Weights and optimiser states by the parameters' names; if sharded, on the first process alone, but all must call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=is_sharded(drafter))
    return {
        "drafter": get_model_state_dict(drafter, options=options),
        "optimizers": [get_optimizer_state_dict(drafter, optimizer, options=options) for optimizer in optimizers],
    }


def load_full_state(drafter: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Puts a `full_state` back; before the drafter is sharded its weights, behind that the optimisers' states."""
    options = StateDictOptions(full_state_dict=True)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        set_optimizer_state_dict(drafter, optimizer, saved, options=options)


def whole_copy(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """The drafter as it decodes and is saved: itself, or if it is sharded a copy of it in each process."""
    if not is_sharded(drafter):
        return drafter
    whole: Any = DFlashDraftModel(copy.deepcopy(drafter.config))
    whole.load_state_dict(get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True)))
    return whole.to(drafter.device).eval()
