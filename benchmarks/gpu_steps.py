"""The time of each step of a decode, and what was compiled or recorded in it.

A step ends when the host has its tokens. A text's time divided by its steps would include recordings of graphs, the first
draft and the last blocks, which are narrower. Here each step has a time of its own, and those steps are left out. This
module knows nothing of models.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Generator, Sequence
from itertools import islice, pairwise
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


class Mark(NamedTuple):
    """The end of a step: seconds of the host's clock, the tokens of all sequences, and what was recorded and compiled so far."""

    seconds: float
    num_tokens: int
    counts: Counts


class StepMarks(list[Mark]):
    """The marks of one decode: its beginning, the prompt's forward, then every step. A streamer of `transformers`, too."""

    def mark(self, num_tokens: int) -> None:
        self.append(Mark(time.perf_counter(), num_tokens, GraphWatch.installed().counts()))

    def put(self, token_ids: torch.Tensor) -> None:
        """Called by `generate` with the prompt at first, then with the tokens of a step."""
        self.mark(token_ids.numel())

    def end(self) -> None:
        """Nothing is held back."""


def read_blocks(blocks: Generator[Any], marks: StepMarks, num_sequences: int, num_steps: int) -> list[list[int]]:
    """The tokens of each sequence after the prompt's forward and `num_steps` steps of `generate_blocks`, which are marked.

    No sequence may end before: a step is then a block of each.
    """
    token_ids: list[list[int]] = [[] for _ in range(num_sequences)]
    marks.mark(0)
    for _ in range(1 + num_steps):
        step = list(islice(blocks, num_sequences))
        marks.mark(sum(len(block.token_ids) for block in step))
        for block in step:
            token_ids[block.sequence] += block.token_ids
    blocks.close()
    return token_ids


def step_figures(marks: Sequence[Mark], num_sequences: int, by_mean: bool = False) -> dict[str, Any]:
    """Milliseconds of a step, and tokens that it gave each sequence, over the steps that count.

    The first step does not count: it reads the prompt's features. Nor does one in which something was compiled or recorded.
    A token takes the median step over the tokens of a step; `by_mean` the mean step, for decodes whose steps are of several
    kinds, among which a median would choose one.

    Raises:
        ValueError: if no step counts.
    """
    begin, first, *steps = marks
    counted = [(before, after) for before, after in pairwise(steps) if before.counts == after.counts]
    if not counted:
        raise ValueError(
            f"None of {len(steps)} steps counts: each recorded or compiled something; let it write more tokens."
        )
    times = [1e3 * (after.seconds - before.seconds) for before, after in counted]
    tokens_per_step = sum(after.num_tokens for _, after in counted) / (len(counted) * num_sequences)
    cuts = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return {
        "ms_per_step": median(times),
        "ms_per_step_p10": cuts[0],
        "ms_per_step_p90": cuts[-1],
        "ms_per_step_mean": fmean(times),
        "steps": len(steps),
        "steps_counted": len(counted),
        "tokens_per_step": tokens_per_step,
        "ms_per_token": (fmean(times) if by_mean else median(times)) / tokens_per_step,
        "ms_to_first_token": 1e3 * (first.seconds - begin.seconds),
    }
