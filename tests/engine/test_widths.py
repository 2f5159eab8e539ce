"""How wide a step is, by what steps have cost and accepted: on a scripted clock, and the text that does not depend on it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, SMALL, PlacedDrafter, counted_forwards, greedy, make_prompt
from tiny_models import ScriptedDrafter as AnyScriptedDrafter
from tiny_models import make_drafter as any_drafter
from tiny_models import make_target as any_target

from dflash import generate_blocks, spec_generate
from dflash.engine import widths
from dflash.engine.state import PairState
from dflash.engine.trees import TreeProposals
from dflash.engine.widths import (
    LONGEST_PAUSE,
    SHORT,
    SHORTEST_PAUSE,
    Experience,
    StepCosts,
    WidthProposer,
    accepted_columns,
    expected_tokens,
)
from dflash.model import drafting_dflash
from dflash.model.acceptance_dflash import Proposals
from dflash.model.sequences_dflash import TextSequence


make_target = partial(any_target, num_hidden_layers=2)
make_drafter = partial(any_drafter, **SMALL)
ScriptedDrafter = partial(AnyScriptedDrafter, **SMALL)

WIDEST = 15


def usual(width: int, num_sequences: int) -> float:
    """A draft costs as much as a target forward, and each column a little."""
    return 1.0 if width == 0 else 2.0 + 0.1 * width


def free(width: int, num_sequences: int) -> float:
    """All steps cost the same."""
    return 1.0


def per_column(width: int, num_sequences: int) -> float:
    """Each column of each sequence costs the same."""
    return 0.2 + num_sequences * (1 + width)


@dataclass
class Clock:
    """What steps cost, and the time that this adds up to."""

    seconds: Callable[[int, int], float] = usual
    now: float = 0.0

    def stopwatch(self) -> Callable[[], float]:
        began = self.now
        return lambda: self.now - began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    scripted = Clock()
    monkeypatch.setattr(widths, "stopwatch", scripted.stopwatch)
    return scripted


class Drafts:
    """Proposes nothing of interest, as many tokens as it may."""

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        return Proposals(torch.zeros(len(sequences), min(most, WIDEST), dtype=torch.long))

    def record(self, proposals: Proposals, blocks: Any) -> None:
        pass


@dataclass
class Text:
    """A text that is decoded on the scripted clock."""

    clock: Clock
    state: Any = field(default_factory=lambda: SimpleNamespace(widths={}))
    num_sequences: int = 1

    def __post_init__(self) -> None:
        self.proposer = WidthProposer(Drafts(), self.state, WIDEST)
        self.num_tokens = 0
        self.began = self.clock.now

    def run(self, num_steps: int, num_right: int) -> list[int]:
        """The widths of steps whose drafts have `num_right` right tokens before the first wrong one."""
        sequences = [TextSequence(index, torch.zeros(9)) for index in range(self.num_sequences)]
        anchors = torch.zeros(self.num_sequences, 1, dtype=torch.long)
        chosen = []
        for _ in range(num_steps):
            proposals = self.proposer.propose(sequences, anchors, 999)
            width = proposals.token_ids.shape[1]
            self.clock.now += self.clock.seconds(width, self.num_sequences)
            num_accepted = min(num_right, width)
            blocks = [SimpleNamespace(num_accepted=num_accepted)] * self.num_sequences
            self.proposer.record(proposals, blocks)
            self.num_tokens += self.num_sequences * (1 + num_accepted)
            chosen.append(width)
        return chosen

    @property
    def speed(self) -> float:
        """Tokens of a sequence per second."""
        return self.num_tokens / self.num_sequences / (self.clock.now - self.began)


def test_costs_of_widths_that_were_not_run_are_guessed_low() -> None:
    """Promise: in proportion to the columns and a part that all steps have, so that a width is tried once."""
    costs = StepCosts()
    assert costs.of(7, WIDEST) == costs.of(0, WIDEST)
    costs.add(15, 4.0)
    assert costs.of(15, WIDEST) == 4.0
    assert costs.of(0, WIDEST) == pytest.approx(4.0 / 5)
    assert costs.of(7, WIDEST) == pytest.approx(4.0 * (7 + 3.75) / (15 + 3.75))
    costs.add(0, 0.5)
    assert costs.of(7, WIDEST) == pytest.approx(0.5 * (7 + 3.75) / 3.75), "the lowest guess"


def test_a_busy_moment_does_not_decide_what_a_step_costs() -> None:
    costs = StepCosts()
    for seconds in (50.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        costs.add(7, seconds)
    assert costs.of(7, WIDEST) == pytest.approx(1.0, rel=1)
    costs.add(7, 3.0)
    assert costs.of(7, WIDEST) < 2.0
    first = StepCosts()
    first.add(7, 50.0)
    for _ in range(3000):
        first.add(15, 1.0)
    assert first.of(7, WIDEST) < 1.0, "a width that was not run lately is tried again"


def test_tokens_of_wider_steps_are_those_of_the_failed_draft() -> None:
    """Promise: a draft that failed says what all widths give; a draft that was accepted says nothing bad of wider ones."""
    known = Experience(WIDEST)
    for _ in range(200):
        known.add_draft(WIDEST, [range(1, 6), range(1, 10)])
    assert known.tokens == pytest.approx({0: 1, 3: 4, 7: 1 + (5 + 7) / 2, 15: 1 + (5 + 9) / 2}, abs=1e-3)
    for _ in range(200):
        known.add_draft(3, [range(1, 4)])
    assert known.tokens == pytest.approx({0: 1, 3: 4, 7: 8, 15: 16}, abs=1e-3)
    for _ in range(200):
        known.add_draft(7, [[2, 6, 7]])  # columns of a tree
    assert known.tokens == pytest.approx({0: 1, 3: 2, 7: 4, 15: 4}, abs=1e-3)


def test_a_useless_drafter_is_asked_less_and_less(clock: Clock) -> None:
    text = Text(clock)
    chosen = text.run(900, num_right=0)
    drafted = [step for step, width in enumerate(chosen) if width]
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(drafted)]
    assert drafted[0] == 0
    assert len(drafted) < 14
    assert [pause for pause in pauses if pause >= SHORTEST_PAUSE] == [8, 16, 32, 64, 128, 256, 256]
    assert max(pauses) == LONGEST_PAUSE
    assert {chosen[step] for step in drafted[-4:]} == {3}, "the narrowest draft that could show that drafts pay"


def test_a_useless_drafter_costs_little_from_the_first_text_on(clock: Clock) -> None:
    state = Text(clock).state
    speeds = []
    for _ in range(4):
        text = Text(clock, state)
        text.run(256, num_right=0)
        speeds.append(text.speed)
    assert speeds[0] > 0.9
    assert min(speeds[1:]) > 0.98


@pytest.mark.parametrize("seconds", [usual, per_column], ids=["usual", "per column"])
def test_a_bad_drafter_costs_a_batch_little(clock: Clock, seconds: Any) -> None:
    clock.seconds = seconds
    state, plain = Text(clock).state, 1 / seconds(0, 16)
    for least in (0.8, 0.95, 0.95):
        text = Text(clock, state, num_sequences=16)
        text.run(256, num_right=0)
        assert text.speed > least * plain


def test_a_good_drafter_pays_for_nothing(clock: Clock) -> None:
    """Promise: no step without a draft, and as good as no narrow one, where most proposals are accepted."""
    chosen = Text(clock).run(300, num_right=12)
    assert min(chosen) > 0
    assert sum(width < WIDEST for width in chosen) <= 5


def test_a_drafter_that_recovers_is_asked_again(clock: Clock) -> None:
    text = Text(clock)
    assert 0 in text.run(60, num_right=0)[-8:]
    chosen = text.run(LONGEST_PAUSE, num_right=12)
    num_waited = chosen.index(next(filter(None, chosen)))
    assert all(chosen[num_waited:]), "the first try decides"
    assert chosen[-1] >= 7


def test_one_bad_block_is_bad_luck(clock: Clock) -> None:
    text = Text(clock)
    text.run(20, num_right=12)
    for num_right in (0, 12, 12, 0, 12):
        assert text.run(1, num_right) > [0]


def test_few_accepted_proposals_make_narrow_steps_where_columns_cost(clock: Clock) -> None:
    """Promise: steps become as narrow as pays, for one sequence and for a batch."""
    clock.seconds = lambda width, num_sequences: 1.0 if width == 0 else 1.1 + 0.1 * num_sequences * width
    for num_sequences, num_right, narrowest, widest in ((1, 2, 1, 3), (16, 3, 0, 3), (1, 14, 15, 15)):
        chosen = Text(clock, num_sequences=num_sequences).run(120, num_right)
        usual_width = max(set(chosen[40:]), key=chosen[40:].count)
        assert narrowest <= usual_width <= widest


def test_wide_steps_that_cost_nothing_stay_wide(clock: Clock) -> None:
    clock.seconds = free
    chosen = Text(clock).run(100, num_right=4)
    assert chosen.count(WIDEST) >= 93


def test_a_choice_reads_earlier_steps_alone(clock: Clock) -> None:
    """Promise: the width is settled before the drafter runs, so the tokens that it draws cannot change it.

    A width chosen by drawn tokens would prefer some of them, and the text would not have the target's distribution.
    """
    text = Text(clock)
    text.run(30, num_right=2)
    asked: list[int] = []

    class Asked(Drafts):
        def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
            asked.append(most)
            return Proposals(torch.zeros(1, most, dtype=torch.long))

    text.proposer.drafts = Asked()
    for _ in range(20):
        copied = copy.deepcopy(text.proposer)
        assert copied._known.choose(copied._costs) in (0, *text.run(1, num_right=2))
    assert asked
    sequences, anchors = [TextSequence(0, torch.zeros(9))], torch.zeros(1, 1, dtype=torch.long)
    proposals = text.proposer.propose(sequences, anchors, 999)
    assert proposals.token_ids.shape[1] in (0, asked[-1])


class SureDrafts(Drafts):
    """Knows how many of its proposals are right."""

    def __init__(self, num_right: int) -> None:
        self.num_right = num_right

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        proposals = super().propose(sequences, anchors, most)
        is_right = torch.arange(proposals.token_ids.shape[1]) < self.num_right
        return dataclasses.replace(proposals, confidences=is_right.float().expand_as(proposals.token_ids))


def test_a_drafter_that_knows_its_chances_decides_each_step(clock: Clock) -> None:
    clock.seconds = per_column
    text = Text(clock)
    drafts = text.proposer.drafts = SureDrafts(WIDEST)
    text.run(10, WIDEST)
    drafts.num_right = 1
    assert set(text.run(5, 1)) == {WIDEST // 4}, "the first step already"
    drafts.num_right = WIDEST
    first, *later = text.run(5, WIDEST)
    assert first > WIDEST // 4
    assert set(later) == {WIDEST}


def test_a_batch_goes_by_its_earlier_steps(clock: Clock) -> None:
    text = Text(clock, num_sequences=4)
    text.proposer.drafts = SureDrafts(0)
    assert text.run(3, WIDEST) == [WIDEST] * 3, "drafts are right though the drafter is not sure of them"


def test_tokens_are_expected_from_the_chances_of_each_proposal() -> None:
    confidences = torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.0, 1.0]])
    expected = expected_tokens(confidences, [1, 3, 7])
    assert expected == pytest.approx({1: 1.75, 3: 2.0, 7: 2.0})


def test_what_a_text_taught_counts_in_the_next(clock: Clock) -> None:
    state = Text(clock).state
    first = sum(width > 0 for width in Text(clock, state).run(200, num_right=0))
    later = [sum(width > 0 for width in Text(clock, state).run(60, num_right=0)) for _ in range(3)]
    assert first <= 9
    assert max(later) <= 2
    for _ in range(4):
        Text(clock, state).run(300, num_right=0)
    better = Text(clock, state).run(LONGEST_PAUSE, num_right=12)
    num_waited = better.index(next(filter(None, better)))
    assert 0 < num_waited <= LONGEST_PAUSE // 4, "the next text may differ, and is given the benefit of that in time"


def test_steps_with_lookups_say_nothing_about_drafts(clock: Clock) -> None:
    text = Text(clock)
    text.run(5, num_right=9)
    known = text.state.widths[WIDEST, None]
    before = pickle.dumps(known)
    sequences, anchors = [TextSequence(0, torch.zeros(9))], torch.zeros(1, 1, dtype=torch.long)
    text.proposer.propose(sequences, anchors, 999)
    clock.now += 1000
    looked_up = Proposals(torch.zeros(1, 31, dtype=torch.long), looked_up=(0,))
    text.proposer.record(looked_up, [SimpleNamespace(num_accepted=0)])
    text.proposer.record(looked_up, [SimpleNamespace(num_accepted=0)])  # a step that did not ask for drafts
    assert pickle.dumps(known) == before


def test_no_more_than_the_most_is_proposed(clock: Clock) -> None:
    text = Text(clock)
    sequences, anchors = [TextSequence(0, torch.zeros(9))], torch.zeros(1, 1, dtype=torch.long)
    for most in (0, 1, 4):
        proposals = text.proposer.propose(sequences, anchors, most)
        assert proposals.token_ids.shape[1] == most
        clock.now += 1.0
        text.proposer.record(proposals, [SimpleNamespace(num_accepted=most)])


def test_the_first_nodes_of_a_tree_are_verified_if_later_ones_are_never_right(clock: Clock) -> None:
    clock.seconds = lambda width, num_sequences: 1.0 if width == 0 else 1.2 + 0.2 * width
    token_ids, parents = torch.tensor([[[11, 12, 13, 14, 15, 16, 17]], [[0, 0, 1, 1, 2, 2, 3]]])

    class Trees(Drafts):
        def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
            return TreeProposals(token_ids[:, :most], parents=parents[:, :most])

    proposer = WidthProposer(Trees(), Text(clock).state, 7)
    sequences, anchors, sizes = [TextSequence(0, torch.zeros(9))], torch.zeros(1, 1, dtype=torch.long), []
    for _ in range(80):
        proposals = proposer.propose(sequences, anchors, 999)
        sizes.append(proposals.token_ids.shape[1])
        clock.now += clock.seconds(sizes[-1], 1)
        path = [11, 13] if sizes[-1] >= 3 else [11][: sizes[-1]]  # nodes 1 and 3
        proposer.record(proposals, [SimpleNamespace(num_accepted=len(path), token_ids=[*path, 99])])
    assert max(set(sizes[20:]), key=sizes[20:].count) == 3


# -- the state of a pair


def test_what_is_learned_is_a_pairs_own_and_ends_with_it() -> None:
    target, drafter, other = make_target(), make_drafter(), make_drafter()
    state = PairState.of(drafter, target)
    assert PairState.of(drafter, target) is state
    assert PairState.of(other, target) is not state
    assert PairState.of(drafter, make_target()) is not state
    left = weakref.ref(PairState.of(other, target))
    of_target = weakref.ref(state)
    del other, state
    gc.collect()
    assert left() is None
    assert of_target() is not None
    del target
    gc.collect()
    assert of_target() is None


def test_copies_of_a_drafter_begin_with_nothing() -> None:
    target, drafter = make_target(), make_drafter()
    state = PairState.of(drafter, target)
    for copied in (copy.copy(drafter), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert PairState.of(copied, target) is not state
        assert PairState.of(copied, target) is PairState.of(copied, target)
    assert PairState.of(drafter, target) is state
    assert not any("_dflash" in name for name in drafter.state_dict())


# -- with models


@pytest.fixture
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which the seconds of steps are seeded noise, so that all widths come up."""
    noise = torch.Generator().manual_seed(2)
    monkeypatch.setattr(widths, "stopwatch", lambda: lambda: float(torch.rand(1, generator=noise)))


@pytest.mark.usefixtures("_busy")
@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        (1, {"draft_tree": True}),  # one prompt at a time
        *((rows, {"adaptive": True, **more}) for rows in (1, 3) for more in ({}, {"temperature": 0.9})),
    ],
)
def test_the_text_does_not_depend_on_the_width(asked: dict[str, Any], rows: int) -> None:
    target, prompt = make_target(), torch.cat([make_prompt(14, seed=seed) for seed in range(rows)])
    truth = greedy(target, prompt, max_new_tokens=70, eos_token_id=None)
    drafter = ScriptedDrafter(target, list(truth), [BLOCK_SIZE - 1, 1])
    request: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.0, "stop_token_ids": [], **asked}
    request["prompt_lookup_num_tokens"] = 0

    def run(**more: Any) -> torch.Tensor:
        noise = torch.Generator().manual_seed(5)
        return spec_generate(drafter, target, prompt, generator=noise, **{**request, **more})

    plain = run(adaptive=False, draft_tree=False)
    if not request["temperature"]:
        assert torch.equal(plain, truth[:, : 14 + 60])
    for _ in range(3):
        assert torch.equal(run(), plain)


@pytest.mark.usefixtures("_busy")
def test_widths_change_within_a_text() -> None:
    """Promise: the width that runs is the one that was chosen."""
    target, prompt = make_target(), make_prompt(14)
    truth = greedy(target, prompt, max_new_tokens=150, eos_token_id=None)
    drafter = ScriptedDrafter(target, truth, [1])
    asked: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0.0, "stop_token_ids": [], "adaptive": True}
    blocks = list(generate_blocks(drafter, target, prompt, prompt_lookup_num_tokens=0, **asked))
    assert [t for block in blocks for t in block.token_ids] == truth[0, 14 : 14 + 120].tolist()
    assert {block.num_proposals for block in blocks} >= {0, 2, BLOCK_SIZE - 1}


def make_drafts_dear(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    """By the clock of steps, one with a draft takes 2.5 times as long; the drafter's `runs` grow."""

    def stopwatch() -> Callable[[], float]:
        num_runs = len(runs)
        return lambda: 2.5 if len(runs) > num_runs else 1.0

    monkeypatch.setattr(widths, "stopwatch", stopwatch)


def test_a_useless_drafter_seldom_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, prompt = any_target(), any_drafter(), make_prompt(14)
    asked: dict[str, Any] = {"max_new_tokens": 200, "temperature": 0.0, "stop_token_ids": [], "adaptive": True}
    with counted_forwards(drafter) as drafts, counted_forwards(target) as forwards:
        make_drafts_dear(monkeypatch, drafts)
        list(generate_blocks(drafter, target, prompt, prompt_lookup_num_tokens=0, **asked))
    assert len(forwards) > 150
    assert len(drafts) <= 12


def test_a_drafter_that_fails_from_some_position_on_is_left_aside_there(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = make_target(), make_prompt(14)
    truth = greedy(target, prompt, max_new_tokens=210, eos_token_id=None)
    drafter = PlacedDrafter(target, **SMALL)
    drafter.follow([truth], [BLOCK_SIZE - 1] * 80 + [0] * 400)
    runs: list[int] = []
    handle = drafter.register_forward_pre_hook(lambda *_: runs.append(sum(len(b.token_ids) for b in blocks)))
    make_drafts_dear(monkeypatch, runs)
    asked: dict[str, Any] = {"max_new_tokens": 200, "temperature": 0.0, "stop_token_ids": [], "adaptive": True}
    blocks: list[Any] = []
    for block in generate_blocks(drafter, target, prompt, prompt_lookup_num_tokens=0, **asked):
        blocks.append(block)
    handle.remove()
    assert [t for block in blocks for t in block.token_ids] == truth[0, 14:214].tolist()
    assert len([written for written in runs if written < 66]) >= 10
    assert len([written for written in runs if written >= 100]) <= 10, "of 100 steps"


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_is_proposed_than_asked_for(most: int) -> None:
    target, prompt = make_target(), make_prompt(14)
    truth = greedy(target, prompt, max_new_tokens=40, eos_token_id=None)
    drafter = ScriptedDrafter(target, truth, [BLOCK_SIZE - 1])
    asked: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": [], "max_draft_tokens": most}
    with counted_forwards(drafter) as drafts:
        blocks = list(generate_blocks(drafter, target, prompt, **asked))
    assert max(block.num_proposals for block in blocks) == most
    assert [token for block in blocks for token in block.token_ids] == truth[0, 14 : 14 + 24].tolist()
    assert (len(drafts) == 0) == (most == 0)


@pytest.mark.parametrize("value", [-1, 2.5, True])
def test_a_number_of_proposals_that_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match="max_draft_tokens="):
        spec_generate(
            make_drafter(), make_target(), make_prompt(9), max_draft_tokens=value, max_new_tokens=4, temperature=0.0
        )


@pytest.mark.usefixtures("_busy")
def test_adaptive_steps_without_drafts_are_plain_ones() -> None:
    """Bug: the widest of no widths was asked for."""
    target, prompt = make_target(), make_prompt()
    asked: dict[str, Any] = {"temperature": 0.0, "adaptive": True, "max_draft_tokens": 0, "max_new_tokens": 6}
    written = spec_generate(make_drafter(), target, prompt, **asked)
    assert torch.equal(written, greedy(target, prompt, max_new_tokens=6))


def test_adaptive_text_is_the_one_that_the_seed_decides() -> None:
    """Promise: an adaptive step proposes the likeliest path, so that no clock decides which uniforms a text uses."""
    target, prompt = make_target(), make_prompt(14)
    drafter = make_drafter(selector_rank=4, selector_top_k=8)
    for seed in range(8):
        asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "stop_token_ids": []}
        texts = [
            spec_generate(drafter, target, prompt, generator=torch.Generator().manual_seed(seed), **asked, **more)
            for more in ({"verification": "match"}, {"adaptive": True}, {"adaptive": True, "verification": "match"})
        ]
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_useless_drafter_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_adaptive: bool
) -> None:
    monkeypatch.setattr(drafting_dflash, "INACTIVE_STEPS", 2)
    target, drafter, prompt = make_target(), make_drafter(), make_prompt(14)
    asked: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0.0, "stop_token_ids": [], "adaptive": is_adaptive}
    spec_generate(drafter, target, prompt, **asked)
    assert len([record for record in caplog.records if "not one drafted token" in record.message]) == 1


def test_a_tree_keeps_to_the_number_of_proposals_asked_for() -> None:
    target, prompt = make_target(), make_prompt(14)
    asked: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0, "stop_token_ids": []}
    blocks = generate_blocks(make_drafter(), target, prompt, draft_tree=20, max_draft_tokens=3, **asked)
    assert max(block.num_proposals for block in blocks) == 3


def test_costs_are_those_of_like_batches_and_lengths() -> None:
    """Promise: a step is compared with steps of about as many texts, whose longest is about as long."""
    known = Experience(WIDEST)

    def costs_of(*lengths: int) -> StepCosts:
        return known.costs_of([TextSequence(index, torch.zeros(length)) for index, length in enumerate(lengths)])

    assert costs_of(9) is costs_of(SHORT - 1)
    assert costs_of(2 * SHORT) is costs_of(4 * SHORT - 1)
    assert costs_of(9, 2 * SHORT) is costs_of(2 * SHORT, 2 * SHORT)
    for lengths in ((SHORT,), (2 * SHORT,), (9, 9), (9, 2 * SHORT)):
        assert costs_of(*lengths) is not costs_of(9)
    assert costs_of(*[9] * 4) is not costs_of(9, 9)


def test_each_text_of_a_batch_has_the_columns_of_its_own_tree() -> None:
    trees = TreeProposals(torch.tensor([[5, 6, 7], [6, 7, 8]]), parents=torch.tensor([[0, 0, 2], [0, 1, 0]]))
    blocks = [SimpleNamespace(token_ids=[6, 7, 9]), SimpleNamespace(token_ids=[6, 7, 9])]
    assert [accepted_columns(trees, place, block) for place, block in enumerate(blocks)] == [[2, 3], [1, 2]]


def test_a_cut_draft_has_as_many_chances_as_tokens(clock: Clock) -> None:
    clock.seconds = per_column
    text = Text(clock)
    text.proposer.drafts = SureDrafts(1)
    text.run(2, 1)
    sequences, anchors = [TextSequence(0, torch.zeros(9))], torch.zeros(1, 1, dtype=torch.long)
    proposals = text.proposer.propose(sequences, anchors, 999)
    assert proposals.confidences is not None
    assert 0 < proposals.token_ids.shape[1] == proposals.confidences.shape[1] < WIDEST


def test_a_drafter_that_knows_its_chances_drafts_as_much_as_it_may(clock: Clock) -> None:
    """Promise: the number of proposals follows from a whole draft, whatever earlier steps recommend."""
    clock.seconds = per_column
    asked: list[int] = []

    class Asked(SureDrafts):
        def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
            asked.append(most)
            return super().propose(sequences, anchors, most)

    text = Text(clock)
    text.proposer.drafts = Asked(1)
    assert text.run(6, num_right=1)[-1] == WIDEST // 4
    assert asked[1:] == [999] * 5
