"""Measuring from outside: clocks around the loop, and what two texts have in common."""

from .comparison import Difference, first_difference
from .timing import TimedRun, timed_blocks, timed_generate


__all__ = ["Difference", "TimedRun", "first_difference", "timed_blocks", "timed_generate"]
