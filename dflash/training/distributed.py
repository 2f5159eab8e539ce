"""Trains in several processes: shards a drafter (FSDP2), joins gradients and counts, and reads and loads full states.

Losses, gradients and counts are summed over the processes.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dflash.drafter import DFlashDraftModel

from .acceptance import AcceptanceCounts
from .adaptation_lora import has_low_rank_updates, merged
from .losses import DraftCounts
from .settings import Facts


def asked_sharding(accelerator: Accelerator) -> Facts | None:
    """Returns the options of `fully_shard` that accelerate's configuration asks for; `None` if it asks for no sharding.

    Precision and activation checkpointing of that configuration are ignored: the trainer has settings of its own for
    them.

    Raises:
        ValueError: for DeepSpeed, Megatron, FSDP 1, or parameters that are offloaded to the CPU.
    """
    kind, subject = accelerator.distributed_type, "accelerate's configuration asks for"
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"{subject} {kind.value}, which drafters are not trained with: ask for FSDP 2.")
    if kind != DistributedType.FSDP:
        return None
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        remedy = "write `fsdp_version: 2` there, or leave FSDP out and give --shard"
        raise ValueError(f"{subject} FSDP {plugin.fsdp_version}: {remedy}.")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        remedy = "write `fsdp_offload_params: false`"
        raise ValueError(f"{subject} fsdp_offload_params, which a drafter is too small to need: {remedy}.")
    return {"reshard_after_forward": plugin.reshard_after_forward}


def shard_drafter(drafter: DFlashDraftModel, **options: Any) -> None:
    """Shards a drafter in place: each layer is gathered when it runs, all other weights when the forward begins.

    The `options` of `fully_shard` apply to the layers alone, because the other weights are read after the forward too.
    """
    shard_layers(drafter.layers, **options)
    fully_shard(drafter)


def shard_layers(layers: Iterable[nn.Module], **options: Any) -> None:
    """Shards `layers` in place. A target's embedding and head stay whole, because the drafter calls them too."""
    for layer in layers:
        fully_shard(layer, **options)


def is_sharded(model: nn.Module) -> bool:
    """Whether any weight of `model` is sharded."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def full_state(drafter: nn.Module, optimizers: Sequence[Optimizer]) -> Facts:
    """Returns the unsharded state dicts of the drafter, as `drafter`, and of each optimiser, as `optimizers`.

    All processes must call it. If the drafter is sharded, only the first process gets the tensors.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=is_sharded(drafter))
    return {
        "drafter": get_model_state_dict(drafter, options=options),
        "optimizers": [get_optimizer_state_dict(drafter, optimizer, options=options) for optimizer in optimizers],
    }


def load_optimizer_states(drafter: nn.Module, optimizers: Sequence[Optimizer], state: Facts) -> None:
    """Loads the optimiser states of a `full_state`. Load its weights earlier, before the drafter is sharded."""
    options = StateDictOptions(full_state_dict=True)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        set_optimizer_state_dict(drafter, optimizer, saved, options=options)


def decodable(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """Returns the drafter unsharded and with low-rank updates merged, to decode or save. All processes must call it.

    The result is a copy if the drafter is sharded or has such updates, else `drafter` itself.
    """
    if has_low_rank_updates(drafter):
        return merged(drafter)
    if not is_sharded(drafter):
        return drafter
    whole: Any = DFlashDraftModel(copy.deepcopy(drafter.config))
    whole.load_state_dict(get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True)))
    return whole.to(drafter.device).eval()


def join_gradients(
    accelerator: Accelerator, drafter: DFlashDraftModel, counts: DraftCounts, stop: bool
) -> tuple[float, bool]:
    """Replaces the gradients of each process's loss sum by those of the mean loss over all processes, in place.

    Returns this mean loss, and whether any process passed `stop`. Everything is summed in one message, because summing
    many small tensors is mostly latency. The gradients of a sharded drafter were already summed by FSDP.
    """
    wish = counts.loss_sum.new_tensor(float(stop))
    figures = torch.stack([counts.loss_sum, counts.weight_sum, wish])
    gradients: list[Any] = []
    for parameter in drafter.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    if is_sharded(drafter):
        figures = accelerator.reduce(figures, reduction="sum")
    elif accelerator.num_processes > 1:
        parts = [*map(torch.flatten, gradients), figures]
        message = torch.cat(parts)
        total = accelerator.reduce(message, reduction="sum")
        sizes = [len(part) for part in parts]
        *sums, figures = total.split(sizes)
        for gradient, values in zip(gradients, sums, strict=True):
            gradient.copy_(values.view_as(gradient))
    loss_sum, weight_sum, num_stopping = figures.tolist()
    weight_sum = max(weight_sum, 1e-9)
    for gradient in gradients:
        gradient /= weight_sum
    return loss_sum / weight_sum, num_stopping > 0


def counts_of_each(accelerator: Accelerator, counts: DraftCounts) -> dict[str, Tensor]:
    """Gathers the counts of all processes on the CPU. The first dimension of each tensor is that of the processes.

    They are not summed, because a resumed run that adds to the sum would round differently.
    """
    gathered = counts.each(lambda count: accelerator.gather(count[None]))
    return vars(gathered.each(Tensor.cpu))


def counts_of_process(accelerator: Accelerator, saved: dict[str, Tensor]) -> DraftCounts:
    """Returns this process's part of counts from `counts_of_each`. The parts of all processes add up to the total."""
    index = accelerator.process_index
    num_processes = accelerator.num_processes

    def own(values: Tensor) -> Tensor:
        total = values[index::num_processes].sum(dim=0)
        return total.to(accelerator.device)

    return DraftCounts(**saved).each(own)


def join_acceptances(accelerator: Accelerator, acceptance: AcceptanceCounts) -> AcceptanceCounts:
    """Returns the acceptance counts summed over all processes."""
    counts = [acceptance.steps, acceptance.committed, acceptance.kept, *acceptance.accepted]
    tensor = torch.tensor(counts, device=accelerator.device)
    sums = accelerator.reduce(tensor, reduction="sum")
    steps, committed, kept, *accepted = sums.tolist()
    return AcceptanceCounts(steps, committed, kept, tuple(accepted))
