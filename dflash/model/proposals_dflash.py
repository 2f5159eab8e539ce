"""What is put before the target: rows of text, draft trees, lookups in the text's past, and how many proposals pay.

Trees (DDTree, arXiv 2604.12989): every node sees the text and its ancestors alone, so its logits are those of plain
decoding after its path, and walking along the target's own choices is exact.

Pacing (CaDDTree, arXiv 2606.01813, has a latency curve likewise): proposals are taken, likeliest first, as long as the next
one promises more tokens than its time gives elsewhere. The clock here decides how long things take, never the text.
"""

from __future__ import annotations

import heapq
import json
import math
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria


HOST_CRITERIA = (MaxTimeCriteria, StopStringCriteria)  # which take a text on the host, so that no device is waited for


@dataclass
class Row:
    """A prompt of the batch and what was written behind it."""

    index: int
    prompt_ids: torch.Tensor  # [S], with its padding
    new_ids: list[int] = field(default_factory=list)
    is_done: bool = False

    @cached_property
    def on_host(self) -> Row:
        """This row, its prompt on the CPU; the new tokens are shared."""
        return replace(self, prompt_ids=self.prompt_ids.cpu())

    def text(self, more_ids: Sequence[int] = ()) -> torch.Tensor:
        """Prompt, new tokens and `more_ids`, [1, S + new + more], as plain `generate` shows them to processors."""
        return torch.cat([self.prompt_ids, self.prompt_ids.new_tensor([*self.new_ids, *more_ids])])[None]


def token_limit(criteria: StoppingCriteriaList, prompt_length: int) -> int:
    """How many new tokens the criteria allow; a caller's own length criterion stands in place of the config's."""
    return min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)) - prompt_length


def make_cutter(criteria: StoppingCriteriaList, max_new_tokens: int) -> Callable[[Row, list[int]], list[int]]:
    """`cut(row, token_ids)` writes tokens into the row, one by one as `generate` does, till it stops: returns those."""
    stop_ids = {i for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist()}
    asked = [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    on_host = StoppingCriteriaList(c for c in asked if type(c) in HOST_CRITERIA)
    others = StoppingCriteriaList(c for c in asked if type(c) not in HOST_CRITERIA)

    def cut(row: Row, token_ids: list[int]) -> list[int]:
        for count, token_id in enumerate(token_ids, start=1):
            row.new_ids.append(token_id)
            row.is_done = token_id in stop_ids or len(row.new_ids) == max_new_tokens
            if on_host:
                row.is_done |= bool(on_host(row.on_host.text(), None).all())
            if others:
                row.is_done |= bool(others(row.text(), None).all())
            if row.is_done:
                return token_ids[:count]
        return token_ids

    return cut


@dataclass(frozen=True)
class DraftTree:
    """Column 0 is the anchor; the nodes, columns 1, 2, …, stand behind it, each after its parent."""

    token_ids: list[int]
    parents: list[int]  # columns
    probabilities: list[float]  # of each one's whole path, by the drafter's distributions; never rising

    def first(self, count: int) -> DraftTree:
        """The `count` likeliest nodes: a tree, because nobody is likelier than its parent."""
        return DraftTree(self.token_ids[:count], self.parents[:count], self.probabilities[:count])

    @cached_property
    def depths(self) -> list[int]:
        """How many tokens each column stands behind the anchor's."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each column, the columns of its children by their token."""
        children: list[dict[int, int]] = [{} for _ in self.depths]
        for column, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True), start=1):
            children[parent][token_id] = column
        return children

    def chain(self) -> list[int]:
        """The nodes of the likeliest path, each the likeliest child of the one before, as indices of `token_ids`."""
        columns = [0]
        while children := self.children[columns[-1]]:
            columns.append(min(children.values()))
        return [column - 1 for column in columns[1:]]

    def ancestors(self) -> torch.Tensor:
        """Which columns each column sees, itself included: bool [1 + n, 1 + n]."""
        sees = torch.eye(len(self.depths), dtype=torch.bool)
        for column, parent in enumerate(self.parents, start=1):
            sees[column] |= sees[parent]
        return sees


def grow_tree(log_probs: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], budget: int) -> DraftTree:
    """The `budget` likeliest paths, best first, of independent positions; `log_probs` fall (DDTree, algorithm 1)."""
    tree = DraftTree([], [], [])
    # Minus the path's log-probability, its parent's, the parent's column, its position and its rank there.
    frontier = [(-log_probs[0][0], 0.0, 0, 0, 0)] if log_probs else []
    while frontier and len(tree.token_ids) < budget:
        cost, cost_of_parent, parent, position, rank = heapq.heappop(frontier)
        if cost == math.inf:  # a token that the drafter cannot say
            break
        tree.token_ids.append(token_ids[position][rank])
        tree.parents.append(parent)
        tree.probabilities.append(math.exp(-cost))
        if rank + 1 < len(log_probs[position]):
            sibling = cost_of_parent - log_probs[position][rank + 1]
            heapq.heappush(frontier, (sibling, cost_of_parent, parent, position, rank + 1))
        if position + 1 < len(log_probs):
            child = cost - log_probs[position + 1][0]
            heapq.heappush(frontier, (child, cost, len(tree.token_ids), position + 1, 0))
    return tree


RECENT = 0.25  # how much of the running mean the latest block is
RETRY_AFTER = 16  # places where a loser could have proposed, after which it is tried again


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the text's last `ngram_size` tokens.

    It pays while its blocks have had at least as many tokens accepted as the drafter's, on a running mean; otherwise it
    is tried once in a while.
    """

    def __init__(self, num_tokens: int, ngram_size: int) -> None:
        self.num_tokens, self.ngram_size = num_tokens, ngram_size
        # For each row its text, and for each n-gram but the last one where the token behind it stands.
        self._read: dict[int, tuple[list[int], dict[tuple[int, ...], int]]] = {}
        self._mean_accepted: dict[bool, float] = {}  # of lookups (untried, they are tried) and of the drafter's blocks
        self._num_passed = 0

    def propose(self, rows: list[Row]) -> dict[int, list[int]]:
        """Proposals by place in `rows`, where the text's end occurred before and looking back pays."""
        found = {place: ids for place, row in enumerate(rows) if (ids := self._continue(row))}
        if not found or self._mean_accepted.get(True, math.inf) >= self._mean_accepted.get(False, 0.0):
            return found
        self._num_passed = (self._num_passed + 1) % RETRY_AFTER
        return {} if self._num_passed else found

    def record(self, is_lookup: bool, num_accepted: int) -> None:
        """Counts what was accepted of a block of either kind."""
        mean = self._mean_accepted.get(is_lookup, float(num_accepted))
        self._mean_accepted[is_lookup] = mean + RECENT * (num_accepted - mean)

    def _continue(self, row: Row) -> list[int] | None:
        """What stood behind the latest earlier occurrence of the row's end, repeated if it reaches that end."""
        text, places = self._read.setdefault(row.index, ([], {}))
        first_end = max(len(text), self.ngram_size)
        text += row.new_ids[len(text) - len(row.prompt_ids) :] if text else row.prompt_ids.tolist() + row.new_ids
        for end in range(first_end, len(text)):
            places[tuple(text[end - self.ngram_size : end])] = end
        begin = places.get(tuple(text[-self.ngram_size :]))
        if begin is None:
            return None
        period = len(text) - begin
        return [text[begin + i % period] for i in range(self.num_tokens)]


REPEATS, UNTIMED = 5, 3  # timed forwards, after some in which compiled ones are recorded and compared
clock = time.perf_counter  # the one clock of the shipped code
_measured: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # curves by target, drafter and setting


@dataclass(frozen=True)
class LatencyCurve:
    """Milliseconds of one verify step by its number of columns, of one draft, and of what a tree adds."""

    widths: tuple[int, ...]  # columns, anchor included, rising from 1
    verify_ms: tuple[float, ...]  # of the target's forward over so many
    draft_ms: float
    machine: dict[str, Any]  # what they were measured on: device, dtype, threads, versions
    tree_ms: float | None = None  # more of a step whose columns are a tree; None: not measured

    def __post_init__(self) -> None:
        widths = list(self.widths)
        if widths[:1] != [1] or widths != sorted(set(widths)) or len(widths) != len(self.verify_ms):
            raise ValueError(
                f"A latency curve has the widths {widths} for {len(self.verify_ms)} times: give one time for each of "
                "rising widths from 1 on."
            )
        if not all(ms > 0 for ms in (*self.verify_ms, self.draft_ms)) or (self.tree_ms or 0.0) < 0:
            shortest = min(*self.verify_ms, self.draft_ms, self.tree_ms or 0.0)
            raise ValueError(f"A latency curve holds {shortest} ms: measure it again.")

    def verify(self, width: int) -> float:
        """Milliseconds of `width` columns: on the line through the measured widths around it, or the last two."""
        if len(self.widths) == 1:
            return self.verify_ms[0]
        right = min(max(bisect_left(self.widths, width), 1), len(self.widths) - 1)
        (w0, w1), (t0, t1) = self.widths[right - 1 : right + 1], self.verify_ms[right - 1 : right + 1]
        return t0 + (t1 - t0) * (width - w0) / (w1 - w0)

    def to_json(self) -> str:
        """As text for a file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LatencyCurve:
        """What `to_json` wrote; raises ValueError if it is something else."""
        try:
            fields = json.loads(text)
            widths, verify_ms = tuple(map(int, fields["widths"])), tuple(map(float, fields["verify_ms"]))
            draft_ms, tree_ms = float(fields["draft_ms"]), fields["tree_ms"]
            tree_ms, measured_on = None if tree_ms is None else float(tree_ms), dict(fields["machine"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is no latency curve ({error!r}): give what LatencyCurve.to_json wrote.") from error
        return cls(widths, verify_ms, draft_ms, measured_on, tree_ms)

    def check(self, target: Any, drafter: Any, is_tree: bool) -> None:
        """Raises ValueError if it was measured on another machine or of another pair, or knows no trees."""
        if is_tree and self.tree_ms is None:
            raise ValueError("The latency curve was measured without draft_tree: measure it with draft_tree=True.")
        here = machine(target, drafter)
        others = [name for name, value in here.items() if self.machine.get(name) != value]
        if others:
            said = ", ".join(f"{name} {self.machine.get(name)!r} and not {here[name]!r}" for name in others)
            raise ValueError(f"The latency curve was measured elsewhere ({said}): measure it here.")


def machine(target: Any, drafter: Any) -> dict[str, Any]:
    """What the times of a pair depend on."""
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
    draft: Callable[[], torch.Tensor],
    verify_tree: Callable[[int], torch.Tensor] | None = None,
) -> LatencyCurve:
    """The curve of a target and a drafter over `widths`, rising from 1, measured if it was not before in this `setting`.

    A setting is what else the times depend on. `verify` runs the target over so many columns, `verify_tree` over those
    of a tree, and `draft` the drafter; each leaves everything as it was.
    """
    target, drafter = models
    of_pair = _measured.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, {})
    key = (setting, tuple(widths), target.dtype, target.device, torch.get_num_threads())
    if key not in of_pair:
        # Wider is never faster: what says so is noise.
        times = tuple(accumulate([_milliseconds(partial(verify, width)) for width in widths], max))
        tree_ms = None
        if verify_tree is not None:
            tree_ms = max(0.0, _milliseconds(partial(verify_tree, widths[-1])) - times[-1])
        of_pair[key] = LatencyCurve(tuple(widths), times, _milliseconds(draft), machine(target, drafter), tree_ms)
    return of_pair[key]


def _milliseconds(run: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(UNTIMED + REPEATS):
        began = clock()
        run().flatten()[0].item()  # reading a value waits for the device
        times.append(1e3 * (clock() - began))
    return min(times[UNTIMED:])  # what another process slows down is not the machine's


DECAY = 0.95  # what a running sum keeps of itself per step: about twenty steps count
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256  # steps without a draft, or drafts without a tree, after those did not pay
MARGIN = 0.9  # drafts pay that give this share of what plain decoding gives in their time: less is no bad luck
CREDIT = 16  # steps by which what drafts gave in earlier texts counts in a new one: a few bad blocks are bad luck
MOST_WORTH = 1.5  # times plain decoding that it counts as at most: a text where drafts fail is soon found out


@dataclass
class Pause:
    """How long something is left out that did not pay: twice as long each time."""

    length: int = 0  # of the latest pause; 0 while tries pay
    left: int = 0

    def is_over(self) -> bool:
        """Whether it is time to try again; a step of the pause passes if not."""
        self.left -= 1
        return self.left < 0

    def record(self, has_paid: bool) -> None:
        """Takes note of what a try gave."""
        self.length = 0 if has_paid else min(max(2 * self.length, SHORTEST_PAUSE), LONGEST_PAUSE)
        self.left = self.length


class Habits:
    """What one text teaches about a drafter for the next: what drafts give, and how often to try what gave nothing."""

    _of: weakref.WeakKeyDictionary[Any, Habits] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.drafts, self.trees = Pause(), Pause()
        # Of recent steps with a draft: tokens, and what plain decoding would have given in their time.
        self._gained = self._plain = float(CREDIT)

    @classmethod
    def of(cls, drafter: Any) -> Habits:
        """The drafter's."""
        return cls._of.setdefault(drafter, cls())

    def weigh_anew(self) -> None:
        """Counts the past like `CREDIT` steps; if drafts did not pay, like one: what is tried is judged by itself."""
        if self.drafts.length:
            self._gained = self._plain = 1.0
        else:
            self._gained, self._plain = CREDIT * min(self._gained / self._plain, MOST_WORTH), float(CREDIT)

    def record(self, gained: float, plain: float) -> None:
        """Takes note of a step with a draft: its tokens, and what plain decoding would have given in its time."""
        self._gained, self._plain = DECAY * self._gained + gained, DECAY * self._plain + plain
        has_paid = self._gained > MARGIN * self._plain
        self.drafts.record(has_paid)
        if not has_paid:
            self.weigh_anew()


class Pacer:
    """Chooses the width of each step by a latency curve and by how well the drafter's confidence has held.

    A step gives each of `num_rows` at least one token, and `widths` are the numbers of columns that it may have.
    """

    def __init__(
        self, curve: LatencyCurve, num_rows: int = 1, habits: Habits | None = None, widths: Sequence[int] | None = None
    ) -> None:
        self.curve, self.num_rows = curve, num_rows
        self._habits, self._widths = habits or Habits(), widths
        for pause in (self._habits.drafts, self._habits.trees):
            pause.left = min(pause.left, LONGEST_PAUSE // 2)  # this text may be another matter
        self._habits.weigh_anew()
        # Of recent steps: tokens and milliseconds (by the curve); accepted proposals and how many were expected.
        self._tokens, self._milliseconds = float(num_rows), curve.verify(1)
        self._accepted, self._expected = 1.0, 1.0
        self.begin_step()

    def begin_step(self) -> None:
        """A step without a draft, until `choose` says otherwise."""
        # Whether it drafts, what a tree adds, and how many accepted proposals are expected.
        self._is_drafted, self._tree_ms, self._promised = False, 0.0, 0.0

    def wants_draft(self, num_rows: int = 1) -> bool:
        """Whether to draft in the next step for so many rows. While drafts do not pay, only now and then one is tried."""
        if num_rows != self.num_rows:  # the others are done, and the text grows so much slower
            self._tokens *= num_rows / self.num_rows
            self.num_rows = num_rows
            self._habits.drafts.left = 0
            self._habits.weigh_anew()
        return self._habits.drafts.is_over()

    def wants_tree(self) -> bool:
        """Whether to grow a tree behind this draft. While a chain pays more, only now and then one is tried."""
        return self._habits.trees.is_over()

    def choose(self, survival: Sequence[float], tree_survival: Sequence[float] = ()) -> tuple[int, bool]:
        """How many proposals to verify, and whether as a tree.

        By the chance that each token, or node, likeliest first, stands by the drafter's confidence, summed over rows.
        """
        count, gain = self._best(survival, 0.0)
        tree_ms = self.curve.tree_ms or 0.0
        num_nodes, gain_of_tree = self._best(tree_survival, tree_ms)
        is_tree = gain_of_tree > gain
        if tree_survival:
            self._habits.trees.record(is_tree)
        if is_tree:
            count, survival, self._tree_ms = num_nodes, tree_survival, tree_ms
        self._is_drafted, self._promised = True, sum(survival[:count])
        return count, is_tree

    def _best(self, survival: Sequence[float], extra_ms: float) -> tuple[int, float]:
        """The number of proposals that gains most over none, in tokens, and what it gains."""
        plain_ms = self.curve.verify(1)
        rate = max(self._tokens / self._milliseconds, self.num_rows / plain_ms)  # never less than plain decoding's
        calibration = self._accepted / self._expected
        best, best_gain, expected = 0, 0.0, 0.0
        for count, chance in enumerate(survival, start=1):
            expected += min(chance * calibration, self.num_rows)
            gain = expected - rate * (self.curve.verify(1 + count) - (plain_ms - extra_ms))
            may_be = self._widths is None or 1 + count in self._widths or count == len(survival)
            if may_be and gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain

    def record(self, num_proposals: int, num_accepted: int) -> None:
        """Takes note of a step: the proposals of each row, and how many stood in all rows."""
        milliseconds = self.curve.verify(1 + num_proposals) + self._tree_ms
        milliseconds += self.curve.draft_ms if self._is_drafted else 0.0
        self._tokens = DECAY * self._tokens + num_accepted + self.num_rows
        self._milliseconds = DECAY * self._milliseconds + milliseconds
        if self._is_drafted:
            self._habits.record(num_accepted + self.num_rows, self.num_rows * milliseconds / self.curve.verify(1))
        if self._promised:
            self._accepted = DECAY * self._accepted + num_accepted
            self._expected = DECAY * self._expected + self._promised
        self.begin_step()
