"""Encoded sequences of a source, kept in the cache of `datasets` and read from there by every later start.

A table of `datasets` holds them, which is mapped into memory and not read into it. Its key says what decided the encoding; its
last row is the digest of the others. A table of which either is wrong is written again.
"""

import hashlib
import json
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import transformers
from filelock import FileLock

from dflash.common.fingerprints import fingerprint
from dflash.common.messages import first_line

from .data import Example, Wanted, encoded
from .lazy_sequences import LazySequence
from .sources import open_source


# Part of the key: another number makes all tables old. For a change of `encode` that makes other sequences of the same rows.
ENCODING = 1
# Of fewer rows no table is kept: they are encoded sooner than `datasets` is imported (0.6 s; a chat takes about 0.5 ms).
CACHED_ROWS = 2000

COLUMNS = {"input_ids": ("int32", "i"), "loss_mask": ("int8", "b"), "rejected": ("int32", "i")}


class StoredExamples(LazySequence[Example]):
    """The examples of a table, each read from the mapped file when it is asked for."""

    def __init__(self, table: Any) -> None:
        self.digest = table.column("digest")[-1].as_py()
        chunks = [table.column(name).chunks for name in COLUMNS]
        self._begins = [0, *accumulate(map(len, chunks[0]))]
        self._chunks = list(zip(*([_values(chunk) for chunk in column] for column in chunks), strict=True))

    def __len__(self) -> int:
        return self._begins[-1] - 1

    def read(self, place: int) -> Example:
        """The example at `place`, in arrays of its own."""
        chunk = bisect_right(self._begins, place) - 1
        row, arrays = place - self._begins[chunk], []
        for (offsets, values), (_, typecode) in zip(self._chunks[chunk], COLUMNS.values(), strict=True):
            size = array(typecode).itemsize
            arrays.append(array(typecode, bytes(values[size * offsets[row] : size * offsets[row + 1]])))
        return Example(*arrays)

    def lengths(self) -> list[int]:
        """The length of each example, by where it begins in the table."""
        of_chunks = [numpy.diff(tokens_begin) for (tokens_begin, _), *_ in self._chunks]
        return numpy.concatenate(of_chunks)[:-1].tolist()

    @property
    def has_rejected(self) -> bool:
        """Whether an example has anchors of drafts that verification rejected."""
        return any(begins[0] < begins[-1] for *_, (begins, _) in self._chunks)

    def is_whole(self) -> bool:
        """Whether the digest in the table is that of its examples."""
        digest = _Digest()
        for example in self:
            digest.add(example)
        return self.digest == digest.text()


def cached_examples(
    source: str,
    tokenizer: Any,
    *,
    split: str = "train",
    max_length: int | None = None,
    streaming: bool = False,
    wanted: Wanted | None = None,
    announce: Callable[[str], None] | None = None,
    **template_kwargs: Any,
) -> StoredExamples | list[Example]:
    """What `load_examples` gives, encoded once: of `CACHED_ROWS` or more a table is kept, which later starts read.

    Processes that start together wait for the one that encodes. `announce` is told where the table is kept, or why it cannot be;
    then this start goes on without. Old tables are not deleted. Arguments and errors: as of
    [`load_examples`].
    """
    opened = open_source(source, split, streaming)

    def encode_all() -> Iterator[Example]:
        return encoded(opened.rows(), source, tokenizer, max_length, wanted, template_kwargs)

    rules = tokenizer_rules(tokenizer)
    if rules is None or (wanted is not None and wanted.samples < CACHED_ROWS):
        return list(encode_all())
    version = opened.version()
    if version.num_rows is not None and version.num_rows < CACHED_ROWS:
        return list(encode_all())
    asked = [max_length, None if wanted is None else vars(wanted), template_kwargs]
    key = fingerprint([ENCODING, version.fingerprint, rules, asked])

    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE, "dflash", key)

    def begin() -> None:
        if announce is not None:
            announce(f"{source} is encoded once and kept in {folder}.")

    try:
        return _kept(folder, encode_all, begin)
    except _CannotKeep as error:
        if announce is not None:
            announce(
                f"The encoded sequences of {source} cannot be kept in {folder.parent} ({error}), so every start encodes them: make "
                "room there, or set HF_DATASETS_CACHE to a folder that can be written."
            )
        return list(encode_all())


def tokenizer_rules(tokenizer: Any) -> str | None:
    """A short hash of all that decides what `tokenizer` makes of a text; `None` of one that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    for of_last_call in ("truncation", "padding"):
        rules.pop(of_last_call, None)
    of_folder = {name for name in tokenizer.init_kwargs if name == "name_or_path" or name.endswith("_file")}
    options = {name: value for name, value in tokenizer.init_kwargs.items() if name not in of_folder}
    options = {name: value for name, value in options.items() if value not in (None, {}, [])}  # which saving adds
    versions = transformers.__version__, tokenizers.__version__
    said = [type(tokenizer).__name__, rules, options, tokenizer.chat_template, tokenizer.special_tokens_map]
    return fingerprint([*said, tokenizer.eos_token_id, versions])


class _CannotRead(Exception):
    """Reading the data failed; the argument is how."""


class _CannotKeep(Exception):
    """Nothing can be written where tables are kept."""


class _Digest:
    """The digest of examples, which are added one by one."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, example: Example) -> None:
        for values in (example.token_array, example.mask_array, example.rejected):
            self._hash.update(len(values).to_bytes(8, "little"))
            self._hash.update(values.tobytes())

    def text(self) -> str:
        return self._hash.hexdigest()


def _kept(folder: Path, encode_all: Callable[[], Iterable[Example]], begin: Callable[[], None]) -> StoredExamples:
    """The table in `folder`, written if there is none that is whole; `begin` is called before that.

    Raises:
        _CannotKeep: if it cannot be written. What reading the data raises is raised as it is.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        with lock:
            found = _table(folder, encode_all, begin)
        if found is not None and found.is_whole():  # checked by all processes at once
            return found
        with lock:
            found = _table(folder, encode_all, begin)  # another one may have written it meanwhile
            if found is None or not found.is_whole():
                shutil.rmtree(folder)
                found = _table(folder, encode_all, begin)
    except _CannotRead as error:
        raise error.args[0] from error
    except OSError as error:
        raise _CannotKeep(first_line(error)) from error
    if found is None:
        raise _CannotKeep("what was written there cannot be read")
    return found


def _table(
    folder: Path, encode_all: Callable[[], Iterable[Example]], begin: Callable[[], None]
) -> StoredExamples | None:
    """The table in `folder`, whole or not, written if there is none; `None` for one that cannot be read."""
    import datasets

    raised: list[Exception] = []
    is_written = False

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal is_written
        is_written = True
        begin()
        digest = _Digest()
        try:
            for example in encode_all():
                digest.add(example)
                arrays = map(numpy.asarray, (example.token_array, example.mask_array, example.rejected))
                yield dict(zip(COLUMNS, arrays, strict=True)) | {"digest": None}
        except Exception as error:
            raised.append(error)
            raise
        yield dict.fromkeys(COLUMNS, ()) | {"digest": digest.text()}

    columns = {name: datasets.List(datasets.Value(dtype)) for name, (dtype, _) in COLUMNS.items()}
    features = datasets.Features(columns | {"digest": datasets.Value("string")})
    # `datasets` writes aside and renames. With a fingerprint given it does not look for one in what `rows` refers to.
    how: dict[str, Any] = {"features": features, "cache_dir": str(folder), "fingerprint": folder.name}
    try:
        table = datasets.Dataset.from_generator(rows, **how)
        return StoredExamples(table.data)
    except Exception as error:
        if raised:
            raise _CannotRead(raised[0]) from error
        if is_written:
            raise OSError(first_line(error.__cause__ or error)) from error
        return None


def _values(chunk: Any) -> tuple[Any, Any]:
    """Where each row of a column's chunk begins, and the bytes of all of them; neither is copied."""
    return chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=True).view("uint8")
