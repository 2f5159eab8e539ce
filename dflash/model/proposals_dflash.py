"""What the target verifies: sequences, draft trees, prompt lookup, and how many proposals are worth their time.

Trees (DDTree, arXiv 2604.12989): each node sees only the text and its ancestors. Its logits are those of plain decoding after
its path, so following the target's choices down the tree is exact.

Pacing (with a latency curve, as in CaDDTree, arXiv 2606.01813): proposals are added, most probable first, while the next one
is expected to give more tokens than the same time gives elsewhere. The clock decides how much is verified, never the text.
"""

from __future__ import annotations

import heapq
import json
import math
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria


HOST_CRITERIA = (MaxTimeCriteria, StopStringCriteria)  # accept a text on the CPU, so they do not wait for the device


@dataclass
class TextSequence:
    """A prompt of the batch and the tokens generated after it."""

    index: int
    prompt_ids: torch.Tensor  # [S], with its padding
    new_ids: list[int] = field(default_factory=list)
    is_done: bool = False

    @cached_property
    def on_host(self) -> TextSequence:
        """This sequence with its prompt on the CPU. The list of new tokens is shared."""
        return replace(self, prompt_ids=self.prompt_ids.cpu())

    def text(self, more_ids: Sequence[int] = ()) -> torch.Tensor:
        """Prompt, new tokens and `more_ids`, [1, S + new + more], as `generate` passes them to processors."""
        return torch.cat([self.prompt_ids, self.prompt_ids.new_tensor([*self.new_ids, *more_ids])])[None]


def make_cutter(criteria: StoppingCriteriaList, max_new_tokens: int) -> Callable[[TextSequence, list[int]], list[int]]:
    """`cut(sequence, token_ids)` appends tokens one by one, as `generate` does, until the text stops, and returns those."""
    stop_ids = {i for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist()}
    asked = [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    on_host = StoppingCriteriaList(c for c in asked if type(c) in HOST_CRITERIA)
    others = StoppingCriteriaList(c for c in asked if type(c) not in HOST_CRITERIA)

    def cut(sequence: TextSequence, token_ids: list[int]) -> list[int]:
        for count, token_id in enumerate(token_ids, start=1):
            sequence.new_ids.append(token_id)
            sequence.is_done = token_id in stop_ids or len(sequence.new_ids) == max_new_tokens
            if on_host:
                sequence.is_done |= bool(on_host(sequence.on_host.text(), None).all())
            if others:
                sequence.is_done |= bool(others(sequence.text(), None).all())
            if sequence.is_done:
                return token_ids[:count]
        return token_ids

    return cut


@dataclass(frozen=True)
class DraftTree:
    """A tree of proposals. Column 0 is the anchor; nodes are columns 1, 2, …, each after its parent."""

    token_ids: list[int]
    parents: list[int]  # columns
    probabilities: list[float]  # of each node's path under the drafter, in descending order

    @classmethod
    def grown(
        cls, log_probs: Sequence[Sequence[Sequence[float]]], token_ids: Sequence[Sequence[int]], budget: int
    ) -> DraftTree:
        """The `budget` most probable paths, best first (DDTree, algorithm 1).

        `log_probs[p][i][j]` is of token j of position p after token i of the position before, where i = 0 is the anchor. A
        position with a single row has the same probabilities after every token.
        """
        tree = cls([], [], [])
        # Negative log-probability of a path, its parent's column, and position and index of its last token.
        frontier: list[tuple[float, int, int, int]] = []

        def push(cost: float, parent: int, position: int, before: int) -> None:
            after = log_probs[position] if position < len(log_probs) else [()]
            for token, log_prob in enumerate(after[before if len(after) > 1 else 0]):
                heapq.heappush(frontier, (cost - log_prob, parent, position, token))

        push(0.0, 0, 0, 0)
        while frontier and len(tree.token_ids) < budget:
            cost, parent, position, token = heapq.heappop(frontier)
            if cost == math.inf:  # outside the drafter's vocabulary
                break
            tree.token_ids.append(token_ids[position][token])
            tree.parents.append(parent)
            tree.probabilities.append(math.exp(-cost))
            push(cost, len(tree.token_ids), position + 1, token)
        return tree

    def first(self, count: int) -> DraftTree:
        """The `count` most probable nodes. They form a tree: no node is more probable than its parent."""
        return DraftTree(self.token_ids[:count], self.parents[:count], self.probabilities[:count])

    @cached_property
    def depths(self) -> list[int]:
        """Distance of each column from the anchor, in tokens."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each column, its children: token to column."""
        children: list[dict[int, int]] = [{} for _ in self.depths]
        for column, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True), start=1):
            children[parent][token_id] = column
        return children

    def chain(self) -> list[int]:
        """The path that always takes the most probable child, as indices of `token_ids`."""
        columns = [0]
        while children := self.children[columns[-1]]:
            columns.append(min(children.values()))
        return [column - 1 for column in columns[1:]]

    @cached_property
    def paths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns down to each leaf, padded with the anchor's [P, depth], and a path and depth of each column [2, S]."""
        paths = [[0]]
        for column, parent in enumerate(self.parents, start=1):
            paths.append([*paths[parent], column])
        paths = [path for path, children in zip(paths, self.children, strict=True) if not children]
        places = {column: (i, depth) for i, path in enumerate(paths) for depth, column in enumerate(path)}
        padded = torch.tensor([[*path, *[0] * (max(self.depths) + 1 - len(path))] for path in paths])
        return padded, torch.tensor([places[column] for column in sorted(places)]).T

    def ancestors(self) -> torch.Tensor:
        """Which columns each column sees, itself included, bool [1 + n, 1 + n]."""
        sees = torch.eye(len(self.depths), dtype=torch.bool)
        for column, parent in enumerate(self.parents, start=1):
            sees[column] |= sees[parent]
        return sees


LONGEST_MATCH = 64  # tokens of an earlier occurrence that are compared, at most
MOST_OCCURRENCES = 32  # newest ones that are compared
REACH = 64  # tokens after a repeated one in which a text counts as repeating itself


class PromptLookup:
    """Proposes what followed the longest, then the newest, earlier occurrence of a sequence's last tokens.

    At least `ngram_size` tokens have to match. After each lookup of which no token was accepted, twice as many.
    """

    def __init__(self, num_tokens: int, ngram_size: int) -> None:
        self.num_tokens, self.ngram_size = num_tokens, ngram_size
        self._text: list[int] = []
        # For each n-gram, where the tokens after it begin, oldest first. The text's last n-gram is added with its next token.
        self._begins: dict[tuple[int, ...], list[int]] = {}
        self._num_matching = ngram_size
        self._repeated = -REACH - 1  # length of the text after the last n-gram that had occurred before
        self._first: int | None = None  # proposal of this step that was looked up first

    def read(self, sequence: TextSequence) -> bool:
        """Reads what was written since the last call; returns whether the text has repeated itself lately."""
        text, size, num_read = self._text, self.ngram_size, len(self._text)
        prompt_ids, new_ids = sequence.prompt_ids, sequence.new_ids
        text += new_ids[num_read - len(prompt_ids) :] if text else prompt_ids.tolist() + new_ids
        for end in range(max(num_read, size), len(text) + 1):
            if begins := self._begins.setdefault(tuple(text[end - size : end]), []):
                self._repeated = end
            if end < len(text):
                begins.append(end)
        return len(text) - self._repeated <= REACH

    def propose(self, drafted: Sequence[int] = ()) -> tuple[int, list[int]] | None:
        """The number of drafted tokens to keep, and what is found after them; `None`: nothing after any of them."""
        text = [*self._text[-LONGEST_MATCH:], *drafted]
        for count in range(min(len(drafted), self.num_tokens - 1) + 1):
            if (begin := self._find(text[: len(text) - len(drafted) + count])) is not None:
                self._first = count
                found = [*self._text[begin : begin + self.num_tokens], *drafted[:count]]
                return count, [found[i % len(found)] for i in range(self.num_tokens - count)]
        return None

    def record(self, num_accepted: int) -> None:
        """Adapts the number of tokens that have to match to the accepted ones of a step."""
        if self._first is not None and num_accepted >= self._first:
            factor = 2.0 if num_accepted == self._first else 0.5
            self._num_matching = int(min(max(factor * self._num_matching, self.ngram_size), LONGEST_MATCH))
        self._first = None

    def _find(self, last: list[int]) -> int | None:
        """Where the text goes on after the best earlier occurrence of `last`."""
        best, most = None, self._num_matching - 1
        for begin in reversed(self._begins.get(tuple(last[-self.ngram_size :]), [])[-MOST_OCCURRENCES:]):
            length = self.ngram_size
            while length < min(begin, len(last)) and self._text[begin - length - 1] == last[-length - 1]:
                length += 1
            if length > most:
                best, most = begin, length
        return best


REPEATS, UNTIMED = 3, 3  # timed runs of a forward, and those before them, which record and compare compiled ones
ROUNDS, PATIENCE = 4, 20  # measurements, as one may be disturbed; each waits for this multiple of the one before
clock = time.perf_counter  # the only clock in the shipped code
_measured: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # rounds, by target, drafter and setting


@dataclass(frozen=True)
class LatencyCurve:
    """Measured durations of the two forwards of a target and drafter pair, for adaptive decoding.

    Attributes:
        widths (`tuple[int, ...]`): Numbers of columns, anchor included, rising from 1.
        verify_ms (`tuple[float, ...]`): Milliseconds of the target's forward, for each width.
        draft_ms (`float`): Milliseconds of one draft.
        machine (`dict[str, Any]`): What they were measured on: device, dtype, threads, versions, sizes of the models.
        tree_ms (`float`, *optional*): Additional milliseconds of a step that verifies a tree; `None` if not measured.
        whole_ms (`float`, *optional*): Milliseconds of a step that is one compiled function; `None` if there is none.

    Example:
        >>> curve = LatencyCurve.from_json(Path("curve.json").read_text())
        >>> text_ids = drafter.spec_generate(input_ids, target=target, latency_curve=curve)
    """

    widths: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float
    machine: dict[str, Any]
    tree_ms: float | None = None
    whole_ms: float | None = None

    def __post_init__(self) -> None:
        widths = list(self.widths)
        if widths[:1] != [1] or widths != sorted(set(widths)) or len(widths) != len(self.verify_ms):
            given = f"A latency curve has the widths {widths} for {len(self.verify_ms)} times"
            raise ValueError(f"{given}: give one time for each of rising widths from 1 on.")
        if not all(ms > 0 for ms in (*self.verify_ms, self.draft_ms)) or (self.tree_ms or 0.0) < 0:
            shortest = min(*self.verify_ms, self.draft_ms, self.tree_ms or 0.0)
            raise ValueError(f"A latency curve holds {shortest} ms: measure it again.")

    def verify(self, width: int) -> float:
        """Milliseconds of a target forward over `width` columns, interpolated linearly between measured widths."""
        if len(self.widths) == 1:
            return self.verify_ms[0]
        right = min(max(bisect_left(self.widths, width), 1), len(self.widths) - 1)
        (w0, w1), (t0, t1) = self.widths[right - 1 : right + 1], self.verify_ms[right - 1 : right + 1]
        return t0 + (t1 - t0) * (width - w0) / (w1 - w0)

    def to_json(self) -> str:
        """The curve as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LatencyCurve:
        """The curve that `to_json` wrote. Raises ValueError for any other text."""
        try:
            fields = json.loads(text)
            widths, verify_ms = tuple(map(int, fields["widths"])), tuple(map(float, fields["verify_ms"]))
            draft_ms, measured_on = float(fields["draft_ms"]), dict(fields["machine"])
            others = [None if (ms := fields[name]) is None else float(ms) for name in ("tree_ms", "whole_ms")]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is no latency curve ({error!r}): give what LatencyCurve.to_json wrote.") from error
        return cls(widths, verify_ms, draft_ms, measured_on, *others)

    def check(self, target: Any, drafter: Any, is_tree: bool) -> None:
        """Raises ValueError if the curve is of another machine or pair, or was measured without trees and `is_tree`."""
        if is_tree and self.tree_ms is None:
            raise ValueError("The latency curve was measured without draft_tree: measure it with draft_tree=True.")
        here = machine(target, drafter)
        if others := [name for name, value in here.items() if self.machine.get(name) != value]:
            said = ", ".join(f"{name} {self.machine.get(name)!r} and not {here[name]!r}" for name in others)
            raise ValueError(f"The latency curve was measured elsewhere ({said}): measure it here.")


def machine(target: Any, drafter: Any) -> dict[str, Any]:
    """Everything that the durations of a pair depend on."""
    device = target.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "drafter_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }


def measured_curve(
    models: tuple[Any, Any],
    setting: Any,
    widths: Sequence[int],
    verify: Callable[[int], torch.Tensor],
    forwards: Mapping[str, Callable[[], torch.Tensor]] | None,
) -> LatencyCurve | None:
    """The curve of target and drafter over `widths`, from at most `ROUNDS` rounds per `setting`; `tree_ms`: of the widest forward.

    Without `forwards` the known curve, or `None` if a round is due.
    """
    target, drafter = models
    of_pair = _measured.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, {})
    key = (setting, tuple(widths), target.dtype, target.device, torch.get_num_threads())
    rounds = of_pair.setdefault(key, [])
    if not rounds or (len(rounds) < ROUNDS and clock() > rounds[-1][0]):
        if forwards is None:
            return None
        runs: dict[Any, Any] = {**{width: partial(verify, width) for width in widths}, **forwards}
        began, num_untimed = clock(), 1 if rounds else UNTIMED
        times = {name: _milliseconds(run, num_untimed) for name, run in runs.items()}
        rounds.append((clock() + PATIENCE * (clock() - began), times))  # when the next one is due
    times = {name: min(times[name] for _, times in rounds) for name in rounds[0][1]}  # other processes only add time
    # A wider forward is never faster; a measurement that says so is an outlier.
    verify_ms = tuple(accumulate([times.pop(width) for width in widths], max))
    times |= {"tree_ms": max(0.0, times["tree_ms"] - verify_ms[-1])} if "tree_ms" in times else {}
    return LatencyCurve(tuple(widths), verify_ms, machine=machine(target, drafter), **times)


def _milliseconds(run: Callable[[], torch.Tensor], num_untimed: int) -> float:
    times = []
    for _ in range(num_untimed + REPEATS):
        began = clock()
        run().flatten()[0].item()  # reading a value waits for the device
        times.append(1e3 * (clock() - began))
    return min(times[num_untimed:])


DECAY = 0.95  # of running sums, per step: about twenty steps count
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256  # steps without a draft, or drafts without a tree
MARGIN = 0.9  # drafts are kept up while they give this share of plain decoding's tokens in the same time
CREDIT = 16  # weight of earlier texts in a new one, in steps: a few bad blocks do not stop drafting
MOST_WORTH = 1.5  # cap on that history's gain, so that a text whose drafts fail is detected within a few steps


@dataclass
class Pause:
    """Exponential back-off for drafts, trees, or choices among proposals that do not pay."""

    length: int = 0  # of the latest pause; 0 while tries pay
    left: int = 0

    def is_over(self) -> bool:
        """Whether to try again; if not, one step of the pause passes."""
        self.left -= 1
        return self.left < 0

    def record(self, has_paid: bool) -> None:
        """Ends the pause if the try has paid, or doubles it."""
        self.length = 0 if has_paid else min(max(2 * self.length, SHORTEST_PAUSE), LONGEST_PAUSE)
        self.left = self.length


class Habits:
    """Statistics of a drafter that are carried from one text to the next: gains of drafts, and pauses."""

    _of: weakref.WeakKeyDictionary[Any, Habits] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.drafts, self.trees, self.choices = Pause(), Pause(), Pause()
        # Of recent steps with a draft: tokens, and the tokens that plain decoding gives in the same time.
        self._gained = self._plain = float(CREDIT)

    @classmethod
    def of(cls, drafter: Any) -> Habits:
        """Those of `drafter`."""
        return cls._of.setdefault(drafter, cls())

    def weigh_anew(self) -> None:
        """Weighs the past like `CREDIT` steps, or like one step if drafts did not pay."""
        if self.drafts.length:
            self._gained = self._plain = 1.0
        else:
            self._gained, self._plain = CREDIT * min(self._gained / self._plain, MOST_WORTH), float(CREDIT)

    def record(self, gained: float, plain: float) -> None:
        """Adds a step with a draft: its tokens, and those that plain decoding gives in the same time."""
        self._gained, self._plain = DECAY * self._gained + gained, DECAY * self._plain + plain
        has_paid = self._gained > MARGIN * self._plain
        self.drafts.record(has_paid)
        if not has_paid:
            self.weigh_anew()


class Pacer:
    """Chooses the width of each step by a latency curve and the drafter's confidence; `widths`: allowed ones, or any."""

    def __init__(
        self, curve: LatencyCurve, num_sequences: int = 1, habits: Habits | None = None, widths: Sequence[int] = ()
    ) -> None:
        self.curve, self.num_sequences = curve, num_sequences
        self.habits, self._widths = habits or Habits(), widths
        for pause in (self.habits.trees, self.habits.choices):
            pause.left = min(pause.left, LONGEST_PAUSE // 2)  # this text may differ
        self.habits.drafts.left = 0  # so it is tried
        self.habits.weigh_anew()
        # Of recent steps: tokens, milliseconds by the curve, accepted proposals, and expected ones.
        self._tokens, self._milliseconds = float(num_sequences), curve.verify(1)
        self._accepted, self._expected = 1.0, 1.0
        self.begin_step()

    def begin_step(self) -> None:
        """Begins a step, without a draft until `choose` is called."""
        # Whether the step drafts, milliseconds that a tree adds, and the expected number of accepted proposals.
        self._is_drafted, self._tree_ms, self._promised = False, 0.0, 0.0

    def wants_draft(self, num_sequences: int = 1) -> bool:
        """Whether to draft in the next step. While drafts do not pay, they are tried at growing intervals."""
        if num_sequences != self.num_sequences:  # sequences are done, and tokens come proportionally slower
            self._tokens *= num_sequences / self.num_sequences
            self.num_sequences = num_sequences
            self.habits.drafts.left = 0
            self.habits.weigh_anew()
        return self.habits.drafts.is_over()

    def num_whole(self, num_sequences: int) -> int:
        """How many of the next steps verify the whole block without a choice, which would cost more than it gives."""
        is_known = self.curve.whole_ms is not None and num_sequences == self.num_sequences
        return self.habits.choices.left if is_known and self.habits.drafts.left <= 0 else 0

    def choose(self, survival: Sequence[float], tree_survival: Sequence[float] = ()) -> tuple[int, bool]:
        """How many proposals to verify, and whether as a tree, by the drafter's probabilities, summed over sequences."""
        count, gain = self._best(survival, 0.0)
        tree_ms = self.curve.tree_ms or 0.0
        num_nodes, gain_of_tree = self._best(tree_survival, tree_ms)
        is_tree = gain_of_tree > gain
        if tree_survival:
            self.habits.trees.record(is_tree)
        if self.curve.whole_ms is not None:
            saved_ms = self.curve.draft_ms + self.curve.verify(1 + len(survival)) - self.curve.whole_ms
            self.habits.choices.record(max(gain, gain_of_tree) > self._best(survival, -saved_ms, len(survival))[1])
        if is_tree:
            count, survival, self._tree_ms = num_nodes, tree_survival, tree_ms
        self._is_drafted, self._promised = True, sum(survival[:count])
        return count, is_tree

    def _best(self, survival: Sequence[float], extra_ms: float, least: int = 1) -> tuple[int, float]:
        """The number of proposals from `least` on with the largest expected gain over none, and that gain in tokens."""
        plain_ms = self.curve.verify(1)
        rate = max(self._tokens / self._milliseconds, self.num_sequences / plain_ms)  # at least plain decoding's
        calibration = self._accepted / self._expected
        best, best_gain, expected = 0, 0.0, 0.0
        for count, chance in enumerate(survival, start=1):
            expected += min(chance * calibration, self.num_sequences)
            gain = expected - rate * (self.curve.verify(1 + count) - (plain_ms - extra_ms))
            may_be = not self._widths or 1 + count in self._widths or count == len(survival)
            if may_be and count >= least and gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain

    def record(self, num_proposals: int, num_accepted: int, is_whole: bool = False) -> None:
        """Adds a step: proposals per sequence, and accepted proposals of all sequences."""
        milliseconds = self.curve.verify(1 + num_proposals) + self._tree_ms
        milliseconds += self.curve.draft_ms if self._is_drafted else 0.0
        if is_whole and self.curve.whole_ms is not None:
            milliseconds, self._is_drafted = self.curve.whole_ms, True
            self.habits.choices.left -= 1
        self._tokens = DECAY * self._tokens + num_accepted + self.num_sequences
        self._milliseconds = DECAY * self._milliseconds + milliseconds
        if self._is_drafted:
            plain = self.num_sequences * milliseconds / self.curve.verify(1)
            self.habits.record(num_accepted + self.num_sequences, plain)
        if self._promised:
            self._accepted = DECAY * self._accepted + num_accepted
            self._expected = DECAY * self._expected + self._promised
        self.begin_step()
