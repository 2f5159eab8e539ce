"""Measures rows one after another in a process of their own, so that a row that fails or hangs loses only itself.

A row is a dict; what became of it is written into it. One that exceeds its limit in seconds, or that ends the process, is
noted, and a new process goes on with the next. Rows of another group have a new process, too. This module knows no model and
no torch; the bench that it opens in the other process measures.
"""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
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


def new_row(name: str, group: str, limit: float, **setting: Any) -> Row:
    """A row that may take `limit` seconds in a process of its group; `seconds` is `None` where it was not begun."""
    outcome = {"status": SKIPPED, "reason": "not begun yet", "seconds": None}
    return {"name": name, "group": group, "limit": limit, **outcome, **setting}


class _LostError(Exception):
    """The process gave no answer."""


class _Worker:
    """A process that opens a bench and measures rows, from the first to the last."""

    def __init__(self, opener: Opener, options: dict[str, Any], rows: Sequence[Row]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, opener, options, rows), daemon=True)
        self._process.start()
        other_end.close()

    def receive(self, limit: float) -> dict[str, Any]:
        """Its next answer, within a limit of seconds."""
        try:
            if self._connection.poll(max(0.0, limit)):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=10)
            code = self._process.exitcode
            if code is None or code >= 0:
                raise _LostError(f"its process ended with status {code}") from None
            memory = ", as a system that is out of memory does" if code == -signal.SIGKILL else ""
            raise _LostError(f"its process was ended by signal {-code}{memory}") from None
        raise _LostError(f"it took longer than the {limit:.0f} s that it had")

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.join()


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
    num_failed_starts = place = 0
    on_change(rows, facts)
    while place < len(rows):
        if time.monotonic() >= deadline:
            _skip(rows[place:], "the time for all rows was over before this one began")
            break
        worker = _Worker(opener, options, [row for row in rows[place:] if row["group"] == rows[place]["group"]])
        try:
            answer = worker.receive(min(START_LIMIT, deadline - time.monotonic()))
            if "error" in answer:
                raise _LostError(answer["error"])
            facts |= answer
            num_failed_starts = 0
            place = _measure(rows, place, worker, deadline, partial(on_change, rows, facts))
        except _LostError as error:
            num_failed_starts += 1
            rows[place].update(status=FAILED, reason=f"no process to measure in: {error}")
            place += 1
            on_change(rows, facts)
            if num_failed_starts == MOST_STARTS:
                _skip(rows[place:], f"{num_failed_starts} processes in a row did not start: {error}")
                break
        finally:
            worker.end()
    on_change(rows, facts)


def _measure(rows: Sequence[Row], place: int, worker: _Worker, deadline: float, on_change: Callable[[], None]) -> int:
    """Waits for the rows of one worker, from a place on; returns the place of the first that needs another worker."""
    group = rows[place]["group"]
    is_fit = True
    while is_fit and place < len(rows) and rows[place]["group"] == group and time.monotonic() < deadline:
        row, began = rows[place], time.monotonic()
        try:
            answer = worker.receive(min(row["limit"], deadline - began))
        except _LostError as error:
            answer = {"status": FAILED, "reason": str(error), "is_fit": False}
        is_fit = answer.pop("is_fit")
        row.update(answer, seconds=round(time.monotonic() - began, 2))
        place += 1
        on_change()
    return place


def _skip(rows: Sequence[Row], reason: str) -> None:
    for row in rows:
        row.update(status=SKIPPED, reason=reason)


def _serve(connection: Connection, opener: Opener, options: dict[str, Any], rows: Sequence[Row]) -> None:
    """Runs in the other process: opens the bench, then measures the rows."""
    try:
        bench = opener(options)
    except Exception as error:
        traceback.print_exc()
        connection.send({"error": reason_of(error)})
        return
    connection.send(bench.facts)
    for row in rows:
        outcome = _outcome(bench, row)
        connection.send(outcome)
        if not outcome["is_fit"]:
            return


def _outcome(bench: Any, row: Row) -> dict[str, Any]:
    """What becomes of a row, and whether the process can go on."""
    try:
        return {"status": MEASURED, "reason": None, **bench.measure(row), "is_fit": True}
    except Exception as error:
        reason = reason_of(error)
        status = REFUSED if isinstance(error, ValueError) else FAILED
        if status == FAILED:
            traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # frames hold tensors; without them the memory can be freed
    try:
        bench.recover()
    except Exception as error:
        return {"status": FAILED, "reason": f"{reason}; after it: {reason_of(error)}", "is_fit": False}
    return {"status": status, "reason": reason, "is_fit": True}


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    what = "out of memory" if isinstance(error, MemoryError) or name == "OutOfMemoryError" else name
    return f"{what}: {lines[0][:300]}" if lines[0] else what
