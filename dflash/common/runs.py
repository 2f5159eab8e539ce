"""How a process takes part in work that several share, and who is told of its progress."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .processes import Processes


def _ignore(*progress: Any) -> None:
    """Nobody is told."""


def refuse_both(resume: bool, overwrite: bool) -> None:
    """Raises ValueError if a run is to go on and to begin anew."""
    if resume and overwrite:
        raise ValueError("resume and overwrite are both given: go on with the run, or begin anew.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The processes of a run, and what its caller does beside it."""

    processes: Processes = field(default_factory=Processes)  # by default those of the launcher's variables
    on_begin: Callable[..., None] = _ignore  # called with this process's share, and with what is done already
    on_done: Callable[..., None] = _ignore  # called with each result
    is_locked: bool = False  # whether the caller holds the lock of the output, as who loads a model first should
