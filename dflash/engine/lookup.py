"""Prompt lookup: where a text repeats itself, or an earlier text, what followed there is proposed.

A lookup costs a search on the host and no forward. Its proposals are verified like the drafter's, so the text stays the target's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dflash.model.acceptance_dflash import Proposals
from dflash.model.cache_dflash import to_device
from dflash.model.drafting_dflash import Proposer
from dflash.model.sequences_dflash import TextSequence

from .history import History
from .trees import TreeProposals


# Most tokens of an earlier occurrence that are compared.
LONGEST_MATCH = 64
# Most occurrences that are compared, the newest ones.
MOST_OCCURRENCES = 32

Ngram = tuple[int, ...]
Matches = dict[int, list[int]]  # what followed an earlier occurrence of a sequence's end, by its place in the batch


class PromptLookup:
    """Finds what followed the longest, then the newest, earlier occurrence of a sequence's last tokens.

    At least `ngram_size` tokens have to match. After each lookup of which no token was accepted, twice as many.

    Args:
        num_tokens: Most tokens that are found in the sequence itself; 0: it is not searched.
        ngram_size: The smallest number of tokens that match.
        history: Earlier texts, which are searched first.
        num_earlier: Most tokens that are found there.
        vocabulary_size: Other requests may have added tokens that this target does not have. These are not proposed.
    """

    def __init__(
        self,
        num_tokens: int,
        ngram_size: int,
        history: History | None = None,
        num_earlier: int = 0,
        vocabulary_size: float = math.inf,
    ) -> None:
        self.num_tokens = num_tokens
        self.ngram_size = ngram_size
        self.history = history
        self.num_earlier = num_earlier
        self.vocabulary_size = vocabulary_size
        self._is_own = True  # whether the latest match is of the sequence itself
        self._text: list[int] = []
        # Of each n-gram, where the tokens after it begin, oldest first. The text's last n-gram is added with its next token.
        self._begins = defaultdict[Ngram, list[int]](list)
        self._num_matching = ngram_size

    def read(self, sequence: TextSequence) -> None:
        """Reads what was written since the last call."""
        if not self._text:
            self._append(sequence.prompt_ids.tolist())
        num_read = len(self._text) - len(sequence.prompt_ids)
        self._append(sequence.new_ids[num_read:])

    def _append(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            begins = self._begins[self._last_ngram()]
            begins.append(len(self._text))
            self._text.append(token_id)

    def _last_ngram(self) -> Ngram:
        """The last n-gram of the text. A shorter text is one of its own, which never occurs again."""
        return tuple(self._text[-self.ngram_size :])

    def match(self) -> list[int] | None:
        """The tokens that followed an earlier occurrence of the text's end; `None`: it did not occur before."""
        earlier = self.history.after(self._text, self.num_earlier) if self.history else []
        if earlier and max(earlier) >= self.vocabulary_size:
            earlier = []
        self._is_own = not earlier
        if earlier or not self.num_tokens:
            return earlier or None
        ngram = self._last_ngram()
        begins = self._begins.get(ngram, [])
        newest_first = begins[: -MOST_OCCURRENCES - 1 : -1]
        begin = max(newest_first, default=0, key=self._num_equal)
        if self._num_equal(begin) < self._num_matching:
            return None
        following = self._text[begin : begin + self.num_tokens]
        repeated = cycle(following)  # after the end of the text it starts at `begin` again
        return list(islice(repeated, self.num_tokens))

    def _num_equal(self, begin: int) -> int:
        """How many tokens before `begin` equal the last ones of the text."""
        longest = min(begin, LONGEST_MATCH)
        for count in range(longest):
            place = begin - 1 - count
            if self._text[place] != self._text[-1 - count]:
                return count
        return longest

    def record(self, num_accepted: int) -> None:
        """Adapts the number of tokens that have to match to the accepted tokens of a lookup in the sequence itself."""
        if not self._is_own:
            return
        if num_accepted:
            self._num_matching = max(self._num_matching // 2, self.ngram_size)
        else:
            self._num_matching = min(2 * self._num_matching, LONGEST_MATCH)


def with_lookups(proposals: Proposals, matches: Mapping[int, list[int]], most: int) -> Proposals:
    """The proposals with the tokens of `matches`, by place in the batch, instead of those of their sequences, at most `most`.

    No proposal may have been drawn: q of each of them is one token.
    """
    rows = list(proposals.token_ids)
    for place, match in matches.items():
        row = rows[place]
        tail = row[len(match) :]
        looked_up_ids = torch.tensor(match)
        looked_up_ids = to_device(looked_up_ids, row.device)
        rows[place] = torch.cat([looked_up_ids, tail])
    token_ids = pad_sequence(rows, batch_first=True)
    token_ids = token_ids[:, :most]
    return replace(proposals, token_ids=token_ids, looked_up=tuple(matches))


class LookupProposer:
    """Proposes what followed in the texts' own past or in earlier texts, and what another proposer drafts where nothing did.

    If all sequences have a match, nothing is drafted. If fewer than half of them have one, a step is not wider than the drafts.
    Beside drawn proposals and trees nothing is looked up.

    Args:
        drafts: The proposer for the other sequences.
        lookup: Makes the [`PromptLookup`] of a sequence.
    """

    def __init__(self, drafts: Proposer, lookup: Callable[[], PromptLookup]) -> None:
        self.drafts = drafts
        self._lookups: dict[int, PromptLookup] = defaultdict(lookup)  # by index of the sequence

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn."""
        drafts: Any = self.drafts  # a `DraftProposer` in whole steps, which alone ask
        return bool(drafts.draws)

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """At most `most` tokens after the anchors [B, 1] of the sequences."""
        matches = self.matches(sequences) if most else {}
        proposals = Proposals(anchors[:, :0])
        if len(matches) < len(sequences):
            proposals = self.drafts.propose(sequences, anchors, most)
        is_fixed = proposals.is_drawn or isinstance(proposals, TreeProposals)
        is_rare = 2 * len(matches) < len(sequences)
        num_drafted = proposals.token_ids.shape[1]
        width = num_drafted if is_rare else most
        if is_fixed or not width or not matches:
            return proposals
        return with_lookups(proposals, matches, width)

    def matches(self, sequences: list[TextSequence]) -> Matches:
        """What followed earlier occurrences of the sequences' ends."""
        matches = {}
        for place, sequence in enumerate(sequences):
            lookup = self._lookups[sequence.index]
            lookup.read(sequence)
            match = lookup.match()
            if match is not None:
                matches[place] = match
        return matches

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """Adapts the lookups of a step to what was accepted of them. `blocks`: one of each sequence, in their order."""
        for place in proposals.looked_up:
            block = blocks[place]
            self._lookups[block.sequence].record(block.num_accepted)
        self.drafts.record(proposals, blocks)

    def forget(self, sequence: int) -> None:
        """Drops what was found in the text of a sequence that has left, by its index."""
        self._lookups.pop(sequence, None)
