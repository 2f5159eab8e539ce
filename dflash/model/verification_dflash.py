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

The target's judgement of a block: logits as plain `generate` would process them, then an accept rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .cache_dflash import to_device
from .proposals_dflash import DraftTree, Row


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


# Processors that look at a row's scores alone, so that all rows of a block may share one call.
PREFIX_FREE_PROCESSORS = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class Judge:
    """`judge(logits, rows, proposals)` for blocks of logits [B, n + 1, V].

    Args:
        processors: The target's `LogitsProcessorList`.
        batch_size: Rows that the batch began with.
        noise: Source of uniforms; `None` decodes greedily.
        verification: One of `VERIFICATIONS`. "auto" is "match" for proposals that are one token, and "block" for drawn
            ones. Greedy decoding has one rule, "match".
    """

    def __init__(self, processors: Any, batch_size: int, noise: PositionNoise | None, verification: str) -> None:
        self.processors = processors
        self.batch_size = batch_size
        self.noise: Any = noise
        self.verification = verification
        self._is_prefix_free = all(type(processor) in PREFIX_FREE_PROCESSORS for processor in processors)

    @property
    def takes_drawn_proposals(self) -> bool:
        """Whether proposals that are drawn from the drafter's law are accepted more often than its argmax."""
        return self.noise is not None and self.verification != "match"

    def runs_ahead(self, proposals: Proposals) -> bool:
        """Whether a block like this one is judged without knowing the text before it, and how long that is."""
        return self._is_prefix_free and proposals.tree is None and self._rule(proposals) == "match"

    def __call__(
        self, logits: torch.Tensor, rows: list[Row], proposals: Proposals, unread: Verdict | None = None
    ) -> Verdict:
        """What of the proposals stands. Column i of the logits is processed behind [text, proposals 1..i].

        The text is that of the rows and, behind it, what an `unread` verdict gives, if this block `runs_ahead`.
        """
        logits = logits.to(proposals.token_ids.device)
        if proposals.tree is not None:
            return self._walk(logits[0], rows[0], proposals.tree)
        rule = self._rule(proposals)
        if self.processors:
            logits = self._process(logits.float(), rows, proposals.token_ids, rule)
        if rule == "match":
            return verify_match(proposals, logits, self._choose(logits, rows, unread=unread))
        uniforms = torch.stack([self.noise.fresh(row.index, logits.shape[1]) for row in rows]).to(logits.device)
        verify = verify_rejection if rule == "rejection" else verify_block
        return verify(proposals, logits, uniforms)

    def _walk(self, logits: torch.Tensor, row: Row, tree: DraftTree) -> Verdict:
        """Follows the target's own choices from the anchor down the tree: logits [1 + n, V] of its columns.

        Each choice is made behind the path that led to it, with the noise of its position, as by plain decoding.
        """
        scores, choices = logits, None
        if self._is_prefix_free:
            if self.processors:
                scores = self.processors(row.prompt_ids[None], logits.float())
            choices = self._choose_at(scores, row, tree.depths).tolist()
        columns, token_ids, seen = [0], list[int](), list[torch.Tensor]()
        while True:
            column = columns[-1]
            if choices is None:
                behind = row.text(row.prompt_ids.new_tensor(token_ids))
                seen.append(self._process_one(row, behind, logits[column].float()))
                token_ids += self._choose_at(seen[-1][None], row, [tree.depths[column]]).tolist()
            else:
                token_ids.append(choices[column])
            if token_ids[-1] not in tree.children[column]:
                break
            columns.append(tree.children[column][token_ids[-1]])
        return Verdict(
            num_accepted=row.prompt_ids.new_tensor([len(columns) - 1]),
            token_ids=row.prompt_ids.new_tensor([token_ids]),
            scores=(torch.stack(seen) if seen else scores[columns])[None],
            columns=columns,
        )

    def _choose_at(self, scores: torch.Tensor, row: Row, depths: list[int]) -> torch.Tensor:
        """The target's choices [N] by scores [N, V] of columns so many tokens behind the anchor."""
        if self.noise is None:
            return choose_greedy(scores)
        uniforms = self.noise(row.index, len(row.new_ids), max(depths) + 1)[depths]
        return choose_sampled(scores, uniforms.to(scores.device))

    def _rule(self, proposals: Proposals) -> str:
        if self.noise is None:
            return "match"
        if self.verification == "auto":
            return "match" if proposals.probabilities is None else "block"
        return self.verification

    def _choose(
        self, scores: torch.Tensor, rows: list[Row], first: int = 0, unread: Verdict | None = None
    ) -> torch.Tensor:
        """The target's choices [B, N] by scores [B, N, V] of the columns from `first` on."""
        if self.noise is None:
            return choose_greedy(scores)
        count = scores.shape[1] + (0 if unread is None else unread.token_ids.shape[1])
        drawn = torch.stack([self.noise(row.index, len(row.new_ids) + first, count) for row in rows])
        uniforms = to_device(drawn, scores.device)
        if unread is not None:  # each row's columns begin behind what that verdict gives it
            columns = torch.arange(scores.shape[1], device=scores.device)
            uniforms = uniforms.gather(1, unread.num_written[:, None] + columns)
        return choose_sampled(scores, uniforms)

    def _process(self, scores: torch.Tensor, rows: list[Row], proposals: torch.Tensor, rule: str) -> torch.Tensor:
        """The processors' scores [B, n + 1, V]; those that never look at the prefix get all columns in one call."""
        if self._is_prefix_free:
            return self.processors(proposals, scores.flatten(0, 1)).view_as(scores)
        return torch.stack(
            [self._process_along(*of_row, rule) for of_row in zip(rows, proposals, scores, strict=True)]
        )

    def _process_along(self, row: Row, proposed: torch.Tensor, scores: torch.Tensor, rule: str) -> torch.Tensor:
        """One row's scores [n + 1, V], column by column and no further than its proposals can stand.

        Behind a text that is never written a processor need have no answer: a grammar has none.
        """
        processed = scores.clone()
        for column in range(len(scores)):
            processed[column] = self._process_one(row, row.text(proposed[:column]), scores[column])
            if column == len(proposed):
                break
            if rule == "match":
                can_stand = self._choose(processed[None, column : column + 1], [row], column)[0, 0] == proposed[column]
            else:
                can_stand = processed[column, proposed[column]] > -torch.inf
            if not can_stand:
                break
        return processed

    def _process_one(self, row: Row, text_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # A processor may hold something for each row of the batch (the repetition penalty does: its padding), and rows
        # have prefixes of different lengths. So each asks as all rows of the batch, and takes the answer in its place.
        count = self.batch_size
        processed = self.processors(text_ids.expand(count, -1), scores.repeat(count, 1))[row.index]
        if processed.isnan().any() or processed.max() == -torch.inf:
            names = ", ".join(type(processor).__name__ for processor in self.processors)
            raise ValueError(
                f"The logits processors ({names}) left no token possible behind {text_ids.shape[1]} tokens (scores are NaN or "
                "all -inf): remove or correct the one that does."
            )
        return processed
