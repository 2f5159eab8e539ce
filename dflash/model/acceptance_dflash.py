"""Which proposals are accepted: the accept rules, as functions of tensors, and why the text is the target's.

Every rule is lossless: for any proposals, the committed text has the distribution of plain decoding. The logits of column i are
the target's after [committed text, proposals 1..i]. If these proposals are accepted, they are the logits of plain decoding.

 * `match`: the target chooses a token for every column. Proposals are accepted while they equal its choices, and the choices are
   committed, so the committed text is what the target chooses alone. A greedy choice is the argmax. A sampled one is drawn
   with the uniform number of its position (`PositionUniforms`), which the drafter never sees. So it is independent of the
   proposals, and the text depends only on the seed.
 * `rejection` (Leviathan et al. 2023, algorithm 1): a proposal x that was drawn from q is accepted with probability
   min(1, p(x)/q(x)), where p is the target's distribution. So x is drawn and accepted with probability min(q(x), p(x)). The
   first rejected proposal is replaced by a draw from the residual max(p - q, 0), scaled to a sum of 1. It adds the missing
   p(x) - min(q(x), p(x)), so x is committed with probability p(x).
 * `block` (Sun et al. 2024, block verification, algorithm 2): the proposals of a block are verified together. On average it
   accepts at least as many as `rejection`, with the same distribution.

A proposal that was not drawn has a q of one token. Then all rules accept it with probability p(x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from transformers.generation import logits_process

from .sampling_dflash import PositionUniforms, Sampler, choose_sampled, pick, place_uniforms
from .sequences_dflash import TextSequence


TARGET_BROKE, DRAFTER_BROKE = -1, -2  # values of `num_accepted` where a model's logits are NaN or infinite

# Processors that read only the scores, so that all columns of a step can share one call.
PREFIX_FREE_PROCESSORS = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)


@dataclass(frozen=True)
class Proposals:
    """Tokens that the target verifies after the anchor, n per sequence."""

    token_ids: torch.Tensor  # [B, n]
    candidate_ids: torch.Tensor | None = None  # [B, n, K], tokens that each was drawn from; None: q has one token
    probabilities: torch.Tensor | None = None  # [B, n, K], q of the candidates
    confidences: torch.Tensor | None = None  # [B, n], the head's chance that each is accepted if those before it are
    is_finite: torch.Tensor | None = None  # [B], whether the drafter's logits were finite; None: not drafted
    looked_up: tuple[int, ...] = ()  # places in the batch whose proposals come from a lookup, at least in part

    @property
    def is_drawn(self) -> bool:
        """Whether they were drawn by probabilities."""
        return self.probabilities is not None

    @property
    def depths(self) -> Sequence[int]:
        """How many tokens after the anchor each column of their step is."""
        return range(self.token_ids.shape[1] + 1)

    def accept_match(self, choices: torch.Tensor, best: torch.Tensor) -> Acceptance:
        """Accepts them while they equal the target's choices [B, n + 1], which are committed.

        `best` [B, n + 1] holds a number of each column that is not finite where its logits are not.
        """
        num_accepted = accept_prefix(self.token_ids, choices)
        num_accepted = checked(num_accepted, best, self)
        return Acceptance(num_accepted, choices)


@dataclass(frozen=True)
class Acceptance:
    """The decision of a rule. The first `num_accepted + 1` of a sequence's `token_ids` are committed."""

    num_accepted: torch.Tensor  # [B], accepted proposals, or `TARGET_BROKE` or `DRAFTER_BROKE`
    token_ids: torch.Tensor  # [B, n + 1]
    scores: torch.Tensor | None = None  # [B, n + 1, V], that they were chosen by, if requested

    @property
    def anchors(self) -> torch.Tensor:
        """The last committed token, [B, 1], which is the anchor of the next block."""
        last = self.num_accepted.clamp(min=0)
        return self.token_ids.gather(1, last[:, None])

    def before_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Of states [B, n + 1, ...] of a step's columns, those that the tokens follow, in order."""
        return states


def accept_prefix(proposals: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Length [B] of the longest prefix in which proposals [B, N - 1] equal choices [B, N]."""
    is_equal = proposals == choices[:, :-1]
    return _length_of_prefix(is_equal)


def _length_of_prefix(is_true: torch.Tensor) -> torch.Tensor:
    """How many columns of is_true [B, n] come before the first that is false, [B]."""
    return is_true.long().cumprod(1).sum(1)


def checked(num_accepted: torch.Tensor, best: torch.Tensor, proposals: Proposals) -> torch.Tensor:
    """`num_accepted` [B], negative where the logits of a committed token, or the drafter's, are not finite."""
    num_finite = _length_of_prefix(best.isfinite())
    num_accepted = torch.where(
        num_accepted < num_finite,
        num_accepted,
        TARGET_BROKE,
    )
    if proposals.is_finite is None:
        return num_accepted
    is_finite = proposals.is_finite.to(best.device)
    return torch.where(is_finite, num_accepted, DRAFTER_BROKE)


class _Drawn:
    """Drawn proposals with p and q of their candidates. All tensors are on `device`.

    Attributes:
        best: the largest score of each column, [B, n + 1].
        target_probs: p of all tokens, [B, n + 1, V].
        p, q: of the candidates, float64 [B, n + 1, K]. After the last proposal there are none, so both are 0.
        ratios: p / q of the proposals themselves, [B, n].
    """

    def __init__(self, proposals: Proposals, scores: torch.Tensor, device: torch.device) -> None:
        self.proposals = proposals
        scores = scores.to(device)
        self.best = scores.amax(-1)
        self.target_probs = scores.float().softmax(-1)
        self.token_ids = proposals.token_ids.to(device)
        of_proposals = self.token_ids[..., None]
        candidate_ids = of_proposals
        q = torch.ones_like(of_proposals)
        if proposals.candidate_ids is not None and proposals.probabilities is not None:
            candidate_ids = proposals.candidate_ids.to(device)
            q = proposals.probabilities.to(device)
        of_columns = self.target_probs[:, :-1]
        p = of_columns.gather(-1, candidate_ids).double()
        q = q.double()
        is_proposed = candidate_ids == of_proposals
        p_of_proposals = (p * is_proposed).sum(-1)
        q_of_proposals = (q * is_proposed).sum(-1)
        self.ratios = p_of_proposals / q_of_proposals

        one_column = (0, 0, 0, 1)
        self.candidate_ids = functional.pad(candidate_ids, one_column)
        self.p = functional.pad(p, one_column)
        self.q = functional.pad(q, one_column)

    def accept(self, num_accepted: torch.Tensor, reach: torch.Tensor, uniforms: torch.Tensor) -> Acceptance:
        """Accepts `num_accepted` [B] proposals and draws a token by the last of uniforms [B, n + 1].

        It is drawn from the residual max(reach * p - q, 0), where `reach` is [B, n + 1].
        """
        places = torch.arange(len(uniforms), device=uniforms.device)
        at = (places, num_accepted)
        p = self.target_probs[at].double()  # [B, V]
        reached = reach[at][:, None] * p
        residual = reached.scatter_add(
            1,
            self.candidate_ids[at],
            -self.q[at],
        )
        residual = residual.clamp(min=0.0)
        # Empty only by rounding: a proposal is only rejected where p exceeds q for some token.
        is_possible = residual.any(1, keepdim=True)
        residual = torch.where(is_possible, residual, p)
        drawn = pick(residual, uniforms[:, -1])
        token_ids = functional.pad(self.token_ids, (0, 1))
        token_ids = token_ids.scatter(
            1,
            num_accepted[:, None],
            drawn[:, None],
        )
        num_accepted = checked(num_accepted, self.best, self.proposals)
        return Acceptance(num_accepted, token_ids)


def accept_rejection(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Acceptance:
    """Speculative sampling by the target's scores [B, n + 1, V], with fresh uniforms [B, n + 1]: one a proposal, one more."""
    drawn = _Drawn(proposals, scores, uniforms.device)
    is_accepted = uniforms[:, :-1] < drawn.ratios
    num_accepted = _length_of_prefix(is_accepted)
    reach = torch.ones_like(uniforms)
    return drawn.accept(num_accepted, reach, uniforms)


def accept_block(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Acceptance:
    """Block verification: accepts the longest prefix that passes its test. Arguments as in `accept_rejection`.

    In the paper `reach` is p_i and `pass_rates` is h_i. After the last proposal q is 0, so there its test is uniform < reach.
    """
    drawn = _Drawn(proposals, scores, uniforms.device)
    reach = _reach(drawn.ratios)
    reached = reach[..., None] * drawn.p
    overlap = torch.minimum(reached, drawn.q)
    overlap = overlap.sum(-1)
    surplus = reach - overlap  # the sum over all tokens of max(reach * p - q, 0), as p has a sum of 1
    missing = 1.0 - overlap  # surplus + 1 - reach
    # Nothing missing: p equals q, and no prefix ends here. NaN passes, too, so that it is committed and reported.
    pass_rates = torch.where(
        missing > 0,
        surplus / missing,
        1.0,
    )
    fails = uniforms[:, :-1] >= pass_rates[:, 1:]
    num_failing_last = _length_of_prefix(fails.flip(1))
    num_accepted = fails.shape[1] - num_failing_last
    return drawn.accept(num_accepted, reach, uniforms)


# Rules for drawn proposals, by the name of `verification`.
RULES = {"rejection": accept_rejection, "block": accept_block}
VERIFICATIONS = ("auto", "match", *RULES)


def rule_of(verification: str, is_drawn: bool) -> str:
    """The rule that a `verification` means for proposals that were drawn or not."""
    if verification != "auto":
        return verification
    return "block" if is_drawn else "match"


def _reach(ratios: torch.Tensor) -> torch.Tensor:
    """Probability of the first i proposals under the target, relative to the drafter, at most 1 after each: [B, n + 1]."""
    before = ratios.new_ones(len(ratios))
    reach = [before]
    for ratio in ratios.unbind(1):
        before = (before * ratio).clamp(max=1.0)
        reach.append(before)
    return torch.stack(reach, 1)


class Acceptor:
    """Processes logits as plain `generate` does, and accepts proposals by a rule, for one request.

    `verification` names the rule; "auto" is "block" for drawn proposals and "match" for others. Without sampling the rule is
    "match".
    """

    def __init__(self, request: Any, processors: Sequence[Any], ends: Callable[[torch.Tensor], bool]) -> None:
        """`processors`: a list of them for each sequence. All lists do the same; some processors keep a state of a text.

        `ends` says whether a text [1, S] stops at its end.
        """
        self.processors = processors[0]
        self._processors_of = processors
        self._ends = ends
        self._batch_size = len(processors)
        self._names = ", ".join(type(processor).__name__ for processor in self.processors)
        self._is_prefix_free = all(type(processor) in PREFIX_FREE_PROCESSORS for processor in self.processors)
        self.keeps_scores = "scores" in request.keeping
        self.verification = "match"
        self.uniforms_of: Any = None  # `PositionUniforms`; None: choices are greedy
        # Instead of the processors, where it gives the same tokens: it gives no scores.
        self.sampler: Sampler | None = None
        if request.config.do_sample:
            self.verification = request.verification
            self.uniforms_of = PositionUniforms(self._batch_size, request.uniforms_generator)
            if not self.keeps_scores:
                self.sampler = Sampler.of(self.processors, request.input_ids.device)

    def accept(self, logits: torch.Tensor, sequences: list[TextSequence], proposals: Proposals) -> Acceptance:
        """Accepts proposals by logits [B, n + 1, V]; those of column i are processed after [text, proposals 1..i].

        Raises ValueError if the processors leave no token possible, or return scores of another shape.
        """
        logits = logits.to(proposals.token_ids.device)
        scores = self.process(logits, sequences, proposals)
        rule = self.rule(proposals)
        if rule == "match":
            choices, best = self.choose(scores, sequences, proposals.depths)
            acceptance = proposals.accept_match(choices, best)
        else:
            accept = RULES[rule]
            width = scores.shape[1]
            uniforms = self.uniforms_of.fresh(sequences, width, scores.device)
            acceptance = accept(proposals, scores, uniforms)
        if self.keeps_scores:
            scores = acceptance.before_tokens(scores)
            acceptance = replace(acceptance, scores=scores)
        return acceptance

    def rule(self, proposals: Proposals) -> str:
        """The rule by which these proposals are accepted."""
        return rule_of(self.verification, proposals.is_drawn)

    def uniforms(self, sequences: list[TextSequence], depths: Sequence[int], device: torch.device) -> torch.Tensor:
        """Uniforms [B, N] of the positions `depths` tokens after each sequence's last one, for logits on `device`."""
        following = [
            self.uniforms_of(
                sequence.index,
                len(sequence.new_ids),
                max(depths) + 1,
            )
            for sequence in sequences
        ]
        uniforms = torch.stack(following)[:, list(depths)]
        return place_uniforms(uniforms, device)

    def choose(
        self, scores: torch.Tensor, sequences: list[TextSequence], depths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's choices [B, N] by scores [B, N, V] of columns that are `depths` tokens after the anchor.

        And the largest score of each column, [B, N]. It is not finite if the scores hold NaN or +inf, or nothing but -inf.
        """
        if self.uniforms_of is None:
            best, choices = scores.max(-1)
            return choices, best
        uniforms = self.uniforms(sequences, depths, scores.device)
        draw = choose_sampled if self.sampler is None else self.sampler
        return draw(scores, uniforms), scores.amax(-1)

    def process(self, logits: torch.Tensor, sequences: list[TextSequence], proposals: Proposals) -> torch.Tensor:
        """Scores [B, n + 1, V] that tokens are chosen by. Columns that cannot be accepted may keep their logits."""
        is_sampler_used = self.sampler is not None and self.rule(proposals) == "match"
        if not self.processors or is_sampler_used:
            return logits
        if self._is_prefix_free:
            processed = self.processors(
                proposals.token_ids,
                logits.float().flatten(0, 1),
            )
            return processed.view_as(logits)
        return self.process_each(logits, sequences, proposals)

    def process_each(self, logits: torch.Tensor, sequences: list[TextSequence], proposals: Proposals) -> torch.Tensor:
        """As `process`, sequence by sequence."""
        scores = logits.to(torch.float32, copy=True)
        for place, sequence in enumerate(sequences):
            self.process_sequence(
                scores[place],
                sequence,
                place,
                proposals,
            )
        return scores

    def process_sequence(self, scores: torch.Tensor, sequence: TextSequence, place: int, proposals: Proposals) -> None:
        """Processes the columns of scores [n + 1, V] in place, up to the first proposal that cannot be accepted.

        So processors are called once for each token that may be committed, in order. `place`: that of the sequence in the batch.
        """
        is_matched = self.rule(proposals) == "match"
        path: list[int] = []
        for proposal in proposals.token_ids[place].tolist():
            column = scores[len(path)]
            if not self.process_column(column, sequence, path):
                return
            if is_matched:
                choices, _ = self.choose(column[None, None], [sequence], [len(path)])
                may_accept = int(choices) == proposal
            else:
                may_accept = bool(column[proposal] > -torch.inf)
            if not may_accept:
                return
            path.append(proposal)
        self.process_column(scores[-1], sequence, path)

    def process_column(self, scores: torch.Tensor, sequence: TextSequence, path: list[int]) -> bool:
        """Processes scores [V] in place, which follow a sequence's text and the proposals of `path`.

        False: no token follows this text, because it has stopped, or the logits are not finite, which is reported when they
        are read. Raises ValueError if the processors leave no token possible for another reason, or return another shape.
        """
        text_ids = sequence.text(path)
        # A processor may keep something for each sequence, such as its padding, and prefixes differ in length. So
        # the prefix is repeated for the whole batch, and the result of this sequence is taken.
        texts = text_ids.expand(self._batch_size, -1)
        of_batch = scores.repeat(self._batch_size, 1)
        processed = self._processors_of[sequence.index](texts, of_batch)
        if processed.shape == scores.shape:  # plain `generate` decodes this form of one text, too
            processed = processed[None]
        if processed.shape != of_batch.shape:
            raise ValueError(
                f"The logits processors ({self._names}) returned {list(processed.shape)} for scores "
                f"{list(of_batch.shape)}: return scores of the same shape."
            )
        processed = processed[sequence.index]
        if processed.max() > -torch.inf:  # false for NaN, too
            scores.copy_(processed)
            return True
        if self._ends(text_ids) or not scores.max().isfinite():
            return False
        raise ValueError(
            f"The logits processors ({self._names}) left no token possible after {text_ids.shape[1]} tokens "
            "(scores are NaN or all -inf): remove or correct the one that does."
        )
