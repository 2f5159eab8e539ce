"""Writes regenerated rows to a file as they are finished. A manifest beside it says what they depend on."""

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
    """The location of a line in a file, and the number of lines of its row."""

    path: Path
    offset: int  # in bytes
    num_lines: int

    def read(self) -> bytes:
        """Reads the line from the file and returns its bytes."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.readline()


def check_answer_file(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Raises an error unless a run may write its answers to `path`. Call it before models are loaded.

    [`regenerate_data`] calls it too.

    Raises:
        ValueError: if `path` is a folder or does not end in `.jsonl`, as `dflash train` needs; if it holds something
            other than a run; if it holds a run and neither `resume` nor `overwrite` is given; or if both `resume` and
            `overwrite` are given.
        OSError: if `path` cannot be written.
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
    """The output of a run as JSON lines, one or more for each row of the data. `finish` sorts them by row.

    `settings` are what the rows depend on. A run can be resumed only with the same settings, except for a larger
    `samples`.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        super().__init__(path, rank, remedy="go on with --resume")
        self.manifest = manifest_path(path)
        self._settings = json.loads(json.dumps(settings))
        self._dropped: list[int] = []  # numbers of rows that were cut and are not in the file

    def _check_settings(self) -> None:
        """Raises ValueError if the run to resume had other settings. The message names those that differ."""
        if not self.manifest.exists():
            return
        before = read_manifest(self.path)["settings"]
        samples = self._settings.get("samples")
        before_samples = before.get("samples")
        if before_samples is not None and (samples is None or samples > before_samples):
            before["samples"] = samples
        refuse_changes(before, self._settings)

    def begin(self, overwrite: bool, facts: dict[str, Any]) -> None:
        """Deletes temporary files of a killed run and, with `overwrite`, the older run. Then writes the manifest.

        Only the first process may call it.
        """
        for path in (self.path, self.manifest):
            for unfinished in leftovers(path, "*.tmp"):
                unfinished.unlink()
        if overwrite:
            for path in (*self.parts(), self.manifest):
                path.unlink(missing_ok=True)
        self.write_manifest(facts | {"complete": False})

    def mend(self) -> None:
        """Removes an incomplete last line from this process's part, and then the lines of an incomplete last row."""
        super().mend()
        if not self._own.exists():
            return
        offsets = [offset for offset, _ in whole_lines(self._own)]
        last_row: list[int] = []  # offsets of its lines
        row_number = num_lines = 0
        for offset in reversed(offsets):
            line = json.loads(Line(self._own, offset, 1).read())
            if last_row and line["row"] != row_number:
                break
            row_number = line["row"]
            num_lines = line["parts"]
            last_row.append(offset)
        if len(last_row) < num_lines:
            os.truncate(self._own, last_row[-1])

    def finished(self, drop_cut: bool = False) -> set[int]:
        """Returns the numbers of the rows that the run to resume has answered. With `drop_cut`, dropped rows count too.

        Call it before `begin`, which rewrites the manifest: the dropped numbers are read from it here. ValueError if
        the run to resume had other settings.
        """
        self._check_settings()
        if drop_cut and self.manifest.exists():
            self._dropped = read_manifest(self.path).get("dropped", [])
        return {*self._lines(), *self._dropped}

    def finish(self, drop_cut: bool) -> dict[str, int]:
        """Joins the parts of all processes, sorted by row, and returns the counts `rows`, `tokens` and `cut` (rows).

        With `drop_cut`, cut rows are left out. Only the first process may call it, after all have finished.

        Raises:
            OSError: if the output cannot be written; the parts stay.
            ValueError: if `drop_cut` would leave no row; the parts stay.
        """
        counts = {"rows": 0, "tokens": 0, "cut": len(self._dropped)}
        self.join(self._ordered(drop_cut, counts))
        return counts

    def write_manifest(self, facts: dict[str, Any]) -> None:
        """Replaces the manifest in one rename. The new one holds the run's settings and `facts`."""
        manifest = {"settings": self._settings, **facts}
        if self._dropped:
            manifest["dropped"] = self._dropped
        write_text(self.manifest, json.dumps(manifest, indent=1) + "\n")

    def _ordered(self, drop_cut: bool, counts: dict[str, int]) -> Iterator[bytes]:
        """Yields the lines of complete rows, sorted by row, and adds up `counts`. ValueError if no row is left."""
        dropped = list(self._dropped)
        for row_number, lines in sorted(self._lines().items()):
            texts = [line.read() for line in lines]
            rows = [json.loads(text) for text in texts]
            is_cut = rows[0]["finish"] == "length"
            counts["cut"] += is_cut
            if is_cut and drop_cut:
                dropped.append(row_number)
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
        """Returns the lines of each complete row as locations, from all parts, by the number of the row."""
        rows: dict[int, list[Line]] = {}
        for part in self.parts():
            lines_of_rows: dict[int, list[Line]] = {}
            for offset, text in whole_lines(part):
                row = json.loads(text)
                line = Line(part, offset, row["parts"])
                lines_of_rows.setdefault(row["row"], []).append(line)
            for row_number, lines in lines_of_rows.items():
                if len(lines) == lines[0].num_lines:  # a killed process may have written fewer
                    rows[row_number] = lines
        return rows
