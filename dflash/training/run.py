"""A run from its first step to its last: what is shown, measured and saved meanwhile, and how it goes on after a stop."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import broadcast_object_list
from tqdm import tqdm
from transformers.modeling_utils import PreTrainedModel

from dflash.checkpoints import check_replaceable, read_licence
from dflash.common.files import check_writable, followed, only_writer
from dflash.common.fingerprints import model_fingerprint
from dflash.common.processes import PATIENCE
from dflash.common.provenance import public_name
from dflash.common.stopwatch import LINE_SECONDS, stopwatch
from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import max_positions

from .checkpointing import Checkpointer, TrainingRecord, describe_inputs
from .data import Example, Source, parts_of
from .data_checks import check_lengths, usable
from .device import is_cpu_alone
from .loading import answers_of, prepare
from .settings import TrainingSettings
from .size_estimate import oversize
from .trainer import StepFigures, Trainer
from .training_state import clear_leftovers, find_run, read_tensors, refuse_changes, state_folder
from .uploading import Uploads, check_upload


# Tau is called flat if the last `FLAT_POINTS` points are below `LEARNED_TAU` and differ by less than `FLAT_TAU`.
FLAT_POINTS, FLAT_TAU, LEARNED_TAU = 4, 0.02, 1.5


@dataclass(frozen=True)
class Goal:
    """What a run measures, and which point is the best: that of the highest tau on the `held_out` prompts, or the last one."""

    held_out: Sequence[Sequence[int]]

    def measure(self, trainer: Trainer) -> dict[str, Any]:
        """A point of the curve."""
        return trainer.measure(self.held_out)

    def is_better(self, point: dict[str, Any], record: TrainingRecord) -> bool:
        """Whether the weights at `point` are better than the best ones of `record`."""
        return not self.held_out or point["tau"] > record.best_tau


@dataclass(frozen=True)
class Claim:
    """A run's folder, and the facts of the unfinished run in it to go on from, or of a finished one."""

    output: Path
    saved: dict[str, Any] | None
    finished: dict[str, Any] | None


def train_drafter(
    target: str | os.PathLike[str],
    data: Source | Sequence[Source],
    output: str | os.PathLike[str],
    settings: TrainingSettings | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    provenance: dict[str, Any] | None = None,
    **arguments: Any,
) -> TrainingRecord:
    """Trains a drafter for `target` on `data`, as `dflash train` does.

    Args:
        target: Folder or Hub id of any `AutoModelForCausalLM`.
        data: The texts to train on; best the target's own answers. Several sources are mixed, by weights if each has one:
            `["chats.jsonl:0.7", "org/name:0.3"]`.
        output: Folder of the checkpoint.
        settings: The recipe. Default: short.
        resume: As in `train`.
        overwrite: As in `train`.
        provenance: As in `train`.
        arguments: Others of `train`.

    Example:
        >>> record = train_drafter("Qwen/Qwen3-4B", "answers.jsonl", "Qwen3-4B-DFlash", TrainingSettings(epochs=2))
    """
    settings, announce = settings or TrainingSettings(), arguments.get("announce")
    with claimed(output, settings, resume, overwrite) as claim:  # before anything is loaded
        if claim.finished is not None:
            return TrainingRecord.of_finished(claim.finished)
        ready = prepare(target, data, settings, announce)
        parts = parts_of(data)
        manifests = [answers_of(source, ready.target, announce) for source, _ in parts]
        names = [f"{public_name(source)}{f':{weight:g}' if weight else ''}" for source, weight in parts]
        known = {
            "target_name": public_name(target),
            "target_is_local": os.path.exists(target),
            "data_name": ", ".join(names),
            "answers": manifests[0] if len(parts) == 1 else None,
        }
        models_and_data = ready.drafter, ready.target, ready.examples, ready.held_out
        return train(*models_and_data, settings, output, known | (provenance or {}), claim=claim, **arguments)


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
    claim: Claim | None = None,
    goal: Goal | None = None,
) -> TrainingRecord:
    """Trains `drafter` in place and keeps in `output` the state of it that accepts most on the `held_out` prompts.

    Several processes (of `torchrun`, `accelerate launch`, or any that set the same environment) call it with the same
    arguments, train the same drafter and return the same record. The first one alone writes, draws and calls `on_point`, and
    it holds the lock of `output`.

    SIGTERM, or Ctrl-C once, ends the run after the step at hand with the training state saved (`record.stopped_at`). A run
    that was killed, at whatever step, and is resumed ends as it would have ended, bit for bit, on as many processes.

    Args:
        drafter: The drafter, with fp32 weights.
        target: Its target; frozen here.
        examples: Sequences that the target would write.
        held_out: Prompts to decode for true acceptance; without any the last state is kept.
        settings: The recipe.
        output: Folder of the checkpoint, replaced in one rename each time a better one is found. The training state is beside
            it, in `OUTPUT.state`, until the run is complete.
        provenance: Facts to keep beside the checkpoint, such as where the data came from.
        show_progress: Draw a progress bar.
        on_point: Called with each new point of the curve.
        resume: Go on from the training state, or begin if there is none. A run that is complete is left as it is
            (`record.was_complete`).
        overwrite: Begin anew where another run wrote.
        announce: Told in a sentence what is about to take long or much room.
        claim: On `output`, by a caller that holds its lock, as `train_drafter` does.
        goal: Another measure of what is best than tau on the `held_out` prompts.

    Raises:
        ValueError: if nothing in the data can be trained on, if `output` holds another run or another process writes it, or if
            a run to resume had other settings or data.
        FloatingPointError: if loss, gradient or logits are not finite; checkpoint and training state are the last good ones.
        OSError: if one of them cannot be written; the older one stands.
    """
    elapsed = stopwatch()
    with nullcontext(claim) if claim else claimed(output, settings, resume, overwrite) as held:
        output, saved = held.output, held.saved
        if held.finished is not None:
            return TrainingRecord.of_finished(held.finished)
        too_large = oversize(drafter, target, settings.init is not None)
        if too_large is not None and announce is not None:
            announce(too_large)
        state = None if saved is None else read_tensors(state_folder(output))
        examples = usable(examples, drafter, target, announce, settings.eval_new_tokens if held_out else None)
        check_lengths(examples, held_out, max_positions(target))
        inputs = describe_inputs(target, drafter, examples, held_out)
        if settings.init is not None:
            inputs["init"] = {"fingerprint": model_fingerprint(drafter)}
        if saved is not None:
            before, now = ({name: one["fingerprint"] for name, one in of.items()} for of in (saved["inputs"], inputs))
            refuse_changes(before, now)
        trainer = Trainer(drafter, target, examples, settings, state, announce, **tracker_options(settings, output))
        if saved is not None:  # a default that follows from the machine
            refuse_changes({"mixed_precision": saved["precision"]}, {"mixed_precision": trainer.precision})
        record = TrainingRecord(**saved["record"]) if saved is not None else TrainingRecord()
        licence = None if settings.init is None else read_licence(settings.init)
        origin = {} if licence is None else {"init_licence": "not known" if licence.unread else licence.inherited}
        checkpointer = Checkpointer(trainer, output, inputs, origin | (provenance or {}), record, elapsed)
        if saved is None:
            checkpointer.save_state(is_beginning=True)
        elif saved["processes"] != trainer.accelerator.num_processes and announce is not None:
            announce(
                f"The run began in {saved['processes']} processes and goes on in {trainer.accelerator.num_processes}: it learns "
                "the same, but sums round another way."
            )
        display, last = _Display(trainer, show_progress, on_point, announce), trainer.num_steps
        eval_every, save_every = (settings.interval(name, last) for name in ("eval_every", "save_every"))

        goal = goal or Goal(held_out)
        uploads = Uploads(output, settings.publish_to if trainer.is_first else None, announce)

        def measure() -> bool:
            """Adds a point to the curve and keeps the weights if they are the best; gives whether the run has to end here."""
            point = goal.measure(trainer)
            is_better = goal.is_better(point, record)
            record.curve.append(point)
            display.show_point(point, record.curve)
            if is_better:
                record.best_step, record.best_tau = point["step"], point.get("tau", float("nan"))
                checkpointer.save_checkpoint()
            since_best = sum(one["step"] > record.best_step for one in record.curve)
            return settings.patience is not None and since_best >= settings.patience

        if settings.init is not None and held_out and not record.curve:  # what it begins with may stay the best
            measure()
        with _named_divergence(record, output), _noted_signals() as signals:
            for step in display.steps:
                figures = trainer.step(stop=bool(signals))
                if step % settings.log_every == 0:
                    display.show_step(step, figures)
                display.show_line(step, figures)
                if (step % eval_every == 0 or step == last) and measure():
                    checkpointer.finish()
                    break
                if figures.is_stopping and step < last:
                    checkpointer.save_state()
                    record.stopped_at, record.signal = step, signals[0] if signals else None
                    break
                if step % save_every == 0 and step < last:
                    checkpointer.save_state()
                if step % eval_every == 0 and step < last:  # after the state is saved: an upload may take long
                    uploads.add(record.best_step)
            else:
                checkpointer.finish()
        if record.stopped_at is None:
            uploads.add(record.best_step, is_last=True)
        display.close()
        trainer.accelerator.wait_for_everyone()  # whoever returns finds the checkpoint
        return record


@contextmanager
def claimed(
    output: str | os.PathLike[str], settings: TrainingSettings, resume: bool, overwrite: bool
) -> Iterator[Claim]:
    """The claim on `output`, made by the first process under the lock; what it finds, or why it refuses, is told to all."""
    folder, found = followed(Path(output)), list[Any]([None])
    tracker_options(settings, folder)
    with ExitStack() as held:
        # The first process may write features for hours while the others wait.
        if accelerate.PartialState(cpu=is_cpu_alone(), timeout=PATIENCE).is_main_process:
            try:
                check_replaceable(folder)
                check_writable(folder / "config.json")
                held.enter_context(only_writer(folder))
                for path in (folder, state_folder(folder)):
                    clear_leftovers(path)
                found = [Claim(folder, *find_run(folder, settings, resume, overwrite))]
                if found[0].finished is None:
                    check_upload(settings)
            except (ValueError, OSError) as error:
                found = [error]
        broadcast_object_list(found)
        if isinstance(found[0], Exception):
            raise found[0]
        yield found[0]


@contextmanager
def _named_divergence(record: TrainingRecord, output: Path) -> Iterator[None]:
    """Says in a FloatingPointError of the body which checkpoint stands."""
    try:
        yield
    except FloatingPointError as error:
        best = f"the checkpoint of step {record.best_step} stands in {output}"
        kept = best if record.curve else "it had saved no checkpoint yet"
        raise FloatingPointError(f"{str(error).rstrip('.')}; {kept}.") from error


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Notes SIGTERM and the first SIGINT, so that the step at hand can end; a second SIGINT interrupts at once.

    Off the main thread, where Python allows no handlers, it notes nothing.
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)} if is_main else {}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Display:
    """What is seen of a run: a progress bar over `steps`, those that are left, the trackers, and the points of the curve."""

    def __init__(
        self,
        trainer: Trainer,
        show_progress: bool,
        on_point: Callable[[dict[str, Any]], None] | None,
        announce: Callable[[str], None] | None,
    ) -> None:
        self._announce, self._is_warned, self._since_line = announce, False, stopwatch()
        self._trainer, self._accelerator = trainer, trainer.accelerator
        self._on_point = on_point if trainer.is_first else None
        if trainer.settings.log_with is not None:
            self._accelerator.init_trackers("dflash", config=_flat(asdict(trainer.settings)))
        first, last, is_hidden = trainer.step_number, trainer.num_steps, not (show_progress and trainer.is_first)
        numbers = range(first + 1, last + 1)
        self.steps = tqdm(numbers, "drafter", last, initial=first, disable=is_hidden, dynamic_ncols=True)

    def show_step(self, step: int, figures: StepFigures) -> None:
        shown = {"loss": figures.loss, "gradient_norm": figures.gradient_norm, "learning_rate": figures.rates}
        self._accelerator.log(_flat(shown, "train/"), step=step)

    def show_line(self, step: int, figures: StepFigures) -> None:
        """A sentence a minute where no bar is drawn."""
        if self.steps.disable and self._announce is not None and self._since_line() >= LINE_SECONDS:
            self._since_line = stopwatch()
            self._announce(f"step {step:,} of {self._trainer.num_steps:,}: loss {figures.loss:.3f}")

    def show_point(self, point: dict[str, Any], curve: Sequence[dict[str, Any]]) -> None:
        taus = [one["tau"] for one in curve[-FLAT_POINTS:] if "tau" in one]
        is_flat = len(taus) == FLAT_POINTS and max(taus) < LEARNED_TAU and max(taus) - min(taus) < FLAT_TAU
        if is_flat and not self._is_warned and self._announce is not None:
            self._is_warned = True
            settings = self._trainer.settings
            other = "" if settings.recipe == "short" else "--recipe short, "
            self._announce(
                f"tau has stayed at {taus[-1]:.2f} for {FLAT_POINTS} measurements, as of a drafter that proposes one token everywhere "
                f"({settings.recipe_text()}): give {other}other rates, or more steps."
            )
        self.steps.clear()
        if self._on_point is not None:
            self._on_point(point)
        self._accelerator.log(_flat(point, "eval/"), step=point["step"])
        self.steps.set_postfix({name: f"{value:.3f}" for name, value in point.items() if isinstance(value, float)})

    def close(self) -> None:
        self.steps.close()
        for tracker in self._accelerator.trackers:  # `end_training` would leave the caller's process group too
            tracker.finish()


def tracker_options(settings: TrainingSettings, output: Path) -> dict[str, Any]:
    """The arguments of `Accelerator` that ask for a tracker; ValueError for one that is not installed."""
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
    """The numbers and texts that trackers take; a list as one entry per place."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{prefix}{name}_{place}": item for place, item in enumerate(value, start=1)}
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}/")
        elif value is not None and name != "step":
            flat[prefix + name] = value
    return flat
