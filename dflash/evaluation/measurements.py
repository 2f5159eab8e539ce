"""Measurements of methods on the same prompts, in turns, warmed up and repeated; and the rows of their result.

Machines are shared and noisy, so a speed is always a ratio of two methods that took turns on every prompt.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from .methods import Method
from .profiling import Profile
from .timing import TimedRun, draft_lengths, tau, tokens_per_step


# A method and the index of a prompt that it decodes before it is measured.
Warming = tuple[Method, int]


@dataclass(frozen=True)
class Prompt:
    """A prompt of a task, as token ids [1, S] in the chat template."""

    task: str
    input_ids: torch.Tensor


@dataclass(frozen=True)
class Measurement:
    """One method on one prompt: counts of its first text, seconds of every repeat, graphs compiled in all."""

    task: str
    prompt_index: int
    method: str
    num_tokens: int
    num_forwards: int
    acceptance_lengths: list[int]
    is_identical: bool
    seconds: list[float]
    seconds_to_first_token: list[float]
    num_compilations: int = 0
    lookup_steps: list[int] = field(default_factory=list)  # indices of the verify steps with looked-up proposals

    @property
    def draft_lengths(self) -> list[int]:
        """Acceptance lengths of the steps whose proposals are all the drafter's, of which tau is the mean."""
        return draft_lengths(self.acceptance_lengths, self.lookup_steps)


def compare(
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    repeats: int = 3,
    progress: Callable[[Iterable[Prompt]], Iterable[Prompt]] = iter,
    warm_up: Callable[[Iterable[Warming]], Iterable[Warming]] = iter,
) -> list[Measurement]:
    """Every method on every prompt, `repeats` times, in turns; texts are compared with those of the first method.

    Each method decodes the first, the shortest and the longest prompt once before, unmeasured. `progress` and `warm_up`
    show bars over the prompts and over these runs, in which models are compiled.
    """
    by_length = sorted(range(len(prompts)), key=lambda index: prompts[index].input_ids.shape[1])
    chosen = dict.fromkeys([0, by_length[0], by_length[-1]])
    for run, index in warm_up([(run, index) for run in methods.values() for index in chosen]):
        run(prompts[index].input_ids)
    measurements = []
    for index, prompt in enumerate(progress(prompts)):
        rounds = [take_turns(methods, prompt.input_ids, index + repeat) for repeat in range(repeats)]
        measurements += measured(prompt.task, index, rounds)
    return measurements


def take_turns(methods: Mapping[str, Method], input_ids: torch.Tensor, first: int) -> dict[str, TimedRun]:
    """Every method once on one prompt, in an order that rotates with `first`."""
    names = list(methods)
    shift = first % len(names)
    runs = {name: methods[name](input_ids) for name in names[shift:] + names[:shift]}
    return {name: runs[name] for name in names}


def measured(task: str, prompt_index: int, rounds: Sequence[Mapping[str, TimedRun]]) -> list[Measurement]:
    """A measurement for each method from several rounds of [`take_turns`] on one prompt."""
    reference = next(iter(rounds[0].values())).token_ids
    return [
        Measurement(
            task=task,
            prompt_index=prompt_index,
            method=name,
            num_tokens=len(first.token_ids),
            num_forwards=first.num_forwards,
            acceptance_lengths=first.acceptance_lengths,
            is_identical=all(runs[name].token_ids == reference for runs in rounds),
            seconds=[runs[name].seconds for runs in rounds],
            seconds_to_first_token=[runs[name].seconds_to_first_token for runs in rounds],
            num_compilations=sum(runs[name].num_compilations for runs in rounds),
            lookup_steps=list(first.lookup_steps),
        )
        for name, first in rounds[0].items()
    ]


def summarise(measurements: Sequence[Measurement], profiles: Sequence[Profile] = ()) -> list[dict[str, Any]]:
    """One row per task and method: speed, speed-up over the first method, tau, tokens per step, identical texts.

    A prompt counts with the median of its repeats; speeds are total tokens over total seconds. The speed-up has two
    spreads: over prompts (10th and 90th percentile of the per-prompt ratios), and over repeats of the whole task. Both
    means of tau are given: over verify steps (micro) and over prompts (macro). Neither counts steps with looked-up tokens. The time of a step or token counts
    everything after the first token, the drafter's share included. Fields from `profiles` begin with `profiled_`.
    """
    rows = []
    tasks = list(dict.fromkeys(m.task for m in measurements))
    names = list(dict.fromkeys(m.method for m in measurements))
    for task in tasks:
        plain = {m.prompt_index: m for m in measurements if m.task == task and m.method == names[0]}
        for name in names:
            chosen = [m for m in measurements if m.task == task and m.method == name]
            seconds = [median(m.seconds) for m in chosen]
            ratios = sorted(median(plain[m.prompt_index].seconds) / median(m.seconds) for m in chosen)
            to_first = sum(median(m.seconds_to_first_token) for m in chosen)
            tokens, forwards = sum(m.num_tokens for m in chosen), sum(m.num_forwards for m in chosen)
            lengths = [length for m in chosen for length in m.acceptance_lengths]
            drafted = [m.draft_lengths for m in chosen if m.draft_lengths]
            taus = [tau(of_prompt) for of_prompt in drafted]
            # The task's seconds in each repeat, of plain decoding and of this method.
            totals = [
                [sum(each) for each in zip(*(m.seconds for m in of), strict=True)] for of in (plain.values(), chosen)
            ]
            rows.append(
                {
                    "task": task,
                    "method": name,
                    "prompts": len(chosen),
                    "identical": sum(m.is_identical for m in chosen),
                    "tokens": tokens,
                    "tokens_per_second": _ratio(tokens, sum(seconds)),
                    "speedup": _ratio(sum(median(m.seconds) for m in plain.values()), sum(seconds)),
                    "speedup_p10": rounded(ratios[len(ratios) // 10]),
                    "speedup_p90": rounded(ratios[-1 - len(ratios) // 10]),
                    "speedup_by_repeat": [_ratio(mine, other) for mine, other in zip(*totals, strict=True)],
                    "tokens_per_step": rounded(tokens_per_step(tokens, forwards, len(chosen))),
                    "ms_per_step": _ratio(1e3 * (sum(seconds) - to_first), forwards - len(chosen)),
                    "ms_per_output_token": _ratio(1e3 * (sum(seconds) - to_first), tokens - len(chosen)),
                    "ms_to_first_token": _ratio(1e3 * to_first, len(chosen)),
                    "tau_micro": rounded(tau([length for of_prompt in drafted for length in of_prompt])),
                    "tau_macro": _ratio(sum(taus), len(taus)),
                    # The number of verify steps that gave 1, 2, 3, … tokens.
                    "acceptance_histogram": [lengths.count(n) for n in range(1, max(lengths) + 1)]
                    if lengths
                    else None,
                    "compilations": sum(m.num_compilations for m in chosen),
                    **_profiled([p for p in profiles if p.task == task and p.method == name]),
                }
            )
    return rows


def _profiled(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Fields of a row: means over all steps of the profiled prompts."""
    if not profiles:
        return {}
    steps = sum(p.num_steps for p in profiles)

    def per_step(values: Iterable[float]) -> float | None:
        return _ratio(sum(value * p.num_steps for value, p in zip(values, profiles, strict=True)), steps)

    return {
        "profiled_prompts": len(profiles),
        "profiled_ms_draft": per_step(p.ms_draft for p in profiles),
        "profiled_ms_verify": per_step(p.ms_verify for p in profiles),
        "profiled_ms_rest": per_step(p.ms_rest for p in profiles),
        "profiled_host_syncs_per_step": per_step(p.host_syncs for p in profiles),
        "profiled_memory_bytes": max(p.memory_bytes for p in profiles),
    }


def _ratio(part: float, whole: float) -> float | None:
    return rounded(part / whole) if whole else None


def rounded(value: float | None) -> float | None:
    """Four decimals; `None` for what is no finite number."""
    return None if value is None or not math.isfinite(value) else round(value, 4)
