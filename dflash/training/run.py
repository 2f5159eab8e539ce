"""Runs a training from its first step to its last: it shows progress, measures, saves, and resumes after a stop."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import broadcast_object_list
from tqdm import tqdm
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from dflash.checkpoints import check_replaceable, read_licence
from dflash.common.files import check_writable, followed, only_writer
from dflash.common.fingerprints import model_fingerprint
from dflash.common.json_lines import refuse_changes
from dflash.common.messages import Announce, say_nothing
from dflash.common.processes import PATIENCE
from dflash.common.provenance import public_name
from dflash.common.stopwatch import LINE_SECONDS, stopwatch
from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import max_positions

from .checkpointing import Checkpointer, TrainingRecord, describe_inputs
from .data import parts_of
from .data_checks import check_lengths, usable
from .device import is_cpu_alone
from .examples import Examples, Prompts
from .loading import Prepared, answers_of, prepare
from .losses import SUMMARY
from .settings import Facts, TrainingSettings
from .size_estimate import oversize
from .sources import Source
from .trainer import StepFigures, Trainer
from .training_state import Claim, clear_leftovers, find_run, read_tensors, state_folder
from .uploading import Uploads, check_upload


logger = logging.get_logger(__name__)

# Tau is flat if the last `FLAT_POINTS` points are below `LEARNED_TAU` and differ by less than `FLAT_TAU`.
FLAT_POINTS, FLAT_TAU, LEARNED_TAU = 4, 0.02, 1.5


@dataclass(frozen=True)
class Goal:
    """Decides what a run measures and which weights are best: those with the highest tau on `held_out`, or the last."""

    held_out: Prompts  # if empty, the last weights are best

    def measure(self, trainer: Trainer) -> Facts:
        """Returns a point of the curve: training counts since the last point and, with prompts, acceptance on them."""
        return trainer.measure(self.held_out)

    def is_better(self, point: Facts, record: TrainingRecord) -> bool:
        """Whether `point` has a higher tau than the best point of `record`; always true without held-out prompts."""
        return not self.held_out or point["tau"] > record.best_tau


@dataclass(frozen=True)
class RunOptions:
    """How a run is started and watched. They are keywords of [`train`], [`train_drafter`] and [`adapt`].

    Attributes:
        resume: Go on from the training state, or begin if there is none. A run that is already complete is not changed
            (`record.was_complete`).
        overwrite: Begin anew, even if `output` holds another run.
        provenance: Further entries of `training.json`, such as where the data came from.
        show_progress: Draw a progress bar.
        on_point: Called on the first process with each new point of the curve.
        announce: Called with a sentence about anything that will take long or much space, or is probably not intended.
        claim: The claim on `output`, if the caller has locked it already with [`claimed`].
        goal: Decides what is measured and which weights are best. Default: tau on the held-out prompts.
    """

    resume: bool = False
    overwrite: bool = False
    provenance: Facts = field(default_factory=dict)
    show_progress: bool = True
    on_point: Callable[[Facts], None] | None = None
    announce: Announce = say_nothing
    claim: Claim | None = None
    goal: Goal | None = None

    def claimed(self, output: Source, settings: TrainingSettings) -> AbstractContextManager[Claim]:
        """Returns a context manager that yields the caller's claim on `output`, or a new one by [`claimed`]."""
        if self.claim is not None:
            return nullcontext(self.claim)
        return claimed(output, settings, self.resume, self.overwrite)

    def with_facts(self, **facts: Any) -> "RunOptions":
        """Returns a copy with `facts` added to `provenance`. Entries that are there already are kept."""
        return replace(self, provenance=facts | self.provenance)


def train_drafter(
    target: Source,
    data: Source | Sequence[Source],
    output: Source,
    settings: TrainingSettings | None = None,
    **options: Any,
) -> TrainingRecord:
    """Trains a drafter for `target` on `data`, as `dflash train` does.

    Args:
        target: Folder or Hub id of any `AutoModelForCausalLM`.
        data: The texts to train on, at best the target's own answers. Several sources are mixed, by weights if each has
            one: `["chats.jsonl:0.7", "org/name:0.3"]`.
        output: Folder of the checkpoint.
        settings: The recipe. Default: the recipe `short`.
        options: Fields of [`RunOptions`], such as `resume` and `overwrite`.

    It returns, raises and stops as [`train`] does. It also raises a ValueError for models or data that do not fit each
    other.

    Example:
        >>> record = train_drafter("Qwen/Qwen3-4B", "answers.jsonl", "Qwen3-4B-DFlash", TrainingSettings(epochs=2))
    """
    settings = settings or TrainingSettings()
    run_options = RunOptions(**options)
    with run_options.claimed(output, settings) as claim:  # before anything is loaded
        if claim.finished is not None:
            return TrainingRecord.of_finished(claim.finished)
        ready = prepare(target, data, settings, run_options.announce)
        parts = parts_of(data)
        manifests = [answers_of(source, ready.target, run_options.announce) for source, _ in parts]
        names = [_name_of(*part) for part in parts]
        run_options = run_options.with_facts(
            target_name=public_name(target),
            target_is_local=os.path.exists(target),
            data_name=", ".join(names),
            answers=manifests[0] if len(manifests) == 1 else None,
        )
        return train_prepared(ready, settings, claim, run_options)


def _name_of(source: str, weight: float | None) -> str:
    name = str(public_name(source))
    return f"{name}:{weight:g}" if weight else name


def train(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    examples: Examples,
    held_out: Prompts,
    settings: TrainingSettings,
    output: Source,
    **options: Any,
) -> TrainingRecord:
    """Trains `drafter` in place, and saves its weights with the highest tau on the `held_out` prompts to `output`.

    Several processes (of `torchrun`, `accelerate launch`, or any launcher that sets the same environment) call this
    function with the same arguments, train the same drafter and return the same record. Only the first one writes,
    shows progress and calls `on_point`; it locks `output`.

    SIGTERM, or Ctrl-C once, ends the run after the current step and saves the training state (`record.stopped_at`). A
    run that was killed at any step and is resumed on the same number of processes learns the same weights, bit for bit,
    as without the kill.

    Args:
        drafter: The drafter, with fp32 weights.
        target: Its target. It is frozen in place.
        examples: Sequences to train on. Unusable sequences are left out.
        held_out: Prompts to measure acceptance on. Without any, the last weights are kept.
        settings: The recipe.
        output: Folder of the checkpoint. Each better checkpoint replaces it in one rename. Until the run is complete,
            the training state is beside it in `OUTPUT.state`.
        options: Fields of [`RunOptions`], such as `resume` and `overwrite`.

    Raises:
        ValueError: if nothing in the data can be trained on, if `output` holds another run or another process writes
            it, or if a run to resume had other settings or data.
        FloatingPointError: if loss, gradient or logits are not finite; the last good checkpoint and training state are
            kept.
        OSError: if checkpoint or training state cannot be written; the older one is kept.
    """
    run_options = RunOptions(**options)
    with run_options.claimed(output, settings) as claim:
        if claim.finished is not None:
            return TrainingRecord.of_finished(claim.finished)
        examples = usable(examples, drafter, target, run_options.announce)
        ready = Prepared(target, None, drafter, examples, held_out)
        return train_prepared(ready, settings, claim, run_options)


def train_prepared(ready: Prepared, settings: TrainingSettings, claim: Claim, options: RunOptions) -> TrainingRecord:
    """Trains as [`train`] does, on examples that are checked already, in the folder that `claim` has locked."""
    run = _Run(ready, settings, claim, options)
    with _named_divergence(run.record, claim.output), _noted_signals() as signals:
        try:
            run.measure_start()
            run.take_steps(signals)
        finally:
            run.display.close()
    run.trainer.accelerator.wait_for_everyone()  # no process returns before the checkpoint is written
    return run.record


class _Run:
    """One start of a run: takes the steps, and owns the objects that measure, save, show and upload."""

    def __init__(self, ready: Prepared, settings: TrainingSettings, claim: Claim, options: RunOptions) -> None:
        elapsed = stopwatch()
        announce, saved = options.announce, claim.saved
        output = claim.output
        self._settings = settings
        self._goal = options.goal or Goal(ready.held_out)
        state = None if saved is None else read_tensors(state_folder(output))
        check_lengths(ready.examples, ready.held_out, max_positions(ready.target))
        inputs = describe_inputs(
            ready.target,
            ready.drafter,
            ready.examples,
            ready.held_out,
        )
        if settings.init is not None:
            inputs["init"] = {"fingerprint": model_fingerprint(ready.drafter)}
        if saved is not None:
            refuse_changes(_fingerprints(saved["inputs"]), _fingerprints(inputs))
        _announce_sizes(ready, settings, inputs["data"]["longest_answer"], announce)
        self.trainer = Trainer(
            ready.drafter,
            ready.target,
            ready.examples,
            settings,
            state,
            announce,
            **tracker_options(settings, output),
        )
        if saved is not None:  # the default depends on the machine
            refuse_changes({"mixed_precision": saved["precision"]}, {"mixed_precision": self.trainer.precision})
        self.record = TrainingRecord(**saved["record"]) if saved is not None else TrainingRecord()
        facts = _licence_of_init(settings) | options.provenance
        self._checkpointer = Checkpointer(
            self.trainer,
            output,
            inputs,
            facts,
            self.record,
            elapsed,
        )
        num_processes = self.trainer.accelerator.num_processes
        if saved is None:
            self._checkpointer.save_state(is_beginning=True)
        elif saved["processes"] != num_processes:
            announce(
                f"The run began in {saved['processes']} processes and goes on in {num_processes}: it learns the same, "
                "but sums are rounded differently."
            )
        self.display = _Display(self.trainer, options)
        # Without `announce`, uploads are logged.
        tell_upload = logger.warning if announce is say_nothing else announce
        repo_id = settings.publish_to if self.trainer.is_first else None
        self._uploads = Uploads(output, repo_id, tell_upload)

    def measure_start(self) -> None:
        """Measures an initial drafter (`init`) before its first step, because it may stay the best."""
        has_point = bool(self.record.curve)
        if self._settings.init is not None and self._goal.held_out and not has_point:
            self._measure()

    def take_steps(self, signals: Sequence[int]) -> None:
        """Takes the remaining steps, until the last one, a signal, or `patience` measurements without a better one."""
        settings = self._settings
        record, trainer = self.record, self.trainer
        last = trainer.num_steps
        eval_every = settings.interval("eval_every", last)
        save_every = settings.interval("save_every", last)
        for step in self.display.steps:
            figures = trainer.step(stop=bool(signals))
            self.display.show_step(step, figures)
            is_measured = step % eval_every == 0 or step == last
            if is_measured:
                self._measure()
            if is_measured and self._is_patience_exhausted():
                break
            if step == last:
                break
            if figures.is_stopping:
                self._checkpointer.save_state()
                record.stopped_at = step
                record.signal = signals[0] if signals else None
                return
            if step % save_every == 0:
                self._checkpointer.save_state()
            if is_measured:  # after the state is saved: an upload may take long
                self._uploads.add(record.best_step)
        self._checkpointer.finish()
        self._uploads.add(record.best_step, is_last=True)

    def _measure(self) -> None:
        """Adds a point to the curve, and saves the weights if they are the best so far."""
        record = self.record
        point = self._goal.measure(self.trainer)
        is_better = self._goal.is_better(point, record)
        record.curve.append(point)
        self.display.show_point(point, record.curve)
        if is_better:
            record.best_step = point["step"]
            record.best_tau = point.get("tau", math.nan)
            self._checkpointer.save_checkpoint()

    def _is_patience_exhausted(self) -> bool:
        """Whether the last `patience` measurements found no better weights."""
        steps = [point["step"] for point in self.record.curve]
        since_best = sum(step > self.record.best_step for step in steps)
        patience = self._settings.patience
        return patience is not None and since_best >= patience


def _fingerprints(inputs: Facts) -> dict[str, str]:
    return {name: facts["fingerprint"] for name, facts in inputs.items()}


def _licence_of_init(settings: TrainingSettings) -> Facts:
    """Returns the licence of the initial drafter as an entry of `training.json`; an empty dict without `init`."""
    if settings.init is None:
        return {}
    licence = read_licence(settings.init)
    return {"init_licence": "not known" if licence.unread else licence.inherited}


def _announce_sizes(
    ready: Prepared, settings: TrainingSettings, most_supervised_tokens: int, announce: Announce
) -> None:
    """Announces a drafter larger than the target's layers, and measured texts longer than what the data supervises."""
    too_large = oversize(ready.drafter, ready.target, settings.init is not None)
    if too_large is not None:
        announce(too_large)
    if ready.held_out and most_supervised_tokens < settings.eval_new_tokens:
        announce(
            f"Acceptance is measured on texts of up to {settings.eval_new_tokens} tokens, and no sequence of the data "
            f"has more than {most_supervised_tokens} supervised tokens. Fewer drafts are accepted beyond the length "
            f"that the drafter was trained on: eval_new_tokens={most_supervised_tokens} measures up to this length."
        )


@contextmanager
def claimed(output: Source, settings: TrainingSettings, resume: bool, overwrite: bool) -> Iterator[Claim]:
    """Checks and locks `output` while the body of the `with` runs, and yields the claim on it.

    The first process does so for all; they get the same claim or raise the same error.

    Raises:
        ValueError: if `output` holds another run, the run to resume had other settings, another process writes it, the
            tracker is not installed, or `publish_to` cannot be uploaded to.
        OSError: if `output` cannot be written.
    """
    folder = followed(Path(output))
    tracker_options(settings, folder)
    answers: list[Any] = [None]
    with ExitStack() as stack:
        # The first process may write features for hours while the others wait.
        if accelerate.PartialState(cpu=is_cpu_alone(), timeout=PATIENCE).is_main_process:
            try:
                check_replaceable(folder)
                check_writable(folder / "config.json")
                stack.enter_context(only_writer(folder))
                clear_leftovers(folder)
                clear_leftovers(state_folder(folder))
                claim = find_run(folder, settings, resume, overwrite)
                if claim.finished is None:
                    check_upload(settings)
                answers = [claim]
            except Exception as error:  # of any type, because the other processes wait for an answer
                answers = [error]
        broadcast_object_list(answers)
        (answer,) = answers
        if isinstance(answer, Exception):
            raise answer
        yield answer


@contextmanager
def _named_divergence(record: TrainingRecord, output: Path) -> Iterator[None]:
    """Extends the message of a FloatingPointError that the body of the `with` raises.

    It appends the step of the checkpoint in `output`, or that none was saved yet.
    """
    try:
        yield
    except FloatingPointError as error:
        best = f"the checkpoint of step {record.best_step} is kept in {output}"
        kept = best if record.curve else "no checkpoint was saved yet"
        raise FloatingPointError(f"{str(error).rstrip('.')}; {kept}.") from error


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yields a list to which SIGTERM and the first SIGINT are added, so that the current step can end.

    A second SIGINT interrupts at once. In other threads than the main one, where Python allows no signal handlers, the
    list stays empty.
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            handlers[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            # `None` stands for a handler that Python did not set and cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Display:
    """Shows a run: a progress bar over the remaining `steps`, entries in the trackers, and points of the curve."""

    def __init__(self, trainer: Trainer, options: RunOptions) -> None:
        self._trainer = trainer
        self._announce = options.announce
        self._on_point = options.on_point if trainer.is_first else None
        self._is_warned = False
        self._since_line = stopwatch()
        if trainer.settings.log_with is not None:
            trainer.accelerator.init_trackers("dflash", config=_flat(asdict(trainer.settings)))
        first, last = trainer.step_number, trainer.num_steps
        self.steps = tqdm(
            range(first + 1, last + 1),
            desc="drafter",
            total=last,
            initial=first,
            disable=not (options.show_progress and trainer.is_first),
            dynamic_ncols=True,
        )

    def show_step(self, step: int, figures: StepFigures) -> None:
        """Logs the figures of a step to the trackers. Without a bar, announces the loss once a minute."""
        if step % self._trainer.settings.log_every == 0:
            shown = {
                "loss": figures.loss,
                "gradient_norm": figures.gradient_norm,
                "learning_rate": figures.rates,
            }
            self._trainer.accelerator.log(_flat(shown, "train/"), step=step)
        if self.steps.disable and self._since_line() >= LINE_SECONDS:
            self._since_line = stopwatch()
            num_steps = self._trainer.num_steps
            self._announce(f"step {step:,} of {num_steps:,}: loss {figures.loss:.3f}")

    def show_point(self, point: Facts, curve: Sequence[Facts]) -> None:
        """Shows `point`, the newest one of `curve`, and logs it to the trackers. Announces once if tau stays low."""
        if not self._is_warned:
            self._warn_if_flat(curve[-FLAT_POINTS:])
        self.steps.clear()
        if self._on_point is not None:
            self._on_point(point)
        means = {name: value for name, value in point.items() if name in SUMMARY}  # of the steps since the last point
        measured = {name: value for name, value in point.items() if name not in SUMMARY}
        figures = _flat(measured, "eval/") | _flat(means, "train/mean/")
        self._trainer.accelerator.log(figures, step=point["step"])
        floats = {name: value for name, value in point.items() if isinstance(value, float)}
        self.steps.set_postfix(floats)  # the bar rounds them

    def _warn_if_flat(self, points: Sequence[Facts]) -> None:
        taus = [point["tau"] for point in points if "tau" in point]
        if not _is_flat(taus):
            return
        self._is_warned = True
        settings = self._trainer.settings
        recipe = "" if settings.recipe == "short" else "--recipe short, "
        self._announce(
            f"tau has stayed at {taus[-1]:.2f} for {FLAT_POINTS} measurements, as for a drafter that proposes the "
            f"same token everywhere ({settings.recipe_text()}): give {recipe}other learning rates, or more steps."
        )

    def close(self) -> None:
        """Closes the bar and the trackers. accelerate's `end_training` would also end the caller's process group."""
        self.steps.close()
        for tracker in self._trainer.accelerator.trackers:
            tracker.finish()


def _is_flat(taus: list[float]) -> bool:
    """Whether there are `FLAT_POINTS` taus, all below `LEARNED_TAU`, that differ by less than `FLAT_TAU`."""
    if len(taus) < FLAT_POINTS:
        return False
    highest = max(taus)
    return highest < LEARNED_TAU and highest - min(taus) < FLAT_TAU


def tracker_options(settings: TrainingSettings, output: Path) -> Facts:
    """Returns the arguments of `Accelerator` for the tracker in `settings`; ValueError if it is not installed.

    Trackers that write files write to `OUTPUT.logs`.
    """
    if settings.log_with is None:
        return {}
    known = [str(tracker) for tracker in accelerate.tracking.get_available_trackers()]
    if settings.log_with not in known:
        raise ValueError(
            f"log_with={settings.log_with!r} is not one of the trackers installed here ({', '.join(known) or 'none'}): "
            f"pip install {settings.log_with}, or leave log_with out."
        )
    folder = output.with_name(f"{output.name}.logs")
    return {"log_with": settings.log_with, "project_dir": str(folder)}


def _flat(values: Facts, prefix: str = "") -> Facts:
    """Flattens nested figures into entries of a tracker: `name/inner`, and `name_1`, `name_2` for a list."""
    flat: Facts = {}
    for name, value in values.items():
        if isinstance(value, list):
            for place, item in enumerate(value, start=1):
                flat[f"{prefix}{name}_{place}"] = item
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}/")
        elif value is not None and name != "step":
            flat[prefix + name] = value
    return flat
