"""Which questions are finished: a line each, so that a run that was stopped goes on where it was. It knows no model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .answers import Answer
from .tasks import Question


class Journal:
    """The file of one process, and what it and its siblings' files hold.

    The first line of a file is what its answers depend on. A question is known by its task, its row and what is asked, so
    that more prompts, other tasks and another number of processes may follow; nothing else may change.

    Args:
        path: The journal's file; processes but the first write beside it and their lines are joined to it at the end.
        settings: What the answers depend on.
        rank: The number of this process.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        self.path = path
        self._own = path if rank == 0 else path.with_name(f"{path.stem}.part{rank}{path.suffix}")
        self._settings = json.loads(json.dumps(settings))

    def read(self) -> dict[str, list[Answer]]:
        """Finished questions by [`key`]; half a line at a file's end, of a process that was killed, does not count.

        Raises:
            ValueError: if a file was begun with other settings, with their names.
        """
        found: dict[str, list[Answer]] = {}
        for path in self._files():
            lines = path.read_bytes().split(b"\n")[:-1]  # behind the last line's end there is nothing, or half a line
            if not lines:
                continue
            self._check(path, json.loads(lines[0])["settings"])
            for line in lines[1:]:
                record = json.loads(line)
                found[record["key"]] = [Answer(**answer) for answer in record["answers"]]
        return found

    def append(self, question: Question, answers: list[Answer]) -> None:
        """Writes a finished question; it stands when this returns."""
        record = {"key": key(question), "answers": [asdict(answer) for answer in answers]}
        begins = not self._own.exists() or not self._own.stat().st_size
        with self._own.open("ab") as file:
            if begins:
                file.write(_line({"settings": self._settings}))
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def mend(self) -> None:
        """Cuts half a line off the end of this process's file. Once, before the first `append`."""
        if self._own.exists():
            content = self._own.read_bytes()
            os.truncate(self._own, content.rfind(b"\n") + 1)

    def join(self) -> None:
        """Brings the siblings' lines into the one file. For the first process, when all are done."""
        for path in self._files():
            if path == self.path:
                continue
            lines = path.read_bytes().split(b"\n")[:-1]
            begins = not self.path.exists() or not self.path.stat().st_size
            with self.path.open("ab") as file:
                file.writelines(line + b"\n" for line in (lines if begins else lines[1:]))
            path.unlink()

    def _files(self) -> list[Path]:
        parts = sorted(self.path.parent.glob(f"{self.path.stem}.part*{self.path.suffix}"))
        return [path for path in (self.path, *parts) if path.exists()]

    def _check(self, path: Path, settings: dict[str, Any]) -> None:
        names = sorted({*settings, *self._settings})
        changed = [name for name in names if settings.get(name) != self._settings.get(name)]
        if changed:
            said = ", ".join(
                f"{name} {_short(settings.get(name))}, now {_short(self._settings.get(name))}" for name in changed
            )
            raise ValueError(
                f"{path} was begun with other settings ({said}): give them again, name another --output, or delete the file."
            )


def key(question: Question) -> str:
    """By which a finished question is known again: its task, its row and its text."""
    text = json.dumps([question.turns, question.reference], default=str)
    return f"{question.task}/{question.index}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def unfinished(questions: Iterable[Question], done: Iterable[str]) -> list[Question]:
    """Those that are not in the journal, in their order."""
    known = set(done)
    return [question for question in questions if key(question) not in known]


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
