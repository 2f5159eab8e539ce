"""Earlier texts that drafts are taken from: rollouts of the same prompts, or what an agent has written before."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash.common.files import replaced


BYTES_PER_TOKEN = 150  # of a text and its n-grams, about
TENSORS = {"token_ids", "lengths"}  # of a file: those of all texts, one after another


class History:
    """Earlier texts as token ids, and where their n-grams end. The oldest ones are dropped where they take too much memory.

    Where the last tokens of a new text occurred in one of them, what followed there is proposed, and verified like every proposal.
    So the new text stays the target's.

    Args:
        most_bytes: How much memory they may take, about.
        ngram_size: How many tokens have to match.

    Attributes:
        num_tokens (`int`): Tokens of all texts.
        largest_id (`int`): The largest token id that was ever added; -1: none was.

    Example:
        >>> history = History()
        >>> first = drafter.generate_batch(prompts, target=target, history=history)
        >>> second = drafter.generate_batch(prompts, target=target, history=history)  # in fewer steps
    """

    def __init__(self, most_bytes: int = 2**28, ngram_size: int = 8) -> None:
        self.most_tokens = most_bytes // BYTES_PER_TOKEN
        self.ngram_size = ngram_size
        self.num_tokens = 0
        self.largest_id = -1
        self._lock = threading.Lock()  # several managers may share a history
        self._num_texts = 0
        self._texts: OrderedDict[int, array[int]] = OrderedDict()  # by number, oldest first
        # Of each n-gram, its newest text and the position after it.
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds a text, prompt and answer. ValueError for a token id below 0, as labels have where nothing is learned."""
        text = array("q", token_ids)
        if min(text, default=0) < 0:
            raise ValueError(
                f"A text of a history holds the token id {min(text)}: give token ids alone, without label masks."
            )
        with self._lock:
            number = self._num_texts
            self._num_texts += 1
            self._texts[number] = text
            self.num_tokens += len(text)
            self.largest_id = max(self.largest_id, max(text, default=-1))
            for end in range(self.ngram_size, len(text)):
                key = self._key(text, end)
                self._ends[key] = (number, end)
            while self.num_tokens > self.most_tokens:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        number, text = self._texts.popitem(last=False)
        self.num_tokens -= len(text)
        for end in range(self.ngram_size, len(text)):
            key = self._key(text, end)
            if self._ends.get(key) == (number, end):  # no newer text has it
                del self._ends[key]

    def _key(self, text: Sequence[int], end: int) -> tuple[int, ...]:
        return tuple(text[end - self.ngram_size : end])

    def after(self, recent_ids: Sequence[int], most: int) -> list[int]:
        """What followed the last tokens of `recent_ids` in the newest text that holds them, at most `most` tokens."""
        key = self._key(recent_ids, len(recent_ids))
        with self._lock:
            if key not in self._ends:
                return []
            number, end = self._ends[key]
            text = self._texts[number]
            return list(text[end : end + most])

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError if a target of this vocabulary cannot have written the texts."""
        if self.largest_id >= size:
            raise ValueError(
                f"history holds the token id {self.largest_id}, and the target has {size} tokens: give a history of its own "
                "tokenizer's texts."
            )

    def save(self, path: str | Path) -> None:
        """Writes the texts to a safetensors file, which replaces an earlier one once it is whole."""
        with self._lock:
            texts = list(self._texts.values())
        lengths = [len(text) for text in texts]
        token_ids = list(chain.from_iterable(texts))
        tensors = {
            "token_ids": torch.tensor(token_ids, dtype=torch.int64),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
        }
        with replaced(Path(path)) as aside:
            save_file(tensors, aside)

    def load(self, path: str | Path) -> None:
        """Adds the texts of a file that `save` has written. ValueError for another file."""
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no safetensors file ({error}): give one that History.save has written."
            ) from error
        is_whole = set(tensors) == TENSORS and tensors["lengths"].sum() == len(tensors["token_ids"])
        if not is_whole:
            names = ", ".join(sorted(tensors))
            raise ValueError(f"{path} holds the tensors {names}: give a file that History.save has written.")
        lengths = tensors["lengths"].tolist()
        for text in tensors["token_ids"].split(lengths):
            self.add(text.tolist())
