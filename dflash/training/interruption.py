"""Signals that ask a run to end, kept until the step at hand has ended."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While it is entered, SIGTERM and the first SIGINT are noted in `number`; a second SIGINT interrupts at once.

    Off the main thread, where Python lets nobody listen, it notes nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
