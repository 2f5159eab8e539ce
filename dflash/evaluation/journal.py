"""Keeps the answers of an evaluation on disk, a line for each finished question, so that a stopped run can continue."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash.common.fingerprints import fingerprint
from dflash.common.json_lines import JsonLines, as_line, changes, whole_lines

from .task_answers import TaskAnswer
from .tasks import Question


# With which a journal begins.
BEGINNING = b'{"settings":'


class Journal(JsonLines):
    """The file of finished questions. Its first line holds the settings that the answers depend on.

    A question is identified by its task, row and text. A later run may therefore have more prompts, other tasks or another
    number of processes, but no other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        super().__init__(path, rank)
        self._settings = json.loads(json.dumps(settings))

    def parts(self) -> list[Path]:
        """The parts that hold anything; ValueError if one is no journal, so that nothing else is cut, replaced or deleted."""
        parts = super().parts()
        for part in parts:
            with part.open("rb") as file:
                beginning = file.read(len(BEGINNING))
            if not BEGINNING.startswith(beginning):  # of a run that was killed at once there is less
                raise ValueError(
                    f"{part} is no journal of an evaluation, and one would be written there: name another --output."
                )
        return parts

    def read(self) -> dict[str, list[TaskAnswer]]:
        """Finished questions of all processes by [`key`]; ValueError if a part was begun with other settings."""
        finished: dict[str, list[TaskAnswer]] = {}
        for part in self.parts():
            records = [json.loads(line) for _, line in whole_lines(part)]
            if not records:
                continue
            begun, *records = records
            changed = changes(begun["settings"], self._settings)
            if changed:
                raise ValueError(
                    f"{part} was begun with other settings ({changed}): give them again, name another --output, or pass "
                    "overwrite (--overwrite) to begin anew."
                )
            for record in records:
                answers = [TaskAnswer(**answer) for answer in record["answers"]]
                finished[record["key"]] = answers
        return finished

    def add(self, question: Question, answers: list[TaskAnswer]) -> None:
        """Writes a finished question; it is on the disk when this returns."""
        size = self._own.stat().st_size if self._own.exists() else 0
        if not size:
            self.append([{"settings": self._settings}])
        records = [asdict(answer) for answer in answers]
        self.append([{"key": key(question), "answers": records}])

    def join_parts(self) -> None:
        """Joins the lines of all processes in one file. Called by the first process when all are done."""
        parts = self.parts()
        if parts == [self.path]:
            return
        lines = [as_line({"settings": self._settings})]
        for part in parts:
            _, *finished = whole_lines(part)
            lines += [line for _, line in finished]
        self.join(lines)

    def delete(self) -> None:
        """Deletes all parts. Called by the first process, before any process reads."""
        for part in self.parts():
            part.unlink()


def key(question: Question) -> str:
    """What identifies a question: its task, its row and the hash of its text."""
    text = [question.turns, question.reference, *question.before]
    return f"{question.task}/{question.index}/{fingerprint(text)}"
