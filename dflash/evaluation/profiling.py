"""Measures the parts of a step's time, the host's waits for the device, and the bytes that a decode allocates.

Each is measured in a pass of its own, because looking inside slows decoding down or disturbs `torch.compile`. Figures
are per verify step, without the prefill.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import PreTrainedModel

from dflash.engine import runner
from dflash.engine.lookup import LookupProposer
from dflash.engine.steps import WholeRunner
from dflash.engine.waiting import waits
from dflash.model.drafting_dflash import DraftProposer
from dflash.model.targets_dflash import Target

from .memory import allocated_memory
from .timing import Progress, TimedRun, silent


# Python-level calls on a tensor that wait for its value.
T = torch.Tensor
READS = {T.item, T.tolist, T.cpu, T.numpy, T.__bool__, T.__int__, T.__float__, T.__index__}


@dataclass(frozen=True)
class Profile:
    """The figures of one method on one prompt from these passes, as means over its verify steps."""

    task: str
    prompt_index: int
    method: str
    num_steps: int  # verify steps after the first token
    ms_draft: float  # for the proposals: the drafter's forward, the head, the choice; 0 without a draft
    ms_verify: float  # in the target's forward; in the whole step where that is one compiled function
    ms_rest: float
    host_syncs: float  # times that the host reads a value from the device
    memory_bytes: int  # peak of the tensors that the decode allocated


class StepSplit(NamedTuple):
    """The number of verify steps of a decode, and the milliseconds of one by its parts."""

    num_steps: int
    ms_draft: float
    ms_verify: float
    ms_rest: float


Run = Callable[..., TimedRun]


def profile(
    methods: Mapping[str, Run],
    prompts: Sequence[Any],
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    progress: Progress = silent,
) -> list[Profile]:
    """Every method, warmed up before, on every prompt (with `task` and `input_ids`), once per pass.

    A few prompts are enough: only the split of a step's time is noisy. `progress` shows a bar.
    """
    profiles = []
    for index, prompt in enumerate(progress(prompts, "Profiling")):
        input_ids = prompt.input_ids
        for name, run in methods.items():
            split = step_split(run, input_ids, target, drafter)
            syncs = host_syncs(run, input_ids, target.device)
            memory = allocated_memory(partial(run, input_ids), target.device)
            profiles.append(Profile(prompt.task, index, name, *split, syncs, memory))
    return profiles


def step_split(run: Run, input_ids: torch.Tensor, target: PreTrainedModel, drafter: PreTrainedModel) -> StepSplit:
    """Where the time of a decode's verify steps goes.

    On CUDA the times are those of events in the stream: nothing waits for them, so steps overlap as usual.
    """
    marks: list[tuple[str, Any]] = []
    starts: list[int] = []

    def mark(part: str) -> None:
        marks.append((part, _now(target.device)))

    # Our loop is watched around its own parts, which may be compiled; a loop of transformers, around its forwards.
    for watched in (_watched_loop, partial(_watched_models, target, drafter)):
        marks.clear()
        starts.clear()
        with watched(mark):
            timed = run(input_ids, lambda *_: starts.append(len(marks)))
            mark("end")
        if len(marks) > 1:
            break
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    totals = {"draft": 0.0, "verify": 0.0, "rest": 0.0}
    first = max(0, starts[0] - 1)  # after the first token
    for (part, began), (_, ended) in pairwise(marks[first:]):
        if isinstance(began, float):
            totals[part] += 1e3 * (ended - began)
        else:
            totals[part] += began.elapsed_time(ended)
    divisor = max(timed.num_steps, 1)
    return StepSplit(
        timed.num_steps,
        totals["draft"] / divisor,
        totals["verify"] / divisor,
        totals["rest"] / divisor,
    )


@contextmanager
def _watched_loop(mark: Callable[[str], None]) -> Iterator[None]:
    """Calls `mark` where a part of a step begins, in our loop."""
    is_inside = False

    def around(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # a call inside a part belongs to it
                return work(*args, **kwargs)
            is_inside = True
            mark(part)
            try:
                return work(*args, **kwargs)
            finally:
                is_inside = False
                mark("rest")

        return marked

    proposers = (LookupProposer, runner.WidthProposer, runner.TreeProposer, DraftProposer)
    verifying = [(Target, "verify"), (Target, "verify_columns"), (WholeRunner, "run_whole")]
    with ExitStack() as patches:
        for proposer in proposers:
            patches.enter_context(mock.patch.object(proposer, "propose", around("draft", proposer.propose)))
        for owner, name in verifying:
            patches.enter_context(mock.patch.object(owner, name, around("verify", getattr(owner, name))))
        yield


@contextmanager
def _watched_models(target: PreTrainedModel, drafter: PreTrainedModel, mark: Callable[[str], None]) -> Iterator[None]:
    """Calls `mark` where a part of a step begins, by the models' forwards: a draft lasts until the target's begins."""
    with (
        drafter.register_forward_pre_hook(lambda *_: mark("draft")),
        target.register_forward_pre_hook(lambda *_: mark("verify")),
        target.register_forward_hook(lambda *_: mark("rest")),
    ):
        yield


def host_syncs(run: Run, input_ids: torch.Tensor, device: torch.device) -> float:
    """Times in a verify step that the host waits for a value.

    On CUDA PyTorch's sync warnings are counted; elsewhere every read of a tensor's value. Plain decoding is watched
    through a streamer, for which `generate` reads each token: that is one of its waits.
    """
    counter = _DriverSyncs() if device.type == "cuda" else _ReadCounter()
    counts: list[int] = []
    with counter:
        timed = run(input_ids, lambda *_: counts.append(counter.total()))
    num_syncs = counter.total() - counts[0]
    return num_syncs / max(timed.num_steps, 1)


class _ReadCounter(TorchFunctionMode):
    """Counts reads of a tensor's value: calls from Python, and operations inside others that need one."""

    def __init__(self) -> None:
        super().__init__()
        self._num_reads = 0
        self._operations = _OperationCounter()

    def total(self) -> int:
        return self._num_reads + self._operations.num_reads

    def __enter__(self) -> _ReadCounter:
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._operations.num_reads
        result = func(*args, **(kwargs or {}))
        if func in READS:
            self._num_reads += 1
            self._operations.num_reads = before  # the operation inside is the same read
        return result


class _OperationCounter(TorchDispatchMode):
    """Counts operations that read a value."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.num_reads += waits(func.overloadpacket.__name__, args, kwargs)
        return func(*args, **kwargs)


class _DriverSyncs:
    """Counts PyTorch's warnings of a synchronising operation on the current CUDA device."""

    def __enter__(self) -> _DriverSyncs:
        self._before = torch.cuda.get_sync_debug_mode()
        self._catching = warnings.catch_warnings(record=True)
        self._caught: Any = self._catching.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_sync_debug_mode(self._before)
        self._catching.__exit__(None, None, None)

    def total(self) -> int:
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in self._caught)


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
