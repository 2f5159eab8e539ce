"""One benchmark from a pair and prompts to a result: every way of decoding, timed in turns, then looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.evaluation.harness import EAGER, Prompt, compare, decoding_methods, summarise
from dflash.evaluation.profiling import profile, step_split
from dflash.evaluation.records import record
from dflash.evaluation.timing import timed_blocks


# Shows a bar over what it is given: `(items, what is done with them)`.
Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def run_bench(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 256,
    repeats: int = 3,
    methods: Sequence[str] | None = None,
    num_profiled: int = 4,
    decoding: Mapping[str, Any] | None = None,
    progress: Progress = lambda items, what: items,
) -> dict[str, Any]:
    """Decodes every prompt greedily by every method, `repeats` times, interleaved, and gives the result.

    Args:
        target: Any causal language model.
        drafter: Its drafter.
        prompts: Behind their chat template.
        max_new_tokens: The longest answer.
        repeats: Of every method on every prompt; the median counts.
        methods: Names as `decoding_methods` has them, besides plain decoding; `None` for all.
        num_profiled: Prompts of each task that are decoded again to see where a step's time goes; 0 for none.
        decoding: What else a reader has to know: names of the pair, chat template, thinking.
        progress: Shows a bar.

    Raises:
        ValueError: for an unknown method.
    """
    ways = decoding_methods(target, drafter, max_new_tokens, methods)
    measurements = compare(ways, prompts, repeats, lambda todo: progress(todo, "Decoding"))
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    chosen = [p for task in tasks for p in [q for q in prompts if q.task == task][:num_profiled]]
    profiles = profile(ways, chosen, target, drafter, lambda todo: progress(todo, "Profiling"))
    return record(
        "decode",
        target,
        drafter,
        decoding={
            "temperature": 0.0,
            "batch_size": 1,
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            **(decoding or {}),
        },
        summary=summarise(measurements, profiles),
        widths=step_times(target, drafter, chosen, max_new_tokens, repeats),
        measurements=[asdict(measurement) for measurement in measurements],
        profiles=[asdict(one) for one in profiles],
    )


def step_times(
    target: PreTrainedModel, drafter: PreTrainedModel, prompts: Sequence[Prompt], max_new_tokens: int, repeats: int = 3
) -> list[dict[str, Any]]:
    """Milliseconds of a step's two forwards by the tokens that are verified at once, in the eager loop."""
    block_size = drafter.config.block_size
    widths = [width for width in (1, 2, 4, 8, 16, 32) if width < block_size] + [block_size]
    seen: dict[int, list[dict[str, float]]] = {width: [] for width in widths}
    for repeat in range(repeats if prompts else 0):
        prompt = prompts[repeat % len(prompts)]
        for width in widths:
            options = {**EAGER, "max_draft_tokens": width - 1, "max_new_tokens": max_new_tokens, "temperature": 0.0}

            def run(ids: Any, on_step: Any = None, options: dict[str, Any] = options) -> Any:
                return timed_blocks(drafter, target, ids, on_step, **options)

            seen[width].append(step_split(run, prompt.input_ids, target, drafter)[1])
    return [
        {
            "width": width,
            "ms_verify": round(median(split["verify"] for split in splits), 4),
            "ms_draft": round(median(split["draft"] for split in splits), 4) if width > 1 else None,
        }
        for width, splits in seen.items()
        if splits
    ]


def save_plots(result: dict[str, Any], output: Path) -> list[Path]:
    """The result's figures as PNG beside `output`, which names them; their paths.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    from dflash.evaluation import plots

    rows, setup = result["summary"], result["environment"]
    note = f"{setup['device']}, {setup['threads']} threads, {setup['target_dtype']}, block {setup['block_size']}"
    figures = {"speedup": plots.speedups(rows, note)}
    if any(row["acceptance_histogram"] for row in rows):
        figures["acceptance"] = plots.acceptance_by_position(_one_per_text(rows), note)
    if result["widths"]:
        figures["step_time"] = plots.step_time(result["widths"], note)
    return [plots.save(figure, output.with_name(f"{output.stem}_{name}.png")) for name, figure in figures.items()]


def _one_per_text(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose acceptance is the drafter's: those that propose nothing show nothing, and twins show the same curve."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        histogram = row["acceptance_histogram"]
        twin = any(row["task"] == k["task"] and histogram == k["acceptance_histogram"] for k in kept)
        if histogram and len(histogram) > 1 and not twin:
            kept.append(row)
    return kept
