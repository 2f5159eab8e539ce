"""The most memory that one run had at a time: of the GPUs, or of this process where there is none."""

from __future__ import annotations

import contextlib
import sys

import torch


class PeakMemory:
    """Call `reset`, run, then `read` the bytes.

    Attributes:
        kind: What is counted: "CUDA allocated" by tensors on all GPUs, or "process resident", all of this process.
    """

    def __init__(self, on_cuda: bool) -> None:
        self.kind = "CUDA allocated" if on_cuda else "process resident"
        self._devices = range(torch.cuda.device_count()) if on_cuda else range(0)

    def reset(self) -> None:
        """Forgets the peak so far; where the system cannot (macOS), the peak stays that of the whole process."""
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._devices:
            with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
                peak.write("5")

    def read(self) -> int:
        """Bytes at the peak since `reset`."""
        if self._devices:
            return sum(torch.cuda.max_memory_allocated(device) for device in self._devices)
        try:
            with open("/proc/self/status", encoding="ascii", errors="replace") as status:
                return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak
