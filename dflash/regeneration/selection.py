"""Chooses the rows that a run answers: draws them, and leaves out rows that cannot or need not be answered."""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from dflash.common.fingerprints import fingerprint
from dflash.training import FORMS, SEARCHED_ROWS, named_row, read_rows

from .dialogues import Dialogue, Unanswerable, as_dialogue
from .settings import RegenerationSettings


Row = Mapping[str, Any]
# A function that returns an iterable over all rows, from the first one at each call.
OpenRows = Callable[[], Iterable[Row]]

# The key under which a tokenizer of transformers notes that it has warned about a long text.
WARNED_OF_LENGTH = "sequence-length-is-longer-than-the-specified-maximum"


def opened(data: str | os.PathLike[str] | Iterable[Row], settings: RegenerationSettings) -> OpenRows:
    """Returns a function that returns the rows of `data`: a file, folder, Hub id or rows.

    Rows in an iterator are collected in a list, unless the settings ask for streaming. Raises the errors of
    `read_rows`.
    """
    rows: Iterable[Row]
    if isinstance(data, (str, os.PathLike)):
        read = partial(read_rows, os.fspath(data), settings.split, settings.streaming)
        rows = read()
        if isinstance(rows, Iterator):
            return read
    elif isinstance(data, Iterator) and not settings.streaming:
        rows = list(data)  # because the rows may be read twice
    else:
        rows = data
    return lambda: rows


class SeenRows:
    """Counts and hashes the rows that are read, and collects their licences, for the manifest. Rows are not kept."""

    def __init__(self) -> None:
        self.count = 0
        self._licenses: set[str] = set()
        self._digest = hashlib.sha256()

    def watched(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yields `rows` unchanged, and counts and hashes each one."""
        for row in rows:
            self.count += 1
            self._digest.update(fingerprint(row).encode())
            for key in ("license", "licence"):
                if row.get(key):
                    self._licenses.add(str(row[key]))
            yield row

    @property
    def fingerprint(self) -> str:
        """A short hash of all rows in their order."""
        return self._digest.hexdigest()[:16]

    @property
    def license(self) -> str | None:
        """The licences that rows state, separated by commas. `None` if no row states one."""
        return ", ".join(sorted(self._licenses)) or None


class Drawn(NamedTuple):
    """A row that was drawn."""

    number: int  # its number in the data, counted from 1
    order: int  # its index in the random order, of which the first `samples` rows are drawn
    row: Row


def drawn_rows(source: OpenRows, seen: SeenRows, settings: RegenerationSettings) -> Iterator[Drawn]:
    """Yields `samples` rows drawn with the seed, in the order of the data. `seen` counts the rows that are read.

    Yields all rows if `samples` is `None` or the data is streamed.
    """
    rows = seen.watched(source())
    if settings.streaming or settings.samples is None:
        for row in rows:
            yield Drawn(seen.count, seen.count, row)
        return
    for _ in rows:
        pass
    numbers = list(range(1, seen.count + 1))
    generator = random.Random(f"samples-{settings.seed}")
    generator.shuffle(numbers)
    indices = {}
    for index, number in enumerate(numbers[: settings.samples]):
        indices[number] = index
    for number, row in enumerate(source(), start=1):
        if number in indices:
            yield Drawn(number, indices[number], row)


def selected(
    rows: Iterable[Drawn], name: str, tokenizer: Any, settings: RegenerationSettings, positions: int | None
) -> tuple[list[Dialogue], Counter[str]]:
    """Returns the dialogues to answer, and how many rows are left out, by reason.

    A stream is read until there are `samples` dialogues. If several rows ask the same, the row that was drawn first is
    kept. So a run with more samples has all rows of a run with fewer.

    Raises:
        ValueError: if no row can be answered. Also for a malformed row; the message then has its number.
    """
    left_out: Counter[str] = Counter()
    kept: dict[int | bytes, Dialogue] = {}
    orders: dict[int | bytes, int] = {}
    for number, order, row in rows:
        with named_row(number, name):
            try:
                dialogue = as_dialogue(
                    number, row, tokenizer, settings.prompt_tokens, enable_thinking=settings.thinking
                )
                _check_length(dialogue, settings, positions)
            except Unanswerable as reason:
                left_out[str(reason)] += 1
                dialogue = None
        if dialogue is not None:
            key = dialogue.digest() if settings.deduplicate else number
            if key in kept:
                left_out["a prompt that repeats another one"] += 1
            if key not in kept or order < orders[key]:
                kept[key] = dialogue
                orders[key] = order
        has_no_usable_row = not kept and number == SEARCHED_ROWS
        if settings.streaming and (len(kept) == settings.samples or has_no_usable_row):
            break
    if not kept:
        raise _nothing_left(name, left_out, settings)
    return list(kept.values()), left_out


def _nothing_left(name: str, left_out: Counter[str], settings: RegenerationSettings) -> ValueError:
    """Returns the error for data of which no row can be answered."""
    if not left_out:
        return ValueError(f"{name} holds no row: give {FORMS}.")
    reasons = [f"{reason} ({count})" for reason, count in left_out.items()]
    remedy = "give rows with a question"
    if settings.max_prompt_tokens is not None:
        remedy += ", or a larger max_prompt_tokens"
    return ValueError(f"No row of {name} can be answered: {', '.join(reasons)}; {remedy}.")


def _check_length(dialogue: Dialogue, settings: RegenerationSettings, positions: int | None) -> None:
    """Raises Unanswerable if the prompt fills the target's positions or is longer than `max_prompt_tokens`."""
    if not dialogue.room(1, positions):
        raise Unanswerable(f"a prompt that fills the target's {positions} positions")
    max_prompt_tokens = settings.max_prompt_tokens
    if max_prompt_tokens is not None and dialogue.num_prompt_tokens > max_prompt_tokens:
        raise Unanswerable(f"a prompt longer than {max_prompt_tokens} tokens")


@contextmanager
def unwarned_of_length(tokenizer: Any) -> Iterator[None]:
    """Silences the tokenizer's warning about long texts inside the `with`. A run cuts such texts or leaves them out."""
    warned = getattr(tokenizer, "deprecation_warnings", {})
    with mock.patch.dict(warned, {WARNED_OF_LENGTH: True}):
        yield
