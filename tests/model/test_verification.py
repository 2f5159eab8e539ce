"""The accept rule, the target's choices and the uniforms, each against a loop that anyone can check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash.model.acceptance_dflash import accept_prefix
from dflash.model.sampling_dflash import UNIFORMS_CHUNK, PositionUniforms, Sampler, choose_sampled, pick
from dflash.model.sequences_dflash import TextSequence


@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=5, max_size=5), min_size=1, max_size=4
    )
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_accept_prefix_equals_a_naive_loop(rows: list[list[tuple[int, int]]]) -> None:
    """Promise: the longest agreeing prefix, per row; matches after a mismatch count for nothing."""
    proposals = torch.tensor([[pair[0] for pair in row[:4]] for row in rows])
    choices = torch.tensor([[pair[1] for pair in row] for row in rows])
    expected = []
    for row in rows:
        count = 0
        while count < 4 and row[count][0] == row[count][1]:
            count += 1
        expected.append(count)
    assert accept_prefix(proposals, choices).tolist() == expected


def test_accept_prefix_without_proposals_is_zero() -> None:
    """Promise: the prefill is a step without proposals."""
    assert accept_prefix(torch.empty(2, 0, dtype=torch.long), torch.tensor([[3], [4]])).tolist() == [0, 0]


def test_choose_sampled_is_inverse_transform() -> None:
    """Promise: the token whose interval of the cumulative distribution holds the uniform, lower edge included."""
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()[None, None]
    for uniform, token in [(0.0, 0), (0.49, 0), (0.5, 1), (0.74, 1), (0.75, 2), (0.999, 2)]:
        assert choose_sampled(logits, torch.tensor([[uniform]], dtype=torch.float64)).tolist() == [[token]]


def test_choose_sampled_has_the_softmax_distribution() -> None:
    """Promise: chi-square against softmax at a fixed seed, rows and batch drawn at once and independently."""
    torch.manual_seed(0)
    num_draws = 40000
    logits = torch.randn(2, 1, 8) * 1.5
    uniforms = torch.rand(2, num_draws, dtype=torch.float64)
    picks = choose_sampled(logits.expand(2, num_draws, 8), uniforms)
    for row in range(2):
        counts = torch.bincount(picks[row], minlength=8).double()
        expected = logits[row, 0].double().softmax(dim=-1) * num_draws
        statistic = ((counts - expected) ** 2 / expected).sum()
        p_value = torch.special.gammaincc(torch.tensor(3.5, dtype=torch.float64), statistic / 2)
        assert p_value > 1e-3
        # The test of the test: another row's distribution fails it.
        other = logits[1 - row, 0].double().softmax(dim=-1) * num_draws
        wrong = ((counts - other) ** 2 / other).sum()
        assert torch.special.gammaincc(torch.tensor(3.5, dtype=torch.float64), wrong / 2) < 1e-6


@pytest.mark.parametrize("vocab_size", [5, 50000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_probability_zero_are_never_picked(vocab_size: int, dtype: torch.dtype) -> None:
    """Known trap: at u = 0 the first token, at u -> 1 one past the last, is picked although top_p removed it.

    Removed tokens lie at both ends and in the middle, and rounding of the sum over a large vocabulary must not reach them.
    """
    torch.manual_seed(0)
    logits = torch.randn(vocab_size).to(dtype)
    removed = torch.zeros(vocab_size, dtype=torch.bool)
    removed[[0, vocab_size // 2, vocab_size - 1]] = True
    logits[removed] = float("-inf")
    last = 1.0 - 2.0**-53  # the largest double below 1
    uniforms = torch.tensor([[0.0, 5e-324, 0.5, last, 1.0]], dtype=torch.float64)  # 1.0: as a rounded uniform may be
    picks = choose_sampled(logits.expand(1, 5, -1), uniforms)[0]
    assert ((picks >= 0) & (picks < vocab_size)).all()
    assert not removed[picks].any()
    assert picks[0] == 1
    assert picks[3] == picks[4] == vocab_size - 2


def test_one_possible_token_is_always_picked() -> None:
    """Promise: top_k=1 is greedy at every uniform."""
    logits = torch.full((1, 3, 6), float("-inf"))
    logits[:, :, 4] = -3.0
    uniforms = torch.tensor([[0.0, 0.5, 1.0 - 2.0**-53]], dtype=torch.float64)
    assert choose_sampled(logits, uniforms).tolist() == [[4, 4, 4]]


def seeded(seed: int) -> torch.Generator:
    """A generator at `seed`."""
    return torch.Generator().manual_seed(seed)


def test_noise_is_the_same_whatever_the_chunking() -> None:
    """Promise: position t's number depends neither on how many are asked for at a time nor in what order."""
    end = 2 * UNIFORMS_CHUNK + 9
    for row in range(2):
        whole = PositionUniforms(2, seeded(5))(row, 0, end)
        for steps in ([1] * 12, [5, 16, 3], [UNIFORMS_CHUNK, 1, UNIFORMS_CHUNK, 2], [end]):
            noise, start = PositionUniforms(2, seeded(5)), 0
            for step in steps:
                assert torch.equal(noise(row, start, step), whole[start : start + step])
                start += step
        noise = PositionUniforms(2, seeded(5))
        assert torch.equal(noise(row, UNIFORMS_CHUNK + 3, 2), whole[UNIFORMS_CHUNK + 3 : UNIFORMS_CHUNK + 5])
        # Asked again, as for a position that was drafted, rejected and drafted anew.
        assert torch.equal(noise(row, 2, 2), whole[2:4])


def test_noise_of_a_row_does_not_depend_on_the_batch() -> None:
    """Promise: row r's stream depends on the seed and on r alone, so a text is the same in any batch."""
    wide = PositionUniforms(40, seeded(6))
    rows = [wide(row, 0, 20) for row in reversed(range(40))][::-1]
    for batch_size in (1, 2, 4, 17):
        noise = PositionUniforms(batch_size, seeded(6))
        for row in range(batch_size):
            assert torch.equal(noise(row, 0, 20), rows[row])
    assert len({tuple(row.tolist()) for row in rows}) == 40


def test_noise_is_uniform_in_double_precision() -> None:
    """Promise: numbers in [0, 1), with more bits than a float has, so that a large vocabulary's tail can be drawn."""
    drawn = PositionUniforms(1, seeded(7))(0, 0, 20000)
    assert drawn.dtype == torch.float64
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert not torch.equal(drawn, drawn.float().double())
    counts = torch.histc(drawn.float(), bins=10, min=0, max=1).double()
    statistic = ((counts - 2000) ** 2 / 2000).sum()
    assert torch.special.gammaincc(torch.tensor(4.5, dtype=torch.float64), statistic / 2) > 1e-3


def test_noise_from_the_global_seed() -> None:
    """Promise: without a generator, torch's global seed rules."""
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(PositionUniforms(1)(0, 0, 4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_noise_does_not_disturb_the_global_stream_as_it_is_read() -> None:
    """Promise: after the seed is drawn, reading noise leaves torch's global generator alone."""
    noise = PositionUniforms(1)
    state = torch.get_rng_state()
    noise(0, 0, 3 * UNIFORMS_CHUNK)
    assert torch.equal(torch.get_rng_state(), state)


def warpers(temperature: float = 1.0, k: int = 0, p: float = 1.0) -> LogitsProcessorList:
    """The processors that `generate` makes of these settings."""
    of_settings = LogitsProcessorList()
    if temperature != 1.0:
        of_settings.append(TemperatureLogitsWarper(temperature))
    if k:
        of_settings.append(TopKLogitsWarper(k))
    if p < 1.0:
        of_settings.append(TopPLogitsWarper(p))
    return of_settings


TIES = torch.bfloat16  # a dtype in which tokens tie; of those at the edge of top-p, either may be cut


@pytest.mark.parametrize(
    ("settings_of", "dtype"),
    [
        ({"temperature": 0.7, "k": 20, "p": 0.6}, torch.float32),
        ({"temperature": 2.0}, torch.float32),
        ({"k": 50}, torch.float32),
        ({"k": 5}, TIES),
        ({"temperature": 0.7, "k": 20}, TIES),
    ],
)
def test_the_sampler_draws_what_the_warpers_allow(settings_of: dict[str, Any], dtype: torch.dtype) -> None:
    """Promise: the tokens are those drawn from the processed logits, also among ties at the k-th, and so are the scores."""
    torch.manual_seed(3)
    logits = torch.randn(4, 500, 300).mul(3).to(dtype)
    uniforms = torch.rand(4, 500, dtype=torch.float64)
    processors = warpers(**settings_of)
    sampler = Sampler.of(processors, logits.device)
    assert sampler is not None
    processed = processors(torch.zeros(2000, 1, dtype=torch.long), logits.float().flatten(0, 1)).view(4, 500, 300)
    assert torch.equal(sampler(logits, uniforms), choose_sampled(processed, uniforms))
    assert torch.equal(sampler.scores(logits), processed)


def test_other_processors_have_no_sampler() -> None:
    """Promise: what is not temperature, top-k and top-p in this order is left to transformers."""
    device = torch.device("cpu")
    assert Sampler.of(warpers(0.5, 5, 0.5), device) is not None
    assert Sampler.of(warpers(), device) is not None
    assert Sampler.of(warpers(p=0.5), device) is None  # it would read the whole vocabulary
    assert Sampler.of(LogitsProcessorList(reversed(warpers(0.5, 5))), device) is None
    assert Sampler.of([TopKLogitsWarper(5), TopKLogitsWarper(3)], device) is None
    assert Sampler.of([TopKLogitsWarper(5, filter_value=-9.0)], device) is None
    assert Sampler.of([TopKLogitsWarper(5), TopPLogitsWarper(0.5, min_tokens_to_keep=2)], device) is None

    class Other(TopKLogitsWarper):
        pass

    assert Sampler.of([Other(5)], device) is None


def test_weights_of_any_sum_are_picked_alike() -> None:
    """Promise: `pick` scales the uniform by the sum of the weights; a weight of 0 is never picked."""
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    uniforms = torch.tensor([0.0, 0.74, 0.76, 1.0], dtype=torch.float64)
    for scale in (1.0, 1e-6, 1e6):
        assert pick((scale * weights).expand(4, -1), uniforms).tolist() == [1, 1, 3, 3]


def test_one_generator_for_each_sequence_or_one() -> None:
    """Promise: with one each, every sequence's uniforms are those that it has alone; other counts are refused."""
    together = PositionUniforms(3, [seeded(seed) for seed in (4, 5, 6)])
    for index, seed in enumerate((4, 5, 6)):
        assert torch.equal(together(index, 0, 7), PositionUniforms(1, seeded(seed))(0, 0, 7))
    with pytest.raises(ValueError, match="generator holds 2 for 3 sequences"):
        PositionUniforms(3, [seeded(1), seeded(2)])


def test_uniforms_of_a_step_are_used_for_nothing_else() -> None:
    """Promise: rules that draw per step get numbers that no position has, each once, and a sequence's alone."""
    sequences = [TextSequence(index, torch.tensor([1])) for index in range(3)]
    device = torch.device("cpu")
    uniforms = PositionUniforms(3, seeded(8))
    of_positions = torch.stack([uniforms(index, 0, 40) for index in range(3)])
    first, second = uniforms.fresh(sequences, 20, device), uniforms.fresh(sequences[1:], 20, device)
    every = torch.cat([of_positions.flatten(), first.flatten(), second.flatten()])
    assert len(every.unique()) == len(every)
    again = PositionUniforms(3, seeded(8))
    assert torch.equal(again.fresh(sequences[2:], 20, device)[0], first[2])
    assert torch.equal(again.fresh(sequences[2:], 20, device)[0], second[1])


@pytest.mark.parametrize("k", [2, 4])
def test_tokens_that_tie_with_the_kth_are_drawn_too(k: int) -> None:
    """Promise: top-k keeps all ties, also where k is a power of two and the ties reach beyond k tokens."""
    processors = warpers(k=k)
    sampler = Sampler.of(processors, torch.device("cpu"))
    assert sampler is not None
    logits = torch.zeros(1, 400, 5)
    uniforms = torch.rand(1, 400, dtype=torch.float64, generator=seeded(2))
    assert set(sampler(logits, uniforms)[0].tolist()) == set(range(5))


def test_a_token_beyond_exactly_top_p_is_never_drawn() -> None:
    """Promise: of two equal tokens one has probability 0.5 already, so top_p=0.5 leaves one, as transformers does."""
    processors = warpers(k=2, p=0.5)
    sampler = Sampler.of(processors, torch.device("cpu"))
    assert sampler is not None
    uniforms = torch.rand(1, 40, dtype=torch.float64, generator=seeded(2))
    assert len(sampler(torch.zeros(1, 40, 2), uniforms).unique()) == 1
    assert processors(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 2)).isfinite().sum() == 1
