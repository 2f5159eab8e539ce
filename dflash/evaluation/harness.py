"""Several ways to decode, on the same prompts, in one run: interleaved, warmed up, repeated, with the texts compared.

Machines are shared and noisy, so a speed here is always a ratio of two methods that took turns on every prompt. It knows
nothing about data sets, files or tables.
"""

from __future__ import annotations

import copy
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from dflash.configuration_dflash import DFlashConfig
from dflash.evaluation.profiling import Profile
from dflash.evaluation.timing import TimedRun, timed_blocks, timed_generate
from dflash.modeling_dflash import DFlashDraftModel


# Shape of what `compare` returns; raised when a field changes its meaning or goes away.
SCHEMA_VERSION = 1

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
RANDOM_DRAFTER = "random drafter, adaptive"

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


def decoding_methods(
    target: PreTrainedModel, drafter: PreTrainedModel, max_new_tokens: int, names: Sequence[str] | None = None
) -> dict[str, Method]:
    """Greedy decoding by name: plain `target.generate` (always first), prompt lookup, native DFlash, and this library.

    Beside what the library does by default there are its variants, its loop without any proposal (what of a speed-up is
    not speculation), and a drafter of the same shape that never learned anything. Native DFlash exists from transformers
    5.15 on and is left out before.

    Raises:
        ValueError: for a name that does not exist, with those that do.
    """

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
    if not hasattr(transformers.GenerationConfig(), "speculation_type"):
        del methods[NATIVE]
    unknown = set(names or ()) - set(methods) - {RANDOM_DRAFTER}
    if unknown:
        raise ValueError(f"Unknown methods {sorted(unknown)}: choose from {[*methods, RANDOM_DRAFTER]}.")
    if names is None or RANDOM_DRAFTER in names:
        methods[RANDOM_DRAFTER] = ours(untrained(drafter), **VARIANTS["dflash adaptive"])
    return {name: run for name, run in methods.items() if name == PLAIN or names is None or name in names}


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
    means of tau are given: over verify steps (micro) and over prompts (macro). What `profiles` say stands beside, in
    fields that begin with `profiled_`, and the peak memory of the prompt that takes most.
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
            tokens = sum(m.num_tokens for m in chosen)
            steps = sum(m.num_forwards - 1 for m in chosen)
            lengths = [length for m in chosen for length in m.acceptance_lengths]
            per_prompt = [
                sum(m.acceptance_lengths) / len(m.acceptance_lengths) for m in chosen if m.acceptance_lengths
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
                    "speedup_p10": _rounded(ratios[len(ratios) // 10]),
                    "speedup_p90": _rounded(ratios[-1 - len(ratios) // 10]),
                    "speedup_by_repeat": _speedup_by_repeat(list(plain.values()), chosen),
                    "tokens_per_step": _ratio(tokens - len(chosen), steps),
                    "ms_per_step": _ratio(1e3 * (sum(seconds) - _to_first_token(chosen)), steps),
                    "ms_to_first_token": _ratio(1e3 * _to_first_token(chosen), len(chosen)),
                    "tau_micro": _ratio(sum(lengths), len(lengths)),
                    "tau_macro": _ratio(sum(per_prompt), len(per_prompt)),
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
        "peak_memory_bytes": max(p.peak_memory_bytes for p in profiles),
    }


def environment(target: PreTrainedModel, drafter: PreTrainedModel) -> dict[str, Any]:
    """What a figure depends on besides the code: versions, hardware, dtype, attention, threads."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else target.device.type,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "drafter_dtype": str(drafter.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "target_parameters": target.num_parameters(),
        "drafter_parameters": drafter.num_parameters(),
        "block_size": drafter.config.block_size,
    }


def _to_first_token(measurements: Sequence[Measurement]) -> float:
    return sum(median(m.seconds_to_first_token) for m in measurements)


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


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
