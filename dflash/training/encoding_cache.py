"""Keeps the encoded sequences of a source as a table in the cache of `datasets`.

Later runs memory-map this table instead of encoding again. `datasets` writes, maps, selects and joins the tables. Two
things are done here instead: rows are encoded one by one, because `Dataset.map` would read a source to its end, and
JSON lines of different forms do not fit one table; and a hash of each table is kept beside it, because `datasets` does
not notice a damaged file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from filelock import FileLock

from dflash.common.files import replaced, write_text
from dflash.common.fingerprints import fingerprint
from dflash.common.messages import Announce, first_line, say_nothing

from .data import Wanted, encoded
from .examples import Example, Examples, ExampleTable
from .sources import file_digest, open_source


# Part of each table's key. Raise it when `encode` changes the ids of the same rows: older tables are then no longer
# used.
ENCODING = 2
# A source with fewer rows is not cached: encoding it is faster than importing `datasets` (0.6 s; a chat takes about 0.5
# ms).
CACHED_ROWS = 2000


def cached_examples(
    source: str,
    tokenizer: Any,
    *,
    split: str = "train",
    max_length: int | None = None,
    streaming: bool = False,
    wanted: Wanted | None = None,
    announce: Announce = say_nothing,
    **template_kwargs: Any,
) -> Examples:
    """Returns the examples of [`load_examples`], from a cache if there are many.

    A source with at least `CACHED_ROWS` rows, or a stream, is encoded once and cached, unless `wanted` asks for fewer
    rows or the tokenizer is a slow one. Processes that start together wait for the one that encodes. `announce` is told
    where the table is kept or, if it cannot be written, why every start encodes anew. Old tables are not deleted. Other
    arguments and errors are those of [`load_examples`].
    """
    opened = open_source(source, split, streaming)

    def encode_all() -> Iterator[Example]:
        return encoded(
            opened.rows(),
            source,
            tokenizer,
            max_length,
            wanted,
            template_kwargs,
        )

    rules = tokenizer_fingerprint(tokenizer)
    if rules is None or (wanted is not None and wanted.samples < CACHED_ROWS):
        return list(encode_all())
    version = opened.version()
    if version.num_rows is not None and version.num_rows < CACHED_ROWS:
        return list(encode_all())
    options = [max_length, None if wanted is None else vars(wanted), template_kwargs]
    key = fingerprint([ENCODING, version.fingerprint, rules, options])

    import datasets

    path = Path(datasets.config.HF_DATASETS_CACHE, "dflash", f"{key}.arrow")
    lock = path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        announce(
            f"The encoded sequences of {source} cannot be kept in {path.parent} ({first_line(error)}), so every start "
            "encodes them: make room there, or set HF_DATASETS_CACHE to a folder that can be written."
        )
        return list(encode_all())
    with FileLock(lock):
        if not _is_whole(path):
            announce(f"{source} is encoded once and kept in {path.parent}.")
            _write(path, encode_all())
    return ExampleTable(datasets.Dataset.from_file(str(path)))


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Returns a short hash of all that decides the ids of a text; `None` for a slow (Python) tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    for state_of_last_call in ("truncation", "padding"):
        rules.pop(state_of_last_call, None)
    options = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if name != "name_or_path"
        and not name.endswith("_file")
        and value not in (None, {}, [])  # saving a tokenizer adds empty options
    }
    return fingerprint(
        [
            type(tokenizer).__name__,
            rules,
            options,
            tokenizer.chat_template,
            tokenizer.special_tokens_map,
            tokenizer.eos_token_id,
            transformers.__version__,
            tokenizers.__version__,
        ]
    )


def _is_whole(path: Path) -> bool:
    """Whether there is a table at `path` whose hash equals the hash stored beside it."""
    digest = path.with_suffix(".digest")
    return path.exists() and digest.exists() and digest.read_text() == file_digest(path)


def _write(path: Path, examples: Iterator[Example]) -> None:
    from datasets.arrow_writer import ArrowWriter

    features = ExampleTable.features()
    with replaced(path) as aside, ArrowWriter(path=str(aside), features=features) as writer:
        for example in examples:
            writer.write(example.row())
        writer.finalize()
    write_text(path.with_suffix(".digest"), file_digest(path))
