"""Adapts a drafter to a user's texts: the trainer's steps, a goal by domain, and the drafter as it was as the first candidate."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dflash.common.provenance import public_name

from .checkpointing import TrainingRecord
from .data import Example
from .lazy_sequences import chosen, joined, lengths_of
from .loading import Prepared, answers_of, prepare
from .run import Claim, Goal, claimed, train
from .settings import ADAPTATION, TrainingSettings
from .sources import FILE_FORMATS
from .trainer import Trainer


# The share of its tau on a domain that a drafter may lose while it accepts more of the others.
FORGOTTEN = 0.02


@dataclass(frozen=True, kw_only=True)
class AdaptationGoal(Goal):
    """The highest mean tau of the `domains` but the `general` one, while that of none falls by more than `FORGOTTEN`."""

    domains: Mapping[str, Sequence[Sequence[int]]]  # held-out prompts
    general: str | None = None  # the domain that is to be kept and not to be adapted to

    def measure(self, trainer: Trainer) -> dict[str, Any]:
        """A point of the curve with the acceptance on each domain; before the first step without a loss."""
        point = trainer.measure(())
        found = {name: trainer.acceptance(prompts) for name, prompts in self.domains.items()}
        point["tau"] = fmean(one.tau for name, one in found.items() if name != self.general)
        point["domains"] = {
            name: {
                "tau": one.tau,
                "tokens_per_step": one.tokens_per_step,
                "accepted": [round(count / max(1, one.steps), 4) for count in one.accepted],
            }
            for name, one in found.items()
        }
        return point

    def is_better(self, point: dict[str, Any], record: TrainingRecord) -> bool:
        """Whether more is accepted than at the best point, and no domain was forgotten."""
        first = record.curve[0]["domains"] if record.curve else {}
        is_forgotten = any(point["domains"][name]["tau"] < (1 - FORGOTTEN) * one["tau"] for name, one in first.items())
        return not is_forgotten and super().is_better(point, record)


def adapt(
    target: str | os.PathLike[str],
    drafter: str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    settings: TrainingSettings = ADAPTATION,
    *,
    general: str | os.PathLike[str] | None = None,
    general_share: float = 0.3,
    provenance: dict[str, Any] | None = None,
    announce: Callable[[str], None] | None = None,
    claim: Claim | None = None,
    **arguments: Any,
) -> TrainingRecord:
    """Trains `drafter` further on `data`, and keeps in `output` the state of it that accepts most: at first the one it was.

    Each file is a domain, whose acceptance is measured on prompts of its own before and after; the checkpoint's card says both.
    A state that accepts more than 2 % less of any file, or of the `general` texts, is not kept. It ends when nothing
    has improved for `settings.patience` measurements.

    Args:
        target: Folder or Hub id of the target.
        drafter: Folder or Hub id of its drafter, of any dialect.
        data: Files of the target's own answers, or of a [`Trace`], for blocks where drafts were rejected (`rejected_share`).
        output: Folder of the checkpoint.
        settings: The recipe. Without `lora_rank` all weights are trained.
        general: Answers to prompts of the kind that the drafter is good at already.
        general_share: Share of the tokens that are general, at most.
        provenance: As in [`train`].
        announce: As in [`train`].
        claim: As in [`train`].
        arguments: Others of [`train`], such as `resume` and `overwrite`.

    Raises:
        ValueError: for data that cannot be trained on or measured on, a trace of another target, or as [`train`].
        FloatingPointError: as [`train`]; `output` holds the best state, which may be that of the beginning.

    Example:
        >>> record = adapt("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", ["support.trace.jsonl"], "support-DFlash")
        >>> print(record.best_step, record.best_tau)
    """
    sources = adaptation_sources(data, settings, general, general_share)
    target, general = os.fspath(target), None if general is None else next(reversed(sources))
    settings = replace(settings, init=os.fspath(drafter))
    flags = {name: arguments.pop(name, False) for name in ("resume", "overwrite")}
    with nullcontext(claim) if claim else claimed(output, settings, **flags) as held:  # before anything is loaded
        if held.finished is not None:
            return TrainingRecord.of_finished(held.finished)
        domains = _domains(sources, target, settings, announce)
        first = next(iter(domains.values()))
        known = {
            "target_name": public_name(target),
            "target_is_local": os.path.exists(target),
            "data_name": ", ".join(sources),
            "adapted": {"name": public_name(drafter), "weights": first.init_weights},
        }
        goal = AdaptationGoal(
            held_out=[prompt for domain in domains.values() for prompt in domain.held_out],
            domains={name: domain.held_out for name, domain in domains.items()},
            general=general,
        )
        examples = joined([domain.examples for name, domain in domains.items() if name != general])
        if general is not None:
            room = general_share / (1 - general_share) * sum(lengths_of(examples))
            examples = joined([examples, _some(domains[general].examples, room, settings.seed)])
        arguments |= {"announce": announce, "claim": held, "goal": goal, "provenance": known | (provenance or {})}
        return train(first.drafter, first.target, examples, goal.held_out, settings, output, **arguments)


def adaptation_sources(
    data: Sequence[str | os.PathLike[str]],
    settings: TrainingSettings,
    general: str | os.PathLike[str] | None = None,
    general_share: float = 0.3,
) -> dict[str, str]:
    """`data` and, last, `general` by the names by which they are reported: without folder and ending.

    Raises:
        ValueError: for arguments that [`adapt`] refuses, before anything is read.
    """
    if not data:
        raise ValueError("data names no file: give one or more of the target's own answers.")
    if settings.eval_data is not None:
        raise ValueError(
            f"eval_data={settings.eval_data!r}: each file is measured on prompts of its own; leave it out."
        )
    if not 0 < general_share < 1:
        raise ValueError(f"general_share={general_share}: give a share of the tokens, above 0 and below 1.")
    named: dict[str, str] = {}
    for one in [*data, *([] if general is None else [general])]:
        source, path = os.fspath(one), Path(one)
        name = (path.stem if path.suffix in (".jsonl", ".json", *FILE_FORMATS) else path.name).removesuffix(".trace")
        if name in named:
            raise ValueError(
                f"{named[name]} and {source} have one name ({name}), by which they are reported: rename one of them."
            )
        named[name] = source
    return named


def _domains(
    sources: Mapping[str, str],
    target: str,
    settings: TrainingSettings,
    announce: Callable[[str], None] | None,
) -> dict[str, Prepared]:
    """Each domain's examples and held-out prompts, with the models, which all share."""
    domains: dict[str, Prepared] = {}
    found = None
    for name, source in sources.items():
        domains[name] = found = prepare(target, source, settings, announce, found, needs_held_out=True)
        answers_of(source, found.target, announce)  # for what it announces
    return domains


def _some(examples: Sequence[Example], room: float, seed: int) -> Sequence[Example]:
    """Examples of at most `room` tokens in all, in random order."""
    places, lengths = [], lengths_of(examples)
    for place in random.Random(seed).sample(range(len(examples)), len(examples)):
        room -= lengths[place]
        if room < 0:
            break
        places.append(place)
    return chosen(examples, places)
