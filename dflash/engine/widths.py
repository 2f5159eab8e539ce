"""As many proposals as pay, chosen by what steps have cost and how many proposals were accepted so far.

A step's cost is the time from its proposals to its commit. Nothing is run only to be measured.

The number of proposals of a step is chosen before the drafter runs, from earlier steps alone. So it does not depend on the tokens
that are drawn for this step, and the text keeps the target's distribution: among drawn tokens, a choice would prefer some.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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
# Drafts after which a width is tried that is not the best; then twice as many, and so on.
SHORTEST_EXPLORATION = 32
LONGEST_EXPLORATION = 1024
# Steps without a draft that are run to learn their cost.
PLAIN_STEPS = 2
# Weight of a step in running means: of its acceptance, of the acceptance of a try after a pause, and of its time.
NEW_WEIGHT = 0.1
TRIAL_WEIGHT = 0.5
FASTER_WEIGHT = 0.5
SLOWER_WEIGHT = 0.1  # less, because what else the machine does only adds time
# Before anything is known: the chance of a proposal after an accepted one, and how many steps this counts like.
FIRST_RATE = 0.9
FIRST_COUNT = 2
# Speeds are known this exactly: a narrower width has to promise more, because a few unlucky drafts do.
ABOUT_AS_FAST = 0.85
# Bits of a text's length; up to it steps are taken to cost equally much.
SHORTEST_SIZE = 10


class Backoff:
    """Growing intervals between tries of what has not paid."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self.length = 0  # of the latest interval; 0: the last try has paid
        self.left = 0

    def tick(self) -> bool:
        """Lets a step pass; returns whether it may try."""
        self.left -= 1
        return self.left < 0

    def record(self, has_paid: bool) -> None:
        """Ends the intervals if a try has paid, or doubles them."""
        self.length = 0 if has_paid else min(max(2 * self.length, self.shortest), self.longest)
        self.left = self.length


class StepCosts:
    """Seconds of steps by the number of proposals that they verify, 0 for steps without a draft.

    Numbers of one size are taken together: 0, 1, 2-3, 4-7 and so on.
    """

    def __init__(self) -> None:
        # By the largest number of each size.
        self._means: dict[int, float] = {}
        self._counts: Counter[int] = Counter()

    def count(self, num_proposals: int) -> int:
        """How many steps of this size were recorded."""
        return self._counts[largest_of_size(num_proposals)]

    def add(self, num_proposals: int, seconds: float) -> None:
        """Records a step."""
        width = largest_of_size(num_proposals)
        mean = self._means.get(width, seconds)
        weight = FASTER_WEIGHT if seconds < mean else SLOWER_WEIGHT
        self._means[width] = mean + weight * (seconds - mean)
        self._counts[width] += 1

    def of(self, num_proposals: int) -> float | None:
        """The mean of steps of this size, interpolated between sizes that were run; `None`: nothing is known."""
        width = largest_of_size(num_proposals)
        known = sorted(self._means)
        if not known or (width == 0 and known[0] > 0):
            return None
        # The next smaller and larger one that was run; beyond the ends, the last one.
        place = bisect_left(known, width)
        larger = known[min(place, len(known) - 1)]
        smaller = larger if larger <= width or place == 0 else known[place - 1]
        mean = self._means[smaller]
        if smaller == larger:
            return mean
        share = (width - smaller) / (larger - smaller)
        return mean + share * (self._means[larger] - mean)


def largest_of_size(number: int) -> int:
    """The largest number with as many bits: 0, 1, 3, 7 and so on."""
    return 2 ** number.bit_length() - 1


class Chances:
    """How often proposals are accepted: of a chain by depth, of a tree by the rank of its nodes."""

    def __init__(self, num_proposals: int) -> None:
        self._rates = [FIRST_RATE] * num_proposals  # of each, where the one that it follows was accepted
        self._counts = [FIRST_COUNT] * num_proposals
        self._parents = list(range(num_proposals))  # the column that each follows; 0 is the anchor

    def add(self, parents: Sequence[int], accepted: Sequence[set[int]], weight: float) -> None:
        """Records a step: the column that each proposal follows, and the accepted columns of each sequence, 0 among them."""
        for index, parent in enumerate(parents):
            self._parents[index] = parent
            reached = [columns for columns in accepted if parent in columns]
            if not reached:
                continue
            num_accepted = sum(index + 1 in columns for columns in reached)
            change = num_accepted / len(reached) - self._rates[index]
            self._counts[index] += 1
            share = max(weight, 1 / self._counts[index])
            self._rates[index] += share * change

    def tokens(self, num_proposals: int) -> float:
        """Expected tokens of a step with the first `num_proposals`, its own among them."""
        chances = [1.0]
        for rate, parent in zip(self._rates[:num_proposals], self._parents, strict=False):
            chances.append(chances[parent] * rate)
        return sum(chances)


class Experience:
    """What the steps of a drafter and a target have shown, kept from text to text."""

    def __init__(self, num_proposals: int) -> None:
        self.chances = Chances(num_proposals)
        self.pause = Backoff(SHORTEST_PAUSE, LONGEST_PAUSE)  # of drafts, while they do not pay
        self.exploration = Backoff(SHORTEST_EXPLORATION, LONGEST_EXPLORATION)  # of widths other than the best
        self.exploration.record(has_paid=False)
        self._costs: dict[tuple[int, int], StepCosts] = defaultdict(StepCosts)

    def costs_of(self, sequences: list[TextSequence]) -> StepCosts:
        """The costs of steps with about as many sequences, whose longest text is about as long."""
        lengths = [len(sequence.prompt_ids) + len(sequence.new_ids) for sequence in sequences]
        size = max(SHORTEST_SIZE, max(lengths).bit_length())
        return self._costs[len(sequences).bit_length(), size]


class WidthProposer:
    """Lets another proposer draft as many tokens as pay: all of them, fewer, or none.

    While steps with a draft give fewer tokens per second than steps without, drafts are only tried, at intervals that grow.

    Args:
        drafts: The proposer of chains or trees.
        state: What is known of the drafter and the target.
        num_proposals: Tokens of a whole draft.
        setting: What else the time of a step and its acceptance depend on: only steps of the same setting are compared.
    """

    def __init__(self, drafts: Proposer, state: PairState, num_proposals: int, setting: Any = None) -> None:
        self.drafts = drafts
        sizes = range(1, num_proposals.bit_length())
        self._widths = [2**size - 1 for size in sizes] + [num_proposals]  # one of each size
        key = (num_proposals, setting)
        self._known = state.widths.setdefault(key, Experience(num_proposals))
        pause = self._known.pause
        pause.left = min(pause.left, pause.length // 4)  # this text may differ
        self._costs = StepCosts()  # of steps like this one
        self._is_exploring = False
        self._elapsed: Callable[[], float] | None = None  # seconds since this step began

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """At most `most` tokens after the anchors [B, 1]: as many as the steps before this one recommend."""
        if most == 0:
            return Proposals(anchors[:, :0])
        self._costs = self._known.costs_of(sequences)
        self._elapsed = stopwatch()
        width = min(most, self.choose())
        if width == 0:
            return Proposals(anchors[:, :0])
        return self.drafts.propose(sequences, anchors, width).first(width)

    def choose(self) -> int:
        """The number of proposals of the next step."""
        self._is_exploring = False
        pause = self._known.pause
        if pause.length and not pause.tick():
            return 0
        if self._is_poor() and self._costs.count(0) < PLAIN_STEPS:
            return 0
        if pause.length:
            return self._trial()
        best = self._best()
        self._is_exploring = self._known.exploration.tick()
        return self._neighbour(best) if self._is_exploring else best

    def _is_poor(self) -> bool:
        """Whether steps give fewer tokens than half of their columns: then steps without a draft might give more."""
        widest = self._widths[-1]
        return self._known.chances.tokens(widest) < (1 + widest) / 2

    def _speed(self, width: int) -> float:
        """Expected tokens per second of steps with `width` proposals, 0 if nothing is known of them."""
        seconds = self._costs.of(width)
        return 0.0 if seconds is None else self._known.chances.tokens(width) / seconds

    def _best(self) -> int:
        """The widest of the widths that are about as fast as the fastest."""
        fastest = max(self._speed(width) for width in self._widths)
        return max(width for width in self._widths if self._speed(width) >= ABOUT_AS_FAST * fastest)

    def _trial(self) -> int:
        """The narrowest width that shows that drafts pay if all of its proposals are accepted."""
        for width in self._widths:
            seconds = self._costs.of(width)
            if seconds is not None and (1 + width) / seconds > self._speed(0):
                return width
        return self._widths[0]

    def _neighbour(self, width: int) -> int:
        """The width beside this one that was run less often."""
        place = self._widths.index(width)
        neighbours = self._widths[max(0, place - 1) : place + 2]
        neighbours.remove(width)
        return min(neighbours, key=self._costs.count, default=width)

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """Adds the time and the accepted proposals of a step. One with lookups says nothing about drafts."""
        width = proposals.token_ids.shape[1]
        if self._elapsed is not None and not proposals.looked_up:
            self._costs.add(width, self._elapsed())
            if width:
                self._record_draft(proposals, blocks, width)
        self._elapsed = None
        self.drafts.record(proposals, blocks)

    def _record_draft(self, proposals: Proposals, blocks: Sequence[Any], width: int) -> None:
        known = self._known
        parents: Sequence[int] = range(width)
        if isinstance(proposals, TreeProposals):
            parents = proposals.tree.parents
        accepted = [accepted_columns(proposals, block) for block in blocks]
        weight = TRIAL_WEIGHT if known.pause.length else NEW_WEIGHT
        known.chances.add(parents, accepted, weight)
        best = self._best()
        known.pause.record(has_paid=self._speed(best) > self._speed(0))
        if self._is_exploring:
            known.exploration.record(has_paid=best == width)


def accepted_columns(proposals: Proposals, block: Any) -> set[int]:
    """The columns of a step that were accepted for the block's sequence, the anchor's among them."""
    if not isinstance(proposals, TreeProposals):
        return set(range(1 + block.num_accepted))
    columns = [0]
    for token_id in block.token_ids[: block.num_accepted]:
        children = proposals.tree.children[columns[-1]]
        columns.append(children[token_id])
    return set(columns)
