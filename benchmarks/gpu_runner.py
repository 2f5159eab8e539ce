"""Measures rows one after another in a process of their own, so that a row that fails or hangs loses only itself.

A row is a dict; what became of it is written into it. One that exceeds its limit in seconds, or that ends the process, is
noted, and a new process goes on with the next. This module knows no model and no torch; the bench that it opens in the
other process measures.
"""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


START_LIMIT = 180.0  # seconds for a process to import its libraries and find the device
MOST_STARTS = 2  # processes in a row that end before they have opened a bench; then the other rows are given up

# Refused: it cannot be run, by a ValueError.
MEASURED, REFUSED, FAILED, SKIPPED = "measured", "refused", "failed", "skipped"

Row = dict[str, Any]
# Opens a bench in the other process, from options that can be pickled; a function of a module, so that it can be found there.
# A bench has `facts`, `measure(row)` gives the figures of a row, and `recover()` frees what a failed row has left and
# raises if the process is of no more use.
Opener = Callable[[dict[str, Any]], Any]
# Status, reason, figures, and whether the process can go on.
Answer = tuple[str, str | None, dict[str, Any], bool]


def new_row(name: str, limit: float, **setting: Any) -> Row:
    """A row that may take `limit` seconds, with its setting for the bench; `seconds` is `None` where it was not begun."""
    return {"name": name, "limit": limit, "status": SKIPPED, "reason": "not begun yet", "seconds": None, **setting}


class _Worker:
    """A process with a bench in it."""

    def __init__(self, opener: Opener, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, opener, options), daemon=True)
        self._process.start()
        theirs.close()
        self.is_open, self.is_fit = False, True

    def answer(self, limit: float, row: Row | None = None) -> tuple[str, str | None, dict[str, Any]]:
        """The worker's answer to a row, within a limit of seconds. Without a row: what the bench runs on, once it is open."""
        answer: Answer = FAILED, f"it took longer than the {limit:.0f} s that it had", {}, False
        try:
            if row is not None:
                self._connection.send(row)
            if self._connection.poll(max(0.0, limit)):
                answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=10)
            answer = FAILED, self._how_it_ended(), {}, False
        self.is_open = self.is_fit = answer[-1]
        if not self.is_fit:
            self.end()
        return answer[:-1]

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._connection.close()
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

    `opener` opens the bench with `options`. `on_change` gets the rows and the bench's facts (none before it has opened), at
    first, after each row and at the end.
    """
    facts: dict[str, Any] = {}
    num_starts = 0
    worker = _Worker(opener, options)  # imports its libraries while this process imports its own
    try:
        on_change(rows, facts)
        for place, row in enumerate(rows):
            began = time.monotonic()
            if began >= deadline:
                _skip(rows[place:], "the time for all rows was over before this one began")
                break
            worker = worker if worker.is_fit else _Worker(opener, options)
            if not worker.is_open:
                _, reason, opened = worker.answer(min(START_LIMIT, deadline - began))
                facts |= opened
                num_starts = 0 if worker.is_open else num_starts + 1
                row |= {"status": FAILED, "reason": f"no process to measure in: {reason}"}
                began = time.monotonic()
            if worker.is_open:
                status, why, figures = worker.answer(min(row["limit"], deadline - began), row)
                seconds = round(time.monotonic() - began, 2)
                row |= {"status": status, "reason": why, "seconds": seconds, **figures}
            elif num_starts == MOST_STARTS:
                _skip(rows[place + 1 :], f"{num_starts} processes in a row did not start: {reason}")
                break
            on_change(rows, facts)
    finally:
        worker.end()
    on_change(rows, facts)


def _skip(rows: Sequence[Row], reason: str) -> None:
    for row in rows:
        row |= {"status": SKIPPED, "reason": reason}


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


def _answer(bench: Any, row: Row) -> Answer:
    try:
        return MEASURED, None, bench.measure(row), True
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
