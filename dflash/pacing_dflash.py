"""How many drafted tokens are worth verifying, step by step, and whether drafting is worth its time at all.

A step costs the time of its columns, and of the draft. A proposal is worth the chance that it stands. So proposals are
taken, likeliest first, as long as the next one promises more tokens than the time it costs gives elsewhere: at the rate at
which the text has been growing (CaDDTree, arXiv 2606.01813, finds budgets from a latency curve likewise). The text does
not depend on any of this, only the time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from .latency_dflash import LatencyCurve


# What a running sum keeps of itself per step: about twenty steps count.
DECAY = 0.95

# Steps without a draft, after drafts did not pay, and drafts without a tree: few at first, more each time.
SHORTEST_PAUSE = 8
LONGEST_PAUSE = 256

# Drafts pay as long as they give this share of what plain decoding gives in their time: below it, not by bad luck.
MARGIN = 0.9

# Steps of plain decoding by whose time a text begins with what drafts gave in the one before: a few bad blocks are bad luck.
CREDIT = 16

# What drafts gave before counts as so many times plain decoding at most: a text where they fail is soon found out.
MOST_WORTH = 1.5


class Pause:
    """How often something is left out that did not pay: twice as often each time."""

    def __init__(self) -> None:
        self._length, self._left = SHORTEST_PAUSE, 0

    @property
    def is_shortest(self) -> bool:
        """Whether the last try paid, or there was none."""
        return self._length == SHORTEST_PAUSE

    def is_over(self) -> bool:
        """Whether it is time to try again; a step of the pause passes if not."""
        is_over, self._left = self._left == 0, max(0, self._left - 1)
        return is_over

    def record(self, has_paid: bool) -> None:
        """Takes note of what a try gave."""
        if has_paid:
            self._length = SHORTEST_PAUSE
        else:
            self._left, self._length = self._length, min(2 * self._length, LONGEST_PAUSE)

    def end(self) -> None:
        """Tries in the next step."""
        self._left = 0

    def begin_text(self) -> None:
        """Tries at once, or sooner than the text before would have: this one may be another matter."""
        self._left = 0 if self.is_shortest else min(self._left, self._length // 2)


class Habits:
    """What one text teaches about a drafter for the next one: what drafts give, and how often to try what gave nothing."""

    _of: weakref.WeakKeyDictionary[Any, Habits] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.drafts, self.trees = Pause(), Pause()
        # Of recent steps with a draft: tokens, and what plain decoding would have given in their time.
        self._gained = self._plain = float(CREDIT)

    @classmethod
    def of(cls, drafter: Any) -> Habits:
        """The drafter's."""
        return cls._of.setdefault(drafter, cls())

    @property
    def drafts_pay(self) -> bool:
        """Whether steps with a draft have given as much as plain decoding would have in their time, of late."""
        return self._gained > MARGIN * self._plain

    def weigh_anew(self) -> None:
        """Counts the past like `CREDIT` steps; if drafts did not pay, like one: what is tried is judged by itself."""
        if self.drafts.is_shortest:
            self._gained, self._plain = CREDIT * min(self._gained / self._plain, MOST_WORTH), float(CREDIT)
        else:
            self._gained = self._plain = 1.0

    def record(self, gained: float, plain: float) -> None:
        """Takes note of a step with a draft: its tokens, and what plain decoding would have given in its time."""
        self._gained, self._plain = DECAY * self._gained + gained, DECAY * self._plain + plain
        self.drafts.record(self.drafts_pay)
        if not self.drafts_pay:
            self.weigh_anew()


class Pacer:
    """Chooses the width of each step by a latency curve and by how well the drafter's confidence has held.

    Args:
        curve: Of the pair, for this number of rows.
        num_rows: Rows of the batch: a step gives each at least one token.
        habits: Of earlier texts.
    """

    def __init__(self, curve: LatencyCurve, num_rows: int = 1, habits: Habits | None = None) -> None:
        self.curve = curve
        self.num_rows = num_rows
        # Of recent steps: tokens and milliseconds (by the curve); accepted proposals and how many were expected.
        self._tokens, self._milliseconds = float(num_rows), curve.verify(1)
        self._accepted, self._expected = 1.0, 1.0
        self._is_drafted = self._is_tree = False
        self._promised = 0.0
        self._habits = habits or Habits()
        self._drafts, self._trees = self._habits.drafts, self._habits.trees
        self._drafts.begin_text()
        self._trees.begin_text()
        self._habits.weigh_anew()

    @property
    def rate(self) -> float:
        """Tokens per millisecond of late, and never less than plain decoding gives."""
        return max(self._tokens / self._milliseconds, self.num_rows / self.curve.verify(1))

    @property
    def calibration(self) -> float:
        """Accepted proposals over those that the drafter's confidence promised, of late."""
        return self._accepted / self._expected

    def wants_draft(self, num_rows: int = 1) -> bool:
        """Whether to draft in this step for so many rows. While drafts do not pay, only now and then one is tried."""
        if num_rows != self.num_rows:  # the others are done, and the text grows so much slower
            self._tokens *= num_rows / self.num_rows
            self.num_rows = num_rows
            self._drafts.end()
            self._habits.weigh_anew()
        self._is_drafted, self._is_tree, self._promised = self._drafts.is_over(), False, 0.0
        return self._is_drafted

    def wants_tree(self) -> bool:
        """Whether to grow a tree behind this draft. While a chain pays more, only now and then one is tried."""
        return self._trees.is_over()

    def choose(self, survival: Sequence[float], tree_survival: Sequence[float] = ()) -> tuple[int, bool]:
        """How many proposals to verify, and whether as a tree.

        Args:
            survival: For each drafted token, the chance that it stands by the drafter's confidence, summed over rows.
            tree_survival: The same for the nodes of a tree, likeliest first.
        """
        count, gain = self._best(survival, 0.0)
        num_nodes, gain_of_tree = self._best(tree_survival, self.curve.tree_ms or 0.0)
        self._is_tree = gain_of_tree > gain
        if tree_survival:
            self._trees.record(self._is_tree)
        if self._is_tree:
            count, survival = num_nodes, tree_survival
        self._promised = sum(survival[:count])
        return count, self._is_tree

    def _best(self, survival: Sequence[float], extra_ms: float) -> tuple[int, float]:
        """The number of columns that gains most over a single one, in tokens, and what it gains."""
        best, best_gain, expected = 0, 0.0, 0.0
        rate, calibration, free_ms = self.rate, self.calibration, self.curve.verify(1) - extra_ms
        for count, chance in enumerate(survival, start=1):
            expected += min(chance * calibration, self.num_rows)
            gain = expected - rate * (self.curve.verify(1 + count) - free_ms)
            if gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain

    def record(self, num_proposals: int, num_accepted: int) -> None:
        """Takes note of a step: the proposals of each row, and how many stood in all rows."""
        milliseconds = self.curve.verify(1 + num_proposals)
        milliseconds += self.curve.draft_ms if self._is_drafted else 0.0
        milliseconds += (self.curve.tree_ms or 0.0) if self._is_tree else 0.0
        self._tokens = DECAY * self._tokens + num_accepted + self.num_rows
        self._milliseconds = DECAY * self._milliseconds + milliseconds
        if self._is_drafted:
            self._habits.record(num_accepted + self.num_rows, self.num_rows * milliseconds / self.curve.verify(1))
        if self._promised:
            self._accepted = DECAY * self._accepted + num_accepted
            self._expected = DECAY * self._expected + self._promised
