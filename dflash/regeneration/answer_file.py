"""Writes regenerated rows to a file as they are finished, and a manifest of what they depend on beside it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dflash.common.files import check_writable, leftovers, write_text
from dflash.common.json_lines import JsonLines, refuse_changes, whole_lines
from dflash.common.manifest import manifest_path, read_manifest
from dflash.common.runs import refuse_both


class Line(NamedTuple):
    """The location of a line in a file, and the number of lines that its row takes."""

    path: Path
    offset: int  # in bytes
    num_lines: int

    def read(self) -> bytes:
        """Reads the line from the file and returns its bytes."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.readline()


def check_answer_file(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Raises an error unless a run may write its answers to `path`. Called before models are loaded, and later again.

    Raises:
        ValueError: for a path that is not a `.jsonl` file, as `dflash train` needs it; that holds something other than a run;
            or that holds a run if neither `resume` nor `overwrite` is given. Also if both are given.
        OSError: for a path that cannot be written.
    """
    if path.suffix != ".jsonl" or path.is_dir():
        raise ValueError(f"The output {path} must be a file that ends in .jsonl, which is how training reads it.")
    refuse_both(resume, overwrite)
    check_writable(path)
    manifest = manifest_path(path)
    if not manifest.exists() and JsonLines(path).parts():
        raise ValueError(
            f"{path} holds something other than a run (there is no {manifest.name}): choose another output."
        )
    if manifest.exists() and not resume and not overwrite:
        raise ValueError(
            f"{path} holds a run: pass resume (--resume) to go on with it, overwrite (--overwrite) to begin anew, or "
            "choose another output."
        )


class AnswerFile(JsonLines):
    """The output of a run as JSON lines, one or more for each row of the data. `finish` puts them in the rows' order.

    The rows depend on `settings`. A run is resumed with the same settings, of which only `samples` may grow.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        super().__init__(path, rank, remedy="go on with --resume")
        self.manifest = manifest_path(path)
        self._settings = json.loads(json.dumps(settings))
        self._dropped: list[int] = []  # numbers of the rows that were cut and are not in the file

    def _check_settings(self) -> None:
        """Raises ValueError if the run to resume had other settings; the message names them."""
        if not self.manifest.exists():
            return
        before = read_manifest(self.path)["settings"]
        samples = self._settings.get("samples")
        fewer = before.get("samples")
        if fewer is not None and (samples is None or samples > fewer):
            before["samples"] = samples
        refuse_changes(before, self._settings)

    def begin(self, overwrite: bool, facts: dict[str, Any]) -> None:
        """Deletes temporary files of a killed run and, with `overwrite`, the older run; then writes the manifest.

        Only the first process calls it.
        """
        for path in (self.path, self.manifest):
            for unfinished in leftovers(path, "*.tmp"):
                unfinished.unlink()
        if overwrite:
            for path in (*self.parts(), self.manifest):
                path.unlink(missing_ok=True)
        self.write_manifest(facts | {"complete": False})

    def mend(self) -> None:
        """Cuts an incomplete last line off this process's part, and the lines of an incomplete last row."""
        super().mend()
        if not self._own.exists():
            return
        offsets = [offset for offset, _ in whole_lines(self._own)]
        last_row: list[int] = []  # offsets of its lines
        number = num_lines = 0
        for offset in reversed(offsets):
            line = json.loads(Line(self._own, offset, 1).read())
            if last_row and line["row"] != number:
                break
            number = line["row"]
            num_lines = line["parts"]
            last_row.append(offset)
        if len(last_row) < num_lines:
            os.truncate(self._own, last_row[-1])

    def finished(self, drop_cut: bool = False) -> set[int]:
        """Returns the numbers of rows that the run to resume has answered; with `drop_cut`, also of those it dropped.

        Called before `begin`, because the manifest keeps the dropped ones. ValueError if that run had other settings.
        """
        self._check_settings()
        if drop_cut and self.manifest.exists():
            self._dropped = read_manifest(self.path).get("dropped", [])
        return {*self._lines(), *self._dropped}

    def finish(self, drop_cut: bool) -> dict[str, int]:
        """Joins the parts of all processes in the rows' order, and returns the counts `rows`, `tokens` and `cut` (rows).

        With `drop_cut`, cut rows are left out. Only the first process calls it, when all have finished.

        Raises:
            OSError: if the output cannot be written; the parts stay.
            ValueError: if `drop_cut` would leave no row; the parts stay.
        """
        counts = {"rows": 0, "tokens": 0, "cut": len(self._dropped)}
        self.join(self._ordered(drop_cut, counts))
        return counts

    def write_manifest(self, facts: dict[str, Any]) -> None:
        """Replaces the manifest with the run's settings and `facts`, in one rename."""
        manifest = {"settings": self._settings, **facts}
        if self._dropped:
            manifest["dropped"] = self._dropped
        write_text(self.manifest, json.dumps(manifest, indent=1) + "\n")

    def _ordered(self, drop_cut: bool, counts: dict[str, int]) -> Iterator[bytes]:
        dropped = list(self._dropped)
        for number, lines in sorted(self._lines().items()):
            texts = [line.read() for line in lines]
            rows = [json.loads(text) for text in texts]
            is_cut = rows[0]["finish"] == "length"
            counts["cut"] += is_cut
            if is_cut and drop_cut:
                dropped.append(number)
                continue
            counts["rows"] += 1
            for row in rows:
                mask = row.get("response_mask") or [1] * len(row["response_ids"])
                counts["tokens"] += sum(mask)
            yield from texts
        if not counts["rows"]:
            raise ValueError(f"Every one of the {counts['cut']} answers was cut off: give a larger max_new_tokens.")
        self._dropped = dropped

    def _lines(self) -> dict[int, list[Line]]:
        """Returns the locations of the lines of each complete row, in all parts, by the row's number."""
        rows: dict[int, list[Line]] = {}
        for part in self.parts():
            of_part: dict[int, list[Line]] = {}
            for offset, text in whole_lines(part):
                row = json.loads(text)
                line = Line(part, offset, row["parts"])
                of_part.setdefault(row["row"], []).append(line)
            for number, lines in of_part.items():
                if len(lines) == lines[0].num_lines:  # a killed process may have written fewer
                    rows[number] = lines
        return rows
