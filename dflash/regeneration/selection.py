"""The rows that a run asks: read, drawn, and left out where they cannot or need not be answered. It knows no writer."""

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from dflash.training import FORMS, SEARCHED_ROWS, named_row, read_rows

from .dialogues import Dialogue, Unanswerable, as_dialogue
from .settings import RegenerationSettings


Row = Mapping[str, Any]
# Reads all rows, each time from the first on.
Source = Callable[[], Iterable[Row]]

# The flag with which a tokenizer of transformers remembers that it has warned of a long text.
WARNED_OF_LENGTH = "sequence-length-is-longer-than-the-specified-maximum"


def opened(data: str | os.PathLike[str] | Iterable[Row], settings: RegenerationSettings) -> Source:
    """The rows of a file, folder or Hub id, or the given ones; errors as of `read_rows`."""
    if isinstance(data, (str, os.PathLike)):
        read = partial(read_rows, os.fspath(data), settings.split, settings.streaming)
        found = read()
        return read if isinstance(found, Iterator) else lambda: found
    rows = list(data) if isinstance(data, Iterator) and not settings.streaming else data
    return lambda: rows


class SeenRows:
    """What a manifest says of rows that were read: their number, fingerprint and licences. It keeps no row."""

    def __init__(self) -> None:
        self.count = 0
        self._licenses: set[str] = set()
        self._digest = hashlib.sha256(b"[")

    def watched(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, each counted as it is taken."""
        for row in rows:
            between = ", " if self.count else ""
            self._digest.update(f"{between}{json.dumps(row, sort_keys=True, default=str)}".encode())
            self._licenses |= {str(row[key]) for key in ("license", "licence") if row.get(key)}
            self.count += 1
            yield row

    @property
    def fingerprint(self) -> str:
        """That of the list of all rows, as `common.fingerprints` makes it."""
        digest = self._digest.copy()
        digest.update(b"]")
        return digest.hexdigest()[:16]

    @property
    def license(self) -> str | None:
        """The licences that rows state."""
        return ", ".join(sorted(self._licenses)) or None


class Drawn(NamedTuple):
    """A row, its number from 1, and its place in the order of drawing: fewer samples end at an earlier place."""

    number: int
    place: int
    row: Row


def drawn_rows(source: Source, seen: SeenRows, settings: RegenerationSettings) -> Iterator[Drawn]:
    """`samples` rows, drawn by the seed, in the data's order; of a stream all rows, each as it is asked for."""
    if settings.streaming or settings.samples is None:
        for number, row in enumerate(seen.watched(source()), start=1):
            yield Drawn(number, number, row)
        return
    order = [number for number, _ in enumerate(seen.watched(source()), start=1)]
    random.Random(f"samples-{settings.seed}").shuffle(order)
    places = {number: place for place, number in enumerate(order[: settings.samples])}
    for number, row in enumerate(source(), start=1):
        if number in places:
            yield Drawn(number, places[number], row)


def selected(
    rows: Iterable[Drawn], name: str, tokenizer: Any, settings: RegenerationSettings, positions: int | None
) -> tuple[list[Dialogue], dict[str, int]]:
    """The dialogues to write, and the number of rows left out, by the reason; of streamed rows the first `samples`.

    Of rows that ask the same, the one that was drawn first is kept, so that more samples contain the fewer.
    """
    left_out: Counter[str] = Counter()
    found: dict[int | bytes, tuple[int, Dialogue]] = {}  # with its place
    how = {"num_prompt_tokens": settings.prompt_tokens, "enable_thinking": settings.thinking}
    for number, place, row in rows:
        with named_row(number, name):
            try:
                dialogue = as_dialogue(number, row, tokenizer, **how)
                _check_length(dialogue, settings, positions)
            except Unanswerable as reason:
                left_out[str(reason)] += 1
            else:
                key = dialogue.digest() if settings.deduplicate else number
                if key in found:
                    left_out["a prompt that repeats another one"] += 1
                if key not in found or place < found[key][0]:
                    found[key] = place, dialogue
        if settings.streaming and (len(found) == settings.samples or (not found and number == SEARCHED_ROWS)):
            break
    if not found and not left_out:
        raise ValueError(f"{name} holds no row: give {FORMS}.")
    if not found:
        said = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
        larger = "" if settings.max_prompt_tokens is None else ", or a larger max_prompt_tokens"
        raise ValueError(f"No row of {name} can be answered: {said}; give rows with a question{larger}.")
    return [dialogue for _, dialogue in found.values()], dict(left_out)


def _check_length(dialogue: Dialogue, settings: RegenerationSettings, positions: int | None) -> None:
    """Raises Unanswerable for a prompt that is too long."""
    if not dialogue.room(1, positions):
        raise Unanswerable(f"a prompt that fills the target's {positions} positions")
    longest = settings.max_prompt_tokens
    if longest is not None and dialogue.num_prompt_tokens > longest:
        raise Unanswerable(f"a prompt longer than {longest} tokens")


@contextmanager
def unwarned_of_length(tokenizer: Any) -> Iterator[None]:
    """Keeps the tokenizer from warning of texts that are longer than the target reads: they are cut or left out here."""
    warned = getattr(tokenizer, "deprecation_warnings", {})
    before = warned.get(WARNED_OF_LENGTH, False)
    warned[WARNED_OF_LENGTH] = True
    try:
        yield
    finally:
        warned[WARNED_OF_LENGTH] = before
