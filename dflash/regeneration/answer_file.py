"""The file of regenerated rows while it grows, and the manifest beside it that says what they depend on. It knows no model.

Every process appends to a file of its own, the first to the output itself, and the first joins them in order at the end.
A kill at any moment costs at most the rows under way.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash.common.manifest import manifest_path, read_manifest


class Line(NamedTuple):
    """Where a line stands, and how many lines its row is to have."""

    path: Path
    offset: int
    parts: int


class AnswerFile:
    """A run's output: JSON lines, all lines of a row together.

    Args:
        path: The output, which ends in `.jsonl`.
        settings: What its rows depend on; a run goes on with the same alone. `samples` may grow.
        rank: The number of this process.

    Raises:
        ValueError: for a path that `dflash train` would not read.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        if path.suffix != ".jsonl" or path.is_dir():
            raise ValueError(f"The output {path} must be a file that ends in .jsonl, which is how training reads it.")
        self.path = path
        self.manifest = manifest_path(path)
        self._settings = json.loads(json.dumps(settings))
        self._own = path if rank == 0 else path.with_name(f"{path.stem}.part{rank}{path.suffix}")

    def check(self, resume: bool, overwrite: bool) -> None:
        """Makes sure that this run may write here; every process does, before any of them writes.

        Raises:
            ValueError: if the output holds another run and neither `resume` nor `overwrite` is given, or a run with other
                settings is to go on (with their names), or the output is no run at all.
        """
        if resume and overwrite:
            raise ValueError("resume and overwrite are both given: go on with the run, or begin anew.")
        if not self.manifest.exists():
            if self._parts():
                raise ValueError(
                    f"{self.path} holds something else than a run (there is no {self.manifest.name}): choose another output."
                )
            return
        if not resume and not overwrite:
            raise ValueError(
                f"{self.path} holds another run: pass resume (--resume) to go on with it, overwrite (--overwrite) to begin "
                "anew, or choose another output."
            )
        if resume:
            self._refuse_changes(read_manifest(self.path)["settings"])

    def begin(self, overwrite: bool, facts: dict[str, Any]) -> None:
        """Clears away an older run if asked to, and what a kill left half-written; writes the manifest. For the first process."""
        for name in (self.path.name, self.manifest.name):
            for unfinished in self.path.parent.glob(f".{name}.*.tmp"):
                unfinished.unlink()
        if overwrite:
            for path in (*self._parts(), self.manifest):
                path.unlink(missing_ok=True)
        self.write_manifest(facts | {"complete": False})

    def mend(self) -> None:
        """Cuts half a line off the end of this process's file. Once, before the first `append`."""
        if self._own.exists():
            with self._own.open("rb") as file:
                whole = sum(len(line) for line in file if line.endswith(b"\n"))
            os.truncate(self._own, whole)

    def finished(self) -> set[int]:
        """Numbers of the rows that need not be answered again; a torn line does not count, nor its row."""
        return {number for number, lines in self._lines().items() if len(lines) == lines[0].parts}

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes lines; they stand when this returns.

        Raises:
            OSError: if they cannot be written, as on a full disk; those before them stand.
        """
        if not rows:
            return
        text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
        try:
            with self._own.open("ab") as file:
                file.write(text.encode("utf-8", errors="replace"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"{self._own} cannot be written ({error.strerror}); the rows in it stand: make room and go on with --resume."
            ) from error

    def join(self, drop_cut: bool) -> dict[str, int]:
        """Brings all lines into the output in the rows' order, aside and then renamed; how many rows and what of them.

        For the first process, when all are done.
        """
        lines = self._lines()
        counts: Counter[str] = Counter()
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with aside.open("wb") as file:
                for _, parts in sorted(lines.items()):
                    if len(parts) != parts[0].parts:
                        continue
                    texts = [_read_line(line) for line in parts]
                    rows = list(map(json.loads, texts))
                    if rows[0]["finish"] == "length":
                        counts["cut"] += 1
                        if drop_cut:
                            continue
                    file.writelines(texts)
                    counts["rows"] += 1
                    counts["tokens"] += sum(
                        sum(row.get("response_mask") or [1] * len(row["response_ids"])) for row in rows
                    )
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        except OSError as error:
            raise OSError(
                f"{self.path} cannot be put in order ({error.strerror}); its rows stand: make room and go on with --resume."
            ) from error
        finally:
            aside.unlink(missing_ok=True)
        for path in self._parts():
            if path != self.path:
                path.unlink()
        return {name: counts[name] for name in ("rows", "tokens", "cut")}

    def write_manifest(self, facts: dict[str, Any]) -> None:
        """Writes the manifest, aside and then renamed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.manifest.with_name(f".{self.manifest.name}.{os.getpid()}.tmp")
        aside.write_text(json.dumps({"settings": self._settings} | facts, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, self.manifest)

    def _parts(self) -> list[Path]:
        """The files of all processes that hold anything, the output first."""
        parts = sorted(self.path.parent.glob(f"{self.path.stem}.part*{self.path.suffix}"))
        return [path for path in (self.path, *parts) if path.is_file() and path.stat().st_size]

    def _lines(self) -> dict[int, list[Line]]:
        """Where the lines of each row are."""
        found: dict[int, list[Line]] = {}
        for path in self._parts():
            of_file: dict[int, list[Line]] = {}
            for offset, line in _whole_lines(path):
                row = json.loads(line)
                of_file.setdefault(row["row"], []).append(Line(path, offset, row["parts"]))
            for number, lines in of_file.items():
                # The last lines: a torn row was written again behind what stood of it.
                whole = lines[-lines[0].parts :]
                if len(whole) == whole[0].parts or number not in found:
                    found[number] = whole
        return found

    def _refuse_changes(self, before: dict[str, Any]) -> None:
        names = sorted({*before, *self._settings})
        changed = [name for name in names if before.get(name) != self._settings.get(name)]
        if "samples" in changed and (self._settings["samples"] or float("inf")) > (before["samples"] or float("inf")):
            changed.remove("samples")
        if changed:
            said = "; ".join(
                f"{name}: {_short(before.get(name))}, now {_short(self._settings.get(name))}" for name in changed
            )
            raise ValueError(
                f"The run to resume had other settings ({said}): give the same, choose another output, or pass overwrite "
                "(--overwrite) to begin anew."
            )


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offsets and lines; behind the last line's end there is nothing, or half a line of a process that was killed."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _read_line(line: Line) -> bytes:
    with line.path.open("rb") as file:
        file.seek(line.offset)
        return file.readline()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
