"""Takes the optimiser steps of a run, in one process or several. It works on token ids, never on text.

Each process computes `gradient_accumulation_steps` micro-batches of each batch. Losses, gradients and counts are
summed, so that neither the number of processes nor that of micro-batches changes what is learned.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from dflash.common.files import only_writer
from dflash.common.messages import Announce, say_nothing
from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import decoder_layers, text_config

from .acceptance import AcceptanceCounts, measure_acceptance
from .adaptation_lora import add_low_rank_updates
from .batches import Batch, BatchPlan, epoch_batches, epoch_sequences
from .device import computes_in_bf16, is_cpu_alone
from .distributed import (
    asked_sharding,
    counts_of_each,
    counts_of_process,
    decodable,
    full_state,
    is_sharded,
    join_acceptances,
    join_gradients,
    load_optimizer_states,
    shard_drafter,
    shard_layers,
)
from .examples import Examples, Prompts, has_rejected, lengths_of
from .features import MANIFEST, CachedFeatures, facts_of, feature_bytes, write_features
from .frozen_target import FrozenTarget, can_pack
from .losses import DraftCounts, reads_target
from .objective import DrafterLoss
from .optimizers import build_optimizers, group_names, rate_factor
from .settings import Facts, TrainingSettings


@dataclass(frozen=True)
class StepFigures:
    """The figures of one optimiser step, equal on all processes."""

    loss: float  # weighted mean over the whole batch
    gradient_norm: float  # before clipping
    rates: dict[str, float]  # learning rates by the names of `group_names`
    is_stopping: bool  # whether any process asked to stop


class Place(NamedTuple):
    """The epoch of a batch and its index in the epoch."""

    epoch: int
    batch_index: int


class Trainer:
    """Trains a drafter step by step, and keeps track of its progress. It writes no files except the target's features.

    Args:
        drafter: The drafter, with fp32 weights; trained in place.
        target: Its target, which is frozen in place.
        examples: Sequences to train on, already checked by `usable`.
        settings: The recipe.
        state: The result of `state()` in an earlier start of the same run, which goes on from there.
        announce: Called with a sentence about anything that will take long or much space, or is done
            differently than the settings ask.
        trackers: Passed on to `Accelerator`: `log_with`, `project_dir`.

    Raises:
        ValueError: for settings that do not fit the drafter, the data or accelerate's configuration, or a folder of
            features that belongs to another run.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: PreTrainedModel,
        examples: Examples,
        settings: TrainingSettings,
        state: Facts | None = None,
        announce: Announce = say_nothing,
        **trackers: Any,
    ) -> None:
        self.examples = examples
        self.settings = settings
        self.target = target
        self.drafter = drafter
        self.accelerator = Accelerator(mixed_precision="no", cpu=is_cpu_alone(), **trackers)
        # accelerate's own setting of the precision would hold for all later runs of the process.
        self.precision = settings.mixed_precision or ("bf16" if computes_in_bf16() else "no")
        self.muon_rate = settings.muon_rate(drafter.config.hidden_size)
        self.num_micro_batches = self.accelerator.num_processes * settings.gradient_accumulation_steps
        self._check_settings()
        if settings.lora_rank is not None:
            add_low_rank_updates(drafter, settings.lora_rank, settings.seed)
        self._place_models(state)
        self.optimizers = build_optimizers(
            drafter,
            settings.learning_rate,
            settings.weight_decay,
            self.muon_rate,
        )
        self._peaks = [group["lr"] for group in self._groups()]
        network: Any = torch.compile(drafter) if settings.compile else drafter
        if settings.gradient_checkpointing:
            # transformers 5 renames the method. The default of transformers 4 (reentrant) passes no gradient to keyword
            # arguments.
            enable = getattr(drafter, "activation_checkpointing_enable", drafter.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        self._frozen = FrozenTarget(target, drafter)
        self._loss_of = DrafterLoss(
            self._frozen,
            settings,
            network,
            self._cached_features(announce),
        )
        self.plan = BatchPlan(
            settings.num_anchors,
            settings.batch_tokens,
            settings.seed,
            pad_token_id=text_config(target).pad_token_id or 0,
            pack_length=settings.pack_length if can_pack(target) else None,
            rejected_share=settings.rejected_share,
        )
        if self.plan.pack_length != settings.pack_length:
            announce(f"{type(target).__name__} cannot keep packed documents apart: they are not packed.")
        self.num_steps = settings.steps or settings.epochs * self.batches_per_epoch
        self.step_number = 0
        self.next_place = Place(0, 0)
        self.counts: DraftCounts | None = None
        if state is not None:
            self._go_on_from(state)
        self._batches = self._endless_batches()

    def _check_settings(self) -> None:
        """Raises ValueError for `freeze_init` without a frozen weight, or `rejected_share` without rejected drafts."""
        settings = self.settings
        requires_grad = [parameter.requires_grad for parameter in self.drafter.parameters()]
        if settings.freeze_init and all(requires_grad):
            raise ValueError(
                "freeze_init is set but no weight is frozen: begin with `train_drafter`, or set requires_grad of the "
                "weights to keep to False."
            )
        if settings.rejected_share and not has_rejected(self.examples):
            raise ValueError(
                f"rejected_share={settings.rejected_share} and the data records no rejected draft: give a trace of "
                "dflash regenerate --trace, or leave rejected_share out."
            )

    def _place_models(self, state: Facts | None) -> None:
        settings = self.settings
        device = self.accelerator.device
        target: Any = self.target.requires_grad_(False).eval()
        # The target is sharded before it is moved: the whole target may not fit into the memory of one device.
        if settings.shard_target:
            shard_layers(decoder_layers(target))
        if not hasattr(target, "hf_device_map"):
            target.to(device)
        if state is not None:
            self.drafter.load_state_dict(state["drafter"])
        sharding = asked_sharding(self.accelerator)
        if settings.freeze_init and sharding is not None:
            raise ValueError("freeze_init is set and accelerate's configuration asks for FSDP: leave FSDP out of it.")
        if settings.lora_rank is not None and sharding is not None:
            raise ValueError(
                f"lora_rank={settings.lora_rank} and accelerate's configuration asks for FSDP: a low-rank update is "
                "small; leave FSDP out of it."
            )
        if settings.shard or sharding is not None:
            shard_drafter(self.drafter, **(sharding or {}))
        # The drafter is moved but not wrapped: a wrapped forward would stay in bf16 when the drafter decodes.
        self.drafter.to(device)

    def _groups(self) -> list[Facts]:
        """Returns the parameter groups of all optimisers. They are not stored: loading a state replaces them."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers))

    @property
    def rates(self) -> str:
        """The peak learning rates as text, in the form of settings: `learning_rate=0.002, muon_learning_rate=0.02`."""
        rates = {
            "learning_rate": self.settings.learning_rate,
            "muon_learning_rate": self.muon_rate,
        }
        used = [f"{name}={rate:.4g}" for name, rate in rates.items() if rate]
        return ", ".join(used)

    @property
    def attention(self) -> str:
        """The name of the attention implementation with which the drafter is trained on this device."""
        return self._loss_of.attention(self.accelerator.device)

    def feature_bytes(self) -> int:
        """Returns the number of bytes that the target's features of the data take on disk."""
        wants_states = reads_target(self.settings.loss)
        return feature_bytes(self._frozen, self.examples, wants_states)

    def _cached_features(self, announce: Announce) -> CachedFeatures | None:
        """Returns a reader of the folder `settings.features`, which the first process fills; `None` without one."""
        settings = self.settings
        if settings.features is None:
            return None
        folder = Path(settings.features).expanduser()
        facts = facts_of(
            self._frozen,
            self.examples,
            reads_target(settings.loss),
            self.precision,
        )
        if self.is_first and not (folder / MANIFEST).is_file():
            with only_writer(folder):
                write_features(
                    folder,
                    self._frozen,
                    self.examples,
                    facts,
                    settings.batch_tokens,
                    announce,
                )
        self.accelerator.wait_for_everyone()
        return CachedFeatures(folder, facts)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files, shows progress and reports."""
        return self.accelerator.is_main_process

    def step(self, stop: bool = False) -> StepFigures:
        """Takes one optimiser step on the next batch. If any process passes `stop`, `is_stopping` is true on all.

        Raises:
            FloatingPointError: if loss or gradient are not finite; the weights of the step before are kept.
        """
        self.drafter.train()
        place, batch = next(self._batches)
        counts = self._backward(batch)
        loss, is_stopping = join_gradients(
            self.accelerator,
            self.drafter,
            counts,
            stop,
        )
        parameters = self.drafter.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._check_finite(loss, norm.item(), place, batch)
        self.step_number += 1
        factor = rate_factor(self.step_number, self.num_steps, self.settings.warmup_ratio)
        for group, peak in zip(self._groups(), self._peaks, strict=True):
            group["lr"] = peak * factor
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.counts = counts if self.counts is None else self.counts + counts
        self.next_place = Place(place.epoch, place.batch_index + 1)
        rates = [group["lr"] for group in self._groups()]
        named_rates = dict(zip(group_names(self.optimizers), rates, strict=True))
        return StepFigures(loss, norm.item(), named_rates, is_stopping)

    def _backward(self, batch: Batch) -> DraftCounts:
        """Accumulates the gradients of this process's micro-batches of `batch`, and returns their counts."""
        device = self.accelerator.device
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")
        all_counts = []
        for micro_batch in self._micro_batches(batch):
            with autocast:
                loss_sum, counts = self._loss_of(micro_batch.to(device))
            if is_sharded(self.drafter):  # FSDP takes the mean of the gradients over the processes
                loss_sum = loss_sum * self.accelerator.num_processes
            self.accelerator.backward(loss_sum)
            all_counts.append(counts)
        return reduce(DraftCounts.__add__, all_counts)

    def _check_finite(self, loss: float, norm: float, place: Place, batch: Batch) -> None:
        for name, value in (("loss", loss), ("norm of the gradient", norm)):
            if math.isfinite(value):
                continue
            step = self.step_number + 1
            num_sequences = len(batch.input_ids)
            first_ids = batch.input_ids[0, :8].tolist()
            raise FloatingPointError(
                f"The {name} of step {step} is {value}, on batch {place.batch_index} of epoch {place.epoch} "
                f"({num_sequences} sequences, the first of which begins with the ids {first_ids}): "
                f"lower {self.rates}, set mixed_precision='no', or look at that batch."
            )

    def measure(self, held_out: Prompts) -> Facts:
        """Returns a point of the curve: training counts since the last point, and the acceptance on `held_out`.

        The counts are then reset. If no step was taken since the last point, there are no counts. All processes must
        call it.
        """
        accelerator = self.accelerator
        point: Facts = {"step": self.step_number}
        if self.counts is not None:
            total = self.counts.each(lambda count: accelerator.reduce(count, reduction="sum"))
            point |= total.summary()
            self.counts = None
        if held_out:
            acceptance = self.acceptance(held_out)
            point |= {"tau": acceptance.tau, "tokens_per_step": acceptance.tokens_per_step}
        return point

    def acceptance(self, prompts: Prompts) -> AcceptanceCounts:
        """Decodes `prompts` greedily, shared among the processes, and returns the counts of all processes.

        All processes must call it. FloatingPointError if training has made the drafter's logits NaN or infinite.
        """
        drafter = self.decodable_drafter().eval()
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        if is_sharded(self.target):  # it runs only where all processes run it, so each of them decodes all prompts
            index, count = 0, 1
        try:
            own_prompts = prompts[index::count]
            acceptance = measure_acceptance(
                drafter,
                self.target,
                own_prompts,
                self.settings.eval_new_tokens,
            )
        except ValueError as error:
            if not self.step_number or "drafter's logits" not in str(error):
                raise
            raise FloatingPointError(
                f"After step {self.step_number} the drafter's logits are NaN or infinite: lower {self.rates}."
            ) from error
        return join_acceptances(self.accelerator, acceptance) if count > 1 else acceptance

    def decodable_drafter(self) -> DFlashDraftModel:
        """Returns the drafter unsharded and with low-rank updates merged, to decode or save.

        All processes must call it.
        """
        return decodable(self.drafter)

    def state(self) -> Facts:
        """Returns what a resumed run goes on from: weights, optimisers, step, place in the data and counts.

        A new [`Trainer`] takes the result as `state`. All processes must call it. If the drafter is sharded, only the
        first process gets the tensors.
        """
        return full_state(self.drafter, self.optimizers) | {
            "step": self.step_number,
            "place": list(self.next_place),
            "counts": None if self.counts is None else counts_of_each(self.accelerator, self.counts),
        }

    def _go_on_from(self, state: Facts) -> None:
        load_optimizer_states(self.drafter, self.optimizers, state)
        self.step_number = state["step"]
        self.next_place = Place(*state["place"])
        if state["counts"] is not None:
            self.counts = counts_of_process(self.accelerator, state["counts"])

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """Returns this process's micro-batches of `batch`, whose gradients are accumulated."""
        indices = range(self.accelerator.process_index, self.num_micro_batches, self.accelerator.num_processes)
        micro_batches = [batch.micro_batch(index, self.num_micro_batches) for index in indices]
        if is_sharded(self.drafter) or is_sharded(self.target):  # all processes must run the same number of forwards
            return micro_batches
        num_sequences = len(batch.input_ids)
        num_full = sum(index < num_sequences for index in indices)
        return micro_batches[: max(1, num_full)]

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches in the first epoch. Later epochs may have slightly more or fewer."""
        lengths = lengths_of(self.examples)
        return len(epoch_sequences(lengths, 0, self.plan))

    def _endless_batches(self) -> Iterator[tuple[Place, Batch]]:
        """Yields each batch from `next_place` on, with its place, epoch after epoch without end."""
        epoch, first = self.next_place
        while True:
            batches = epoch_batches(self.examples, epoch, self.plan, first)
            for index, batch in enumerate(batches, start=first):
                yield Place(epoch, index), batch
            epoch, first = epoch + 1, 0
