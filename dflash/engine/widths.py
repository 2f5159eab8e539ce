"""As many proposals as pay, chosen by what steps have cost and how many proposals were accepted so far.

A step's cost is the time from its proposals to its commit. Nothing is run only to be measured.

The number of proposals of a step is chosen from earlier steps, before the drafter runs. A drafter that knows how sure it is of each
proposal (DSpark's confidence) drafts a single text first, and the number follows from what it says. No proposal is drawn here: among drawn tokens a
choice would prefer some, and the text would not keep the target's distribution.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from dflash.common.stopwatch import stopwatch
from dflash.model.acceptance_dflash import Proposals
from dflash.model.drafting_dflash import Proposer
from dflash.model.sequences_dflash import TextSequence

from .state import PairState
from .trees import TreeProposals


# Steps without a draft after the first draft that did not pay; then twice as many, and so on.
SHORTEST_PAUSE = 8
LONGEST_PAUSE = 256
# Weight of a step in running means: of its tokens, of the tokens of a try after a pause, and of its time.
NEW_WEIGHT = 0.1
TRIAL_WEIGHT = 0.5
TIME_WEIGHT = 0.5
# A step counts as at most this much slower than the mean: what else the machine does only adds time.
SLOWEST = 1.2
# What happens to the mean time of a width with each draft of another one, so that it is tried again some time.
FORGETTING = 0.998
# Speeds are known this exactly: a narrower width has to promise more, because a few unlucky drafts do.
ABOUT_AS_FAST = 0.85
# Tokens of a text up to which steps are taken to cost equally much; then each doubling has costs of its own.
SHORT = 1024
# A guess: columns that take as long as the part of a step that is the same for all widths, as a share of the widest.
FIXED_SHARE = 0.25


class StepCosts(dict[int, float]):
    """Mean seconds of steps by the number of proposals that they verify, 0 for steps without a draft."""

    def add(self, width: int, seconds: float) -> None:
        """Records a step."""
        before = self.get(width, seconds)
        change = min(seconds, SLOWEST * before) - before
        if width:
            for other in list(self):  # another thread may add one
                self[other] *= FORGETTING if other else 1.0
        self[width] = before + TIME_WEIGHT * change

    def of(self, width: int, widest: int) -> float:
        """The mean of steps of this width, or a low guess from those of other widths, so that it is tried."""
        if width in self:
            return self[width]
        fixed = FIXED_SHARE * widest
        guesses = []
        for known, seconds in self.items():
            share = (width + fixed) / (known + fixed)
            guesses.append(share * seconds)
        return min(guesses, default=1.0)


class Experience:
    """What the steps of a drafter and a target have shown, kept from text to text.

    Attributes:
        widths (`list[int]`): The numbers of proposals to choose from: a quarter, half and all of a draft.
        tokens (`dict[int, float]`): For each width and 0, the mean number of tokens that a step with so many proposals gives.
        pause (`int`): Number of steps without a draft after the latest draft; 0: it has paid.
        pause_left (`int`): How many of these steps are left.
    """

    def __init__(self, num_proposals: int) -> None:
        widths = {num_proposals // parts for parts in (4, 2, 1)}
        self.widths = sorted(widths - {0})
        self.tokens = {width: 1 + width / 2 for width in (0, *self.widths)}
        self.pause = 0
        self.pause_left = 0
        self._num_drafts = 2  # what is assumed counts like two
        self._costs = defaultdict[Any, StepCosts](StepCosts)

    def costs_of(self, sequences: list[TextSequence]) -> StepCosts:
        """The costs of steps with about as many sequences, whose longest text is about as long."""
        count = len(sequences)
        length = max(sequence.length for sequence in sequences)
        size = length // SHORT
        return self._costs[count.bit_length(), size.bit_length()]

    def choose(self, costs: StepCosts) -> int:
        """The number of proposals of the next step."""
        if self.pause_left:
            self.pause_left -= 1
            return 0
        if self.pause:
            return self.widths[0]
        return self.best(costs)

    def best(self, costs: StepCosts, tokens: Mapping[int, float] | None = None) -> int:
        """The widest of the widths that are about as fast as the fastest.

        `tokens` says what a step of each width is expected to give. Default: what steps have given.
        """
        speeds = {width: self.speed(width, costs, tokens) for width in self.widths}
        fastest = max(speeds.values())
        least = ABOUT_AS_FAST * fastest
        good = [width for width, speed in speeds.items() if speed >= least]
        return max(good)

    def speed(self, width: int, costs: StepCosts, tokens: Mapping[int, float] | None = None) -> float:
        """Expected tokens per second of steps with `width` proposals."""
        seconds = costs.of(width, self.widths[-1])
        expected = tokens or self.tokens
        return expected[width] / seconds

    def add_draft(self, num_proposals: int, accepted: list[Sequence[int]]) -> None:
        """Records which columns of `num_proposals` were accepted for each sequence.

        Wider steps would have accepted more only where all columns were accepted, and are taken to accept all.
        """
        self._num_drafts += 1
        weight = TRIAL_WEIGHT if self.pause else max(NEW_WEIGHT, 1 / self._num_drafts)
        for width in self.widths:
            counts = []
            for columns in accepted:
                is_complete = len(columns) == num_proposals
                count = width if is_complete else bisect(columns, width)
                counts.append(count)
            tokens = 1 + mean(counts)
            change = tokens - self.tokens[width]
            self.tokens[width] += weight * change

    def set_pause(self, costs: StepCosts) -> None:
        """Stops drafting for some steps if the best width is slower than none, each time for longer."""
        best = self.best(costs)
        has_paid = self.speed(best, costs) > self.speed(0, costs)
        longer = max(2 * self.pause, SHORTEST_PAUSE)
        self.pause = 0 if has_paid else min(longer, LONGEST_PAUSE)
        self.pause_left = self.pause


class WidthProposer:
    """Lets another proposer draft as many tokens as pay: all of them, fewer, or none.

    While steps with a draft give fewer tokens per second than steps without, drafts are only tried, at intervals that grow.

    Args:
        drafts: The proposer of chains or trees, which draws nothing.
        state: What is known of the drafter and the target.
        num_proposals: Tokens of a whole draft.
        setting: What else the time of a step and its acceptance depend on: only steps of the same setting are compared.
    """

    def __init__(self, drafts: Proposer, state: PairState, num_proposals: int, setting: Any = None) -> None:
        self.drafts = drafts
        key = (num_proposals, setting)
        known = state.widths.setdefault(key, Experience(num_proposals))
        known.pause_left = min(known.pause_left, known.pause // 4)  # this text may differ
        self._known = known
        self._has_confidences = False  # whether the drafter says how sure it is
        self._costs = StepCosts()  # of steps like this one
        self._elapsed = stopwatch()  # since this step began

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """At most `most` tokens after the anchors [B, 1]: as many as the steps before this one recommend."""
        self._costs = self._known.costs_of(sequences)
        self._elapsed = stopwatch()
        width = min(self._known.choose(self._costs), most)
        # In a batch one width serves all texts, and drafting more than is verified costs more than the choice gains.
        follows = self._has_confidences and len(sequences) == 1
        if not width or not follows:
            proposals = self.drafts.propose(sequences, anchors, width)
            self._has_confidences |= proposals.confidences is not None
            return proposals
        return self._cut(self.drafts.propose(sequences, anchors, most))

    def _cut(self, proposals: Proposals) -> Proposals:
        """As many of the proposals as pay if the drafter is right about its chances."""
        confidences: Any = proposals.confidences
        tokens = expected_tokens(confidences, self._known.widths)
        width = self._known.best(self._costs, tokens)
        return replace(
            proposals,
            token_ids=proposals.token_ids[:, :width],
            confidences=confidences[:, :width],
        )

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """Adds the time and the accepted proposals of a step. One with lookups says nothing about drafts."""
        self.drafts.record(proposals, blocks)
        if proposals.looked_up:
            return
        width = proposals.token_ids.shape[1]
        self._costs.add(width, self._elapsed())
        if width:
            accepted = [accepted_columns(proposals, place, block) for place, block in enumerate(blocks)]
            self._known.add_draft(width, accepted)
            self._known.set_pause(self._costs)


def expected_tokens(confidences: torch.Tensor, widths: Sequence[int]) -> dict[int, float]:
    """The mean number of tokens that a step gives by its width, where proposals are accepted with chances [B, n]."""
    survivals = confidences.cumprod(dim=1)  # that a proposal and all before it are accepted
    totals = 1 + survivals.cumsum(dim=1).mean(dim=0)
    tokens = totals.tolist()  # of 1, 2, … proposals
    most = len(tokens)
    return {width: tokens[min(width, most) - 1] for width in widths}


def accepted_columns(proposals: Proposals, place: int, block: Any) -> Sequence[int]:
    """The columns of a step's proposals that were accepted for the sequence at `place`, whose block this is."""
    if not isinstance(proposals, TreeProposals):
        return range(1, 1 + block.num_accepted)
    token_ids = iter(block.token_ids)
    columns = proposals.walk(place, lambda column: next(token_ids, -1))
    return columns[1:]
