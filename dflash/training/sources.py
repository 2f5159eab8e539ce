"""Opens a source by its name and reads its rows: a file, a folder, or a data set on the Hub, whole or streamed.

It uses no tokenizer.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.common.json_text import parsed_json


FORMS = "messages, prompt and completion, or text"
# What `datasets` calls the files it reads.
FILE_FORMATS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow", ".txt": "text"}

Source = str | os.PathLike[str]


@dataclass(frozen=True)
class Version:
    """A fingerprint of what a source holds, and its number of rows; `None` for a stream."""

    fingerprint: str
    num_rows: int | None


@dataclass(frozen=True)
class OpenSource:
    """A source that exists. `rows()` reads it from its beginning; `version()` describes its present content."""

    rows: Callable[[], Iterable[Mapping[str, Any]]]
    version: Callable[[], Version]


def check_split(sources: Iterable[Source], split: str) -> None:
    """Raises ValueError for a `split` other than the default `train` if all sources are files, which have no splits."""
    names = [os.fspath(source) for source in sources]
    are_files = [Path(name).expanduser().is_file() for name in names]
    if split != "train" and names and all(are_files):
        raise ValueError(
            f"--split {split} chooses a part of a data set, and the data ({', '.join(names)}) names files, which have "
            "no splits: leave --split out."
        )


def read_rows(source: str, split: str, streaming: bool = False) -> Iterable[Mapping[str, Any]]:
    """Returns an iterable over the rows of a source, which is named as [`load_examples`] takes it.

    With `streaming`, `datasets` neither downloads nor converts a whole data set: it reads rows when they are asked for.
    Rows of a file of JSON lines can be iterated once, and a malformed line raises when it is reached.

    Raises:
        ValueError: for an empty name, a split that does not exist, or a line that is not a row.
        FileNotFoundError: for a file or data set that does not exist.
    """
    return open_source(source, split, streaming).rows()


def open_source(source: str, split: str, streaming: bool = False) -> OpenSource:
    """Opens a source by its name. Without `streaming`, a data set is downloaded now.

    ValueError for an empty name or an unknown split, FileNotFoundError if there is no such source. A malformed line
    raises when `rows()` reaches it.
    """
    if not source:
        raise ValueError("The name of the data is empty: give a file, a folder, or the id of a data set on the Hub.")
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json") and path.is_file():
        return OpenSource(lambda: _read_json_lines(path), lambda: _version_of_lines(path))
    import datasets

    if path.suffix in FILE_FORMATS and path.is_file():
        file = {"path": FILE_FORMATS[path.suffix], "data_files": str(path)}
        return _opened(datasets.load_dataset_builder(**file), "train", streaming, source)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = datasets.load_from_disk(str(path))  # maps the files and reads none of them
        return _of_table(_split(saved, split, source) if isinstance(saved, dict) else saved)
    if path.suffix in (".jsonl", ".json", *FILE_FORMATS) and not path.exists():
        raise FileNotFoundError(f"{source} does not exist: give a file, a folder, or the id of a data set on the Hub.")
    name, configuration = str(path), ""
    if not path.exists():
        name, _, configuration = source.partition(":")
    try:
        return _opened(
            datasets.load_dataset_builder(name, configuration or None),
            split,
            streaming,
            source,
        )
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{source} is neither a file nor a data set that can be reached ({str(error).splitlines()[0]}): give a "
            "file, a folder, or the id of a data set on the Hub."
        ) from error


def _opened(builder: Any, split: str, streaming: bool, source: str) -> OpenSource:
    """Returns the source that a builder of `datasets` reads, streamed or as a table.

    ValueError for an unknown split.
    """
    if not streaming:
        _prepare(builder, source)
        return _of_table(_split(builder.as_dataset(), split, source))
    rows = _split(builder.as_streaming_dataset(), split, source)
    # The name of the cache's folder changes with the commit on the Hub or, for local files, with their modification
    # time.
    return OpenSource(lambda: rows, lambda: Version(f"{builder.cache_dir} {split}", None))


def _prepare(builder: Any, source: str) -> None:
    """Downloads a data set and converts it to a table in the cache; ValueError if its files do not fit one table."""
    import datasets

    try:
        builder.download_and_prepare()
    except (RecursionError, datasets.exceptions.DatasetGenerationError) as error:
        lines = str(error.__cause__ or error).strip().splitlines()
        reason = lines[-1].rstrip(".")  # after the names of all columns
        raise ValueError(
            f"{source} cannot be read as one table ({reason}): give files of one kind with the same columns, or only "
            "one file."
        ) from error


def _of_table(rows: Any) -> OpenSource:
    return OpenSource(lambda: rows, lambda: Version(rows._fingerprint, len(rows)))


def _split(splits: Mapping[str, Any], split: str, source: str) -> Any:
    if split not in splits:
        raise ValueError(f"{source} has no split {split!r}: choose one of {', '.join(splits)}.")
    return splits[split]


def file_digest(path: Path) -> str:
    """Returns a hash of a file's content, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _version_of_lines(path: Path) -> Version:
    with path.open("rb") as file:
        num_lines = sum(1 for _ in file)
    return Version(file_digest(path), num_lines)


def _read_json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parsed_json(line)
            except ValueError as error:
                raise ValueError(f"Line {number} of {path} {error}: write one object a line, in UTF-8.") from error
            if not isinstance(row, dict):
                raise ValueError(f"Line {number} of {path} is not an object: write one with {FORMS}.")
            yield row
