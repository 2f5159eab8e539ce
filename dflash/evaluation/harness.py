"""How ways to decode compare: on the same prompts, in one run, interleaved, warmed up, repeated, with the texts compared.

Machines are shared and noisy, so a speed here is always a ratio of two methods that took turns on every prompt. It knows
nothing about data sets, files or tables.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from dflash.model.configuration_dflash import DFlashConfig
from dflash.model.modeling_dflash import DFlashDraftModel

from .profiling import Profile
from .timing import TimedRun, tau, timed_blocks, timed_generate, tokens_per_step


PLAIN = "target.generate"
OURS = "dflash"
PROMPT_LOOKUP = "prompt lookup"
NATIVE = "native dflash"

# A prompt's ids [1, S] in, its continuation under a clock out; `on_step`, if given, is called behind each step;
# other keywords are caches of the turns before.
Method = Callable[..., TimedRun]

# What is asked of the loop by each variant of ours; `OURS` itself is what a caller gets who asks for nothing.
EAGER = {"compile": False, "adaptive": False, "draft_tree": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash eager": EAGER,
    "dflash compiled": {**EAGER, "compile": True},
    "dflash adaptive": {**EAGER, "adaptive": True},
    "dflash tree": {**EAGER, "adaptive": True, "draft_tree": True},
    "dflash drafting nothing": {"max_draft_tokens": 0},
}
RANDOM_DRAFTER = "random drafter adaptive"

# All names, in the order of a result's rows. Native DFlash exists from transformers 5.15 on.
HAS_NATIVE = hasattr(transformers.GenerationConfig(), "speculation_type")
METHODS = (PLAIN, PROMPT_LOOKUP, *([NATIVE] if HAS_NATIVE else []), OURS, *VARIANTS, RANDOM_DRAFTER)

# Said in full, because a target's sampling defaults would only be warned about.
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}

# As many drafted tokens as a DFlash block of 16 holds behind its anchor would be too many for prompt lookup: 10 is what
# transformers' documentation uses.
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Prompt:
    """A prompt of a task, as token ids [1, S] behind the chat template."""

    task: str
    input_ids: torch.Tensor


@dataclass(frozen=True)
class Measurement:
    """One method on one prompt: its text's statistics, the seconds of every repeat, and what was compiled in all of them."""

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


def check_methods(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is none of [`METHODS`], with those that are: before models are loaded."""
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"There is no method {', '.join(map(repr, unknown))}: choose from {', '.join(METHODS)}.")


def decoding_methods(
    target: PreTrainedModel, drafter: PreTrainedModel, max_new_tokens: int, names: Sequence[str] | None = None
) -> dict[str, Method]:
    """Greedy decoding by name: plain `target.generate` (always first), and the others of `names`, `None` for all.

    Beside what the library does by default there are its variants, its loop without any proposal (what of a speed-up is
    not speculation), and a drafter of the same shape that never learned anything.

    Raises:
        ValueError: for a name that does not exist, with those that do.
    """
    check_methods(names or ())
    wanted = [name for name in METHODS if name == PLAIN or names is None or name in names]

    def plain(**options: Any) -> Method:
        request = {"max_new_tokens": max_new_tokens, **GREEDY, **options}
        return lambda ids, on_step=None, **kept: timed_generate(target, ids, on_step, **request, **kept)

    def ours(drafter: PreTrainedModel, **options: Any) -> Method:
        request = {"max_new_tokens": max_new_tokens, "temperature": 0.0, **options}
        return lambda ids, on_step=None, **kept: timed_blocks(drafter, target, ids, on_step, **request, **kept)

    methods: dict[str, Method] = {
        PLAIN: plain(),
        PROMPT_LOOKUP: plain(prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
        NATIVE: plain(assistant_model=drafter, speculation_type="dflash"),
        OURS: ours(drafter),
        **{name: ours(drafter, **options) for name, options in VARIANTS.items()},
    }
    if RANDOM_DRAFTER in wanted:
        methods[RANDOM_DRAFTER] = ours(untrained(drafter), **VARIANTS["dflash adaptive"])
    return {name: methods[name] for name in wanted}


def untrained(drafter: PreTrainedModel) -> PreTrainedModel:
    """A drafter of the same shape, in the same dtype and place, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = DFlashDraftModel(copy.deepcopy(cast(DFlashConfig, drafter.config)))
    return model.to(drafter.device, drafter.dtype).eval()


def compare(
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    repeats: int = 3,
    progress: Callable[[Iterable[Prompt]], Iterable[Prompt]] = iter,
) -> list[Measurement]:
    """Every method on every prompt, `repeats` times, taking turns; the first method is the one texts are compared with.

    Each method decodes the first, the shortest and the longest prompt once before, unmeasured.
    """
    by_length = sorted(range(len(prompts)), key=lambda index: prompts[index].input_ids.shape[1])
    for run in methods.values():
        for index in dict.fromkeys([0, by_length[0], by_length[-1]]):
            run(prompts[index].input_ids)
    measurements = []
    for index, prompt in enumerate(progress(prompts)):
        rounds = [take_turns(methods, prompt.input_ids, index + repeat) for repeat in range(repeats)]
        measurements += measured(prompt.task, index, rounds)
    return measurements


def take_turns(methods: Mapping[str, Method], input_ids: torch.Tensor, first: int) -> dict[str, TimedRun]:
    """Every method once on one prompt, from number `first` (modulo their count) on.

    Who counts `first` up lets the order rotate, so that none always runs behind the same neighbour.
    """
    names = list(methods)
    shift = first % len(names)
    runs = {name: methods[name](input_ids) for name in names[shift:] + names[:shift]}
    return {name: runs[name] for name in names}


def measured(task: str, prompt_index: int, rounds: Sequence[Mapping[str, TimedRun]]) -> list[Measurement]:
    """What several rounds of [`take_turns`] on one prompt say, a measurement for each method."""
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
        )
        for name, first in rounds[0].items()
    ]


def summarise(measurements: Sequence[Measurement], profiles: Sequence[Profile] = ()) -> list[dict[str, Any]]:
    """One row per task and method: speed, speed-up over the first method, tau, tokens per step, identical texts.

    A prompt counts with the median of its repeats; speeds are total tokens over total seconds. The speed-up has two
    spreads: over prompts (10th and 90th percentile of the per-prompt ratios), and the whole task's of each repeat. Both
    means of tau are given: over verify steps (micro) and over prompts (macro). A step and a token count everything behind
    the first token, the drafter's share too. What `profiles` say stands beside, in fields that begin with `profiled_`.
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
            taus = [tau(m.acceptance_lengths) for m in chosen if m.acceptance_lengths]
            rows.append(
                {
                    "task": task,
                    "method": name,
                    "prompts": len(chosen),
                    "identical": sum(m.is_identical for m in chosen),
                    "tokens": tokens,
                    "tokens_per_second": _ratio(tokens, sum(seconds)),
                    "speedup": _ratio(sum(median(m.seconds) for m in plain.values()), sum(seconds)),
                    "speedup_p10": _rounded(ratios[len(ratios) // 10]),
                    "speedup_p90": _rounded(ratios[-1 - len(ratios) // 10]),
                    "speedup_by_repeat": _speedup_by_repeat(list(plain.values()), chosen),
                    "tokens_per_step": _rounded(tokens_per_step(tokens, forwards, len(chosen))),
                    "ms_per_step": _ratio(1e3 * (sum(seconds) - to_first), forwards - len(chosen)),
                    "ms_per_output_token": _ratio(1e3 * (sum(seconds) - to_first), tokens - len(chosen)),
                    "ms_to_first_token": _ratio(1e3 * to_first, len(chosen)),
                    "tau_micro": _rounded(tau(lengths)),
                    "tau_macro": _ratio(sum(taus), len(taus)),
                    "acceptance_histogram": _histogram(lengths) if lengths else None,
                    "compilations": sum(m.num_compilations for m in chosen),
                    **_profiled([p for p in profiles if p.task == task and p.method == name]),
                }
            )
    return rows


def _profiled(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Fields of a row: means over all steps of the prompts that were profiled."""
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


def _histogram(lengths: Sequence[int]) -> list[int]:
    """How many verify steps gave 1, 2, 3, … tokens."""
    return [lengths.count(length) for length in range(1, max(lengths) + 1)]


def _speedup_by_repeat(plain: Sequence[Measurement], chosen: Sequence[Measurement]) -> list[float | None]:
    """The task's speed-up in each repeat by itself."""
    totals = [[sum(seconds) for seconds in zip(*(m.seconds for m in of), strict=True)] for of in (plain, chosen)]
    return [_ratio(mine, theirs) for mine, theirs in zip(*totals, strict=True)]


def _ratio(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
