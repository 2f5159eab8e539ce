"""The accept rules, each on its own: whatever is proposed, what is written has exactly the target's distribution.

Target and drafter are Markov chains over four words, so that every text's probability is known and a hundred thousand
steps take a moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from dflash.model import acceptance_dflash
from dflash.model.acceptance_dflash import (
    DRAFTER_BROKE,
    TARGET_BROKE,
    Acceptance,
    Proposals,
    accept_block,
    accept_match,
    accept_rejection,
)
from dflash.model.sampling_dflash import choose_sampled, pick


VOCAB, DEPTH, ROWS = 4, 3, 60_000
FIRST = 0  # the anchor
Rule = Callable[[Proposals, torch.Tensor, torch.Generator], Acceptance]


def chain(seed: int, sharpness: float) -> torch.Tensor:
    """Probabilities of the next word after each word, float64 [V, V]."""
    noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharpness * noise).softmax(dim=-1)


TARGET, DRAFTER = chain(1, 1.2), chain(2, 1.0)


def uniforms(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(ROWS, count, generator=generator, dtype=torch.float64)


def by_match(proposals: Proposals, scores: torch.Tensor, generator: torch.Generator) -> Acceptance:
    choices = choose_sampled(scores, uniforms(scores.shape[1], generator))
    return accept_match(proposals, choices, scores.amax(dim=-1))


def by_rejection(proposals: Proposals, scores: torch.Tensor, generator: torch.Generator) -> Acceptance:
    return accept_rejection(proposals, scores, uniforms(scores.shape[1], generator))


def by_block(proposals: Proposals, scores: torch.Tensor, generator: torch.Generator) -> Acceptance:
    return accept_block(proposals, scores, uniforms(scores.shape[1], generator))


RULES: dict[str, Rule] = {"match": by_match, "rejection": by_rejection, "block": by_block}


def propose(is_drawn: bool, generator: torch.Generator) -> Proposals:
    """Words drawn from the drafter's chain, with the distribution of each; or its likeliest words."""
    token_ids = torch.full((ROWS, 1), FIRST)
    distributions = []
    for _ in range(DEPTH):
        distributions.append(DRAFTER[token_ids[:, -1]])
        drawn = (
            pick(distributions[-1], uniforms(1, generator).squeeze(1))
            if is_drawn
            else distributions[-1].argmax(dim=-1)
        )
        token_ids = torch.cat([token_ids, drawn[:, None]], dim=1)
    if not is_drawn:
        return Proposals(token_ids[:, 1:])
    candidate_ids = torch.arange(VOCAB).expand(ROWS, DEPTH, VOCAB)
    return Proposals(token_ids[:, 1:], candidate_ids, torch.stack(distributions, dim=1))


def write(rule: Rule, is_drawn: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of all rows, continued from the target: texts [ROWS, DEPTH] and how many proposals stood [ROWS]."""
    generator = torch.Generator().manual_seed(seed)
    proposals = propose(is_drawn, generator)
    after = torch.cat([torch.full((ROWS, 1), FIRST), proposals.token_ids], dim=1)
    acceptance = rule(proposals, TARGET[after].log(), generator)
    texts = acceptance.token_ids[:, :DEPTH].clone()
    for place in range(1, DEPTH):  # what the next steps would write
        more = pick(TARGET[texts[:, place - 1]], uniforms(1, generator).squeeze(1))
        texts[:, place] = torch.where(place > acceptance.num_accepted, more, texts[:, place])
    return texts, acceptance.num_accepted


written = cache(write)  # of the rules as they are


def p_value(counts: torch.Tensor, distribution: torch.Tensor) -> float:
    """Of the chi-square test that `counts` were drawn from `distribution`."""
    expected = distribution * counts.sum()
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(distribution) - 1) / 2, dtype=torch.float64), statistic / 2)
    )


def text_p_value(texts: torch.Tensor) -> float:
    every_text = torch.tensor(list(itertools.product(range(VOCAB), repeat=DEPTH)))
    after = torch.cat([torch.full((len(every_text), 1), FIRST), every_text[:, :-1]], dim=1)
    distribution = TARGET[after, every_text].prod(dim=1)
    cells = (texts * torch.tensor([VOCAB ** (DEPTH - 1 - i) for i in range(DEPTH)])).sum(dim=1)
    return p_value(torch.bincount(cells, minlength=len(distribution)).double(), distribution)


@pytest.mark.parametrize("is_drawn", [False, True], ids=["argmax", "drawn"])
@pytest.mark.parametrize("rule", RULES)
def test_text_has_the_targets_distribution(rule: str, is_drawn: bool) -> None:
    """Promise: chi-square against the exact distribution of all 64 texts, for proposals of either kind."""
    assert text_p_value(written(RULES[rule], is_drawn)[0]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_all_rules_accept_one_token_proposals_alike(rule: str) -> None:
    """Promise: where q is one token, proposal i stands with the probability that the target writes 1..i."""
    likeliest, reach = FIRST, torch.ones(1, dtype=torch.float64)
    for _ in range(DEPTH):
        following = int(DRAFTER[likeliest].argmax())
        reach = torch.cat([reach, reach[-1:] * TARGET[likeliest, following]])
        likeliest = following
    distribution = reach - torch.cat([reach[1:], torch.zeros(1, dtype=torch.float64)])
    accepted = written(RULES[rule], False)[1]
    assert p_value(torch.bincount(accepted, minlength=DEPTH + 1).double(), distribution) > 1e-3


def test_block_verification_keeps_most_and_match_least_of_drawn_proposals() -> None:
    """Promise (Sun et al. 2024): block verification accepts at least as many as rejection; both more than matching."""
    means = {name: float(written(rule, True)[1].double().mean()) for name, rule in RULES.items()}
    assert means["block"] > means["rejection"] + 0.01
    assert means["rejection"] > means["match"] + 0.1


def test_a_drafter_that_is_the_target_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: equal distributions refuse nothing, and the token after the last proposal is the target's."""
    monkeypatch.setattr(f"{__name__}.DRAFTER", TARGET)
    for rule in ("rejection", "block"):
        texts, accepted = write(RULES[rule], is_drawn=True)
        assert accepted.min() == DEPTH
        assert text_p_value(texts) > 1e-3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_wrong_residual_fails_the_distribution_test(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: drawing from the target's own distribution after a refusal is a bias, and is caught."""

    def accept(of: Any, accepted: torch.Tensor, _: torch.Tensor, uniforms: torch.Tensor) -> Acceptance:
        place = accepted[:, None]
        drawn = pick(of.target_probs[torch.arange(ROWS), accepted].double(), uniforms[:, -1])
        token_ids = torch.cat([of.proposals.token_ids, torch.zeros_like(place)], dim=1)
        return Acceptance(accepted, token_ids.scatter(1, place, drawn[:, None]))

    monkeypatch.setattr(acceptance_dflash._Drawn, "accept", accept)
    assert text_p_value(write(RULES[rule], is_drawn=True)[0]) < 1e-6


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_wrong_q_fails_the_distribution_test(rule: str) -> None:
    """The test of the test: accepting by another distribution than the proposals were drawn from is caught."""

    def lenient(proposals: Proposals, scores: torch.Tensor, generator: torch.Generator) -> Acceptance:
        assert proposals.probabilities is not None
        claimed = proposals.probabilities.roll(1, dims=-1)
        lying = Proposals(proposals.token_ids, proposals.candidate_ids, claimed)
        return RULES[rule](lying, scores, generator)

    assert text_p_value(write(lenient, is_drawn=True)[0]) < 1e-6


def mixed(proposals: Proposals, is_found: torch.Tensor, token_ids: torch.Tensor) -> Proposals:
    """Drawn proposals with a q of one token, those of token_ids [ROWS, DEPTH], where is_found [ROWS, DEPTH]."""
    assert proposals.probabilities is not None
    one_token = torch.nn.functional.one_hot(token_ids, VOCAB).double()
    probabilities = torch.where(is_found[..., None], one_token, proposals.probabilities)
    return Proposals(torch.where(is_found, token_ids, proposals.token_ids), proposals.candidate_ids, probabilities)


@pytest.mark.parametrize("depends_on_kept", [True, False], ids=["kept", "replaced"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_lookups_after_drawn_proposals_keep_the_distribution(rule: str, depends_on_kept: bool) -> None:
    """Promise: what is looked up may depend on the drawn proposals before it. The test of the test: not on the one it replaces."""

    def accept(proposals: Proposals, scores: torch.Tensor, generator: torch.Generator) -> Acceptance:
        read = proposals.token_ids[:, 0 if depends_on_kept else 1]
        is_found = (read == 1)[:, None] & torch.tensor([False, True, True])
        proposals = mixed(proposals, is_found, torch.tensor([0, 3, 1]).expand(ROWS, -1))
        after = torch.cat([torch.full((ROWS, 1), FIRST), proposals.token_ids], dim=1)
        return RULES[rule](proposals, TARGET[after].log(), generator)

    assert (text_p_value(write(accept, is_drawn=True)[0]) > 1e-3) == depends_on_kept


@pytest.mark.parametrize("rule", RULES)
def test_numbers_that_are_not_finite_are_reported(rule: str) -> None:
    """Promise: NaN or infinite logits of a committed token, or a broken drafter, are told apart; unread columns say nothing."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.zeros(ROWS, 2, VOCAB, dtype=torch.float64)
    scores[:4, 0] = torch.tensor([[0.0, 9.0, 0.0, torch.nan], [torch.inf, 0.0, 0.0, 0.0], [-torch.inf] * 4, [0.0] * 4])
    scores[4:7, 0, 0] = 60.0  # word 1 is refused, so the next column is never read
    scores[4:7, 1] = torch.nan
    is_finite = torch.ones(ROWS, dtype=torch.bool)
    is_finite[6] = False
    proposals = Proposals(torch.ones(ROWS, 1, dtype=torch.long), is_finite=is_finite)
    num_accepted = RULES[rule](proposals, scores, generator).num_accepted.tolist()
    assert num_accepted[:3] == [TARGET_BROKE] * 3
    assert num_accepted[4:7] == [0, 0, DRAFTER_BROKE]
    assert min(num_accepted[7:] + num_accepted[3:4]) >= 0


def test_proposals_are_cut_whole() -> None:
    """Promise: `first` cuts tokens and their q alike."""
    drawn = Proposals(
        torch.tensor([[1, 2]]),
        torch.tensor([[[1, 0], [2, 3]]]),
        torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]),
        looked_up=(0,),
    )
    assert drawn.first(1).token_ids.tolist() == [[1]]
    assert drawn.first(1).candidate_ids.tolist() == [[[1, 0]]]  # type: ignore[union-attr]
    assert drawn.first(1).probabilities.tolist() == [[[0.5, 0.5]]]  # type: ignore[union-attr]
    assert drawn.first(1).looked_up == (0,)
    assert Proposals(torch.tensor([[1, 2]])).first(0).token_ids.shape == (1, 0)


def test_the_next_anchor_is_the_last_committed_token() -> None:
    """Promise: also where a model broke, whose sequence has no such token."""
    acceptance = Acceptance(torch.tensor([0, 2, TARGET_BROKE]), torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]]))
    assert acceptance.anchors.tolist() == [[5], [7], [5]]
