"""How wide a step is: the latency curve, what it decides, and a text that does not depend on it."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, SMALL, PlacedDrafter, counted_forwards, greedy, make_prompt
from tiny_models import ScriptedDrafter as AnyScriptedDrafter
from tiny_models import make_drafter as any_drafter
from tiny_models import make_target as any_target

from dflash import LatencyCurve, generate_blocks, spec_generate
from dflash.model import decoding_dflash, proposals_dflash
from dflash.model.proposals_dflash import LONGEST_PAUSE, SHORTEST_PAUSE, Habits, Pacer, machine, measured_curve


make_target = partial(any_target, num_hidden_layers=2)
make_drafter = partial(any_drafter, **SMALL)
ScriptedDrafter = partial(AnyScriptedDrafter, **SMALL)

MACHINE = {"device": "cpu"}
FREE = LatencyCurve((1, 16), (4.0, 4.0), 0.001, MACHINE, 0.001)  # as many columns as you like
DEAR = LatencyCurve((1, 2, 16), (4.0, 8.0, 64.0), 2.0, MACHINE, 1.0)  # each column costs a forward
USUAL = LatencyCurve((1, 2, 4, 8, 16), (4.0, 4.2, 4.6, 5.4, 7.0), 3.0, MACHINE, 1.0)
SURE, LOST = [0.95**k for k in range(1, 16)], [0.01**k for k in range(1, 16)]


def test_between_and_beyond_measured_widths() -> None:
    assert [USUAL.verify(width) for width in (1, 3, 4, 12, 24)] == pytest.approx([4.0, 4.4, 4.6, 6.2, 8.6])
    assert LatencyCurve((1,), (4.0,), 1.0, MACHINE).verify(9) == 4.0


def test_a_curve_survives_a_file() -> None:
    assert LatencyCurve.from_json(USUAL.to_json()) == USUAL


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"widths": 3}', json.dumps({**json.loads(USUAL.to_json()), "widths": [2, 3]})]
)
def test_what_is_no_curve_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no latency curve|A latency curve has"):
        LatencyCurve.from_json(text)


def test_a_curve_of_another_machine_is_refused() -> None:
    """Promise: refused by name, before any compute."""
    target, drafter = make_target(), make_drafter()
    here = replace(USUAL, machine=machine(target, drafter))
    elsewhere = replace(here, machine={**here.machine, "device": "NVIDIA H200", "threads": 99})
    asked: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0}
    spec_generate(drafter, target, make_prompt(9), latency_curve=here, **asked)
    with (
        counted_forwards(target) as forwards,
        pytest.raises(ValueError, match=r"device 'NVIDIA H200' and not 'cpu', threads 99"),
    ):
        spec_generate(drafter, target, make_prompt(9), latency_curve=elsewhere, **asked)
    assert not forwards
    with pytest.raises(ValueError, match="measured without draft_tree"):
        spec_generate(
            drafter, target, make_prompt(9), latency_curve=replace(here, tree_ms=None), draft_tree=True, **asked
        )
    with pytest.raises(ValueError, match=r"latency_curve=.*pass what"):
        spec_generate(drafter, target, make_prompt(9), latency_curve={}, **asked)


def test_a_proposal_is_taken_while_it_promises_more_than_its_time_gives_elsewhere() -> None:
    assert Pacer(FREE).choose(SURE) == (15, False)
    assert Pacer(DEAR).choose(SURE) == (0, False)
    few, many = Pacer(USUAL).choose([0.9, 0.5, 0.1, 0.01, 0.001])[0], Pacer(USUAL).choose(SURE)[0]
    assert 0 < few < 5 < many


def test_a_tree_stands_in_for_a_chain_only_where_it_gains_more() -> None:
    chain = [0.6, 0.36, 0.2]
    tree = [0.6, 0.36, 0.3, 0.2, 0.2, 0.18, 0.15]
    assert Pacer(FREE).choose(chain, tree) == (7, True)
    assert Pacer(replace(USUAL, tree_ms=50.0)).choose(chain, tree)[1] is False
    assert Pacer(FREE).choose(chain, chain)[1] is False


def test_confidence_is_held_to_what_came_of_it() -> None:
    """Promise: a drafter that is sure and wrong gets fewer columns, one that is right more often than it says gets more."""
    widths = {}
    for stood in (0.0, 0.5, 2.0):
        pacer = Pacer(USUAL)
        for _ in range(40):
            if pacer.wants_draft():
                count, _ = pacer.choose([0.5, 0.25, 0.125, 0.06, 0.03])
                pacer.record(count, min(count, round(stood * sum([0.5, 0.25, 0.125, 0.06, 0.03][:count]))))
            else:
                pacer.record(0, 0)
        pacer.habits.drafts.left = 0
        widths[stood] = pacer.choose([0.5, 0.25, 0.125, 0.06, 0.03])[0]
    assert widths[0.0] <= widths[0.5] <= widths[2.0]
    assert widths[0.0] < widths[2.0]


def test_asking_for_the_next_draft_forgets_nothing_of_a_step_in_flight() -> None:
    """Known bug: where steps are launched ahead, confidence was never held to what came of it."""
    learned = []
    for is_ahead in (False, True):
        pacer = Pacer(USUAL)
        assert pacer.wants_draft()
        for _ in range(6):
            count, _ = pacer.choose(SURE)
            assert not is_ahead or pacer.wants_draft()
            pacer.record(count, count // 2)
            assert is_ahead or pacer.wants_draft()
        learned.append((pacer._accepted / pacer._expected, pacer._tokens / pacer._milliseconds))
    assert learned[0] == learned[1]
    assert learned[0][0] < 1


def test_a_useless_drafter_is_asked_less_and_less_and_one_that_recovers_is_asked_again() -> None:
    pacer, asked = Pacer(USUAL), []
    for step in range(600):
        if pacer.wants_draft():
            asked.append(step)
            count, _ = pacer.choose(LOST)
            pacer.record(count, 0)
        else:
            pacer.record(0, 0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(asked) < 12
    assert SHORTEST_PAUSE < max(pauses) <= LONGEST_PAUSE + 1
    asked.clear()
    for step in range(400):
        if pacer.wants_draft():
            asked.append(step)
            count, _ = pacer.choose(SURE)
            pacer.record(count, round(sum(SURE[:count])))
        else:
            pacer.record(0, 0)
    assert len(asked) > 200


def test_what_a_text_taught_counts_in_the_next() -> None:
    """Promise: a drafter that is no use is asked less often in the next text, and one that is is not doubted for long."""

    def drafts(habits: Habits, survival: list[float], steps: int) -> int:
        pacer, asked = Pacer(USUAL, habits=habits), 0
        for _ in range(steps):
            if pacer.wants_draft():
                asked += 1
                count, _ = pacer.choose(survival)
                pacer.record(count, round(sum(survival[:count])))
            else:
                pacer.record(0, 0)
        return asked

    habits = Habits()
    first = drafts(habits, LOST, 200)
    assert max(drafts(habits, LOST, 90), drafts(habits, LOST, 90)) <= 2 < first
    assert drafts(habits, SURE, LONGEST_PAUSE // 2 + 40) >= 40
    assert drafts(habits, SURE, 100) == 100
    assert first <= drafts(habits, LOST, 200) < 50


def test_one_bad_block_is_bad_luck() -> None:
    pacer = Pacer(USUAL)
    for stood in (0, 8, 8, 0, 8, 8, 8, 0, 8):
        assert pacer.wants_draft()
        pacer.record(pacer.choose(SURE)[0], stood)


def test_what_drafts_gave_is_remembered() -> None:
    """Promise: where a draft costs several steps, two bad blocks do not yet speak against a drafter that was right before."""
    costly = LatencyCurve((1, 16), (2.0, 6.5), 3.5, MACHINE, 1.0)
    habits = Habits()
    for text in ([9] * 8, [0, 0, 9]):
        pacer = Pacer(costly, habits=habits)
        for stood in text:
            assert pacer.wants_draft()
            pacer.record(15, stood)


def test_habits_are_a_drafters_own_and_end_with_it() -> None:
    drafter, other = make_drafter(), make_drafter()
    assert Habits.of(drafter) is Habits.of(drafter) is not Habits.of(other)
    left = weakref.ref(Habits.of(other))
    del other
    gc.collect()
    assert left() is None


def test_a_pair_is_measured_a_few_times_of_which_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a moment in which the machine was busy does not decide all texts; wider is never taken for faster."""
    target, drafter, now, busy = make_target(), make_drafter(), [0.0], [1]
    calls: list[int] = []
    monkeypatch.setattr(proposals_dflash, "clock", lambda: now[0])

    def verify(width: int) -> torch.Tensor:
        calls.append(width)
        now[0] += busy[0] * {1: 0.004, 4: 0.003}[width]
        return torch.zeros(1)

    def draft() -> torch.Tensor:
        now[0] += busy[0] * 0.002
        return torch.zeros(1)

    def measured(setting: str) -> LatencyCurve:
        return measured_curve((target, drafter), setting, (1, 4), verify, {"draft_ms": draft})

    num_untimed, curves, began = proposals_dflash.UNTIMED, [], now[0]
    for busy[0] in (10, 1, 3, 1, 50, 50):
        calls.clear()
        curves.append(measured("here"))
        per_width = proposals_dflash.REPEATS + num_untimed
        assert calls == ([1] * per_width + [4] * per_width if len(curves) <= proposals_dflash.ROUNDS else [])
        num_untimed = 1
        assert measured("here") == curves[-1], "the next one is long after it, so that measuring takes a small share"
        now[0] += 1.01 * proposals_dflash.PATIENCE * (now[0] - began)
        began = now[0]
    assert curves[0].verify_ms == pytest.approx((40, 40))
    for curve in curves[1:]:
        assert curve.verify_ms == pytest.approx((4, 4))
        assert curve.draft_ms == pytest.approx(2)
    busy[0] = 2
    assert measured("elsewhere").draft_ms == pytest.approx(4)


@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        (1, {"draft_tree": True}),  # one prompt at a time
        *((rows, {"adaptive": True, **more}) for rows in (1, 3) for more in ({}, {"temperature": 0.9})),
    ],
)
def test_the_text_does_not_depend_on_the_width(asked: dict[str, Any], rows: int) -> None:
    """Promise: with a curve that is measured, and with ones that say the opposite, the text is the same."""
    target, prompt = make_target(), torch.cat([make_prompt(14, seed=seed) for seed in range(rows)])
    truth = greedy(target, prompt, max_new_tokens=40, eos_token_id=None)
    drafter = ScriptedDrafter(target, list(truth), [BLOCK_SIZE - 1, 1])
    request: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0, "stop_token_ids": [], **asked}

    def run(**more: Any) -> torch.Tensor:
        # Sampled rows leave the truth, which the script has no answer to once one is done: each is asked alone there.
        noise = torch.Generator().manual_seed(5)
        return spec_generate(drafter, target, prompt, generator=noise, **{**request, **more})

    plain = run(adaptive=False, draft_tree=False)
    if not request["temperature"]:
        assert torch.equal(plain, truth[:, : 14 + 30])
    here = machine(target, drafter)
    assert torch.equal(run(), plain)
    for curve in (FREE, DEAR, USUAL):
        assert torch.equal(run(latency_curve=replace(curve, machine=here)), plain)


def test_a_dear_column_is_not_bought() -> None:
    """Promise: the width that runs is the one that was chosen."""
    target, prompt = make_target(), make_prompt(14)
    truth = greedy(target, prompt, max_new_tokens=60, eos_token_id=None)
    drafter = ScriptedDrafter(target, truth, [BLOCK_SIZE - 1])
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "stop_token_ids": []}
    widths = {}
    for name, curve in (("free", FREE), ("dear", DEAR)):
        curve = replace(curve, machine=machine(target, drafter))
        blocks = list(generate_blocks(drafter, target, prompt, latency_curve=curve, **asked))
        widths[name] = [block.num_proposals for block in blocks if not block.is_prefill]
    assert max(widths["free"]) == BLOCK_SIZE - 1
    assert sum(widths["dear"]) < 4


def test_a_useless_drafter_seldom_runs() -> None:
    target, drafter, prompt = any_target(), any_drafter(), make_prompt(14)
    curve = replace(USUAL, machine=machine(target, drafter))
    with counted_forwards(drafter) as drafts, counted_forwards(target) as forwards:
        list(
            generate_blocks(
                drafter, target, prompt, latency_curve=curve, max_new_tokens=200, temperature=0.0, stop_token_ids=[]
            )
        )
    assert len(drafts) <= 8
    assert len(forwards) > 150


def test_curves_of_windows_and_of_sampling_are_told_apart() -> None:
    """Promise: a draft that reads few keys, or a step that samples, says nothing about others."""
    target, drafter, prompt = make_target(), make_drafter(), make_prompt(14)
    for asked in ({}, {"draft_window": (2, 4)}, {"temperature": 0.7}, {}):
        list(
            generate_blocks(
                drafter, target, prompt, **{"temperature": 0.0, "max_new_tokens": 4, "adaptive": True, **asked}
            )
        )
    assert len(proposals_dflash._measured[target][drafter]) == 3


def test_both_costs_are_measured_again_where_the_text_is_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a drafter that helps in a short text and costs more than it gives in a long one is left aside there."""
    target, prompt, measured = make_target(), make_prompt(14), list[int]()
    truth = greedy(target, prompt, max_new_tokens=110, eos_token_id=None)
    drafter = ScriptedDrafter(target, truth, [2])

    def measure(proposer: Any, *_: Any) -> LatencyCurve:
        measured.append(max(proposer.conversation.target_cache.lengths))
        return FREE if measured[-1] < 64 else replace(DEAR, draft_ms=40.0)

    monkeypatch.setattr(decoding_dflash.Proposer, "_curve", measure)
    monkeypatch.setattr(decoding_dflash, "SHORTEST_SIZE", 0)
    asked: dict[str, Any] = {"max_new_tokens": 100, "temperature": 0.0, "stop_token_ids": [], "adaptive": True}
    blocks = list(generate_blocks(drafter, target, prompt, **asked))
    assert [t for block in blocks for t in block.token_ids] == truth[0, 14:114].tolist()
    assert [length.bit_length() for length in measured] == [4, 5, 6, 7]
    ends = list(itertools.accumulate((len(block.token_ids) for block in blocks), initial=14))
    early, late = (
        [b.num_proposals > 0 for b, end in zip(blocks, ends, strict=False) if (end < 60) == short]
        for short in (True, False)
    )
    assert sum(early) == len(early) - 1, "the prompt's block has none"
    assert sum(late) < len(late) / 8


def test_a_drafter_that_fails_from_some_position_on_is_left_aside_there() -> None:
    target, prompt = make_target(num_hidden_layers=2), make_prompt(14)
    truth = greedy(target, prompt, max_new_tokens=210, eos_token_id=None)
    drafter = PlacedDrafter(target, **SMALL)
    drafter.follow([truth], [BLOCK_SIZE - 1] * 80 + [0] * 400)
    curve = replace(USUAL, machine=machine(target, drafter))
    asked: dict[str, Any] = {"max_new_tokens": 200, "temperature": 0.0, "stop_token_ids": [], "latency_curve": curve}
    drafts: list[int] = []
    handle = drafter.register_forward_pre_hook(lambda *_: drafts.append(sum(len(b.token_ids) for b in blocks)))
    blocks: list[Any] = []
    for block in generate_blocks(drafter, target, prompt, **asked):
        blocks.append(block)
    handle.remove()
    assert [t for block in blocks for t in block.token_ids] == truth[0, 14:214].tolist()
    assert len([written for written in drafts if written < 66]) >= 10
    assert len([written for written in drafts if written >= 100]) <= 10, "of 100 steps"


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


def test_a_width_that_pays_never_chooses_among_drawn_tokens() -> None:
    """Promise: the distribution. A width chosen by how likely the drawn tokens are would keep the likely ones: no draw from q.

    So an adaptive step proposes the likeliest path, and the text is the one that the seed alone decides.
    """
    target, prompt = make_target(), make_prompt(14)
    drafter = make_drafter(selector_rank=4, selector_top_k=8)
    curve = replace(USUAL, machine=machine(target, drafter))
    for seed in range(8):
        asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "stop_token_ids": []}
        texts = [
            spec_generate(drafter, target, prompt, generator=torch.Generator().manual_seed(seed), **asked, **more)
            for more in (
                {"verification": "match"},
                {"latency_curve": curve},
                {"latency_curve": curve, "verification": "match"},
            )
        ]
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(texts[0], texts[2])


def test_rows_that_leave_do_not_make_drafts_look_dear() -> None:
    alone, left = Pacer(USUAL), Pacer(USUAL, num_sequences=32)
    for pacer, rows in ((alone, 1), (left, 32)):
        for _ in range(20):
            pacer.wants_draft(rows)
            count, _ = pacer.choose([rows * chance for chance in SURE])
            pacer.record(count, rows * count)
    for pacer in (alone, left):
        assert pacer.wants_draft(1)
    assert left.choose(SURE)[0] >= alone.choose(SURE)[0] - 1 > 4


def test_a_useless_drafter_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoding_dflash, "INACTIVE_STEPS", 2)
    target, drafter, prompt = make_target(), make_drafter(), make_prompt(14)
    curve = replace(FREE, machine=machine(target, drafter))
    asked: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0.0, "stop_token_ids": [], "latency_curve": curve}
    spec_generate(drafter, target, prompt, **asked)
    assert len([record for record in caplog.records if "not one drafted token" in record.message]) == 1


def test_a_tree_keeps_to_the_number_of_proposals_asked_for() -> None:
    target, prompt = make_target(), make_prompt(14)
    asked: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0, "stop_token_ids": []}
    blocks = generate_blocks(make_drafter(), target, prompt, draft_tree=20, max_draft_tokens=3, **asked)
    assert max(block.num_proposals for block in blocks) == 3
