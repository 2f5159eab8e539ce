"""How long one piece of work takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that `work()` takes; it ends with a value read on the CPU, so that a device has finished too."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
