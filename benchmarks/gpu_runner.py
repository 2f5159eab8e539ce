"""Measures rows one after another in a process of their own, so that a row that fails or hangs loses only itself.

A row has a limit in seconds. One that exceeds it, or that ends the process, is noted, and a new process goes on with the
next. This module knows no model and no torch; the bench that it opens in the other process measures.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol


START_LIMIT = 180.0  # seconds for a process to import its libraries and find the device
MOST_STARTS = 2  # processes in a row that end before they have opened a bench; then the other rows are given up
PATIENCE = 5.0  # seconds for a process that is done to end by itself

MEASURED, REFUSED, FAILED, SKIPPED = "measured", "refused", "failed", "skipped"


@dataclass(frozen=True)
class Row:
    """Something to measure: its name, the seconds that it may take, and its setting, for the bench."""

    name: str
    limit: float
    setting: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """A row after its turn.

    Attributes:
        row: The row.
        status: "measured", "refused" (it cannot be run, by a ValueError), "failed" or "skipped".
        reason: Why it is not measured.
        seconds: That it took, `None` where it was not begun.
        figures: What was measured.
    """

    row: Row
    status: str = SKIPPED
    reason: str | None = "not begun yet"
    seconds: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        seconds = None if self.seconds is None else round(self.seconds, 2)
        head = {"name": self.row.name, "status": self.status, "reason": self.reason, "seconds": seconds}
        return {**head, **self.row.setting, **self.figures}


class Bench(Protocol):
    """Measures, in the other process."""

    facts: dict[str, Any]

    def measure(self, setting: dict[str, Any]) -> dict[str, Any]:
        """The figures of a row."""

    def recover(self) -> None:
        """Frees what a failed row has left; raises if the process is of no more use."""


# In the other process, from options that can be pickled; a function of a module, so that it can be found there.
Opener = Callable[[dict[str, Any]], Bench]


class _Ended(Exception):
    """The other process has ended or was ended; says why."""


class _Worker:
    """A process with a bench in it."""

    def __init__(self, opener: Opener, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, opener, options), daemon=True)
        self._process.start()
        theirs.close()
        self.is_open = False

    def open(self, limit: float) -> dict[str, Any]:
        """The facts of the bench, once it is open."""
        status, said = self.receive(limit)
        if status != MEASURED:
            raise _Ended(said["reason"])
        self.is_open = True
        return said

    def receive(self, limit: float) -> tuple[str, dict[str, Any]]:
        """The next message within so many seconds."""
        try:
            if self._connection.poll(limit):
                return self._connection.recv()
        except EOFError:
            self._process.join(timeout=10)
            raise _Ended(self._how_it_ended()) from None
        raise _Ended(f"it took longer than the {limit:.0f} s that it had")

    def measure(self, setting: dict[str, Any], limit: float) -> tuple[str, dict[str, Any]]:
        """A row's status and figures, or its reason."""
        try:
            self._connection.send(setting)
        except OSError:
            raise _Ended(self._how_it_ended()) from None
        return self.receive(limit)

    def end(self, patience: float = 0.0) -> None:
        """Ends the process, whatever it does; with patience it may end by itself, which it does if it waits for a row."""
        self._connection.close()
        self._process.join(patience)
        self._process.kill()
        self._process.join()

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"its process ended with status {code}"
        memory = ", as a system that is out of memory does" if code == -signal.SIGKILL else ""
        return f"its process was ended by signal {-code}{memory}"


def run_rows(
    rows: Sequence[Row],
    opener: Opener,
    options: dict[str, Any],
    deadline: float,
    on_change: Callable[[list[Outcome], dict[str, Any]], None],
) -> tuple[list[Outcome], dict[str, Any]]:
    """Measures the rows in their order until `deadline`, by `time.monotonic`; what is not begun by then is skipped.

    Args:
        rows: The most useful ones first.
        opener: Opens the bench.
        options: For it.
        deadline: When all ends.
        on_change: Gets all outcomes and the bench's facts, at the beginning and after each row.

    Returns:
        An outcome for each row, and the bench's facts, none if it never opened.
    """
    outcomes = [Outcome(row) for row in rows]
    facts: dict[str, Any] = {}
    worker: _Worker | None = None
    num_starts = 0
    try:
        worker = _Worker(opener, options)
        on_change(outcomes, facts)
        for place, outcome in enumerate(outcomes):
            began = time.monotonic()
            if began >= deadline:
                _skip(outcomes[place:], "the time for all rows was over before this one began")
                break
            is_fit = False
            try:
                worker = worker or _Worker(opener, options)
                if not worker.is_open:
                    facts |= worker.open(min(START_LIMIT, deadline - began))
                    began = time.monotonic()
                num_starts = 0
                limit = max(0.0, min(outcome.row.limit, deadline - began))
                outcome.status, said = worker.measure(outcome.row.setting, limit)
                is_fit = said.pop("is_fit", True)
                outcome.reason, outcome.figures = said.pop("reason", None), said
            except _Ended as ended:
                outcome.status, outcome.reason = FAILED, (why := str(ended))
                if not (worker and worker.is_open):
                    num_starts += 1
                    outcome.reason = f"no process to measure in: {why}"
            if worker and worker.is_open:
                outcome.seconds = time.monotonic() - began
            if not is_fit:
                worker = _ended(worker)
            if num_starts == MOST_STARTS:
                _skip(outcomes[place + 1 :], f"{num_starts} processes in a row did not start: {why}")
                break
            on_change(outcomes, facts)
        if worker is not None:
            worker.end(PATIENCE)
    finally:
        _ended(worker)
    on_change(outcomes, facts)
    return outcomes, facts


def _skip(outcomes: Sequence[Outcome], reason: str) -> None:
    for outcome in outcomes:
        outcome.status, outcome.reason = SKIPPED, reason


def _ended(worker: _Worker | None) -> None:
    if worker is not None:
        worker.end()


def _serve(connection: Connection, opener: Opener, options: dict[str, Any]) -> None:
    """Runs in the other process: opens the bench, then measures what it is asked for."""
    try:
        bench = opener(options)
    except Exception as error:
        traceback.print_exc()
        connection.send((FAILED, {"reason": reason_of(error)}))
        return
    connection.send((MEASURED, bench.facts))
    with suppress(EOFError):  # the other side is done
        while True:
            status, said = _answer(bench, connection.recv())
            connection.send((status, said))
            if not said.get("is_fit", True):
                return


def _answer(bench: Bench, setting: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    try:
        return MEASURED, bench.measure(setting)
    except Exception as error:
        reason, status = reason_of(error), REFUSED if isinstance(error, ValueError) else FAILED
        if status == FAILED:
            traceback.print_exc()
        # Frames hold tensors; without them the memory can be freed.
        traceback.clear_frames(error.__traceback__)
    try:
        bench.recover()
    except Exception as error:
        return FAILED, {"reason": f"{reason}; after it: {reason_of(error)}", "is_fit": False}
    return status, {"reason": reason}


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    what = "out of memory" if isinstance(error, MemoryError) or name == "OutOfMemoryError" else name
    return f"{what}: {lines[0][:300]}" if lines[0] else what
