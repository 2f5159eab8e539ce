"""Trains a drafter further on a user's texts (`dflash adapt`), and measures acceptance before and after."""

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


# Weights are not kept if the tau of a domain has fallen by more than this share of its first value.
FORGOTTEN = 0.02


@dataclass(frozen=True, kw_only=True)
class AdaptationGoal(Goal):
    """Keeps the weights with the highest mean tau over all domains except `general`.

    Weights are never kept if the tau of any domain, `general` included, is more than the share `FORGOTTEN` below its
    first measurement.
    """

    domains: Mapping[str, Prompts]  # held-out prompts by the domain's name
    general: str = ""  # name of the domain whose tau only has to be kept; empty if there is none

    def measure(self, trainer: Trainer) -> Facts:
        """Returns a new entry of `record.curve`, with the acceptance of each domain.

        It has `step`, the training counts since the last entry, `tau` (the mean over the domains except `general`), and
        `domains` (the acceptance figures of each domain). Before the first step there are no training counts.
        """
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
        """Whether the mean tau is above `record.best_tau` and no domain's tau has fallen too far.

        It may fall by at most the share `FORGOTTEN` of its first value.
        """
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
    """Trains `drafter` further on `data`, and saves the weights with the highest tau to `output`.

    Each file of `data` is a domain. Its acceptance is measured on prompts held out of that file, before and after the
    training; the model card of the checkpoint shows both. Weights whose tau on a file, or on the `general` texts, is
    more than 2 % below that of the original drafter are not kept, so the original weights may stay the best. The run
    ends after `settings.patience` measurements in a row without a better one.

    Args:
        target: Folder or Hub id of the target.
        drafter: Folder or Hub id of its drafter, in the format of any supported tool.
        data: One file per domain, with the target's own answers. A [`Trace`] also records where drafts were rejected,
            so that blocks can begin there (`settings.rejected_share`).
        output: Folder of the checkpoint.
        settings: The recipe. All weights are trained or, with `lora_rank`, a low-rank update of them.
        general: Answers to prompts that the drafter is good at already and has to stay good at.
        general_share: Largest share of the training tokens that `general` may have.
        options: Fields of [`RunOptions`], such as `resume` and `overwrite`.

    Raises:
        ValueError: if `data` cannot be trained or measured on, if a trace belongs to another target, or if [`train`]
            raises it.
        FloatingPointError: if loss, gradient or logits are not finite; `output` keeps the best weights so far.

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
    """Returns the sources by domain name, `general` last. Nothing is read yet.

    A domain's name is its file name without the suffix, and without `.trace` before it.

    Raises:
        ValueError: for no data, a `settings.eval_data`, two files of the same name, or a share that is not between 0
            and 1.
    """
    if not data:
        raise ValueError("data is empty: give one or more files with the target's own answers.")
    if settings.eval_data is not None:
        raise ValueError(
            f"eval_data={settings.eval_data!r}: each file is measured on prompts of its own; leave eval_data out."
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
                f"{sources[name]} and {source} have the same name in reports ({name}): rename one of them."
            )
        sources[name] = source
    return sources


def _domains(
    sources: Mapping[str, str], target: Source, settings: TrainingSettings, announce: Announce
) -> dict[str, Prepared]:
    """Loads models and sources; returns the examples and held-out prompts of each domain by name."""
    ready, source_examples = load(
        target,
        list(sources.values()),
        settings,
        announce,
    )
    domains = {}
    for (name, source), examples in zip(sources.items(), source_examples, strict=True):
        domains[name] = prepare_domain(
            ready,
            source,
            examples,
            settings,
            announce,
        )
        answers_of(source, ready.target, announce)  # announces if answers are missing, or another target's
    return domains


def _examples_of(domains: Mapping[str, Prepared], general: str, general_share: float, seed: int) -> Examples:
    """Joins the examples to train on. At most the share `general_share` of all tokens comes from `general`."""
    parts = [domain.examples for name, domain in domains.items() if name != general]
    if general:
        num_tokens = sum(lengths_of(joined(parts)))
        room = num_tokens * general_share / (1 - general_share)
        subset = _subset(domains[general].examples, room, seed)
        parts.append(subset)
    return joined(parts)


def _subset(examples: Examples, room: float, seed: int) -> Examples:
    """Draws examples in random order, until the next one would exceed `room` tokens in total."""
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
