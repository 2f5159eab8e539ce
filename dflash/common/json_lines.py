"""Lines of JSON that several processes append to, each to a part of its own; the first process joins the parts.

A kill at any moment costs at most the line that is being written.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .files import replaced


class JsonLines:
    """A file of JSON lines, the first process's part, and the parts of the other processes beside it.

    `rank` is the number of this process. `remedy` continues the advice of an error after "make room and".
    """

    def __init__(self, path: Path, rank: int = 0, remedy: str = "run the same command again") -> None:
        self.path = path
        self._remedy = remedy
        self._own = path
        if rank > 0:
            self._own = path.with_name(f"{path.stem}.part{rank}{path.suffix}")

    def parts(self) -> list[Path]:
        """The parts that hold anything, the first process's first."""
        name = re.compile(rf"{re.escape(self.path.stem)}\.part\d+{re.escape(self.path.suffix)}")
        others = sorted(path for path in self.path.parent.glob("*.part*") if name.fullmatch(path.name))
        parts = [part for part in (self.path, *others) if part.is_file()]
        return [part for part in parts if part.stat().st_size]

    def mend(self) -> None:
        """Cuts half a line off the end of this process's part. Once, before the first `append`."""
        if self._own.exists():
            os.truncate(self._own, sum(len(line) for _, line in whole_lines(self._own)))

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes a line for each record to this process's part, on the disk; after an OSError earlier lines stay."""
        try:
            with self._own.open("ab") as file:
                _write(file, map(as_line, records))
        except OSError as error:
            raise self._unwritten(f"{self._own} cannot be written", error) from error

    def join(self, lines: Iterable[bytes]) -> None:
        """Replaces what the file holds by `lines` and deletes the other parts; after an OSError all parts stay."""
        try:
            with replaced(self.path) as aside, aside.open("wb") as file:
                _write(file, lines)
        except OSError as error:
            raise self._unwritten(f"{self.path} cannot be put in order", error) from error
        for part in self.parts():
            if part != self.path:
                part.unlink()

    def _unwritten(self, fault: str, error: OSError) -> OSError:
        return OSError(f"{fault} ({error.strerror}); its lines are kept: make room and {self._remedy}.")


def _write(file: IO[bytes], lines: Iterable[bytes]) -> None:
    file.writelines(lines)
    file.flush()
    os.fsync(file.fileno())


def as_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line."""
    return (json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n").encode("utf-8", errors="replace")


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offsets and lines of a file. Half a line at its end, of a process that was killed, is left out."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that differ, each as `name: 8, now 9`, for a sentence; empty if none does."""
    differing = []
    for name in sorted({*before, *now}):
        old = before.get(name)
        new = now.get(name)
        if old != new:
            differing.append(f"{name}: {_short(old)}, now {_short(new)}")
    return "; ".join(differing)


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError if the facts of a run to resume differ from those of `before`: settings, data or models."""
    changed = changes(before, now)
    if changed:
        remedy = "give the same, choose another output, or pass overwrite (--overwrite) to begin anew"
        raise ValueError(f"The run to resume differs ({changed}): {remedy}.")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
