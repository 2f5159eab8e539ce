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

A `Verifier` processes the logits as plain `generate` would and applies the rule. Random choices touch the whole vocabulary
once, in float32: sums of chunks say in which chunk a uniform falls, and float64 is used inside that chunk alone; after top-k
they finish on the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
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

from .cache_dflash import to_device, to_host
from .proposals_dflash import DraftTree, Row


VERIFICATIONS = ("auto", "match", "rejection", "block")

# Uniforms are drawn in chunks of a fixed size so that position t's value depends neither on how many are asked for at
# a time nor on how long the text may become.
NOISE_CHUNK = 256

# Tokens whose weights are summed together when a token is drawn.
VOCABULARY_CHUNK = 256

# Candidates that are kept beside the k most likely tokens, because top-k keeps every token that ties with the k-th.
NUM_TIES = 44


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
        self._drawn = [torch.empty(0, dtype=torch.float64, device="cpu")] * batch_size
        # Rules that draw per step and not per position must not meet a number again that decided something before.
        self._step_streams = [torch.Generator().manual_seed(seed ^ 1) for seed in seeds.tolist()]

    def __call__(self, row: int, start: int, count: int) -> torch.Tensor:
        """Uniforms in [0, 1) of the row's new positions `start..start + count - 1`, float64 [count]."""
        while len(self._drawn[row]) < start + count:
            chunk = torch.rand(NOISE_CHUNK, generator=self._streams[row], dtype=torch.float64, device="cpu")
            self._drawn[row] = torch.cat([self._drawn[row], chunk])
        return self._drawn[row][start : start + count]

    def fresh(self, row: int, count: int) -> torch.Tensor:
        """Uniforms of the row that no call returned before, float64 [count]."""
        return torch.rand(count, generator=self._step_streams[row], dtype=torch.float64, device="cpu")


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
        is_finite: Whether the drafter's logits were finite where tokens were chosen, [B]; `None`: nothing was drafted.
    """

    token_ids: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    looked_up: tuple[int, ...] = ()
    confidences: torch.Tensor | None = None
    tree: DraftTree | None = None
    is_finite: torch.Tensor | None = None

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
            token_ids[place, :count] = to_device(torch.tensor(looked_up[:count]), token_ids.device)
            if candidate_ids is not None and probabilities is not None:
                chosen = token_ids[place, :count, None]
                # In place of the candidate that it equals, or of the first: no candidate stands there twice.
                index = (candidate_ids[place, :count] == chosen).long().argmax(dim=-1, keepdim=True)
                candidate_ids[place, :count] = candidate_ids[place, :count].scatter(-1, index, chosen)
                probabilities[place, :count] = torch.zeros_like(probabilities[place, :count]).scatter(-1, index, 1.0)
        return Proposals(token_ids, candidate_ids, probabilities, tuple(found), is_finite=self.is_finite)


@dataclass(frozen=True)
class Verdict:
    """What a rule decided.

    Attributes:
        num_accepted: How many proposals stand, [B]. Negative where logits were not finite: `TARGET_BROKE`, `DRAFTER_BROKE`.
        token_ids: [B, n + 1], of which the first `num_accepted + 1` are what the target writes.
        scores: What they were chosen by, [B, n + 1, V], if that was asked.
        columns: Of a tree, the columns of its anchor and of the nodes that stand; token i was chosen after column i.
    """

    num_accepted: torch.Tensor
    token_ids: torch.Tensor
    scores: torch.Tensor | None = None
    columns: list[int] | None = None

    @property
    def num_written(self) -> torch.Tensor:
        """How many tokens the target writes, [B]."""
        return self.num_accepted.clamp(min=0) + 1

    @property
    def anchors(self) -> torch.Tensor:
        """The last token that the target writes, [B, 1]: the next block begins with it."""
        return self.token_ids.gather(1, self.num_accepted.clamp(min=0)[:, None])


# What `num_accepted` says where a model's logits are NaN or infinite.
TARGET_BROKE, DRAFTER_BROKE = -1, -2


@dataclass(frozen=True)
class Sampler:
    """The common warpers as numbers on the device: temperature, then top-k, then top-p of what is left.

    Attributes:
        settings: Temperature, k and p, float32 [3].
        num_candidates: The most likely tokens to look at, k and room for ties; 0: all, where nothing is cut off.
    """

    settings: torch.Tensor
    num_candidates: int

    @classmethod
    def of(cls, processors: Any, device: torch.device) -> Sampler | None:
        """Those of a `LogitsProcessorList`; `None` if it holds anything else, or cuts off by p alone."""
        kinds = [type(processor) for processor in processors]
        plain = [kind for kind in (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper) if kind in kinds]
        by_kind: dict[Any, Any] = dict(zip(kinds, processors, strict=True))
        cuts = [by_kind[kind] for kind in plain if kind is not TemperatureLogitsWarper]
        if kinds != plain or any(cut.filter_value != -float("inf") for cut in cuts):
            return None
        if TopPLogitsWarper in kinds and (TopKLogitsWarper not in kinds or cuts[-1].min_tokens_to_keep != 1):
            return None
        k = by_kind[TopKLogitsWarper].top_k if TopKLogitsWarper in kinds else 0
        p = by_kind[TopPLogitsWarper].top_p if TopPLogitsWarper in kinds else 1.0
        temperature = by_kind[TemperatureLogitsWarper].temperature if TemperatureLogitsWarper in kinds else 1.0
        settings = to_device(torch.tensor([temperature, k, p], dtype=torch.float32), device)
        # One of few sizes, so that a compiled step serves every k of a class.
        return cls(settings, 0 if not k else 1 << (k + NUM_TIES - 1).bit_length())

    def __call__(self, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """The tokens drawn by uniforms [...] from logits [..., V]; the same as after transformers' own warpers."""
        temperature, k, p = self.settings
        if not self.num_candidates:
            return choose_sampled(logits.float() / temperature, uniforms)
        values, token_ids = logits.topk(min(self.num_candidates, logits.shape[-1]), dim=-1)  # falling
        values = values.float() / temperature
        last = (k.long().clamp(max=values.shape[-1]) - 1).expand(*values.shape[:-1], 1)
        values = values.masked_fill(values < values.gather(-1, last), -torch.inf)
        tail = values.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)  # what each and all less likely ones have
        is_cut = (tail <= 1 - p) & (p < 1)
        is_cut[..., 0] = False
        token_ids, order = token_ids.sort(dim=-1)  # by id, so that rounding cannot swap two intervals
        values = values.masked_fill(is_cut, -torch.inf).gather(-1, order)
        chosen = pick(values.double().softmax(dim=-1), uniforms)
        return token_ids.gather(-1, chosen[..., None]).squeeze(-1)


def choose_greedy(logits: torch.Tensor) -> torch.Tensor:
    """The target's choice for every row, [B, N] of logits [B, N, V]: its argmax."""
    return logits.argmax(dim=-1)


def choose_sampled(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The target's choice for every row, [B, N] of logits [B, N, V] and uniforms [B, N]: inverse transform sampling.

    The vocabulary is summed in chunks in float32. Neither a large vocabulary's tail nor the last token's edge is lost,
    because sums of chunks and the one chunk that is looked into are in float64. A token of probability zero is never picked.
    """
    if logits.device.type == "mps":  # which has no float64
        return choose_sampled(logits.cpu(), uniforms.cpu()).to(logits.device)
    weights = (logits.float() - logits.amax(dim=-1, keepdim=True).float()).exp()
    return _pick_in_chunks(weights, uniforms)


def _pick_in_chunks(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """As `pick`, of float32 weights [..., V]: first the chunk, then the token in it."""
    missing = -weights.shape[-1] % VOCABULARY_CHUNK
    chunks = functional.pad(weights, (0, missing)).unflatten(-1, (-1, VOCABULARY_CHUNK))  # [..., C, 256]
    sums = chunks.sum(dim=-1).double()
    cumulative = sums.cumsum(dim=-1)
    index = pick(sums, uniforms)[..., None]  # [..., 1]
    size = sums.gather(-1, index)
    before = cumulative.gather(-1, index) - size
    rest = ((uniforms[..., None] * cumulative[..., -1:] - before) / size).clamp(0.0, 1.0).squeeze(-1)
    chunk = chunks.gather(-2, index[..., None].expand(*index.shape, VOCABULARY_CHUNK)).squeeze(-2)
    return index.squeeze(-1) * VOCABULARY_CHUNK + pick(chunk.double(), rest)


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


def verify_match(proposals: Proposals, choices: torch.Tensor, best: torch.Tensor, scores: Any = None) -> Verdict:
    """Proposals stand while they equal the target's `choices` [B, n + 1].

    Args:
        proposals: n tokens per row.
        choices: The target's.
        best: The scores of its likeliest or chosen tokens, [B, n + 1]: not finite where the logits are NaN or infinite.
        scores: What the choices were made by, to be handed on.
    """
    num_accepted = accept_prefix(proposals.token_ids, choices)
    return Verdict(_checked(num_accepted, best, proposals), choices, scores)


def _checked(num_accepted: torch.Tensor, best: torch.Tensor, proposals: Proposals) -> torch.Tensor:
    """`num_accepted` [B], negative where a column that a token is written by is not finite, or the drafter is not."""
    columns = torch.arange(best.shape[1], device=best.device)
    is_broken = (~best.isfinite() & (columns <= num_accepted[:, None])).any(dim=1)
    num_accepted = torch.where(is_broken, TARGET_BROKE, num_accepted)
    if proposals.is_finite is not None:
        num_accepted = torch.where(proposals.is_finite.to(best.device), num_accepted, DRAFTER_BROKE)
    return num_accepted


@dataclass(frozen=True)
class _Drawn:
    """Both distributions where they matter for proposals that were drawn: at the candidates, in float64.

    Attributes:
        p: The target's probabilities of all tokens, float32 [B, n + 1, V].
        p_of: Its probabilities of the candidates, [B, n, K].
        q_of: The drafter's.
        is_chosen: Which candidate was proposed, [B, n, K].
    """

    p: torch.Tensor
    p_of: torch.Tensor
    q_of: torch.Tensor
    is_chosen: torch.Tensor
    candidate_ids: torch.Tensor

    @classmethod
    def of(cls, proposals: Proposals, scores: torch.Tensor) -> _Drawn:
        token_ids, candidate_ids, q_of = (
            proposals.token_ids[..., None],
            proposals.candidate_ids,
            proposals.probabilities,
        )
        if candidate_ids is None or q_of is None:  # q is one token
            candidate_ids, q_of = token_ids, torch.ones(token_ids.shape, dtype=torch.float64, device=token_ids.device)
        p = scores.float().softmax(dim=-1)
        p_of = p[:, :-1].gather(-1, candidate_ids).double()
        return cls(p, p_of, q_of.double(), candidate_ids == token_ids, candidate_ids)

    def proposed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The proposals' probabilities under target and drafter, [B, n] each."""
        return (self.p_of * self.is_chosen).sum(dim=-1), (self.q_of * self.is_chosen).sum(dim=-1)

    def surplus(self, reach: torch.Tensor, place: int) -> torch.Tensor:
        """The sum over all tokens of max(reach * p - q, 0) at a place, [B]. Off the candidates q is 0."""
        p_of, q_of = self.p_of[:, place], self.q_of[:, place]
        elsewhere = (1.0 - p_of.sum(dim=-1)).clamp(min=0.0)
        return reach * elsewhere + (reach[:, None] * p_of - q_of).clamp(min=0.0).sum(dim=-1)


def verify_rejection(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Speculative sampling, token by token.

    Args:
        proposals: n tokens per row, each drawn from its q.
        scores: The target's processed logits, [B, n + 1, V].
        uniforms: Fresh uniforms, float64 [B, n + 1]: one per proposal and one for the token after them.
    """
    drawn = _Drawn.of(proposals, scores)
    p_of, q_of = drawn.proposed()
    num_accepted = (uniforms[:, :-1] * q_of < p_of).long().cumprod(dim=1).sum(dim=1)
    return _closed(proposals, scores, drawn, num_accepted, torch.ones_like(uniforms), uniforms[:, -1])


def verify_block(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Block verification: the longest prefix that passes its own test stands, whether or not shorter ones did.

    Arguments as in `verify_rejection`.
    """
    drawn = _Drawn.of(proposals, scores)
    p_of, q_of = drawn.proposed()
    count = q_of.shape[1]
    # reach[i]: how probable the first i proposals are under the target, relative to the drafter and at most 1.
    reach = [torch.ones_like(uniforms[:, 0])]
    for i in range(count):
        reach.append((reach[-1] * p_of[:, i] / q_of[:, i]).clamp(max=1.0))
    num_accepted = proposals.token_ids.new_zeros(len(p_of))
    for i in range(1, count + 1):
        pass_rate = reach[i]
        if i < count:
            surplus = drawn.surplus(reach[i], i)
            missing = surplus + 1.0 - reach[i]
            # Nothing missing: both distributions are one, and no prefix ends here.
            pass_rate = torch.where(missing > 0, surplus / missing, torch.ones_like(missing))
        num_accepted = torch.where(uniforms[:, i - 1] < pass_rate, i, num_accepted)
    return _closed(proposals, scores, drawn, num_accepted, torch.stack(reach, dim=1), uniforms[:, -1])


def _closed(
    proposals: Proposals,
    scores: torch.Tensor,
    drawn: _Drawn,
    num_accepted: torch.Tensor,  # [B]
    reach: torch.Tensor,  # [B, n + 1] what the target's distribution is weighed by in the residual
    uniforms: torch.Tensor,  # [B]
) -> Verdict:
    """The accepted proposals and, after them, a draw from what the drafter's distribution leaves of the target's."""
    place = num_accepted[:, None]
    at = place[..., None]
    p_at = drawn.p.gather(1, at.expand(-1, -1, drawn.p.shape[-1])).squeeze(1).double()  # [B, V]
    token_ids = torch.cat([proposals.token_ids, proposals.token_ids.new_zeros(len(p_at), 1)], dim=1)
    residual = reach.gather(1, place) * p_at
    if drawn.q_of.shape[1]:
        last = at.clamp(max=drawn.q_of.shape[1] - 1).expand(-1, -1, drawn.q_of.shape[-1])
        # After the last proposal the drafter proposed nothing.
        q_at = drawn.q_of.gather(1, last).squeeze(1) * (place < drawn.q_of.shape[1])
        residual = residual.scatter_add(1, drawn.candidate_ids.gather(1, last).squeeze(1), -q_at).clamp(min=0.0)
    # Empty by rounding alone: a proposal is only refused where the target's distribution exceeds the drafter's somewhere.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_at)
    token_ids = token_ids.scatter(1, place, pick(residual, uniforms)[:, None])
    return Verdict(_checked(num_accepted, scores.amax(dim=-1), proposals), token_ids, scores)


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


class Verifier:
    """`accept(logits, rows, proposals)` for blocks of logits [B, n + 1, V].

    Args:
        processors: The target's `LogitsProcessorList`.
        batch_size: Rows that the batch began with.
        noise: Source of uniforms; `None` decodes greedily.
        verification: One of `VERIFICATIONS`. "auto" is "match" for proposals that are one token, and "block" for drawn
            ones. Greedy decoding has one rule, "match".
        keeps_scores: Whether the processed scores are wanted.
    """

    def __init__(
        self,
        processors: Any,
        batch_size: int,
        noise: PositionNoise | None,
        verification: str,
        keeps_scores: bool = False,
    ) -> None:
        self.processors = processors
        self.batch_size = batch_size
        self.noise: Any = noise
        self.verification = verification
        self._keeps_scores = keeps_scores
        self._is_prefix_free = all(type(processor) in PREFIX_FREE_PROCESSORS for processor in processors)
        self._samplers: dict[torch.device, Sampler | None] = {}

    @property
    def takes_drawn_proposals(self) -> bool:
        """Whether proposals that are drawn from the drafter's distribution are accepted more often than its argmax."""
        return self.noise is not None and self.verification != "match"

    def sampler(self, device: torch.device) -> Sampler | None:
        """How to draw on a device without transformers' processors, where that is the same."""
        if device not in self._samplers:
            of_list = self.noise is not None and not self._keeps_scores
            self._samplers[device] = Sampler.of(self.processors, device) if of_list else None
        return self._samplers[device]

    def is_fusible(self, device: torch.device) -> bool:
        """Whether "match" on a chain needs the logits alone: then one compiled function drafts, verifies and accepts."""
        if self.noise is None:
            return not self.processors and not self._keeps_scores
        return self.verification in ("auto", "match") and self.sampler(device) is not None

    def accept(self, logits: torch.Tensor, rows: list[Row], proposals: Proposals) -> Verdict:
        """What of the proposals stands. Column i of the logits is processed after [text, proposals 1..i]."""
        logits = logits.to(proposals.token_ids.device)
        if proposals.tree is not None:
            return self._walk(logits[0], rows[0], proposals.tree)
        rule = self._rule(proposals)
        sampler = self.sampler(logits.device)
        if rule == "match" and sampler is not None:
            choices = sampler(logits, self.uniforms(rows, logits.shape[1], logits.device))
            return verify_match(proposals, choices, logits.amax(dim=-1))
        if self.processors:
            logits = self._process(logits.float(), rows, proposals.token_ids, rule)
        if rule == "match":
            choices = self._choose(logits, rows)
            best = logits.gather(-1, choices[..., None]).squeeze(-1)
            return verify_match(proposals, choices, best, logits if self._keeps_scores else None)
        uniforms = torch.stack([self.noise.fresh(row.index, logits.shape[1]) for row in rows])
        verify = verify_rejection if rule == "rejection" else verify_block
        return verify(proposals, logits, to_device(uniforms, logits.device))

    def uniforms(self, rows: list[Row], count: int, device: torch.device) -> torch.Tensor:
        """The uniforms [B, count] of each row's next positions."""
        return to_device(torch.stack([self.noise(row.index, len(row.new_ids), count) for row in rows]), device)

    def _walk(self, logits: torch.Tensor, row: Row, tree: DraftTree) -> Verdict:
        """Follows the target's own choices from the anchor down the tree: logits [1 + n, V] of its columns.

        Each choice is made after the path that led to it, with the noise of its position, as by plain decoding.
        """
        scores, choices = logits, None
        if self._is_prefix_free:
            if self.processors and self.sampler(logits.device) is None:
                scores = self.processors(row.prompt_ids[None], logits.float())
            chosen = self._choose_at(scores, row, tree.depths)
            is_broken = ~scores.gather(-1, chosen[:, None]).squeeze(-1).isfinite()
            choices, broken = to_host(torch.stack([chosen, is_broken.long()]))()  # one wait
        columns, token_ids, seen = [0], list[int](), list[torch.Tensor]()
        while True:
            column = columns[-1]
            if choices is None:
                text = row.text(row.prompt_ids.new_tensor(token_ids))
                seen.append(self._process_one(row, text, logits[column].float()))
                token_ids += self._choose_at(seen[-1][None], row, [tree.depths[column]]).tolist()
            else:
                token_ids.append(choices[column])
            if token_ids[-1] not in tree.children[column]:
                break
            columns.append(tree.children[column][token_ids[-1]])
        is_finite = choices is None or not any(broken[column] for column in columns)
        return Verdict(
            num_accepted=torch.tensor([len(columns) - 1 if is_finite else TARGET_BROKE]),
            token_ids=torch.tensor([token_ids]),
            scores=(torch.stack(seen) if seen else scores[columns])[None] if self._keeps_scores else None,
            columns=columns,
        )

    def _choose_at(self, scores: torch.Tensor, row: Row, depths: list[int]) -> torch.Tensor:
        """The target's choices [N] by scores [N, V] of columns that are `depths` tokens after the anchor."""
        if self.noise is None:
            return choose_greedy(scores)
        uniforms = to_device(self.noise(row.index, len(row.new_ids), max(depths) + 1)[depths], scores.device)
        return (self.sampler(scores.device) or choose_sampled)(scores, uniforms)

    def _rule(self, proposals: Proposals) -> str:
        if self.noise is None:
            return "match"
        if self.verification == "auto":
            return "match" if proposals.probabilities is None else "block"
        return self.verification

    def _choose(self, scores: torch.Tensor, rows: list[Row], first: int = 0) -> torch.Tensor:
        """The target's choices [B, N] by scores [B, N, V] of the columns from `first` on."""
        if self.noise is None:
            return choose_greedy(scores)
        return choose_sampled(scores, self.uniforms(rows, first + scores.shape[1], scores.device)[:, first:])

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
