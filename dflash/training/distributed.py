"""A drafter over several processes: whole in each or sharded (FSDP2), and its state as one process would have it.

Losses, gradients and counts are joined as sums.
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
from .adaptation_lora import is_changed, merged
from .losses import DraftCounts
from .settings import Facts


def asked_sharding(accelerator: Accelerator) -> Facts | None:
    """The options of `fully_shard` in the configuration of accelerate; `None` if it asks for whole models.

    Its precision and activation checkpointing are not read: the trainer has settings of its own for them.

    Raises:
        ValueError: for DeepSpeed, Megatron, the first FSDP, or parameters on the CPU.
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
        raise ValueError(f"{subject} fsdp_offload_params, and a drafter is small: {remedy}.")
    return {"reshard_after_forward": plugin.reshard_after_forward}


def shard_drafter(drafter: DFlashDraftModel, **options: Any) -> None:
    """Shards a drafter in place: each layer is gathered when it runs, the rest when the forward begins.

    The `options` of `fully_shard` apply to the layers alone, because other weights are read after the forward too.
    """
    shard_layers(drafter.layers, **options)
    fully_shard(drafter)


def shard_layers(layers: Iterable[nn.Module], **options: Any) -> None:
    """Shards layers alone. The embedding and head of a target stay whole, because the drafter calls them too."""
    for layer in layers:
        fully_shard(layer, **options)


def is_sharded(model: nn.Module) -> bool:
    """Whether some weights of `model` are sharded."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def full_state(drafter: nn.Module, optimizers: Sequence[Optimizer]) -> Facts:
    """Weights and optimiser states by the names of parameters. All processes must call it; the first one has the sharded tensors."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=is_sharded(drafter))
    return {
        "drafter": get_model_state_dict(drafter, options=options),
        "optimizers": [get_optimizer_state_dict(drafter, optimizer, options=options) for optimizer in optimizers],
    }


def load_full_state(drafter: nn.Module, optimizers: Sequence[Optimizer], state: Facts) -> None:
    """Loads the optimisers of a `full_state`. Its weights must be loaded earlier, before the drafter is sharded."""
    options = StateDictOptions(full_state_dict=True)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        set_optimizer_state_dict(drafter, optimizer, saved, options=options)


def whole_copy(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """The drafter as it decodes and is saved. A sharded one, or one with changes of low rank, is copied in each process."""
    if is_changed(drafter):
        return merged(drafter)
    if not is_sharded(drafter):
        return drafter
    whole: Any = DFlashDraftModel(copy.deepcopy(drafter.config))
    whole.load_state_dict(get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True)))
    return whole.to(drafter.device).eval()


def join_gradients(
    accelerator: Accelerator, drafter: DFlashDraftModel, counts: DraftCounts, stop: bool
) -> tuple[float, bool]:
    """Divides the gradients of all processes' loss sums by the sum of the weights; gives the mean loss, and whether a process stops.

    All are summed in one message, because the sum of many small tensors is mostly latency. FSDP has already summed the
    gradients of a sharded drafter.
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
    """The counts of each process, in order. Their sum would round another way when a resumed run adds to it."""
    gathered = counts.each(lambda count: accelerator.gather(count[None]))
    return vars(gathered.each(Tensor.cpu))


def counts_of_share(accelerator: Accelerator, saved: dict[str, Tensor]) -> DraftCounts:
    """The share of this process in the counts that `counts_of_each` saved, on any number of processes."""
    index = accelerator.process_index
    num_processes = accelerator.num_processes

    def own(values: Tensor) -> Tensor:
        total = values[index::num_processes].sum(dim=0)
        return total.to(accelerator.device)

    return DraftCounts(**saved).each(own)


def join_acceptances(accelerator: Accelerator, acceptance: AcceptanceCounts) -> AcceptanceCounts:
    """The acceptance over the prompts of all processes."""
    counts = [acceptance.steps, acceptance.committed, acceptance.kept, *acceptance.accepted]
    tensor = torch.tensor(counts, device=accelerator.device)
    sums = accelerator.reduce(tensor, reduction="sum")
    steps, committed, kept, *accepted = sums.tolist()
    return AcceptanceCounts(steps, committed, kept, tuple(accepted))
