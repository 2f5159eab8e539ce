"""Seconds of wall time."""

import time
from collections.abc import Callable


# Seconds between the lines that say in a log how far a command has come.
LINE_SECONDS = 60


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that `work()` takes; it must end by reading a value, so that the device has finished."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def stopwatch() -> Callable[[], float]:
    """A function that gives the seconds since this call."""
    began = time.perf_counter()
    return lambda: time.perf_counter() - began
