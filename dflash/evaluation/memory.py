"""The memory of a decode, in bytes.

`PeakMemory` includes the models and costs nothing, so it may be read while a clock runs. `allocated_memory` is exact
and counts only what the decode allocates; it slows the decode down.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import torch


class PeakMemory:
    """Peak memory, models included: call `reset`, run, then `read` the bytes."""

    def __init__(self, on_cuda: bool) -> None:
        self.kind = "CUDA allocated" if on_cuda else "process resident"  # by tensors on all GPUs; the whole process
        self._devices = range(torch.cuda.device_count()) if on_cuda else range(0)

    def reset(self) -> None:
        """Forgets the peak so far; macOS cannot, and gives the peak of the whole process."""
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._devices:
            with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
                peak.write("5")

    def read(self) -> int | None:
        """Bytes at the peak since `reset`; `None` on Windows, which does not say."""
        if self._devices:
            return sum(torch.cuda.max_memory_allocated(device) for device in self._devices)
        try:
            with open("/proc/self/status", encoding="ascii", errors="replace") as status:
                return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            try:
                import resource
            except ModuleNotFoundError:
                return None
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak


def allocated_memory(work: Callable[[], Any], device: torch.device) -> int:
    """Peak bytes of the tensors that `work()` allocates, counted by the allocator, on the CPU by the profiler."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():  # the profiler's library writes a line at either end
        profiler.__enter__()
    try:
        work()
    finally:
        with _silent_stderr():
            profiler.__exit__(None, None, None)
    results: Any = profiler.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    allocated = accumulate(event.nbytes() for event in changes)
    return max(allocated, default=0)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
