"""The time of each step of a decode, and what was compiled or recorded in it.

On a GPU marks are events of its own time line, elsewhere times of the host's clock. A text's time divided by its steps would
include recordings of graphs, the first draft and the last blocks, which are narrower. Here each step has a time of its own,
and those steps are left out. This module knows nothing of models.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import torch


class Counts(NamedTuple):
    """CUDA graphs recorded, graphs made by `torch.compile`, and compiled graphs that run unrecorded though recording was asked for."""

    recordings: int = 0
    compilations: int = 0
    skips: int = 0

    def since(self, before: Counts) -> dict[str, int]:
        """What came on top of `before`, by name."""
        return {name: now - then for name, now, then in zip(self._fields, self, before, strict=True)}


class GraphWatch:
    """Counts recordings and compilations of this process, from the first use of `installed` on."""

    def __init__(self) -> None:
        self.num_recordings = 0
        begin = torch.cuda.CUDAGraph.capture_begin

        @functools.wraps(begin)
        def counted(*args: Any, **kwargs: Any) -> None:
            self.num_recordings += 1
            begin(*args, **kwargs)

        torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]

    @classmethod
    @functools.cache
    def installed(cls) -> GraphWatch:
        """The only one of this process."""
        return cls()

    def counts(self) -> Counts:
        """All so far."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: it has made none
        if dynamo is None:
            return Counts(self.num_recordings)
        counters = dynamo.counters
        return Counts(self.num_recordings, counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"])

    def compiled(self) -> list[Any]:
        """The last things that were compiled, as far as this torch tells of them."""
        return list(getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", list)())

    def reasons(self, known: Sequence[Any]) -> list[str]:
        """Why something was compiled again, was not recorded or failed to compile, but for what was `known` to `compiled`."""
        before = set(map(id, known))
        said = [
            f"{name} of {metric.co_name}: {next(iter(str(reason).strip().splitlines()), '')[:300]}"
            for metric in self.compiled()
            for name in ("recompile", "cudagraph_skip", "fail")
            if id(metric) not in before and (reason := getattr(metric, f"{name}_reason", None))
        ]
        return list(dict.fromkeys(said))


class StepClock:
    """Marks between the steps of a decode on a device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._watch = GraphWatch.installed()
        self._marks: list[Any] = []
        self._counts: list[Counts] = []

    def mark(self) -> int:
        """Ends a step; gives the mark's number."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        self._counts.append(self._watch.counts())
        return len(self._marks) - 1

    def milliseconds(self, begin: int, end: int) -> float:
        """From mark to mark; waits for the device."""
        if self._is_cuda:
            self._marks[end].synchronize()
            return self._marks[begin].elapsed_time(self._marks[end])
        return 1e3 * (self._marks[end] - self._marks[begin])

    def is_settled(self, begin: int, end: int) -> bool:
        """Whether nothing was compiled or recorded between two marks."""
        return self._counts[begin] == self._counts[end]


class Step(NamedTuple):
    """One step: its time, the tokens that it gave all sequences together, and whether it counts.

    A step counts if it is whole, of all sequences, and nothing was compiled or recorded in it.
    """

    milliseconds: float
    num_tokens: int
    counts: bool


class TimedText(NamedTuple):
    """The steps after the prompt's forward, the time of that forward, and the new tokens of each sequence."""

    steps: list[Step]
    ms_to_first_token: float
    token_ids: list[list[int]]


def time_blocks(
    blocks: Iterable[Any], clock: StepClock, num_sequences: int, max_new_tokens: int, block_size: int
) -> TimedText:
    """Reads the blocks of `generate_blocks` to the end; each step gives one block to every sequence that is not done.

    The first step does not count: it reads the prompt's features. Nor do steps for which a sequence wanted less than a block.
    """
    token_ids: list[list[int]] = [[] for _ in range(num_sequences)]
    marks, previous = [clock.mark()], num_sequences
    groups: list[dict[str, Any]] = []  # of one step each
    for block in blocks:
        mark, sequence = clock.mark(), block.sequence
        if sequence <= previous:  # blocks of one step come in the order of the sequences
            wanted = max_new_tokens - max(map(len, token_ids))
            groups.append({"tokens": 0, "sequences": 0, "is_whole": wanted >= block_size})
            marks.append(mark)
        previous, marks[-1] = sequence, mark
        groups[-1]["tokens"] += len(block.token_ids)
        groups[-1]["sequences"] += 1
        token_ids[sequence] += block.token_ids
    steps = []
    for place, group in enumerate(groups[1:], start=1):
        interval = marks[place], marks[place + 1]
        is_usual = place > 1 and group["is_whole"] and group["sequences"] == num_sequences
        counts = is_usual and clock.is_settled(*interval)
        steps.append(Step(clock.milliseconds(*interval), group["tokens"], counts))
    return TimedText(steps, clock.milliseconds(marks[0], marks[1]), token_ids)


class StepStreamer:
    """A `transformers` streamer that marks each step of `generate` on a fresh clock."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.num_tokens: list[int] = []  # of each call; the prompt's comes first

    def put(self, token_ids: torch.Tensor) -> None:
        self.clock.mark()
        self.num_tokens.append(token_ids.numel())

    def end(self) -> None:
        """Nothing is held back."""


def time_generate(generate: Callable[..., torch.Tensor], prompt_ids: torch.Tensor, clock: StepClock) -> TimedText:
    """Runs `generate(prompt_ids, streamer=...)`; the first step does not count."""
    streamer = StepStreamer(clock)
    sequences = generate(prompt_ids, streamer=streamer)
    steps = []
    for mark, num_tokens in enumerate(streamer.num_tokens[2:], start=1):
        counts = mark > 1 and clock.is_settled(mark, mark + 1)
        steps.append(Step(clock.milliseconds(mark, mark + 1), num_tokens, counts))
    return TimedText(steps, clock.milliseconds(0, 1), sequences[:, prompt_ids.shape[1] :].tolist())


def step_figures(text: TimedText, num_sequences: int, by_mean: bool = False) -> dict[str, Any]:
    """Milliseconds of a step, and tokens that it gave each sequence, over the steps that count.

    A token takes the median step over the tokens of a step; `by_mean` the mean step, for decodes whose steps are of several
    kinds, among which a median would choose one.

    Raises:
        ValueError: if no step counts.
    """
    counted = [step for step in text.steps if step.counts]
    if not counted:
        raise ValueError(
            f"None of {len(text.steps)} steps counts: each recorded or compiled something, or was not whole; "
            "let it write more tokens."
        )
    times = [step.milliseconds for step in counted]
    tokens_per_step = sum(step.num_tokens for step in counted) / (len(counted) * num_sequences)
    cuts = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return {
        "ms_per_step": median(times),
        "ms_per_step_p10": cuts[0],
        "ms_per_step_p90": cuts[-1],
        "ms_per_step_mean": fmean(times),
        "steps": len(text.steps),
        "steps_counted": len(counted),
        "tokens_per_step": tokens_per_step,
        "ms_per_token": (fmean(times) if by_mean else median(times)) / tokens_per_step,
        "ms_to_first_token": text.ms_to_first_token,
    }
