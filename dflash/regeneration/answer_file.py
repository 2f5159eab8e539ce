"""The file of regenerated rows while it grows, and the manifest beside it that says what they depend on."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dflash.common.files import check_writable, write_text
from dflash.common.json_lines import JsonLines, changes, whole_lines
from dflash.common.manifest import manifest_path, read_manifest


class Line(NamedTuple):
    """Where a line is, and how many lines its row has."""

    path: Path
    offset: int
    parts: int


def check_answer_file(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Makes sure that a run may write its answers to `path`: asked before models are loaded, and before writing.

    Raises:
        ValueError: for a path that `dflash train` would not read, that holds something else than a run, or that holds
            a run while neither `resume` nor `overwrite` is given.
        OSError: for a path that cannot be written.
    """
    if path.suffix != ".jsonl" or path.is_dir():
        raise ValueError(f"The output {path} must be a file that ends in .jsonl, which is how training reads it.")
    if resume and overwrite:
        raise ValueError("resume and overwrite are both given: go on with the run, or begin anew.")
    check_writable(path)
    manifest = manifest_path(path)
    if not manifest.exists() and JsonLines(path).parts():
        said = f"{path} holds something else than a run (there is no {manifest.name})"
        raise ValueError(f"{said}: choose another output.")
    if manifest.exists() and not resume and not overwrite:
        remedy = "resume (--resume) to go on with it, overwrite (--overwrite) to begin anew, or choose another output"
        raise ValueError(f"{path} holds another run: pass {remedy}.")


class AnswerFile(JsonLines):
    """A run's output: JSON lines, all lines of a row together at the end.

    Its rows depend on `settings`. A run is continued with the same; only `samples` may grow.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        super().__init__(path, rank, remedy="go on with --resume")
        self.manifest = manifest_path(path)
        self._settings = json.loads(json.dumps(settings))

    def check_settings(self) -> None:
        """Raises ValueError, with their names, if the run to resume had other settings."""
        before = read_manifest(self.path)["settings"] if self.manifest.exists() else self._settings
        samples = self._settings.get("samples")
        if (samples or float("inf")) > (before.get("samples") or float("inf")):
            before = before | {"samples": samples}
        if changed := changes(before, self._settings):
            remedy = "give the same, choose another output, or pass overwrite (--overwrite) to begin anew"
            raise ValueError(f"The run to resume had other settings ({changed}): {remedy}.")

    def begin(self, overwrite: bool, facts: dict[str, Any]) -> None:
        """Deletes an older run if asked to, and files of a kill; writes the manifest. For the first process."""
        for name in (self.path.name, self.manifest.name):
            for unfinished in self.path.parent.glob(f".{name}.*.tmp"):
                unfinished.unlink()
        if overwrite:
            for path in (*self.parts(), self.manifest):
                path.unlink(missing_ok=True)
        self.write_manifest(facts | {"complete": False})

    def finished(self) -> set[int]:
        """Numbers of the rows that are complete; a torn line does not count, nor does its row."""
        return {number for number, lines in self._lines().items() if len(lines) == lines[0].parts}

    def finish(self, drop_cut: bool) -> dict[str, int]:
        """Joins the parts in the rows' order, without cut rows if `drop_cut`; counts "rows", "tokens" and "cut" rows.

        For the first process, when all are done. OSError if the output cannot be written; the parts stay.
        """
        counts: Counter[str] = Counter(rows=0, tokens=0, cut=0)
        self.join(self._ordered(drop_cut, counts))
        return dict(counts)

    def write_manifest(self, facts: dict[str, Any]) -> None:
        """Writes the manifest."""
        write_text(self.manifest, json.dumps({"settings": self._settings} | facts, indent=1) + "\n")

    def _ordered(self, drop_cut: bool, counts: Counter[str]) -> Iterator[bytes]:
        for _, parts in sorted(self._lines().items()):
            if len(parts) != parts[0].parts:
                continue
            texts = []
            for path, offset, _ in parts:
                with path.open("rb") as file:
                    file.seek(offset)
                    texts.append(file.readline())
            rows = list(map(json.loads, texts))
            is_cut = rows[0]["finish"] == "length"
            counts["cut"] += is_cut
            if is_cut and drop_cut:
                continue
            yield from texts
            counts["rows"] += 1
            counts["tokens"] += sum(sum(row.get("response_mask") or [1] * len(row["response_ids"])) for row in rows)

    def _lines(self) -> dict[int, list[Line]]:
        """The lines of each row."""
        found: dict[int, list[Line]] = {}
        for path in self.parts():
            of_part: dict[int, list[Line]] = {}
            for offset, line in whole_lines(path):
                row = json.loads(line)
                of_part.setdefault(row["row"], []).append(Line(path, offset, row["parts"]))
            for number, lines in of_part.items():
                # The last lines: a torn row was written again after what was left of it.
                whole = lines[-lines[0].parts :]
                if len(whole) == whole[0].parts or number not in found:
                    found[number] = whole
        return found
