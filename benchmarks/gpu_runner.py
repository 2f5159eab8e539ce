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
from typing import Any


START_LIMIT = 180.0  # seconds for a process to import its libraries and find the device
MOST_STARTS = 2  # processes in a row that end before they have opened a bench; then the other rows are given up
PATIENCE = 5.0  # seconds for a process that is done to end by itself

MEASURED, REFUSED, FAILED, SKIPPED = "measured", "refused", "failed", "skipped"


@dataclass
class Row:
    """Something to measure, and what became of it."""

    name: str
    limit: float  # seconds that it may take
    setting: dict[str, Any]  # for the bench
    status: str = SKIPPED  # refused: it cannot be run, by a ValueError
    reason: str | None = "not begun yet"  # why it is not measured
    seconds: float | None = None  # that it took; `None` where it was not begun
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        seconds = None if self.seconds is None else round(self.seconds, 2)
        head = {"name": self.name, "status": self.status, "reason": self.reason, "seconds": seconds}
        return {**head, **self.setting, **self.figures}


# Opens a bench in the other process, from options that can be pickled; a function of a module, so that it can be found there.
# A bench has `facts`, `measure(setting)` gives the figures of a row, and `recover()` frees what a failed row has left and
# raises if the process is of no more use.
Opener = Callable[[dict[str, Any]], Any]
# Status, reason, figures, and whether the process can go on.
Answer = tuple[str, str | None, dict[str, Any], bool]


class _Worker:
    """A process with a bench in it."""

    def __init__(self, opener: Opener, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, opener, options), daemon=True)
        self._process.start()
        theirs.close()
        self.is_open = False

    def answer(self, limit: float, setting: dict[str, Any] | None = None) -> Answer:
        """The worker's answer to a setting, within a limit of seconds. Without a setting: what the bench runs on, once it is open."""
        try:
            if setting is not None:
                self._connection.send(setting)
            if self._connection.poll(max(0.0, limit)):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=10)
            return FAILED, self._how_it_ended(), {}, False
        return FAILED, f"it took longer than the {limit:.0f} s that it had", {}, False

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
    on_change: Callable[[Sequence[Row], dict[str, Any]], None],
) -> None:
    """Measures the rows in their order until `deadline`, by `time.monotonic`; what is not begun by then is skipped.

    What became of a row is written into it. `opener` opens the bench with `options`. `on_change` gets the rows and the bench's
    facts (none before it has opened), at first, after each row and at the end.
    """
    facts: dict[str, Any] = {}
    num_starts = 0
    worker: _Worker | None = _Worker(opener, options)  # imports its libraries while this process imports its own
    try:
        on_change(rows, facts)
        for place, row in enumerate(rows):
            began = time.monotonic()
            if began >= deadline:
                _skip(rows[place:], "the time for all rows was over before this one began")
                break
            worker, is_fit = worker or _Worker(opener, options), False
            if not worker.is_open:
                _, reason, opened, worker.is_open = worker.answer(min(START_LIMIT, deadline - began))
                num_starts = 0 if worker.is_open else num_starts + 1
                facts |= opened
                row.status, row.reason = FAILED, f"no process to measure in: {reason}"
                began = time.monotonic()
            if worker.is_open:
                limit = min(row.limit, deadline - began)
                row.status, row.reason, row.figures, is_fit = worker.answer(limit, row.setting)
                row.seconds = time.monotonic() - began
            if not is_fit:
                worker.end()
                worker = None
            if num_starts == MOST_STARTS:
                _skip(rows[place + 1 :], f"{num_starts} processes in a row did not start: {reason}")
                break
            on_change(rows, facts)
        if worker is not None:
            worker.end(PATIENCE)
            worker = None
    finally:
        if worker is not None:
            worker.end()
    on_change(rows, facts)


def _skip(rows: Sequence[Row], reason: str) -> None:
    for row in rows:
        row.status, row.reason = SKIPPED, reason


def _serve(connection: Connection, opener: Opener, options: dict[str, Any]) -> None:
    """Runs in the other process: opens the bench, then measures what it is asked for."""
    try:
        bench = opener(options)
    except Exception as error:
        traceback.print_exc()
        connection.send((FAILED, reason_of(error), {}, False))
        return
    answer: Answer = (MEASURED, None, bench.facts, True)
    with suppress(EOFError):  # the other side is done
        while True:
            connection.send(answer)
            if not answer[-1]:
                return
            answer = _answer(bench, connection.recv())


def _answer(bench: Any, setting: dict[str, Any]) -> Answer:
    try:
        return MEASURED, None, bench.measure(setting), True
    except Exception as error:
        reason, status = reason_of(error), REFUSED if isinstance(error, ValueError) else FAILED
        if status == FAILED:
            traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # frames hold tensors; without them the memory can be freed
    try:
        bench.recover()
    except Exception as error:
        return FAILED, f"{reason}; after it: {reason_of(error)}", {}, False
    return status, reason, {}, True


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    what = "out of memory" if isinstance(error, MemoryError) or name == "OutOfMemoryError" else name
    return f"{what}: {lines[0][:300]}" if lines[0] else what
