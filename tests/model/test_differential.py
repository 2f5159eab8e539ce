"""Random requests against plain `generate`: families, batches, lengths, blocks, acceptance, stops and paddings, all at once.

The cases are the same in every run; one that fails is printed in full, smallest form first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from distributions import leaning
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, ScriptedDrafter, make_prompt, make_target
from transformers import PreTrainedModel

from dflash import spec_generate


NUM_CASES = 150
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen3_sliding": {"layer_types": ["sliding_attention", "full_attention"]},
}
MOST_NEW_TOKENS = 18
MOST_BLOCK = 16


@dataclass(frozen=True)
class Case:
    """One request, and what its drafter gets right.

    Attributes:
        family: Kind of target.
        lengths: Tokens of each row's prompt.
        more_padding: Columns of padding that every row has.
        seed: Of the prompts.
        block_size: Anchor included.
        script: Right proposals per block; row r starts at its r-th entry.
        max_new_tokens: Where the text ends at the latest.
        stops: Places (row, new token) of the unstopped texts whose tokens are made stop ids.
        is_trained_for_more: The drafter's own block is longer than the one asked for.
    """

    family: str
    lengths: tuple[int, ...]
    more_padding: int
    seed: int
    block_size: int
    script: tuple[int, ...]
    max_new_tokens: int
    stops: tuple[tuple[int, int], ...]
    is_trained_for_more: bool


def cases() -> st.SearchStrategy[Case]:
    """Any request: short prompts and long ones, scripts that accept all, nothing, and anything between."""
    block_size = st.integers(2, MOST_BLOCK)
    scripts = st.one_of(
        st.just((0,)),
        st.just((MOST_BLOCK,)),
        st.lists(st.integers(0, MOST_BLOCK), min_size=1, max_size=6).map(tuple),
        st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple),
    )
    places = st.tuples(st.integers(0, 4), st.integers(0, MOST_NEW_TOKENS - 1))
    return st.builds(
        Case,
        family=st.sampled_from(list(FAMILIES)),
        lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5).map(tuple),
        more_padding=st.integers(0, 3),
        seed=st.integers(0, 10_000),
        block_size=block_size,
        script=scripts,
        max_new_tokens=st.integers(1, MOST_NEW_TOKENS),
        stops=st.lists(places, max_size=2).map(tuple),
        is_trained_for_more=st.booleans(),
    )


@cache
def target_of(family: str) -> PreTrainedModel:
    """One target of every family; read-only."""
    return make_target(family, num_hidden_layers=2, **FAMILIES[family])


def padded(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts [B, S], padded on the left, and their mask."""
    longest = max(case.lengths) + case.more_padding
    rows = [make_prompt(length, seed=case.seed + place)[0] for place, length in enumerate(case.lengths)]
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=PAD_TOKEN_ID) for row in rows])
    return ids, (ids != PAD_TOKEN_ID).long()


def check(case: Case) -> Counter[str]:
    """Asserts that the text is that of plain `generate`, padding included; returns what the case exercised."""
    target, (ids, mask) = target_of(case.family), padded(case)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": PAD_TOKEN_ID}
    # To draft from, and to take stops from.
    length = max(case.max_new_tokens + case.block_size, *(place + 1 for _, place in case.stops), 0)
    unstopped = target.generate(ids, max_new_tokens=length, **options)
    new_ids = unstopped[:, ids.shape[1] :]
    stop_ids = sorted({int(new_ids[row % len(ids), place]) for row, place in case.stops} - {PAD_TOKEN_ID})
    options.update(max_new_tokens=case.max_new_tokens, eos_token_id=stop_ids or None)
    # Without stop ids it would write the beginning of the same text again.
    expected = target.generate(ids, **options) if stop_ids else unstopped[:, : ids.shape[1] + case.max_new_tokens]

    truths = [
        row[len(row) - len(new) - length :] for row, new, length in zip(unstopped, new_ids, case.lengths, strict=True)
    ]
    drafter = ScriptedDrafter(
        target, truths, list(case.script), num_hidden_layers=1, target_layer_ids=[0],
        block_size=MOST_BLOCK if case.is_trained_for_more else case.block_size,
    )  # fmt: skip
    output = spec_generate(drafter, target, ids, block_size=case.block_size, return_dict_in_generate=True, **options)
    assert output.sequences.tolist() == expected.tolist(), f"texts part: {case}"
    lengths = output.acceptance_lengths
    return Counter(
        cases=1,
        accepted=sum(length > 1 for row in lengths for length in row),
        rejected=sum(length < case.block_size for row in lengths for length in row),
        ragged=int(len({tuple(row) for row in lengths}) > 1),
        stopped_early=int(expected.eq(PAD_TOKEN_ID)[:, ids.shape[1] :].any()),
        single_rows=int(len(ids) == 1),
        **{case.family: 1},
    )


def test_random_requests_equal_plain_generate() -> None:
    """Promise: zero differences in fp32 over all cases; and they exercise what they are meant to."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=NUM_CASES, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases())
    def run(case: Case) -> None:
        seen.update(check(case))

    run()
    assert seen["cases"] >= NUM_CASES
    assert min(seen["accepted"], seen["rejected"]) > NUM_CASES
    for what in ("ragged", "stopped_early", "single_rows", *FAMILIES):
        assert seen[what] >= NUM_CASES // 10, (what, seen)


def test_the_check_catches_a_lenient_target() -> None:
    """The test of the test: a target that leans towards what a block shows it parts from plain `generate`."""
    case = Case("llama", (5, 9), 1, 3, 6, (2, 0, 4), MOST_NEW_TOKENS, (), False)
    check(case)
    with leaning(target_of("llama"), strength=20.0), pytest.raises(AssertionError, match="texts part"):
        check(case)


def test_the_prompts_hold_no_padding() -> None:
    """Guards the fixture: the mask is made from the pad id."""
    ids, mask = padded(Case("qwen3", (3, 14), 2, 0, 2, (0,), 1, (), False))
    assert mask.sum(dim=1).tolist() == [3, 14]
    assert int(ids.max()) < VOCAB_SIZE
