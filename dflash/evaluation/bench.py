"""`dflash bench` from a pair and prompts to a result: every way of decoding timed in turns, then profiled."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.common.logits import check_logits
from dflash.common.provenance import environment, public_name, record

from .measurements import Prompt, compare, summarise
from .methods import EAGER, decoding_methods
from .profiling import profile, step_split
from .timing import timed_blocks


# Shows a bar over items: `(items, what is done with them)`.
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
    """Decodes every prompt greedily by every method, `repeats` times, interleaved, and returns the result.

    `methods` are names of [`METHODS`] besides plain decoding; `None` for all. Of each task, `num_profiled` prompts are
    decoded again to profile their steps. `decoding` holds more for the record: names of the pair, chat template,
    thinking.

    Raises:
        ValueError: for an unknown method, or a target whose logits are NaN or infinite.
    """
    check_logits(target)
    more = dict(decoding or {})
    more |= {role: public_name(more[role]) for role in ("target", "drafter") if more.get(role)}
    ways = decoding_methods(target, drafter, max_new_tokens, methods)
    measurements = compare(
        ways,
        prompts,
        repeats,
        progress=lambda todo: progress(todo, "Decoding"),
        warm_up=lambda todo: progress(todo, "Warming up"),
    )
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    chosen = [p for task in tasks for p in [q for q in prompts if q.task == task][:num_profiled]]
    profiles = profile(ways, chosen, target, drafter, lambda todo: progress(todo, "Profiling"))
    return record(
        "decode",
        environment(target, drafter),
        decoding={"temperature": 0.0, "batch_size": 1, "max_new_tokens": max_new_tokens, "repeats": repeats, **more},
        summary=summarise(measurements, profiles),
        widths=step_times(target, drafter, chosen, max_new_tokens, repeats, progress),
        measurements=[asdict(measurement) for measurement in measurements],
        profiles=[asdict(one) for one in profiles],
    )


def step_times(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    repeats: int = 3,
    progress: Progress = lambda items, what: items,
) -> list[dict[str, Any]]:
    """Milliseconds of a step's two forwards, by the number of tokens verified at once, in the eager loop."""
    block_size = drafter.config.block_size
    widths = [width for width in (1, 2, 4, 8, 16, 32) if width < block_size] + [block_size]
    seen: dict[int, list[dict[str, float]]] = {width: [] for width in widths}
    turns = [(repeat, width) for repeat in range(repeats if prompts else 0) for width in widths]
    for repeat, width in progress(turns, "Timing widths"):
        prompt = prompts[repeat % len(prompts)]
        options = {**EAGER, "max_draft_tokens": width - 1, "max_new_tokens": max_new_tokens, "temperature": 0.0}
        run = partial(timed_blocks, drafter, target, **options)
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
