"""The training loop: the paper's recipe on one process or several, with the frozen target giving its features online.

What is trained is the drafter alone; the target, its embedding and its head stay as they are. The loop keeps the drafter
that decodes best on held-out prompts, and knows no text.

Every process takes its share of each batch, in as many parts as gradients are accumulated over. Losses, gradients and counts
travel as sums, so that the batch, and neither the number of processes nor of parts, decides what is learned.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import accelerate
import torch
from tqdm import tqdm
from transformers.modeling_utils import PreTrainedModel

from dflash.hub import save_checkpoint
from dflash.modeling_dflash import DFlashDraftModel
from dflash.target_dflash import TappedTarget
from dflash.validation_dflash import decoder_layers

from .acceptance import Acceptance, measure_acceptance
from .batches import Batch, epoch_batches
from .checks import usable_examples
from .data import Example
from .features import MANIFEST, CachedFeatures, facts_of, feature_bytes, write_features
from .interruption import StopSignal
from .losses import DraftCounts
from .objective import DrafterLoss
from .optimizers import build_optimizers, rate_factor
from .record import TrainingRecord, describe_inputs, describe_run, facts_file, model_card
from .settings import TrainingSettings
from .sharding import full_state, is_sharded, load_full_state, shard_drafter, shard_layers, whole_copy
from .state import claim_output, read_tensors, remove_state, save_state, saving, state_folder
from .targets import can_pack


@dataclass(frozen=True)
class Place:
    """Where in the data a batch stands."""

    epoch: int
    index: int


@dataclass(frozen=True)
class StepFigures:
    """What one optimiser step saw: the batch's mean loss, the norm of its gradient, the rate's factor, and whether to stop."""

    loss: float
    gradient_norm: float
    rate_factor: float
    is_stopping: bool


class Trainer:
    """A drafter, its target and the data, and how far the one has come with the other. It writes no file.

    Args:
        drafter: The drafter, with fp32 weights; trained in place.
        target: Its target; frozen here.
        examples: Sequences that the target would write, of those that `usable` gives.
        settings: The recipe.
        state: What `state` gave in an earlier life of the same run.
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
        self.examples = list(examples)
        self.settings = settings
        # Without `cpu`, accelerate takes several processes without a GPU for as many runs of one.
        self.accelerator = accelerate.Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available(), **trackers)
        # Not accelerate's, which is one for all runs of a process.
        self._autocast = torch.autocast(
            self.accelerator.device.type, torch.bfloat16, enabled=settings.mixed_precision == "bf16"
        )
        self.target = target
        self._place_models(drafter, state)
        self.drafter = drafter
        self.optimizers = build_optimizers(
            drafter, settings.learning_rate, settings.weight_decay, settings.muon_learning_rate
        )
        self._peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        network: Any = torch.compile(drafter) if settings.compile else drafter
        if settings.gradient_checkpointing:
            # Its name changes in transformers 5, its default in 4 keeps gradients from arguments by name.
            enable = getattr(drafter, "activation_checkpointing_enable", drafter.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        self._loss_of = DrafterLoss(
            drafter,
            TappedTarget(target, drafter),
            settings.gamma,
            settings.chunk_rows,
            network,
            loss=settings.loss,
            weights=settings.position_weights,
            dpace_alpha=settings.dpace_alpha,
            selector_weight=settings.selector_weight,
        )
        self._features = self._cached_features(announce)
        self._pack_length = settings.pack_length if can_pack(target) else None
        if settings.pack_length is not None and self._pack_length is None and announce is not None:
            announce(f"{type(target).__name__} cannot keep sequences of one row apart: each runs in a row of its own.")
        self.num_steps = settings.steps or settings.epochs * self.batches_per_epoch
        self.step_number = 0
        self.next_place = Place(0, 0)
        self.counts: DraftCounts | None = None
        if state is not None:
            self._go_on_from(state)
        self._batches = self._endless_batches()

    def _place_models(self, drafter: DFlashDraftModel, state: dict[str, Any] | None) -> None:
        settings, device = self.settings, self.accelerator.device
        movable: Any = self.target.requires_grad_(False).eval()
        if not hasattr(self.target, "hf_device_map"):
            movable.to(device)
        if state is not None:
            drafter.load_state_dict(state["drafter"])
        # The drafter is moved but not wrapped: a wrapped forward would stay in bf16 when the drafter decodes.
        drafter.to(device)
        if settings.shard or self.accelerator.is_fsdp2:
            shard_drafter(drafter)
        if settings.shard_target:
            shard_layers(self.target, list(decoder_layers(self.target)))

    def feature_bytes(self) -> int:
        """What the target's features of the data would take on disk."""
        return feature_bytes(self._loss_of.target, self.examples, self._loss_of.reads_target)

    def _cached_features(self, announce: Callable[[str], None] | None) -> CachedFeatures | None:
        """The features in the folder that the settings name, written first if it holds none; `None` is online."""
        settings = self.settings
        if settings.features is None:
            return None
        folder, frozen = Path(settings.features).expanduser(), self._loss_of.target
        wants_states = self._loss_of.reads_target
        if not (folder / MANIFEST).is_file() and self.is_first:
            write_features(
                folder,
                frozen,
                self.examples,
                wants_states=wants_states,
                batch_tokens=settings.batch_tokens,
                autocast=self._autocast,
                announce=announce,
                show_progress=announce is not None,
            )
        self.accelerator.wait_for_everyone()
        return CachedFeatures(folder, facts_of(frozen, self.examples, wants_states))

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes, draws and reports."""
        return self.accelerator.is_main_process

    def step(self, stop: bool = False) -> StepFigures:
        """One optimiser step on the next batch; `stop` is this process's wish, which all get to know.

        Raises:
            FloatingPointError: if the loss is not a number; the weights are those of the step before.
        """
        self.drafter.train()
        accelerator, settings = self.accelerator, self.settings
        place, batch = next(self._batches)
        counts: DraftCounts | None = None
        for part in self._parts(batch):
            part = part.to(accelerator.device)
            states = None if self._features is None else self._features(part, self._loss_of.reads_target)
            with self._autocast:
                loss_sum, part_counts = self._loss_of(part, states)
            # Pieces of a drafter meet as means over the processes while the backward pass runs.
            accelerator.backward(loss_sum * accelerator.num_processes if is_sharded(self.drafter) else loss_sum)
            counts = _added(counts, part_counts)
        assert counts is not None
        loss, is_stopping = join_gradients(accelerator, self.drafter, counts, stop)
        step = self.step_number + 1
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss of step {step} is {loss.item()}, on batch {place.index} of epoch {place.epoch} "
                f"({len(batch.input_ids)} sequences, the first of which begins with the ids {batch.input_ids[0, :8].tolist()}): "
                f"lower learning_rate={settings.learning_rate}, set mixed_precision='no', or look at that batch."
            )
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), settings.max_grad_norm)
        factor = rate_factor(step, self.num_steps, settings.warmup_ratio)
        for optimizer, peak in zip(self.optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.counts = _added(self.counts, counts)
        self.step_number = step
        self.next_place = Place(place.epoch, place.index + 1)
        return StepFigures(loss.item(), float(getattr(norm, "full_tensor", lambda: norm)()), factor, is_stopping)

    def measure(self, held_out: Sequence[Sequence[int]]) -> dict[str, Any]:
        """A point of the curve: what was counted since the last one, and true acceptance on the `held_out` prompts."""
        accelerator = self.accelerator
        assert self.counts is not None
        counts, self.counts = join_counts(accelerator, self.counts), None
        runs = {"accepted": int(counts.accepted), "blocks": int(counts.blocks)}
        point: dict[str, Any] = {"step": self.step_number, **counts.summary(), **runs}
        if held_out:
            whole = whole_copy(self.drafter)
            whole.eval()
            # A target in pieces runs where all processes run it: each decodes all prompts then.
            index, count = (
                (0, 1) if is_sharded(self.target) else (accelerator.process_index, accelerator.num_processes)
            )
            acceptance = measure_acceptance(whole, self.target, held_out[index::count], self.settings.eval_new_tokens)
            if count > 1:
                acceptance = join_acceptances(accelerator, acceptance)
            point |= {"tau": acceptance.tau, "tokens_per_step": acceptance.tokens_per_step}
        return point

    def state(self) -> dict[str, Any]:
        """All that the next step depends on; of a drafter in pieces on the first process alone, but all must call."""
        return full_state(self.drafter, self.optimizers) | {
            "step": self.step_number,
            "place": asdict(self.next_place),
            "counts": None if self.counts is None else _each(self.accelerator, self.counts),
        }

    def _go_on_from(self, state: dict[str, Any]) -> None:
        load_full_state(self.drafter, self.optimizers, state)
        self.step_number = state["step"]
        self.next_place = Place(**state["place"])
        if state["counts"] is not None:
            index, count = self.accelerator.process_index, self.accelerator.num_processes
            shares = {name: value[index::count].sum(dim=0) for name, value in state["counts"].items()}
            self.counts = DraftCounts(**{name: value.to(self.accelerator.device) for name, value in shares.items()})

    def _parts(self, batch: Batch) -> list[Batch]:
        """What of `batch` this process computes, in the parts that it does so in."""
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        parts = self.settings.gradient_accumulation_steps
        chosen = [index + count * part for part in range(parts)]
        if not is_sharded(self.drafter) and not is_sharded(self.target):  # which all processes run equally often
            chosen = [share for share in chosen if share < len(batch.input_ids)] or chosen[:1]
        return [batch.share(share, count * parts) for share in chosen]

    @cached_property
    def batches_per_epoch(self) -> int:
        """Batches that hold all data once; in later epochs one more or less, where sequences meet other neighbours."""
        return sum(1 for _ in self._epoch(0))

    def _epoch(self, epoch: int) -> Iterator[Batch]:
        return epoch_batches(
            self.examples,
            epoch,
            num_anchors=self.settings.num_anchors,
            batch_tokens=self.settings.batch_tokens,
            pad_token_id=self.target.config.get_text_config(decoder=True).pad_token_id or 0,
            seed=self.settings.seed,
            pack_length=self._pack_length,
            fixed_stride=self.drafter.config.block_size if self.settings.anchors == "fixed" else None,
        )

    def _endless_batches(self) -> Iterator[tuple[Place, Batch]]:
        """Every batch from `next_place` on."""
        epoch, first = self.next_place.epoch, self.next_place.index
        while True:
            for index, batch in enumerate(self._epoch(epoch)):
                if index >= first:
                    yield Place(epoch, index), batch
            epoch, first = epoch + 1, 0


def train(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    examples: Sequence[Example],
    held_out: Sequence[Sequence[int]],
    settings: TrainingSettings,
    output: str | os.PathLike[str],
    provenance: dict[str, Any] | None = None,
    show_progress: bool = True,
    on_point: Callable[[dict[str, Any]], None] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    announce: Callable[[str], None] | None = None,
) -> TrainingRecord:
    """Trains `drafter` in place and keeps in `output` the state of it that accepts most on the `held_out` prompts.

    Several processes (of `torchrun`, `accelerate launch`, or any that set the same environment) call it with the same
    arguments, train the same drafter and return the same record; the first one alone writes, draws and calls `on_point`.

    SIGTERM, or Ctrl-C once, ends it behind the step at hand with the training state saved (`record.stopped_at`). A run that
    was killed, at whatever step, and is resumed ends with what it would have ended with, bit for bit, on as many processes.

    Args:
        drafter: The drafter, with fp32 weights.
        target: Its target; frozen here.
        examples: Sequences that the target would write.
        held_out: Prompts to decode for true acceptance; none keeps the last state.
        settings: The recipe.
        output: Folder of the checkpoint, replaced in one rename each time a better one is found; the training state stands
            beside it, in `OUTPUT.state`, until the run is complete.
        provenance: Facts to keep beside the checkpoint, such as where the data came from.
        show_progress: Draw a progress bar.
        on_point: Called with each new point of the curve.
        resume: Go on from the training state, or begin if there is none.
        overwrite: Begin anew where another run wrote.
        announce: Told in a sentence what is about to take long or much room.

    Raises:
        ValueError: if nothing in the data can be trained on, if `output` holds another run, or if a run to resume had other
            settings or data.
        FloatingPointError: if the loss is not a number; checkpoint and training state are the last good ones.
        OSError: if one of them cannot be written; the older one stands.
    """
    output = Path(output).expanduser().absolute()
    processes = accelerate.PartialState(cpu=not torch.cuda.is_available())
    with processes.main_process_first():
        saved = claim_output(output, resume, overwrite)
    state = None if saved is None else read_tensors(state_folder(output))
    examples = usable(examples, drafter, target, announce)
    inputs = describe_inputs(target, examples, held_out)
    if saved is not None:
        refuse_changes(settings, inputs, saved)
    trainer = Trainer(drafter, target, examples, settings, state, announce, **_trackers(settings, output))
    record = TrainingRecord(**saved["record"]) if saved is not None else TrainingRecord()
    keeper = _Keeper(trainer, output, inputs, provenance or {}, record)
    if settings.log_with is not None:
        trainer.accelerator.init_trackers("dflash", config=_flat(asdict(settings)))

    first, last = trainer.step_number, trainer.num_steps
    bar = tqdm(
        range(first + 1, last + 1),
        "drafter",
        total=last,
        initial=first,
        disable=not (show_progress and trainer.is_first),
        dynamic_ncols=True,
    )
    with StopSignal() as signal:
        for step in bar:
            figures = trainer.step(stop=signal.number is not None)
            if step % settings.log_every == 0:
                shown = {
                    "loss": figures.loss,
                    "gradient_norm": figures.gradient_norm,
                    "learning_rate": figures.rate_factor * settings.learning_rate,
                }
                trainer.accelerator.log(_flat(shown, "train/"), step=step)
            if step % settings.eval_every == 0 or step == last:
                point = trainer.measure(held_out)
                record.curve.append(point)
                if on_point is not None and trainer.is_first:
                    on_point(point)
                trainer.accelerator.log(_flat(point, "eval/"), step=step)
                bar.set_postfix({name: f"{value:.3f}" for name, value in point.items() if isinstance(value, float)})
                if not held_out or point["tau"] > record.best_tau:
                    record.best_step, record.best_tau = step, point.get("tau", float("nan"))
                    keeper.keep_checkpoint()
            if figures.is_stopping and step < last:
                keeper.keep_state()
                record.stopped_at, record.signal = step, signal.number
                break
            if step % settings.save_every == 0 and step < last:
                keeper.keep_state()
    if record.stopped_at is None:
        keeper.finish()
    for tracker in trainer.accelerator.trackers:  # `end_training` would leave the caller's process group too
        tracker.finish()
    trainer.accelerator.wait_for_everyone()  # whoever returns finds the checkpoint
    return record


class _Keeper:
    """Writes what a run leaves behind, on the first process."""

    def __init__(
        self,
        trainer: Trainer,
        output: Path,
        inputs: dict[str, Any],
        provenance: dict[str, Any],
        record: TrainingRecord,
    ) -> None:
        self.trainer = trainer
        self.output = output
        self.inputs = inputs
        self.provenance = provenance
        self.record = record

    def _facts(self) -> dict[str, Any]:
        trainer = self.trainer
        described = describe_run(
            trainer.drafter, self.inputs, trainer.settings, self.record, trainer.accelerator.num_processes
        )
        return described | self.provenance

    def keep_checkpoint(self) -> None:
        """The drafter as it is, in the place of a worse one."""
        whole = whole_copy(self.trainer.drafter)
        if self.trainer.is_first:
            with saving("checkpoint", self.output):
                save_drafter(whole, self.output, self._facts())

    def keep_state(self) -> None:
        """What the run needs to go on."""
        tensors = self.trainer.state()
        if self.trainer.is_first:
            record = {name: value for name, value in vars(self.record).items() if name not in ("stopped_at", "signal")}
            facts = {
                "step": self.trainer.step_number,
                "settings": asdict(self.trainer.settings),
                "processes": self.trainer.accelerator.num_processes,
                "inputs": self.inputs,
                "record": record,
            }
            save_state(state_folder(self.output), facts, tensors)

    def finish(self) -> None:
        """The whole curve beside the best checkpoint, and no training state any more."""
        if self.trainer.is_first:
            config = self.trainer.drafter.config
            aside = self.output.with_name(f".{self.output.name}.partial-{os.getpid()}")
            with saving("checkpoint", self.output):
                for name, text in _texts(config, self.output.name, self._facts()).items():
                    aside.write_text(text, encoding="utf-8")
                    os.replace(aside, self.output / name)
            remove_state(state_folder(self.output))


def save_drafter(
    drafter: DFlashDraftModel, folder: Path, facts: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes the checkpoint in `dtype` with `facts` as `training.json`; a full disk or a kill leaves the older one."""
    rounded: Any = copy.deepcopy(drafter)
    save_checkpoint(rounded.to(dtype), folder, files=_texts(drafter.config, folder.name, facts))


def _texts(config: Any, name: str, facts: dict[str, Any]) -> dict[str, str]:
    """The files beside the weights: the facts and, if they are those of a run, the card that they fill."""
    card = {"README.md": model_card(config, name, facts)} if "curve" in facts else {}
    return {"training.json": facts_file(facts), **card}


def usable(
    examples: Sequence[Example],
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    announce: Callable[[str], None] | None = None,
) -> list[Example]:
    """The examples that hold a place for a block; ValueError for data that the pair cannot be trained on."""
    config = target.config.get_text_config(decoder=True)
    kept, left_out = usable_examples(
        examples,
        block_size=drafter.config.block_size,
        vocab_size=config.vocab_size,
        mask_token_id=drafter.config.mask_token_id or 0,
    )
    if left_out and announce is not None:
        announce(
            f"{left_out:,} of {len(examples):,} sequences are left out: shorter than a block, or without two supervised tokens "
            "in a row."
        )
    return kept


def refuse_changes(settings: TrainingSettings, inputs: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError, naming what differs, unless a run with these settings and inputs goes on from a saved state."""
    changed = settings.changed_from(saved["settings"])
    for name, now in inputs.items():
        before = saved["inputs"].get(name, {}).get("fingerprint")
        if before != now["fingerprint"]:
            changed.append(f"{name}: {before}, now {now['fingerprint']}")
    if changed:
        raise ValueError(
            f"The run to resume had other settings ({'; '.join(changed)}): give the same, or pass overwrite (--overwrite) to "
            "begin anew."
        )


def join_gradients(
    accelerator: accelerate.Accelerator, drafter: DFlashDraftModel, counts: DraftCounts, stop: bool
) -> tuple[torch.Tensor, bool]:
    """Turns the gradients of each process's loss sum into those of the mean loss over all; gives it, and who wants to stop.

    They meet in one message: a sum of many small tensors would mostly wait. Gradients of a drafter in pieces have met before.
    """
    figures = torch.stack([counts.loss_sum, counts.weight_sum, counts.loss_sum.new_tensor(float(stop))])
    parameters = [parameter for parameter in drafter.parameters() if parameter.grad is not None]
    if is_sharded(drafter):
        figures = accelerator.reduce(figures, reduction="sum")
        scale = 1 / figures[1].clamp(min=1e-9).item()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= scale
    else:
        gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        total = accelerator.reduce(torch.cat([*gradients, figures]), reduction="sum")
        figures = total[-len(figures) :]
        means = total[: -len(figures)] / figures[1].clamp(min=1e-9)
        parts = means.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    return figures[0] / figures[1].clamp(min=1e-9), bool(figures[2] > 0)


def join_counts(accelerator: accelerate.Accelerator, counts: DraftCounts) -> DraftCounts:
    """The counts of all processes."""
    names = counts.__dataclass_fields__
    return DraftCounts(**{name: accelerator.reduce(getattr(counts, name), reduction="sum") for name in names})


def _each(accelerator: accelerate.Accelerator, counts: DraftCounts) -> dict[str, torch.Tensor]:
    """The counts of each process, one behind the other: joined and added to later, they would round another way."""
    return {name: accelerator.gather(getattr(counts, name)[None]).cpu() for name in counts.__dataclass_fields__}


def join_acceptances(accelerator: accelerate.Accelerator, acceptance: Acceptance) -> Acceptance:
    """The acceptance over the prompts of all processes."""
    sums = torch.tensor([acceptance.steps, acceptance.committed, acceptance.kept], device=accelerator.device)
    return Acceptance(*accelerator.reduce(sums, reduction="sum").tolist())


def _added(counts: DraftCounts | None, more: DraftCounts) -> DraftCounts:
    if counts is None:
        return copy.copy(more)
    counts += more
    return counts


def _trackers(settings: TrainingSettings, output: Path) -> dict[str, Any]:
    """What `Accelerator` takes to report to a tracker; ValueError for one that is not installed."""
    if settings.log_with is None:
        return {}
    known = [str(tracker) for tracker in accelerate.tracking.get_available_trackers()]
    if settings.log_with not in known:
        raise ValueError(
            f"log_with={settings.log_with!r} is not one of the trackers installed here ({', '.join(known) or 'none'}): "
            f"pip install {settings.log_with}, or leave it out."
        )
    return {"log_with": settings.log_with, "project_dir": str(output.with_name(f"{output.name}.logs"))}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What trackers take: numbers and texts, a list as one entry per place."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{prefix}{name}_{place}": item for place, item in enumerate(value, start=1)}
        elif value is not None and name != "step":
            flat[prefix + name] = value
    return flat
