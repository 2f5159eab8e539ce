"""Drafts from earlier texts: rollouts of the same prompts, or what an agent has written before.

Where the last tokens of a text occurred in an earlier one, what followed there is proposed. It is verified like every proposal, so
the text stays the target's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from dflash.model.acceptance_dflash import Proposals
from dflash.model.cache_dflash import to_device
from dflash.model.drafting_dflash import Proposer
from dflash.model.sequences_dflash import TextSequence


BYTES_PER_TOKEN = 150  # of a text and its n-grams, about


class History:
    """Earlier texts as token ids, and where their n-grams end. The oldest ones are dropped where they take too much memory.

    Args:
        most_bytes: How much memory they may take, about.
        ngram_size: How many tokens have to match.

    Example:
        >>> history = History()
        >>> first = drafter.generate_batch(prompts, target=target, history=history)
        >>> second = drafter.generate_batch(prompts, target=target, history=history)  # in fewer steps
    """

    def __init__(self, most_bytes: int = 2**28, ngram_size: int = 8) -> None:
        self.most_tokens = most_bytes // BYTES_PER_TOKEN
        self.ngram_size = ngram_size
        self.num_tokens = 0
        self._num_texts = 0
        self._texts: OrderedDict[int, array[int]] = OrderedDict()  # by number, oldest first
        self._ends: dict[
            tuple[int, ...], tuple[int, int]
        ] = {}  # of each n-gram: its newest text and the position after it

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds a text, prompt and answer."""
        text = array("q", token_ids)
        number = self._num_texts
        self._num_texts += 1
        self._texts[number] = text
        self.num_tokens += len(text)
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
        number, end = self._ends.get(self._key(recent_ids, len(recent_ids)), (-1, 0))
        text = self._texts.get(number, ())
        return list(islice(text, end, end + most))

    def save(self, path: str | Path) -> None:
        """Writes the texts to a file."""
        torch.save([list(text) for text in self._texts.values()], path)

    def load(self, path: str | Path) -> None:
        """Adds the texts of a file that `save` has written."""
        for text in torch.load(path, weights_only=True):
            self.add(text)


class HistoryProposer:
    """Proposes what followed in earlier texts, and what another proposer proposes for rows without a match.

    Args:
        drafts: The other proposer.
        history: The earlier texts.
        num_proposals: Proposals of a row with a match.
    """

    def __init__(self, drafts: Proposer, history: History, num_proposals: int) -> None:
        self.drafts = drafts
        self.history = history
        self.num_proposals = num_proposals
        self._prompt_ends: dict[int, list[int]] = {}  # the last tokens of prompts, by index of the sequence

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """At most `most` tokens after the anchors [B, 1] of the sequences. Among drawn proposals there are none of earlier texts."""
        most = min(most, self.num_proposals)
        matches = self._matches(sequences, most)
        proposals = Proposals(anchors[:, :0])
        if len(matches) < len(sequences):
            proposals = self.drafts.propose(sequences, anchors, most)
        if not matches or proposals.probabilities is not None:
            return proposals
        longest = max(map(len, matches.values()))
        num_drafted = proposals.token_ids.shape[1]
        missing = max(longest - num_drafted, 0)
        token_ids = functional.pad(proposals.token_ids, (0, missing))
        for place, match in matches.items():
            proposed = to_device(torch.tensor(match), token_ids.device)
            token_ids[place, : len(match)] = proposed
        looked_up = tuple({*matches, *proposals.looked_up})
        return replace(proposals, token_ids=token_ids, looked_up=looked_up)

    def _matches(self, sequences: list[TextSequence], most: int) -> dict[int, list[int]]:
        """What followed in earlier texts, by place in the batch."""
        matches = {}
        for place, sequence in enumerate(sequences):
            recent_ids = self._recent(sequence)
            match = self.history.after(recent_ids, most)
            if match:
                matches[place] = match
        return matches

    def _recent(self, sequence: TextSequence) -> list[int]:
        """The last tokens of a text."""
        size = self.history.ngram_size
        if sequence.index not in self._prompt_ends:
            self._prompt_ends[sequence.index] = sequence.prompt_ids[-size:].tolist()
        return [*self._prompt_ends[sequence.index], *sequence.new_ids[-size:]]

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """As that of the other proposer."""
        self.drafts.record(proposals, blocks)

    def forget(self, index: int) -> None:
        """Forgets a sequence that has ended."""
        self._prompt_ends.pop(index, None)
