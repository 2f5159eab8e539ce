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
        found: dict[str, list[TaskAnswer]] = {}
        for part in self.parts():
            lines = [json.loads(line) for _, line in whole_lines(part)]
            if lines and (changed := changes(lines[0]["settings"], self._settings)):
                remedy = "give them again, name another --output, or pass overwrite (--overwrite) to begin anew"
                raise ValueError(f"{part} was begun with other settings ({changed}): {remedy}.")
            for record in lines[1:]:
                found[record["key"]] = [TaskAnswer(**answer) for answer in record["answers"]]
        return found

    def add(self, question: Question, answers: list[TaskAnswer]) -> None:
        """Writes a finished question; it is on the disk when this returns."""
        begins = not self._own.exists() or not self._own.stat().st_size
        record = {"key": key(question), "answers": [asdict(answer) for answer in answers]}
        self.append([{"settings": self._settings}, record] if begins else [record])

    def join_parts(self) -> None:
        """Brings the lines of all processes into the one file. For the first process, when all are done."""
        if self.parts() != [self.path]:
            own = (line for part in self.parts() for offset, line in whole_lines(part) if offset)
            self.join([as_line({"settings": self._settings}), *own])


def key(question: Question) -> str:
    """A question's task, row and the hash of its text, by which it is known again."""
    text = json.dumps([question.turns, question.reference, *question.before], default=str)
    return f"{question.task}/{question.index}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
