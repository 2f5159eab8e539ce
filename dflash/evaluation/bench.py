"""`dflash bench` from a pair and prompts to a result: every way of decoding timed in turns, then profiled."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.common.logits import check_logits
from dflash.common.provenance import environment, public_name, record

from .measurements import Prompt, compare, rounded, summarise
from .methods import EAGER, decoding_methods
from .profiling import StepSplit, profile, step_split
from .results import Row, grouped
from .timing import Progress, silent, timed_blocks


@dataclass(frozen=True)
class BenchPlan:
    """How prompts are decoded and measured."""

    max_new_tokens: int = 256
    repeats: int = 3  # of every method on every prompt
    methods: Sequence[str] | None = None  # names of [`METHODS`] besides plain decoding; `None` for all
    num_profiled: int = 4  # prompts of each task that are decoded again to profile their steps


def run_bench(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[Prompt],
    plan: BenchPlan,
    decoding: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Decodes every prompt greedily by every method, in turns, and returns the result.

    `decoding` holds more for the record: names of the pair, chat template, thinking.

    Raises:
        ValueError: for an unknown method, or a target whose logits are NaN or infinite.
    """
    check_logits(target)
    names = dict(decoding or {})
    for role in ("target", "drafter"):
        if names.get(role):
            names[role] = public_name(names[role])
    compared = decoding_methods(target, drafter, plan.max_new_tokens, plan.methods)
    measurements = compare(compared, prompts, plan.repeats, progress)
    chosen = []
    for of_task in grouped(prompts, lambda prompt: prompt.task).values():
        chosen += of_task[: plan.num_profiled]
    profiles = profile(compared, chosen, target, drafter, progress)
    return record(
        "decode",
        environment(target, drafter),
        decoding={
            "temperature": 0.0,
            "batch_size": 1,
            "max_new_tokens": plan.max_new_tokens,
            "repeats": plan.repeats,
            **names,
        },
        summary=summarise(measurements, profiles),
        widths=step_times(target, drafter, chosen, plan, progress),
        measurements=[asdict(measurement) for measurement in measurements],
        profiles=[asdict(profile) for profile in profiles],
    )


def step_times(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[Prompt],
    plan: BenchPlan,
    progress: Progress,
) -> list[Row]:
    """Milliseconds of a step's two forwards, by the number of tokens verified at once, in the eager loop."""
    block_size = drafter.config.block_size
    widths = [width for width in (1, 2, 4, 8, 16, 32) if width < block_size]
    widths.append(block_size)
    turns = [(repeat, width) for repeat in range(plan.repeats) for width in widths]
    splits: dict[int, list[StepSplit]] = {}
    for repeat, width in progress(turns if prompts else [], "Timing widths"):
        prompt = prompts[repeat % len(prompts)]
        options = {
            **EAGER,
            "max_draft_tokens": width - 1,
            "max_new_tokens": plan.max_new_tokens,
            "temperature": 0.0,
        }
        run = partial(timed_blocks, drafter, target, **options)
        split = step_split(run, prompt.input_ids, target, drafter)
        splits.setdefault(width, []).append(split)
    rows = []
    for width, of_width in splits.items():
        ms_verify = median(split.ms_verify for split in of_width)
        ms_draft = median(split.ms_draft for split in of_width)
        rows.append(
            {
                "width": width,
                "ms_verify": rounded(ms_verify),
                "ms_draft": rounded(ms_draft) if width > 1 else None,
            }
        )
    return rows
