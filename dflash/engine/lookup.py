"""Prompt lookup: where a text repeats itself, its own past proposes what comes next.

A lookup costs a search on the host and no forward. Its proposals are verified like the drafter's, so the text stays the target's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from dflash.model.acceptance_dflash import Proposals
from dflash.model.cache_dflash import to_device, to_host
from dflash.model.drafting_dflash import Proposer
from dflash.model.sequences_dflash import TextSequence

from .trees import TreeProposals


# Most tokens of an earlier occurrence that are compared.
LONGEST_MATCH = 64
# Most occurrences that are compared, the newest ones.
MOST_OCCURRENCES = 32
# For how many tokens after a repeated one a text counts as repeating itself.
REACH = 64


@dataclass(frozen=True)
class Match:
    """Tokens that followed an earlier occurrence, as proposals from number `start` on."""

    start: int  # how many of the drafter's proposals come before them
    token_ids: list[int]

    @property
    def end(self) -> int:
        """The number of proposals up to the last of them."""
        return self.start + len(self.token_ids)


class PromptLookup:
    """Finds what followed the longest, then the newest, earlier occurrence of a sequence's last tokens.

    At least `ngram_size` tokens have to match. After each lookup of which no token was accepted, twice as many.
    """

    def __init__(self, num_tokens: int, ngram_size: int) -> None:
        self.num_tokens = num_tokens
        self.ngram_size = ngram_size
        self._text: list[int] = []
        # Of each n-gram, where the tokens after it begin, oldest first. The text's last n-gram is added with its next token.
        self._begins: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._num_matching = ngram_size
        self._repeated_at = -REACH - 1  # length of the text when its last n-gram had occurred before

    def read(self, sequence: TextSequence) -> None:
        """Reads what was written since the last call."""
        text = self._text
        if text:
            num_new = len(text) - len(sequence.prompt_ids)
            unread_ids = sequence.new_ids[num_new:]
        else:
            unread_ids = sequence.prompt_ids.tolist() + sequence.new_ids
        for token_id in unread_ids:
            before = self._ngram(text)
            self._begins[before].append(len(text))
            text.append(token_id)
            if self._ngram(text) in self._begins:
                self._repeated_at = len(text)

    def _ngram(self, text: list[int]) -> tuple[int, ...]:
        """The last n-gram of a text. A shorter text is one of its own, which never occurs again."""
        return tuple(text[-self.ngram_size :])

    @property
    def is_repeating(self) -> bool:
        """Whether the text has repeated itself lately."""
        return len(self._text) - self._repeated_at <= REACH

    def match(self, drafted_ids: Sequence[int] = ()) -> Match | None:
        """What followed the text with the fewest of the drafted tokens after it; `None`: none of these occurred before."""
        recent = self._text[-LONGEST_MATCH:]
        for start in range(self.num_tokens):
            kept_ids = list(drafted_ids[:start])
            if len(kept_ids) < start:
                return None
            begin = self._best_begin(recent + kept_ids)
            if begin is not None:
                return self._match(begin, kept_ids)
        return None

    def _match(self, begin: int, kept_ids: list[int]) -> Match:
        """The text from `begin` on. After its end and the kept proposals, it starts at `begin` again."""
        start = len(kept_ids)
        token_ids = self._text[begin : begin + self.num_tokens] + kept_ids
        while start + len(token_ids) < self.num_tokens:
            token_ids += token_ids
        return Match(start, token_ids[: self.num_tokens - start])

    def _best_begin(self, recent: list[int]) -> int | None:
        """Where the text goes on after the best earlier occurrence of `recent`."""
        begins = self._begins.get(self._ngram(recent), [])
        newest_first = begins[: -MOST_OCCURRENCES - 1 : -1]
        best = max(newest_first, default=0, key=lambda begin: self._num_equal(begin, recent))
        if self._num_equal(best, recent) < self._num_matching:
            return None
        return best

    def _num_equal(self, begin: int, recent: list[int]) -> int:
        """How many tokens before `begin` equal the last ones of `recent`."""
        length = 0
        while length < min(begin, len(recent)) and self._text[begin - length - 1] == recent[-length - 1]:
            length += 1
        return length

    def record(self, match: Match, num_accepted: int) -> None:
        """Adapts the number of tokens that have to match to the accepted proposals of a step."""
        if num_accepted < match.start:
            return  # the drafter failed before
        if num_accepted == match.start:
            self._num_matching = min(2 * self._num_matching, LONGEST_MATCH)
        else:
            self._num_matching = max(self._num_matching // 2, self.ngram_size)


def with_lookups(proposals: Proposals, matches: Mapping[int, Match]) -> Proposals:
    """The proposals with the tokens of `matches`, by place in the batch.

    The q of each of these is one token. The other tokens keep theirs: a match depends only on drafted tokens before it.
    """
    drafted_ids = proposals.token_ids
    num_sequences, num_drafted = drafted_ids.shape
    looked_up_ids = _laid_out(matches, num_sequences, num_drafted)
    looked_up_ids = to_device(looked_up_ids, drafted_ids.device)  # [B, n]
    is_looked_up = looked_up_ids >= 0
    width = looked_up_ids.shape[1]
    drafted_ids = functional.pad(drafted_ids, (0, width - num_drafted))
    token_ids = torch.where(is_looked_up, looked_up_ids, drafted_ids)
    mixed = replace(proposals, token_ids=token_ids, looked_up=tuple(matches))
    if proposals.candidate_ids is None or proposals.probabilities is None:
        return mixed

    columns = torch.arange(width, device=token_ids.device)
    columns = columns.clamp(max=num_drafted - 1)
    candidate_ids = proposals.candidate_ids[:, columns]
    probabilities = proposals.probabilities[:, columns]
    # A token takes the slot of the equal candidate, or else the first one: no candidate may occur twice.
    is_equal = candidate_ids == token_ids[..., None]
    slots = is_equal.long().argmax(dim=-1, keepdim=True)
    candidate_ids = candidate_ids.scatter(-1, slots, token_ids[..., None])
    certain = torch.zeros_like(probabilities)
    certain = certain.scatter(-1, slots, 1.0)
    probabilities = torch.where(is_looked_up[..., None], certain, probabilities)
    return replace(mixed, candidate_ids=candidate_ids, probabilities=probabilities)


def _laid_out(matches: Mapping[int, Match], num_sequences: int, num_drafted: int) -> torch.Tensor:
    """The tokens of the matches in their columns [B, n] and -1 elsewhere, on the CPU."""
    width = num_drafted
    for match in matches.values():
        width = max(width, match.end)
    token_ids = torch.full((num_sequences, width), -1, device="cpu")
    token_ids[:, num_drafted:] = 0  # any token: where only other sequences have proposals
    for place, match in matches.items():
        columns = slice(match.start, match.end)
        token_ids[place, columns] = torch.tensor(match.token_ids)
    return token_ids


class LookupProposer:
    """Proposes what followed in the texts' own past, and what another proposer drafts where nothing did.

    If all sequences have a match, nothing is drafted. Otherwise texts that have repeated themselves lately are looked up after
    the first drafted tokens, too. If fewer than half of the sequences have a match, a step is not wider than a block.

    Args:
        drafts: The proposer for the other tokens.
        num_tokens: Proposals of a sequence with a match.
        ngram_size: The smallest number of tokens that match.
        block_proposals: Proposals of a block.
    """

    def __init__(self, drafts: Proposer, num_tokens: int, ngram_size: int, block_proposals: int) -> None:
        self.drafts = drafts
        self.block_proposals = block_proposals
        lookup = partial(PromptLookup, num_tokens, ngram_size)
        self._lookups: dict[int, PromptLookup] = defaultdict(lookup)  # by index of the sequence
        self._matches: dict[int, Match] = {}  # of this step, by place in the batch

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """At most `most` tokens after the anchors [B, 1] of the sequences. A tree gets no lookups."""
        lookups = self._read(sequences)
        matches = {}
        for place, lookup in enumerate(lookups):
            match = lookup.match()
            if match is not None:
                matches[place] = match

        proposals = Proposals(anchors[:, :0])
        if len(matches) < len(sequences):
            proposals = self.drafts.propose(sequences, anchors, most)
            if isinstance(proposals, TreeProposals):
                return proposals
            matches |= self._continued(lookups, matches, proposals)

        is_rare = 2 * len(matches) < len(sequences)
        width = min(most, self.block_proposals) if is_rare else most
        for place, match in matches.items():
            if match.start < width:
                self._matches[place] = match
        if not self._matches:
            return proposals
        return with_lookups(proposals, self._matches).first(width)

    def has_match(self, sequences: list[TextSequence]) -> bool:
        """Whether what a sequence ends with occurred before, so that `propose` looks it up."""
        return any(lookup.match() is not None for lookup in self._read(sequences))

    def _read(self, sequences: list[TextSequence]) -> list[PromptLookup]:
        """The lookups of the sequences, which have read what is new."""
        lookups = []
        for sequence in sequences:
            lookup = self._lookups[sequence.index]
            lookup.read(sequence)
            lookups.append(lookup)
        return lookups

    def _continued(
        self, lookups: list[PromptLookup], matches: Container[int], proposals: Proposals
    ) -> dict[int, Match]:
        """The matches after first drafted tokens, for texts without one that have repeated themselves lately, by place."""
        continued: dict[int, Match] = {}
        places = [place for place, lookup in enumerate(lookups) if lookup.is_repeating and place not in matches]
        if not places:
            return continued
        drafted_ids = to_host(proposals.token_ids)()  # a second wait for the device in this step
        for place in places:
            match = lookups[place].match(drafted_ids[place])
            if match is not None:
                continued[place] = match
        return continued

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """Adapts the lookups of a step to what was accepted of them. `blocks`: one of each sequence, in their order."""
        for place, match in self._matches.items():
            block = blocks[place]
            lookup = self._lookups[block.sequence]
            lookup.record(match, block.num_accepted)
        self._matches = {}
        self.drafts.record(proposals, blocks)
