"""Measures methods on the same prompts, in turns, warmed up and repeated; and summarises them as the rows of a result.

Machines are shared and noisy, so a speed is always a ratio of two methods that took turns on every prompt.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import truediv
from statistics import median

import torch

from .methods import Method
from .profiling import Profile
from .results import Row, grouped
from .timing import Progress, TimedRun, draft_lengths, silent, tau


Methods = Mapping[str, Method]
Runs = Mapping[str, TimedRun]


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids [1, S], and the task or the file that it belongs to."""

    task: str
    input_ids: torch.Tensor


@dataclass(frozen=True)
class Measurement:
    """One method on one prompt: counts of its first text, seconds of every repeat, graphs compiled in all."""

    task: str
    prompt_index: int
    method: str
    num_tokens: int
    num_forwards: int | None
    acceptance_lengths: list[int]
    is_identical: bool  # whether every repeat gives the first method's first text
    seconds: list[float]
    seconds_to_first_token: list[float]
    num_compilations: int = 0
    lookup_steps: list[int] = field(default_factory=list)  # indices of the verify steps with looked-up proposals

    @property
    def draft_lengths(self) -> list[int]:
        """Acceptance lengths of the steps whose proposals are all the drafter's, of which tau is the mean."""
        return draft_lengths(self.acceptance_lengths, self.lookup_steps)


def compare(
    methods: Methods,
    prompts: Sequence[Prompt],
    repeats: int = 3,
    progress: Progress = silent,
) -> list[Measurement]:
    """Every method on every prompt, `repeats` times, in turns; texts are compared with those of the first method.

    Each method decodes the first, the shortest and the longest prompt once before, unmeasured. `progress` shows bars over
    these runs, in which models are compiled, and over the prompts.
    """
    lengths = [prompt.input_ids.shape[1] for prompt in prompts]
    shortest = lengths.index(min(lengths))
    longest = lengths.index(max(lengths))
    chosen = dict.fromkeys([0, shortest, longest])
    warmings = [(run, index) for run in methods.values() for index in chosen]
    for run, index in progress(warmings, "Warming up"):
        run(prompts[index].input_ids)
    measurements = []
    for index, prompt in enumerate(progress(prompts, "Decoding")):
        rounds = []
        for repeat in range(repeats):
            runs = take_turns(methods, prompt.input_ids, index + repeat)
            rounds.append(runs)
        measurements += measured(prompt.task, index, rounds)
    return measurements


def take_turns(methods: Methods, input_ids: torch.Tensor, first: int) -> Runs:
    """Every method once on one prompt, in an order that rotates with `first`."""
    order = deque(methods)
    order.rotate(-first)
    runs = {}
    for name in order:
        runs[name] = methods[name](input_ids)
    return {name: runs[name] for name in methods}


def measured(task: str, prompt_index: int, rounds: Sequence[Runs]) -> list[Measurement]:
    """A measurement for each method from several rounds of [`take_turns`] on one prompt."""
    plain = next(iter(rounds[0].values()))
    measurements = []
    for name, first in rounds[0].items():
        runs = [by_name[name] for by_name in rounds]
        measurements.append(
            Measurement(
                task,
                prompt_index,
                name,
                num_tokens=len(first.token_ids),
                num_forwards=first.num_forwards,
                acceptance_lengths=first.acceptance_lengths,
                is_identical=all(run.token_ids == plain.token_ids for run in runs),
                seconds=[run.seconds for run in runs],
                seconds_to_first_token=[run.seconds_to_first_token for run in runs],
                num_compilations=sum(run.num_compilations for run in runs),
                lookup_steps=list(first.lookup_steps),
            )
        )
    return measurements


def summarise(measurements: Sequence[Measurement], profiles: Sequence[Profile] = ()) -> list[Row]:
    """One row per task and method: speed, speed-up over the first method, tau, tokens per step, identical texts.

    A prompt counts with the median of its repeats; speeds are total tokens over total seconds. The speed-up is
    the first method's seconds over its own, and has two spreads: over prompts (10th and 90th percentile of the per-prompt ratios), and over repeats of the whole task. Both
    means of tau are given: over verify steps (micro) and over prompts (macro). Neither counts steps with looked-up tokens.
    The time of a step or token counts everything after the first token, the drafter's share included. Fields from
    `profiles` begin with `profiled_`.
    """
    rows = []
    for task, of_task in grouped(measurements, lambda m: m.task).items():
        methods = grouped(of_task, lambda m: m.method)
        plain = next(iter(methods.values()))
        for name, chosen in methods.items():
            own_profiles = [p for p in profiles if p.task == task and p.method == name]
            row = {
                "task": task,
                "method": name,
                "prompts": len(chosen),
                "identical": sum(m.is_identical for m in chosen),
                **_speed(chosen, plain),
                **_acceptance(chosen),
                "compilations": sum(m.num_compilations for m in chosen),
                **_profiled(own_profiles),
            }
            rows.append(row)
    return rows


def _speed(chosen: Sequence[Measurement], plain: Sequence[Measurement]) -> Row:
    """Fields of a row: the speed of a method, and how it compares with plain decoding of the same prompts."""
    medians = [median(m.seconds) for m in chosen]
    plain_medians = [median(m.seconds) for m in plain]
    ratios = sorted(map(truediv, plain_medians, medians))
    tenth = len(ratios) // 10
    seconds = sum(medians)
    to_first = sum(median(m.seconds_to_first_token) for m in chosen)
    ms_after_first = 1e3 * (seconds - to_first)
    prompts = len(chosen)
    tokens = sum(m.num_tokens for m in chosen)
    forwards = [m.num_forwards for m in chosen if m.num_forwards is not None]
    steps = sum(forwards) - prompts if len(forwards) == prompts else 0
    return {
        "tokens": tokens,
        "tokens_per_second": ratio(tokens, seconds),
        "speedup": ratio(sum(plain_medians), seconds),
        "speedup_p10": rounded(ratios[tenth]),
        "speedup_p90": rounded(ratios[-1 - tenth]),
        "speedup_by_repeat": list(map(ratio, _totals(plain), _totals(chosen))),
        "tokens_per_step": ratio(tokens - prompts, steps),
        "ms_per_step": ratio(ms_after_first, steps),
        "ms_per_output_token": ratio(ms_after_first, tokens - prompts),
        "ms_to_first_token": ratio(1e3 * to_first, prompts),
    }


def _totals(measurements: Sequence[Measurement]) -> list[float]:
    """The seconds of all prompts in each repeat."""
    return [sum(of_repeat) for of_repeat in zip(*(m.seconds for m in measurements), strict=True)]


def _acceptance(chosen: Sequence[Measurement]) -> Row:
    """Fields of a row: both means of tau, and how many verify steps gave 1, 2, 3, … tokens."""
    drafted = [m.draft_lengths for m in chosen if m.draft_lengths]
    taus = [tau(lengths) for lengths in drafted]
    counts: Counter[int] = Counter()
    for measurement in chosen:
        counts.update(measurement.acceptance_lengths)
    longest = max(counts, default=0)
    return {
        "tau_micro": rounded(tau(list(chain(*drafted)))),
        "tau_macro": ratio(sum(taus), len(taus)),
        "acceptance_histogram": [counts[length + 1] for length in range(longest)] or None,
    }


def _profiled(profiles: Sequence[Profile]) -> Row:
    """Fields of a row: means over all steps of the profiled prompts; of memory the largest."""
    if not profiles:
        return {}
    steps = sum(p.num_steps for p in profiles)
    row: Row = {"profiled_prompts": len(profiles)}
    for name in ("ms_draft", "ms_verify", "ms_rest", "host_syncs"):
        total = sum(getattr(p, name) * p.num_steps for p in profiles)
        unit = "_per_step" if name == "host_syncs" else ""
        row[f"profiled_{name}{unit}"] = ratio(total, steps)
    row["profiled_memory_bytes"] = max(p.memory_bytes for p in profiles)
    return row


def ratio(part: float, whole: float) -> float | None:
    """A part of a whole, to four decimals; `None` of nothing."""
    return rounded(part / whole) if whole else None


def rounded(value: float | None) -> float | None:
    """Four decimals; `None` for what is no finite number."""
    return None if value is None or not math.isfinite(value) else round(value, 4)
