"""Adapts a drafter to a user's texts: acceptance is measured on each domain, and the drafter at the beginning may stay the best."""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from dflash.common.messages import Announce
from dflash.common.provenance import public_name

from .checkpointing import TrainingRecord
from .examples import Examples, Prompts, joined, lengths_of, selected
from .loading import Prepared, answers_of, load, prepare_domain
from .run import Goal, RunOptions, train_prepared
from .settings import ADAPTATION, Facts, TrainingSettings
from .sources import FILE_FORMATS, Source
from .trainer import Trainer


# The share of its tau on a domain that a drafter may lose while it accepts more of the others.
FORGOTTEN = 0.02


@dataclass(frozen=True, kw_only=True)
class AdaptationGoal(Goal):
    """The highest mean tau of the `domains` without the `general` one. The tau of no domain may fall by more than `FORGOTTEN`."""

    domains: Mapping[str, Prompts]  # held-out prompts
    general: str = ""  # the domain that is to be kept and not to be adapted to, if there is one

    def measure(self, trainer: Trainer) -> Facts:
        """A point of the curve with the acceptance on each domain. Before the first step it has no loss."""
        point = trainer.measure(())
        domains = {}
        for name, prompts in self.domains.items():
            domains[name] = trainer.acceptance(prompts).figures()
        taus = {name: figures["tau"] for name, figures in domains.items()}
        taus.pop(self.general, None)
        point["tau"] = fmean(taus.values())
        point["domains"] = domains
        return point

    def is_better(self, point: Facts, record: TrainingRecord) -> bool:
        """Whether tau is higher than at the best point, and no domain was forgotten."""
        first = record.curve[0]["domains"] if record.curve else {}
        for name, figures in first.items():
            tau = point["domains"][name]["tau"]
            if tau < (1 - FORGOTTEN) * figures["tau"]:
                return False
        return super().is_better(point, record)


def adapt(
    target: Source,
    drafter: Source,
    data: Sequence[Source],
    output: Source,
    settings: TrainingSettings = ADAPTATION,
    *,
    general: Source | None = None,
    general_share: float = 0.3,
    **options: Any,
) -> TrainingRecord:
    """Trains `drafter` further on `data`, and keeps in `output` the state that accepts most, which may be its first.

    Each file is a domain, whose acceptance is measured on prompts of its own before and after; the checkpoint's card says both.
    A state that accepts more than 2 % less of any file, or of the `general` texts, is not kept. The run ends when nothing
    has improved for `settings.patience` measurements.

    Args:
        target: Folder or Hub id of the target.
        drafter: Folder or Hub id of its drafter, of any dialect.
        data: Files of the target's own answers, or of a [`Trace`], for blocks where drafts were rejected (`rejected_share`).
        output: Folder of the checkpoint.
        settings: The recipe. Without `lora_rank` all weights are trained.
        general: Answers to prompts of the kind that the drafter is good at already.
        general_share: Share of the tokens that are general, at most.
        options: Fields of [`RunOptions`], such as `resume` and `overwrite`.

    Raises:
        ValueError: for data that cannot be trained on or measured on, a trace of another target, or as [`train`].
        FloatingPointError: as [`train`]; `output` holds the best state, which may be that of the beginning.

    Example:
        >>> record = adapt("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", ["support.trace.jsonl"], "support-DFlash")
        >>> print(record.best_step, record.best_tau)
    """
    sources = adaptation_sources(data, settings, general, general_share)
    general_name = "" if general is None else next(reversed(sources))
    settings = replace(settings, init=os.fspath(drafter))
    run_options = RunOptions(**options)
    with run_options.claimed(output, settings) as claim:  # before anything is loaded
        if claim.finished is not None:
            return TrainingRecord.of_finished(claim.finished)
        domains = _domains(sources, target, settings, run_options.announce)
        ready = next(iter(domains.values()))
        run_options = run_options.with_facts(
            target_name=public_name(target),
            target_is_local=os.path.exists(target),
            data_name=", ".join(sources),
            adapted={"name": public_name(drafter), "weights": ready.init_weights},
        )
        prompts = {name: domain.held_out for name, domain in domains.items()}
        held_out = list(chain.from_iterable(prompts.values()))
        goal = AdaptationGoal(held_out=held_out, domains=prompts, general=general_name)
        examples = _examples_of(domains, general_name, general_share, settings.seed)
        ready = replace(ready, examples=examples, held_out=held_out)
        run_options = replace(run_options, goal=goal)
        return train_prepared(ready, settings, claim, run_options)


def adaptation_sources(
    data: Sequence[Source],
    settings: TrainingSettings,
    general: Source | None = None,
    general_share: float = 0.3,
) -> dict[str, str]:
    """The files of `data` and, last, of `general`. The key of each is its name in reports, without folder and ending.

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
    sources: dict[str, str] = {}
    files = data if general is None else [*data, general]
    for path in map(Path, files):
        source = str(path)
        is_file_name = path.suffix in (".jsonl", ".json", *FILE_FORMATS)
        name = (path.stem if is_file_name else path.name).removesuffix(".trace")
        if name in sources:
            raise ValueError(
                f"{sources[name]} and {source} have one name ({name}), by which they are reported: rename one of them."
            )
        sources[name] = source
    return sources


def _domains(
    sources: Mapping[str, str], target: Source, settings: TrainingSettings, announce: Announce
) -> dict[str, Prepared]:
    """The examples and held-out prompts of each domain. All domains share the models."""
    ready, tables = load(
        target,
        list(sources.values()),
        settings,
        announce,
    )
    domains = {}
    for (name, source), table in zip(sources.items(), tables, strict=True):
        domains[name] = prepare_domain(
            ready,
            source,
            table,
            settings,
            announce,
        )
        answers_of(source, ready.target, announce)  # for what it announces
    return domains


def _examples_of(domains: Mapping[str, Prepared], general: str, general_share: float, seed: int) -> Examples:
    """The examples to train on: those of all domains, and of the general one at most its share of the tokens."""
    parts = [domain.examples for name, domain in domains.items() if name != general]
    if general:
        num_tokens = sum(lengths_of(joined(parts)))
        room = num_tokens * general_share / (1 - general_share)
        some = _some(domains[general].examples, room, seed)
        parts.append(some)
    return joined(parts)


def _some(examples: Examples, room: float, seed: int) -> Examples:
    """Examples of at most `room` tokens in all, in random order."""
    lengths = lengths_of(examples)
    places = range(len(lengths))
    order = random.Random(seed).sample(places, len(places))
    chosen = []
    for place in order:
        room -= lengths[place]
        if room < 0:
            break
        chosen.append(place)
    return selected(examples, chosen)
