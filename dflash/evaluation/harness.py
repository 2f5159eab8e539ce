"""Several ways to decode, on the same prompts, in one run: interleaved, warmed up, repeated, with the texts compared.

Machines are shared and noisy, so a speed here is always a ratio of two methods that took turns on every prompt. It knows
nothing about data sets, files or tables.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from dflash.evaluation.timing import TimedRun, timed_blocks, timed_generate


# Shape of what `compare` returns; raised when a field changes its meaning or goes away.
SCHEMA_VERSION = 1

PLAIN = "target.generate"
OURS = "dflash"
PROMPT_LOOKUP = "prompt lookup"
NATIVE = "native dflash"

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
    """One method on one prompt: its text's statistics and the seconds of every repeat."""

    task: str
    prompt_index: int
    method: str
    num_tokens: int
    num_forwards: int
    acceptance_lengths: list[int]
    is_identical: bool
    seconds: list[float]
    seconds_to_first_token: list[float]


def decoding_methods(
    target: PreTrainedModel, drafter: PreTrainedModel, max_new_tokens: int, names: Sequence[str] | None = None
) -> dict[str, Callable[[torch.Tensor], TimedRun]]:
    """Greedy decoding by name: plain `target.generate` (always first), prompt lookup, native DFlash, and this library.

    Native DFlash exists from transformers 5.15 on and is left out before.

    Raises:
        ValueError: for a name that does not exist, with those that do.
    """

    def plain(**kwargs: Any) -> Callable[[torch.Tensor], TimedRun]:
        return lambda ids: timed_generate(target, ids, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)

    methods: dict[str, Callable[[torch.Tensor], TimedRun]] = {
        PLAIN: plain(),
        PROMPT_LOOKUP: plain(prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
        NATIVE: plain(assistant_model=drafter, speculation_type="dflash"),
        OURS: lambda ids: timed_blocks(drafter, target, ids, max_new_tokens=max_new_tokens, temperature=0.0),
    }
    if not hasattr(transformers.GenerationConfig(), "speculation_type"):
        del methods[NATIVE]
    unknown = set(names or ()) - set(methods)
    if unknown:
        raise ValueError(f"Unknown methods {sorted(unknown)}: choose from {list(methods)}.")
    return {name: run for name, run in methods.items() if name == PLAIN or names is None or name in names}


def compare(
    methods: dict[str, Callable[[torch.Tensor], TimedRun]],
    prompts: Sequence[Prompt],
    repeats: int = 3,
    progress: Callable[[Iterable[Prompt]], Iterable[Prompt]] = iter,
) -> list[Measurement]:
    """Every method on every prompt, `repeats` times, taking turns; the first method is the one texts are compared with.

    Each method decodes the first prompt once before, unmeasured. The order of the methods rotates from repeat to repeat,
    so that none always runs behind the same neighbour.
    """
    for run in methods.values():
        run(prompts[0].input_ids)
    measurements = []
    names = list(methods)
    for index, prompt in enumerate(progress(prompts)):
        runs: dict[str, list[TimedRun]] = {name: [] for name in names}
        for repeat in range(repeats):
            shift = (index + repeat) % len(names)
            for name in names[shift:] + names[:shift]:
                runs[name].append(methods[name](prompt.input_ids))
        reference = runs[names[0]][0].token_ids
        for name in names:
            first = runs[name][0]
            measurements.append(
                Measurement(
                    task=prompt.task,
                    prompt_index=index,
                    method=name,
                    num_tokens=len(first.token_ids),
                    num_forwards=first.num_forwards,
                    acceptance_lengths=first.acceptance_lengths,
                    is_identical=all(run.token_ids == reference for run in runs[name]),
                    seconds=[run.seconds for run in runs[name]],
                    seconds_to_first_token=[run.seconds_to_first_token for run in runs[name]],
                )
            )
    return measurements


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per task and method: speed, speed-up over the first method, tau, tokens per step, identical texts.

    A prompt counts with the median of its repeats; speeds are total tokens over total seconds; the spread of the speed-up
    is over prompts (10th and 90th percentile of the per-prompt ratios). Both means of tau are given: over verify steps
    (micro) and over prompts (macro).
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
                    "tokens_per_second": _rounded(tokens / sum(seconds)),
                    "speedup": _rounded(sum(median(m.seconds) for m in plain.values()) / sum(seconds)),
                    "speedup_p10": _rounded(ratios[len(ratios) // 10]),
                    "speedup_p90": _rounded(ratios[-1 - len(ratios) // 10]),
                    "tokens_per_step": _rounded((tokens - len(chosen)) / steps),
                    "ms_per_step": _rounded(1e3 * (sum(seconds) - _to_first_token(chosen)) / steps),
                    "ms_to_first_token": _rounded(1e3 * _to_first_token(chosen) / len(chosen)),
                    "tau_micro": _rounded(sum(lengths) / len(lengths)) if lengths else None,
                    "tau_macro": _rounded(sum(per_prompt) / len(per_prompt)) if per_prompt else None,
                    "acceptance_histogram": _histogram(lengths) if lengths else None,
                }
            )
    return rows


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


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
