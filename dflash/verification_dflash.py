"""Which drafted tokens stand: the accept rules and the target's choices, as functions of tensors.

Every rule is lossless: whatever is proposed, the committed text has the law of plain decoding. Row i's logits are the
target's logits behind [committed text, proposals 1..i], so they are those of plain decoding if proposals 1..i stand.

 * `match` (greedy decoding, and the default of sampled decoding for drafters that propose one token per row): the
   target chooses a token for every row of the block, and proposals stand as long as they equal its choices. What is
   committed are the choices themselves; a proposal only decides how many rows of one forward were computed behind the
   right prefix. Greedy, a choice is the argmax. Sampled, it is the token that inverse transform sampling picks with the
   noise of that position. The noise belongs to the position (`PositionNoise`), not to the step or to the block, and the
   drafter never sees it; so the text is the one that a loop of one token at a time writes with the same noise.
 * `rejection` (Leviathan et al. 2023, algorithm 1): proposal x drawn from q stands with probability min(1, p(x)/q(x)),
   and the first that falls is replaced by a draw from the residual max(p - q, 0).
 * `block` (Sun et al. 2024, block verification, algorithm 2): the block's proposals are judged together; it keeps at
   least as many of them as `rejection` does, on average, at the same law.

For a q that is one token (the argmax that DFlash drafters of version 1 propose) the three accept with the same law, and
`match` is the one whose text depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .trees_dflash import DraftTree


VERIFICATIONS = ("auto", "match", "rejection", "block")

# Uniforms are drawn in chunks of a fixed size so that position t's value depends neither on how many are asked for at
# a time nor on how long the text may become.
NOISE_CHUNK = 256


class PositionNoise:
    """One uniform number per row and position of the new text, the same for the same seed however text is drafted.

    Every row has its own stream on the CPU, seeded from `generator` (or torch's global one): row r's noise depends on
    the generator's state and on r alone, wherever the models run and in any batch. A list holds a generator for each
    row, which then reads as it would alone.
    """

    def __init__(self, batch_size: int, generator: torch.Generator | Sequence[torch.Generator] | None = None) -> None:
        if isinstance(generator, Sequence):
            if len(generator) != batch_size:
                raise ValueError(
                    f"{len(generator)} generators for {batch_size} rows: pass one for each, or one for all."
                )
            seeds = torch.cat([torch.randint(2**63 - 1, (1,), generator=g, device=g.device).cpu() for g in generator])
        else:
            device = "cpu" if generator is None else generator.device
            seeds = torch.randint(2**63 - 1, (batch_size,), generator=generator, device=device)
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
        self._drawn = [torch.empty(0, dtype=torch.float64)] * batch_size
        # Rules that draw per step and not per position must not meet a number again that decided something before.
        self._step_streams = [torch.Generator().manual_seed(seed ^ 1) for seed in seeds.tolist()]

    def __call__(self, row: int, start: int, count: int) -> torch.Tensor:
        """Uniforms in [0, 1) of the row's new positions `start..start + count - 1`, float64 [count]."""
        while len(self._drawn[row]) < start + count:
            chunk = torch.rand(NOISE_CHUNK, generator=self._streams[row], dtype=torch.float64)
            self._drawn[row] = torch.cat([self._drawn[row], chunk])
        return self._drawn[row][start : start + count]

    def fresh(self, row: int, count: int) -> torch.Tensor:
        """Uniforms of the row that no call returned before, float64 [count]."""
        return torch.rand(count, generator=self._step_streams[row], dtype=torch.float64)


@dataclass(frozen=True)
class Proposals:
    """What is put before the target behind the anchor.

    Attributes:
        token_ids: The proposed tokens, [B, n].
        candidate_ids: Where they were drawn: the tokens that could have been, [B, n, K]; `None`: nothing was drawn, q
            is one token.
        probabilities: The candidates' probabilities q, [B, n, K].
        looked_up: Places of the rows whose proposals were found in their own text.
        confidences: How likely the drafter finds each one behind those before it, [B, n], where that was asked.
        tree: What the tokens of a single row are nodes of; `None`: a chain.
    """

    token_ids: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    looked_up: tuple[int, ...] = ()
    confidences: torch.Tensor | None = None
    tree: DraftTree | None = None

    def first(self, count: int) -> Proposals:
        """The first `count` proposals of each row."""
        candidate_ids, probabilities = self.candidate_ids, self.probabilities
        return replace(
            self,
            token_ids=self.token_ids[:, :count],
            candidate_ids=None if candidate_ids is None else candidate_ids[:, :count],
            probabilities=None if probabilities is None else probabilities[:, :count],
            confidences=None if self.confidences is None else self.confidences[:, :count],
        )

    def with_lookups(self, found: dict[int, list[int]]) -> Proposals:
        """With `found` tokens, which nothing was drawn for, as the first proposals of the rows in those places."""
        token_ids, candidate_ids, probabilities = self.token_ids.clone(), self.candidate_ids, self.probabilities
        if candidate_ids is not None and probabilities is not None:
            candidate_ids, probabilities = candidate_ids.clone(), probabilities.clone()
        found = found if token_ids.shape[1] else {}
        for place, looked_up in found.items():
            count = min(len(looked_up), token_ids.shape[1])
            token_ids[place, :count] = token_ids.new_tensor(looked_up[:count])
            if candidate_ids is not None and probabilities is not None:
                candidate_ids[place, :count, 0] = token_ids[place, :count]
                probabilities[place, :count] = 0.0
                probabilities[place, :count, 0] = 1.0
        return Proposals(token_ids, candidate_ids, probabilities, tuple(found))

    def law(self, vocab_size: int) -> torch.Tensor:
        """The law q, as probabilities over the whole vocabulary, float64 [B, n, V]."""
        law = torch.zeros(*self.token_ids.shape, vocab_size, dtype=torch.float64, device=self.token_ids.device)
        if self.candidate_ids is None or self.probabilities is None:
            return law.scatter_(-1, self.token_ids[..., None], 1.0)
        return law.scatter_add_(-1, self.candidate_ids, self.probabilities.double())


@dataclass(frozen=True)
class Verdict:
    """What a rule decided.

    Attributes:
        num_accepted: How many proposals stand, [B].
        token_ids: [B, n + 1], of which the first `num_accepted + 1` are what the target writes.
        scores: What they were chosen by, [B, n + 1, V].
        columns: Of a tree, the columns of its anchor and of the nodes that stand; token i was chosen behind column i.
    """

    num_accepted: torch.Tensor
    token_ids: torch.Tensor
    scores: torch.Tensor
    columns: list[int] | None = None

    @property
    def num_written(self) -> torch.Tensor:
        """How many tokens the target writes, [B]."""
        return self.num_accepted + 1

    @property
    def num_rejected(self) -> torch.Tensor:
        """How many of the verified columns, anchor included, stand behind no text, [B]."""
        return self.token_ids.shape[1] - self.num_written

    @property
    def anchors(self) -> torch.Tensor:
        """The last token that the target writes, [B, 1]: the next block begins with it."""
        return self.token_ids.gather(1, self.num_accepted[:, None])


def choose_greedy(logits: torch.Tensor) -> torch.Tensor:
    """The target's choice for every row, [B, N] of logits [B, N, V]: its argmax."""
    return logits.argmax(dim=-1)


def choose_sampled(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The target's choice for every row, [B, N] of logits [B, N, V] and uniforms [B, N]: inverse transform sampling.

    In float64, so that neither a large vocabulary's tail nor the last token's edge is lost; a token of probability zero
    is never picked.
    """
    if logits.device.type == "mps":  # which has no float64
        return choose_sampled(logits.cpu(), uniforms.cpu()).to(logits.device)
    return pick(logits.double().softmax(dim=-1), uniforms)


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulative `weights` [..., V] (float64, any sum) holds the uniform [...]."""
    cumulative = weights.cumsum(dim=-1)
    # Scaled by the sum as it was computed, and kept below it, so that rounding cannot push a pick past the last token.
    total = cumulative[..., -1:]
    drawn = torch.minimum(uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(-1)


def accept_prefix(proposals: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """How many proposals stand, [B] of proposals [B, N - 1] and choices [B, N]: the longest prefix that agrees.

    `choices[:, : num_accepted + 1]` is then what the target writes: the accepted proposals, which equal its choices,
    and one token of its own.
    """
    if not proposals.shape[1]:
        return proposals.new_zeros(len(proposals))
    return (proposals == choices[:, : proposals.shape[1]]).long().cumprod(dim=1).sum(dim=1)


def verify_match(proposals: Proposals, scores: torch.Tensor, choices: torch.Tensor) -> Verdict:
    """Proposals stand while they equal the target's `choices` [B, n + 1]."""
    return Verdict(accept_prefix(proposals.token_ids, choices), choices, scores)


def verify_rejection(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Speculative sampling, token by token.

    Args:
        proposals: n tokens per row, each drawn from its q.
        scores: The target's processed logits, [B, n + 1, V].
        uniforms: Fresh uniforms, float64 [B, n + 1]: one per proposal and one for the token behind them.
    """
    p = scores.double().softmax(dim=-1)  # [B, n + 1, V]
    q = proposals.law(p.shape[-1])  # [B, n, V]
    p_of, q_of = _of_proposals(p, q, proposals.token_ids)
    num_accepted = (uniforms[:, :-1] * q_of < p_of).long().cumprod(dim=1).sum(dim=1)
    token_ids = _close(proposals, num_accepted, p, q, torch.ones_like(uniforms), uniforms[:, -1])
    return Verdict(num_accepted, token_ids, scores)


def verify_block(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Block verification: the longest prefix that passes its own test stands, whatever shorter ones did.

    Arguments as in `verify_rejection`.
    """
    p = scores.double().softmax(dim=-1)
    q = proposals.law(p.shape[-1])
    p_of, q_of = _of_proposals(p, q, proposals.token_ids)
    count = q.shape[1]
    # reach[i]: how probable the first i proposals are under the target, relative to the drafter and at most 1.
    reach = [torch.ones_like(uniforms[:, 0])]
    for i in range(count):
        reach.append((reach[-1] * p_of[:, i] / q_of[:, i]).clamp(max=1.0))
    num_accepted = proposals.token_ids.new_zeros(len(p))
    for i in range(1, count + 1):
        pass_rate = reach[i]
        if i < count:
            surplus = (reach[i][:, None] * p[:, i] - q[:, i]).clamp(min=0.0).sum(dim=-1)
            missing = surplus + 1.0 - reach[i]
            # Nothing missing: the target's law and the drafter's are one, and no prefix ends here.
            pass_rate = torch.where(missing > 0, surplus / missing, torch.ones_like(missing))
        num_accepted = torch.where(uniforms[:, i - 1] < pass_rate, i, num_accepted)
    token_ids = _close(proposals, num_accepted, p, q, torch.stack(reach, dim=1), uniforms[:, -1])
    return Verdict(num_accepted, token_ids, scores)


def _of_proposals(p: torch.Tensor, q: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The proposals' probabilities under target and drafter, [B, n] each."""
    index = token_ids[..., None]
    return p[:, :-1].gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1)


def _close(
    proposals: Proposals,
    num_accepted: torch.Tensor,  # [B]
    p: torch.Tensor,  # [B, n + 1, V]
    q: torch.Tensor,  # [B, n, V]
    reach: torch.Tensor,  # [B, n + 1] what the target's law is weighed by in the residual
    uniforms: torch.Tensor,  # [B]
) -> torch.Tensor:  # [B, n + 1]
    """The accepted proposals and, behind them, a draw from what the drafter's law leaves of the target's."""
    place = num_accepted[:, None]
    nothing = torch.zeros_like(p[:, :1])  # behind the last proposal the drafter proposed nothing
    at = place[..., None].expand(-1, -1, p.shape[-1])
    p_at, q_at = p.gather(1, at).squeeze(1), torch.cat([q, nothing], dim=1).gather(1, at).squeeze(1)
    residual = (reach.gather(1, place) * p_at - q_at).clamp(min=0.0)
    # Empty by rounding alone: a proposal is only refused where the target's law exceeds the drafter's somewhere.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_at)
    token_ids = torch.cat([proposals.token_ids, proposals.token_ids.new_zeros(len(p), 1)], dim=1)
    return token_ids.scatter(1, place, pick(residual, uniforms)[:, None])
