"""The answers of an evaluation on disk, a line for each finished question: a run that was stopped continues there."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash.common.json_lines import JsonLines, as_line, changes, whole_lines

from .task_answers import TaskAnswer
from .tasks import Question


class Journal(JsonLines):
    """The file of finished questions, its first line the settings that the answers depend on.

    A question is known by its task, row and text, so more prompts, other tasks and another number of processes may
    follow. Other settings may not.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        super().__init__(path, rank)
        self._settings = json.loads(json.dumps(settings))

    def read(self) -> dict[str, list[TaskAnswer]]:
        """Finished questions of all processes by [`key`]; ValueError if a part was begun with other settings."""
        finished: dict[str, list[TaskAnswer]] = {}
        for part in self.parts():
            lines = [json.loads(line) for _, line in whole_lines(part)]
            changed = changes(lines[0]["settings"], self._settings) if lines else ""
            if changed:
                remedy = "give them again, name another --output, or pass overwrite (--overwrite) to begin anew"
                raise ValueError(f"{part} was begun with other settings ({changed}): {remedy}.")
            for record in lines[1:]:
                finished[record["key"]] = [TaskAnswer(**answer) for answer in record["answers"]]
        return finished

    def add(self, question: Question, answers: list[TaskAnswer]) -> None:
        """Writes a finished question; it is on the disk when this returns."""
        records: list[dict[str, Any]] = [{"key": key(question), "answers": [asdict(answer) for answer in answers]}]
        if not self._own.exists() or not self._own.stat().st_size:
            records.insert(0, {"settings": self._settings})
        self.append(records)

    def join_parts(self) -> None:
        """Brings the lines of all processes into the one file. For the first process, when all are done."""
        parts = self.parts()
        if parts != [self.path]:
            finished = [line for part in parts for offset, line in whole_lines(part) if offset > 0]
            self.join([as_line({"settings": self._settings}), *finished])

    def delete(self) -> None:
        """Deletes all parts. For the first process, before any is read."""
        for part in self.parts():
            part.unlink()


def key(question: Question) -> str:
    """A question's task, row and the hash of its text, by which it is known again."""
    text = json.dumps([question.turns, question.reference, *question.before], default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{question.task}/{question.index}/{digest}"
