"""Measures rows one after another in a process of their own, so that a row that fails or hangs loses only itself.

A row has a limit in seconds. One that exceeds it, or that ends the process, is noted, and a new process goes on with the
next. It knows no model and no torch; a bench that is opened in the other process does the measuring.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol


# Seconds for a process to import its libraries and find the device.
START_LIMIT = 180.0

# Processes in a row that end before they have opened a bench; then the other rows are given up.
MOST_STARTS = 2

# Seconds for a process that is done to end by itself.
PATIENCE = 5.0

MEASURED, REFUSED, FAILED, SKIPPED = "measured", "refused", "failed", "skipped"


@dataclass(frozen=True)
class Row:
    """Something to measure.

    Attributes:
        name: By which it is chosen and found.
        limit: Seconds that it may take.
        setting: What the bench has to know.
    """

    name: str
    limit: float
    setting: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a row.

    Attributes:
        row: Which it is.
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
    """What measures, in the other process."""

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

    def receive(self, limit: float) -> tuple[str, Any]:
        """The next message within so many seconds."""
        try:
            if self._connection.poll(limit):
                return self._connection.recv()
        except EOFError:
            self._process.join(timeout=10)
            raise _Ended(_how_it_ended(self._process.exitcode)) from None
        raise _Ended(f"it took longer than the {limit:.0f} s that it had")

    def send(self, setting: dict[str, Any]) -> None:
        """Asks for a row."""
        try:
            self._connection.send(setting)
        except OSError:
            raise _Ended(_how_it_ended(self._process.exitcode)) from None

    def end(self, patience: float = 0.0) -> None:
        """Ends the process, whatever it does; with patience it may end by itself, which it does if it waits for a row."""
        self._connection.close()
        self._process.join(patience)
        self._process.kill()
        self._process.join()


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
            if time.monotonic() >= deadline:
                _skip(outcomes[place:], "the time for all rows was over before this one began")
                break
            try:
                worker = worker or _Worker(opener, options)
                if not worker.is_open:
                    facts |= _opened(worker, min(START_LIMIT, deadline - time.monotonic()))
                num_starts = 0
            except _Ended as ended:
                worker = _ended(worker)
                num_starts += 1
                outcome.status, outcome.reason = FAILED, f"no process to measure in: {ended}"
                if num_starts == MOST_STARTS:
                    _skip(outcomes[place + 1 :], f"{num_starts} processes in a row did not start: {ended}")
                    break
            else:
                if not _measure(outcome, worker, deadline):
                    worker = _ended(worker)
            on_change(outcomes, facts)
        if worker is not None:
            worker.end(PATIENCE)
    finally:
        _ended(worker)
    on_change(outcomes, facts)
    return outcomes, facts


def _opened(worker: _Worker, limit: float) -> dict[str, Any]:
    kind, said = worker.receive(limit)
    if kind != "opened":
        raise _Ended(said)
    worker.is_open = True
    return said


def _measure(outcome: Outcome, worker: _Worker, deadline: float) -> bool:
    """Measures a row into its outcome; False if the process is of no more use."""
    began = time.monotonic()
    limit = max(0.0, min(outcome.row.limit, deadline - began))
    is_fit = False
    try:
        worker.send(outcome.row.setting)
        outcome.status, said = worker.receive(limit)
        is_fit = outcome.status in (MEASURED, REFUSED) or said["is_fit"]
        if outcome.status == MEASURED:
            outcome.figures, outcome.reason = said, None
        else:
            outcome.reason = said["reason"]
    except _Ended as ended:
        outcome.status, outcome.reason = FAILED, str(ended)
    outcome.seconds = time.monotonic() - began
    return is_fit


def _skip(outcomes: Sequence[Outcome], reason: str) -> None:
    for outcome in outcomes:
        outcome.status, outcome.reason = SKIPPED, reason


def _ended(worker: _Worker | None) -> None:
    if worker is not None:
        worker.end()


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return f"its process was ended by signal {-exit_code}, as a system that is out of memory does"
    if exit_code is not None and exit_code < 0:
        return f"its process was ended by signal {-exit_code}"
    return f"its process ended with status {exit_code}"


def _serve(connection: Connection, opener: Opener, options: dict[str, Any]) -> None:
    """Runs in the other process: opens the bench, then measures what it is asked for."""
    try:
        bench = opener(options)
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", reason_of(error)))
        return
    connection.send(("opened", bench.facts))
    with suppress(EOFError):  # the other side is done
        while True:
            answer = _answer(bench, connection.recv())
            connection.send(answer)
            if answer[0] == FAILED and not answer[1]["is_fit"]:
                return


def _answer(bench: Bench, setting: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    try:
        return MEASURED, bench.measure(setting)
    except ValueError as error:
        reason, status = reason_of(error), REFUSED
        traceback.clear_frames(error.__traceback__)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        reason, status = reason_of(error), FAILED
        # Frames hold tensors; without them the memory can be freed.
        traceback.clear_frames(error.__traceback__)
    try:
        bench.recover()
    except Exception as error:
        return FAILED, {"reason": f"{reason}; after it: {reason_of(error)}", "is_fit": False}
    return status, {"reason": reason, "is_fit": True}


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    what = "out of memory" if isinstance(error, MemoryError) or name == "OutOfMemoryError" else name
    return f"{what}: {lines[0][:300]}" if lines[0] else what
