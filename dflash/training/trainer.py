"""One optimiser step after another by a recipe, on one process or several. It knows no text.

Every process takes its share of each batch, in as many parts as gradients are accumulated over. Losses, gradients and counts
travel as sums, so that neither the number of processes nor that of parts changes what is learned.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from dflash.common.files import only_writer
from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import decoder_layers

from .acceptance import Acceptance, measure_acceptance
from .adaptation_lora import change_in_low_rank
from .batches import Batch, epoch_batches, epoch_sequences
from .data import Example
from .device import computes_in_bf16, is_cpu_alone
from .distributed import (
    asked_sharding,
    counts_of_each,
    full_state,
    is_sharded,
    join_acceptances,
    join_counts,
    join_gradients,
    load_full_state,
    shard_drafter,
    shard_layers,
    whole_copy,
)
from .features import MANIFEST, CachedFeatures, facts_of, feature_bytes, write_features
from .frozen_target import FrozenTarget, can_pack
from .lazy_sequences import lengths_of
from .losses import DraftCounts, reads_target
from .objective import DrafterLoss
from .optimizers import build_optimizers, group_names, rate_factor
from .settings import TrainingSettings


@dataclass(frozen=True)
class StepFigures:
    """The figures of one optimiser step."""

    loss: float  # mean over the batch
    gradient_norm: float
    rates: dict[str, float]  # of each group of `group_names`
    is_stopping: bool  # whether some process asked to stop


class Trainer:
    """A drafter, its target and the data, and how far training has come. It writes no file but the target's features.

    Args:
        drafter: The drafter, with fp32 weights; trained in place.
        target: Its target; frozen here.
        examples: Sequences that the target would write, all of them usable.
        settings: The recipe.
        state: Of `state` in an earlier start of the same run.
        announce: Told in a sentence what is about to take long or much room.
        trackers: Passed on to `accelerate.Accelerator`: `log_with`, `project_dir`.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: PreTrainedModel,
        examples: Sequence[Example],
        settings: TrainingSettings,
        state: dict[str, Any] | None = None,
        announce: Callable[[str], None] | None = None,
        **trackers: Any,
    ) -> None:
        self.examples = examples
        self.settings = settings
        self.accelerator = accelerate.Accelerator(mixed_precision="no", cpu=is_cpu_alone(), **trackers)
        # Not accelerate's, which is one for all runs of a process.
        self.precision = settings.mixed_precision or ("bf16" if computes_in_bf16() else "no")
        is_bf16 = self.precision == "bf16"
        self._autocast = torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=is_bf16)
        self.target = target
        if settings.freeze_init and all(parameter.requires_grad for parameter in drafter.parameters()):
            raise ValueError(
                "freeze_init, and all weights of the drafter would be trained: begin with `train_drafter`, or set "
                "requires_grad of those that stay to False."
            )
        if settings.rejected_share and not any(example.rejected for example in examples):
            raise ValueError(
                f"rejected_share={settings.rejected_share}: the data records no rejected draft: give a trace of dflash "
                "regenerate --trace, or leave it out."
            )
        if settings.lora_rank is not None:
            change_in_low_rank(drafter, settings.lora_rank, settings.seed)
        self._place_models(drafter, state)
        self.drafter = drafter
        self.muon_rate = settings.muon_rate(drafter.config.hidden_size)
        rates = settings.learning_rate, settings.weight_decay, self.muon_rate
        self.optimizers = build_optimizers(drafter, *rates)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        network: Any = torch.compile(drafter) if settings.compile else drafter
        if settings.gradient_checkpointing:
            # Its name changes in transformers 5, its default in 4 keeps gradients from arguments by name.
            enable = getattr(drafter, "activation_checkpointing_enable", drafter.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        self._frozen = FrozenTarget(target, drafter)
        self._loss_of = DrafterLoss(self._frozen, settings, network, self._cached_features(announce))
        self._pack_length = settings.pack_length if can_pack(target) else None
        if settings.pack_length is not None and self._pack_length is None and announce is not None:
            announce(f"{type(target).__name__} cannot keep packed sequences apart: they are not packed.")
        self.num_steps = settings.steps or settings.epochs * self.batches_per_epoch
        self.step_number = 0
        self.next_place = 0, 0  # epoch, and batch in it
        self.counts: DraftCounts | None = None
        if state is not None:
            self._go_on_from(state)
        self._batches = self._endless_batches()

    def _place_models(self, drafter: DFlashDraftModel, state: dict[str, Any] | None) -> None:
        settings, device = self.settings, self.accelerator.device
        movable: Any = self.target.requires_grad_(False).eval()
        if settings.shard_target:  # before it is moved: as a whole it may be larger than a device
            shard_layers(decoder_layers(self.target))
        if not hasattr(self.target, "hf_device_map"):
            movable.to(device)
        if state is not None:
            drafter.load_state_dict(state["drafter"])
        sharding = asked_sharding(self.accelerator)
        if settings.freeze_init and sharding is not None:
            raise ValueError("freeze_init, and accelerate's configuration asks for FSDP: leave FSDP out of it.")
        if settings.shard or sharding is not None:
            shard_drafter(drafter, **(sharding or {}))
        # It is moved but not wrapped: a wrapped forward would stay in bf16 when the drafter decodes.
        drafter.to(device)

    @property
    def rates(self) -> str:
        """The peak rates, as they are given: `learning_rate=0.002, muon_learning_rate=0.02`."""
        rates = {"learning_rate": self.settings.learning_rate, "muon_learning_rate": self.muon_rate}
        return ", ".join(f"{name}={rate:.4g}" for name, rate in rates.items() if rate)

    @property
    def attention(self) -> str:
        """The attention with which the drafter's blocks are trained."""
        return self._loss_of.attention(self.accelerator.device)

    def feature_bytes(self) -> int:
        """Bytes that the target's features of the data would take on disk."""
        return feature_bytes(self._frozen, self.examples, reads_target(self.settings.loss))

    def _cached_features(self, announce: Callable[[str], None] | None) -> CachedFeatures | None:
        """The features in the folder that the settings name, written first if it holds none; `None` is online."""
        settings = self.settings
        if settings.features is None:
            return None
        folder = Path(settings.features).expanduser()
        facts = facts_of(self._frozen, self.examples, reads_target(settings.loss), self.precision)
        if not (folder / MANIFEST).is_file() and self.is_first:
            with only_writer(folder):
                write_features(folder, self._frozen, self.examples, facts, settings.batch_tokens, announce)
        self.accelerator.wait_for_everyone()
        return CachedFeatures(folder, facts)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes, draws and reports."""
        return self.accelerator.is_main_process

    def step(self, stop: bool = False) -> StepFigures:
        """One optimiser step on the next batch; all processes learn if one gives `stop`.

        Raises:
            FloatingPointError: if loss or gradient are not finite; the weights are those of the step before.
        """
        self.drafter.train()
        accelerator, settings = self.accelerator, self.settings
        (epoch, index), batch = next(self._batches)
        counts: DraftCounts | None = None
        for part in self._parts(batch):
            part = part.to(accelerator.device)
            with self._autocast:
                loss_sum, part_counts = self._loss_of(part)
            # FSDP takes the mean of a sharded drafter's gradients over the processes during the backward pass.
            accelerator.backward(loss_sum * accelerator.num_processes if is_sharded(self.drafter) else loss_sum)
            counts = part_counts if counts is None else counts + part_counts
        assert counts is not None
        loss, is_stopping = join_gradients(accelerator, self.drafter, counts, stop)
        step = self.step_number + 1
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), settings.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        what, value = ("loss", loss) if not math.isfinite(loss) else ("norm of the gradient", norm.item())
        if not math.isfinite(value):
            raise FloatingPointError(
                f"The {what} of step {step} is {value}, on batch {index} of epoch {epoch} "
                f"({len(batch.input_ids)} sequences, the first of which begins with the ids {batch.input_ids[0, :8].tolist()}): "
                f"lower {self.rates}, set mixed_precision='no', or look at that batch."
            )
        factor = rate_factor(step, self.num_steps, settings.warmup_ratio)
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.counts = counts if self.counts is None else self.counts + counts
        self.step_number = step
        self.next_place = epoch, index + 1
        groups = (group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups)
        rates = dict(zip(group_names(self.optimizers), groups, strict=True))
        return StepFigures(loss, norm.item(), rates, is_stopping)

    def measure(self, held_out: Sequence[Sequence[int]]) -> dict[str, Any]:
        """A point of the curve: the counts since the last one, if any, and true acceptance on the `held_out` prompts."""
        accelerator = self.accelerator
        point: dict[str, Any] = {"step": self.step_number}
        if self.counts is not None:
            counts, self.counts = join_counts(accelerator, self.counts), None
            point |= counts.summary() | {"accepted": int(counts.accepted), "blocks": int(counts.blocks)}
        if held_out:
            acceptance = self.acceptance(held_out)
            point |= {"tau": acceptance.tau, "tokens_per_step": acceptance.tokens_per_step}
        return point

    def acceptance(self, prompts: Sequence[Sequence[int]]) -> Acceptance:
        """True acceptance on `prompts`, greedy, over all processes. FloatingPointError if the last steps broke the drafter."""
        whole = self.whole_drafter().eval()
        # A sharded target runs only where all processes run it, so each decodes all prompts.
        is_everywhere = is_sharded(self.target)
        index, count = (0, 1) if is_everywhere else (self.accelerator.process_index, self.accelerator.num_processes)
        try:
            acceptance = measure_acceptance(whole, self.target, prompts[index::count], self.settings.eval_new_tokens)
        except ValueError as error:
            if not self.step_number or "drafter's logits" not in str(error):
                raise
            raise FloatingPointError(
                f"After step {self.step_number} the drafter's logits are NaN or infinite: lower {self.rates}."
            ) from error
        return join_acceptances(self.accelerator, acceptance) if count > 1 else acceptance

    def whole_drafter(self) -> DFlashDraftModel:
        """The drafter as it decodes and is saved, changes of low rank merged; of a sharded one all processes must call."""
        return whole_copy(self.drafter)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on; of a sharded drafter on the first process alone, but all must call."""
        return full_state(self.drafter, self.optimizers) | {
            "step": self.step_number,
            "place": dict(zip(("epoch", "index"), self.next_place, strict=True)),
            "counts": None if self.counts is None else counts_of_each(self.accelerator, self.counts),
        }

    def _go_on_from(self, state: dict[str, Any]) -> None:
        load_full_state(self.drafter, self.optimizers, state)
        self.step_number = state["step"]
        self.next_place = state["place"]["epoch"], state["place"]["index"]
        if state["counts"] is not None:
            index, count = self.accelerator.process_index, self.accelerator.num_processes
            shares = {name: value[index::count].sum(dim=0) for name, value in state["counts"].items()}
            self.counts = DraftCounts(**{name: value.to(self.accelerator.device) for name, value in shares.items()})

    def _parts(self, batch: Batch) -> list[Batch]:
        """The share of this process in `batch`, by the parts in which it is computed."""
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        parts = self.settings.gradient_accumulation_steps
        chosen = [index + count * part for part in range(parts)]
        if not is_sharded(self.drafter) and not is_sharded(self.target):  # sharded, all processes run equally often
            chosen = [share for share in chosen if share < len(batch.input_ids)] or chosen[:1]
        return [batch.share(share, count * parts) for share in chosen]

    @cached_property
    def batches_per_epoch(self) -> int:
        """Batches of the first epoch; later epochs may have one more or less."""
        return len(epoch_sequences(lengths_of(self.examples), 0, **self.cut()))

    def cut(self) -> dict[str, Any]:
        """The arguments of `epoch_sequences`, which decide which documents share a batch."""
        settings = self.settings
        return {"batch_tokens": settings.batch_tokens, "seed": settings.seed, "pack_length": self._pack_length}

    def _endless_batches(self) -> Iterator[tuple[tuple[int, int], Batch]]:
        """Every batch from `next_place` on, with its place."""
        epoch, first = self.next_place
        padding = self.target.config.get_text_config(decoder=True).pad_token_id or 0
        while True:
            how = self.cut() | {"num_anchors": self.settings.num_anchors, "pad_token_id": padding, "first": first}
            how["rejected_share"] = self.settings.rejected_share
            for index, batch in enumerate(epoch_batches(self.examples, epoch, **how), start=first):
                yield (epoch, index), batch
            epoch, first = epoch + 1, 0
