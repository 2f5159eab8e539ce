"""A run from its first step to its last: what is shown, measured and kept on the way, and how it goes on after a stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import broadcast_object_list
from tqdm import tqdm
from transformers.modeling_utils import PreTrainedModel

from dflash.common.processes import PATIENCE
from dflash.common.stopwatch import stopwatch
from dflash.model.generation_dflash import max_positions
from dflash.model.modeling_dflash import DFlashDraftModel

from .checks import check_lengths, usable
from .data import Example
from .interruption import StopSignal
from .keeping import Keeper
from .record import TrainingRecord, describe_inputs
from .settings import TrainingSettings
from .state import claim_output, read_tensors, refuse_changes, state_folder
from .trainer import StepFigures, Trainer, is_cpu_alone


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
        FloatingPointError: if loss or gradient are not finite; checkpoint and training state are the last good ones.
        OSError: if one of them cannot be written; the older one stands.
    """
    elapsed = stopwatch()
    output = Path(output).expanduser().absolute()
    saved = _claim(output, resume, overwrite)
    state = None if saved is None else read_tensors(state_folder(output))
    examples = usable(examples, drafter, target, announce)
    check_lengths(examples, held_out, max_positions(target))
    inputs = describe_inputs(target, drafter, examples, held_out)
    if saved is not None:
        refuse_changes(settings, inputs, saved)
    trainer = Trainer(drafter, target, examples, settings, state, announce, **_trackers(settings, output))
    record = TrainingRecord(**saved["record"]) if saved is not None else TrainingRecord()
    keeper = Keeper(trainer, output, inputs, provenance or {}, record, elapsed)
    if saved is None:
        keeper.keep_beginning()
    elif saved["processes"] != trainer.accelerator.num_processes and announce is not None:
        announce(
            f"The run began in {saved['processes']} processes and goes on in {trainer.accelerator.num_processes}: it learns "
            "the same, but sums round another way."
        )
    display = _Display(trainer, show_progress, on_point)

    last = trainer.num_steps
    with StopSignal() as signal:
        for step in display.steps:
            figures = trainer.step(stop=signal.number is not None)
            if step % settings.log_every == 0:
                display.show_step(step, figures)
            if step % settings.eval_every == 0 or step == last:
                point = trainer.measure(held_out)
                record.curve.append(point)
                display.show_point(point)
                if not held_out or point["tau"] > record.best_tau:
                    record.best_step, record.best_tau = step, point.get("tau", float("nan"))
                    keeper.keep_checkpoint()
            if figures.is_stopping and step < last:
                keeper.keep_state()
                record.stopped_at, record.signal = step, signal.number
                break
            if step % settings.save_every == 0 and step < last:
                keeper.keep_state()
        else:
            keeper.finish()
    display.close()
    trainer.accelerator.wait_for_everyone()  # whoever returns finds the checkpoint
    return record


def _claim(output: Path, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """`claim_output` by the first process; what it found, or why it refused, is told to all."""
    found: list[Any] = [None]
    # The first process may write features for hours while the others wait.
    if accelerate.PartialState(cpu=is_cpu_alone(), timeout=PATIENCE).is_main_process:
        try:
            found = [claim_output(output, resume, overwrite)]
        except (ValueError, OSError) as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    facts: dict[str, Any] | None = found[0]
    return facts


class _Display:
    """What is seen of a run while it goes on: a progress bar, the trackers, and who is told of its points.

    Attributes:
        steps: The numbers of the steps that are left, behind a bar on the first process.
    """

    def __init__(
        self, trainer: Trainer, show_progress: bool, on_point: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self._trainer, self._accelerator = trainer, trainer.accelerator
        self._on_point = on_point if trainer.is_first else None
        if trainer.settings.log_with is not None:
            self._accelerator.init_trackers("dflash", config=_flat(asdict(trainer.settings)))
        first, last = trainer.step_number, trainer.num_steps
        self.steps = tqdm(
            range(first + 1, last + 1),
            "drafter",
            total=last,
            initial=first,
            disable=not (show_progress and trainer.is_first),
            dynamic_ncols=True,
        )

    def show_step(self, step: int, figures: StepFigures) -> None:
        shown = {
            "loss": figures.loss,
            "gradient_norm": figures.gradient_norm,
            "learning_rate": figures.rate_factor * self._trainer.settings.learning_rate,
        }
        self._accelerator.log(_flat(shown, "train/"), step=step)

    def show_point(self, point: dict[str, Any]) -> None:
        if self._on_point is not None:
            self._on_point(point)
        self._accelerator.log(_flat(point, "eval/"), step=point["step"])
        self.steps.set_postfix({name: f"{value:.3f}" for name, value in point.items() if isinstance(value, float)})

    def close(self) -> None:
        self.steps.close()
        for tracker in self._accelerator.trackers:  # `end_training` would leave the caller's process group too
            tracker.finish()


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
