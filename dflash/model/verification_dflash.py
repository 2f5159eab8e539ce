"""Which drafted tokens stand: the accept rules and the target's choices, as functions of tensors.

Every rule is lossless: whatever is proposed, the committed text has the distribution of plain decoding. Row i's logits are
the target's after [committed text, proposals 1..i], so they are those of plain decoding if proposals 1..i stand.

 * `match`: the target chooses a token for every row, and proposals stand as long as they equal its choices, which are
   committed. Greedy, a choice is the argmax. Sampled, it is drawn by inverse transform sampling with the noise of its
   position (`PositionNoise`), which the drafter never sees. The text depends on the seed alone.
 * `rejection` (Leviathan et al. 2023, algorithm 1): proposal x drawn from q stands with probability min(1, p(x)/q(x)),
   and the first that falls is replaced by a draw from the residual max(p - q, 0).
 * `block` (Sun et al. 2024, block verification, algorithm 2): the block's proposals are judged together; on average it
   keeps at least as many as `rejection` does, with the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from transformers.generation import logits_process

from .cache_dflash import to_device, to_host
from .proposals_dflash import DraftTree, Row


VERIFICATIONS = ("auto", "match", "rejection", "block")
NOISE_CHUNK = 256  # uniforms are drawn so many at a time, so that no position's depends on how many are asked for
VOCABULARY_CHUNK = 256  # tokens whose weights are summed together when a token is drawn
NUM_TIES = 44  # candidates beside the k most likely, because top-k keeps every token that ties with the k-th
TARGET_BROKE, DRAFTER_BROKE = -1, -2  # what `num_accepted` says where a model's logits are NaN or infinite

WARPERS = (logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper)
# Processors that look at a row's scores alone, so that all rows of a block may share one call.
PREFIX_FREE_PROCESSORS = (
    *WARPERS,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TypicalLogitsWarper,
)


class PositionNoise:
    """One uniform number per row and position of the new text, the same for the same seed however text is drafted.

    Row r's noise depends on the state of `generator` (or of torch's global one) and on r alone, wherever the models run
    and in any batch. A list holds a generator for each row, which then reads as it would alone.
    """

    def __init__(self, batch_size: int, generator: torch.Generator | Sequence[torch.Generator] | None = None) -> None:
        generators, count = (generator, 1) if isinstance(generator, Sequence) else ([generator], batch_size)
        if len(generators) * count != batch_size:
            raise ValueError(f"{len(generators)} generators for {batch_size} rows: pass one for each, or one for all.")
        seeds: list[int] = []
        for one in generators:
            seeds += torch.randint(2**63 - 1, (count,), generator=one, device=one.device if one else "cpu").tolist()
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._drawn = [torch.empty(0, dtype=torch.float64, device="cpu")] * batch_size
        # Rules that draw per step and not per position must not meet a number again that decided something before.
        self._step_streams = [torch.Generator().manual_seed(seed ^ 1) for seed in seeds]

    def __call__(self, row: int, start: int, count: int) -> torch.Tensor:
        """Uniforms in [0, 1) of the row's new positions `start..start + count - 1`, float64 [count] on the CPU."""
        while len(self._drawn[row]) < start + count:
            chunk = torch.rand(NOISE_CHUNK, generator=self._streams[row], dtype=torch.float64, device="cpu")
            self._drawn[row] = torch.cat([self._drawn[row], chunk])
        return self._drawn[row][start : start + count]

    def fresh(self, row: int, count: int) -> torch.Tensor:
        """Uniforms of the row that no call returned before, float64 [count] on the CPU."""
        return torch.rand(count, generator=self._step_streams[row], dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Proposals:
    """What is put before the target behind the anchor: n tokens per row."""

    token_ids: torch.Tensor  # [B, n]
    candidate_ids: torch.Tensor | None = None  # [B, n, K], what each was drawn from; None: q is one token
    probabilities: torch.Tensor | None = None  # [B, n, K], the candidates' q
    looked_up: tuple[int, ...] = ()  # places of the rows whose proposals were found in their own text
    confidences: torch.Tensor | None = None  # [B, n], how likely the drafter finds each behind those before it
    tree: DraftTree | None = None  # what the tokens of a single row are nodes of; None: a chain
    is_finite: torch.Tensor | None = None  # [B], whether the drafter's logits were; None: nothing was drafted

    def first(self, count: int) -> Proposals:
        """The first `count` proposals of each row."""
        names = ("token_ids", "candidate_ids", "probabilities", "confidences")
        return replace(self, **{name: part[:, :count] for name in names if (part := getattr(self, name)) is not None})

    def with_lookups(self, found: dict[int, list[int]]) -> Proposals:
        """With `found` tokens, which nothing was drawn for, as the first proposals of the rows in those places."""
        width = self.token_ids.shape[1]
        looked_up = torch.full(self.token_ids.shape, -1, device="cpu")
        for place, token_ids in found.items():
            looked_up[place, : len(token_ids)] = torch.tensor(token_ids[:width])
        looked_up = to_device(looked_up, self.token_ids.device)
        is_found = looked_up >= 0
        chosen = torch.where(is_found, looked_up, self.token_ids)
        candidate_ids, probabilities = self.candidate_ids, self.probabilities
        if candidate_ids is not None and probabilities is not None:
            # In place of the candidate that it equals, or of the first: no candidate stands there twice.
            index = (candidate_ids == chosen[..., None]).long().argmax(dim=-1, keepdim=True)
            candidate_ids = candidate_ids.scatter(-1, index, chosen[..., None])
            one_token = torch.zeros_like(probabilities).scatter(-1, index, 1.0)
            probabilities = torch.where(is_found[..., None], one_token, probabilities)
        return Proposals(chosen, candidate_ids, probabilities, tuple(found) if width else (), is_finite=self.is_finite)


@dataclass(frozen=True)
class Verdict:
    """What a rule decided: the first `num_accepted + 1` of a row's `token_ids` are what the target writes."""

    num_accepted: torch.Tensor  # [B], proposals that stand, or `TARGET_BROKE` or `DRAFTER_BROKE`
    token_ids: torch.Tensor  # [B, n + 1]
    scores: torch.Tensor | None = None  # [B, n + 1, V], what they were chosen by, if that was asked
    columns: list[int] | None = None  # of a tree: the anchor's and those that stand; token i was chosen after column i

    @property
    def num_written(self) -> torch.Tensor:
        """How many tokens the target writes, [B]."""
        return self.num_accepted.clamp(min=0) + 1

    @property
    def anchors(self) -> torch.Tensor:
        """The last token that the target writes, [B, 1]: the next block begins with it."""
        return self.token_ids.gather(1, self.num_accepted.clamp(min=0)[:, None])


@dataclass(frozen=True)
class Sampler:
    """The common warpers as numbers on the device: temperature, then top-k, then top-p of what is left."""

    settings: torch.Tensor  # temperature, k and p, float32 [3]
    num_candidates: int  # the most likely tokens to look at, k and room for ties; 0: all, where nothing is cut off

    @classmethod
    def of(cls, processors: Any, device: torch.device) -> Sampler | None:
        """Those of a `LogitsProcessorList`; `None` if it holds anything else, or cuts off by p alone."""
        by_kind = {type(processor): processor for processor in processors}
        temperature, top_k, top_p = (by_kind.get(kind) for kind in WARPERS)
        if list(processors) != [one for one in (temperature, top_k, top_p) if one is not None]:
            return None
        if any(getattr(cut, "filter_value", -torch.inf) != -torch.inf for cut in (top_k, top_p)):
            return None
        if top_p is not None and (top_k is None or top_p.min_tokens_to_keep != 1):
            return None
        k = getattr(top_k, "top_k", 0)
        settings = [getattr(temperature, "temperature", 1.0), k, getattr(top_p, "top_p", 1.0)]
        # One of few sizes, so that a compiled step serves every k of a class.
        num_candidates = 1 << (k + NUM_TIES - 1).bit_length() if k else 0
        return cls(to_device(torch.tensor(settings, dtype=torch.float32), device), num_candidates)

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

    Chunks of the vocabulary are summed in float32; their sums, and the one that a uniform falls into, are looked at in
    float64. So neither the tail nor the last token's edge is lost, and a token of probability zero is never picked.
    """
    if logits.device.type == "mps":  # which has no float64
        return choose_sampled(logits.cpu(), uniforms.cpu()).to(logits.device)
    weights = (logits.float() - logits.amax(dim=-1, keepdim=True).float()).exp()
    padding = -weights.shape[-1] % VOCABULARY_CHUNK
    chunks = functional.pad(weights, (0, padding)).unflatten(-1, (-1, VOCABULARY_CHUNK))  # [B, N, C, 256]
    sums = chunks.sum(dim=-1).double()
    cumulative = sums.cumsum(dim=-1)
    index = pick(sums, uniforms)[..., None]  # [B, N, 1]
    size = sums.gather(-1, index)
    before = cumulative.gather(-1, index) - size
    rest = ((uniforms[..., None] * cumulative[..., -1:] - before) / size).clamp(0.0, 1.0).squeeze(-1)
    chunk = chunks.gather(-2, index[..., None].expand(*index.shape, VOCABULARY_CHUNK)).squeeze(-2)
    token_ids = index.squeeze(-1) * VOCABULARY_CHUNK + pick(chunk.double(), rest)
    return token_ids.clamp(max=logits.shape[-1] - 1)  # of NaN, too, a token


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulative `weights` [..., V] (float64, any sum) holds the uniform [...]."""
    cumulative = weights.cumsum(dim=-1)
    # Scaled by the sum as it was computed, and kept below it, so that rounding cannot push a pick past the last token.
    total = cumulative[..., -1:]
    drawn = torch.minimum(uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)  # if NaN


def accept_prefix(proposals: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """How many proposals stand, [B] of proposals [B, N - 1] and choices [B, N]: the longest prefix that agrees."""
    return (proposals == choices[:, : proposals.shape[1]]).long().cumprod(dim=1).sum(dim=1)


def verify_match(proposals: Proposals, choices: torch.Tensor, best: torch.Tensor) -> Verdict:
    """Proposals stand while they equal the target's choices; `best` is not finite where logits are not: [B, n + 1]."""
    return Verdict(_checked(accept_prefix(proposals.token_ids, choices), best, proposals), choices)


def _checked(num_accepted: torch.Tensor, best: torch.Tensor, proposals: Proposals) -> torch.Tensor:
    """`num_accepted` [B], negative where a column that a token is written by is not finite, or the drafter is not."""
    columns = torch.arange(best.shape[1], device=best.device)
    is_broken = (~best.isfinite() & (columns <= num_accepted[:, None])).any(dim=1)
    num_accepted = torch.where(is_broken, TARGET_BROKE, num_accepted)
    if proposals.is_finite is not None:
        num_accepted = torch.where(proposals.is_finite.to(best.device), num_accepted, DRAFTER_BROKE)
    return num_accepted


class _Drawn:
    """Drawn proposals, and both laws at the tokens that could have been: float64 [B, n + 1, K], the last q being 0."""

    def __init__(self, proposals: Proposals, scores: torch.Tensor) -> None:
        self.proposals, self.scores = proposals, scores
        token_ids, candidate_ids, q = proposals.token_ids[..., None], proposals.candidate_ids, proposals.probabilities
        if candidate_ids is None or q is None:  # q is one token
            candidate_ids, q = token_ids, torch.ones_like(token_ids, dtype=torch.float64)
        is_proposed = candidate_ids == token_ids
        self.candidate_ids = functional.pad(candidate_ids, (0, 0, 0, 1))
        self.law = scores.float().softmax(dim=-1)  # the target's, of all tokens
        self.p = self.law.gather(-1, self.candidate_ids).double()
        self.q = functional.pad(q.double(), (0, 0, 0, 1))
        self.p_of = (self.p[:, :-1] * is_proposed).sum(dim=-1)  # of the proposals themselves, [B, n]
        self.q_of = (self.q[:, :-1] * is_proposed).sum(dim=-1)

    def verdict(self, num_accepted: torch.Tensor, reach: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
        """`num_accepted` proposals and a draw [B] from the residual, max(reach * p - q, 0): `reach` is [B, n + 1]."""
        place = torch.arange(len(num_accepted), device=num_accepted.device), num_accepted
        p = self.law[place].double()  # [B, V]
        residual = (reach[place][:, None] * p).scatter_add(1, self.candidate_ids[place], -self.q[place]).clamp(min=0.0)
        # Empty by rounding alone: a proposal is only refused where the target's law exceeds the drafter's somewhere.
        residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
        token_ids = functional.pad(self.proposals.token_ids, (0, 1))
        token_ids[place] = pick(residual, uniforms)
        num_accepted = _checked(num_accepted, self.scores.amax(dim=-1), self.proposals)
        return Verdict(num_accepted, token_ids, self.scores)


def verify_rejection(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Speculative sampling, token by token, of n proposals by the target's processed logits, `scores` [B, n + 1, V].

    `uniforms`, float64 [B, n + 1], decided nothing before: one per proposal and one for the token after them.
    """
    drawn = _Drawn(proposals, scores)
    num_accepted = (uniforms[:, :-1] * drawn.q_of < drawn.p_of).long().cumprod(dim=1).sum(dim=1)
    return drawn.verdict(num_accepted, torch.ones_like(uniforms), uniforms[:, -1])


def verify_block(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Block verification: the longest prefix that passes its own test stands; arguments as in `verify_rejection`."""
    drawn = _Drawn(proposals, scores)
    # How probable the first i proposals are under the target, relative to the drafter and at most 1: [B, n + 1].
    reached = [torch.ones_like(uniforms[:, 0])]
    for p_of, q_of in zip(drawn.p_of.unbind(1), drawn.q_of.unbind(1), strict=True):
        reached.append((reached[-1] * p_of / q_of).clamp(max=1.0))
    reach = torch.stack(reached, dim=1)
    # The sum over all tokens of max(reach * p - q, 0): off the candidates q is 0.
    elsewhere = (1.0 - drawn.p.sum(dim=-1)).clamp(min=0.0)
    surplus = reach * elsewhere + (reach[..., None] * drawn.p - drawn.q).clamp(min=0.0).sum(dim=-1)
    missing = surplus + 1.0 - reach
    # Nothing missing: both distributions are one, and no prefix ends here.
    pass_rates = torch.where(missing > 0, surplus / missing, 1.0)
    pass_rates[:, -1] = reach[:, -1]
    lengths = torch.arange(1, uniforms.shape[1], device=uniforms.device)
    num_accepted = functional.pad((uniforms[:, :-1] < pass_rates[:, 1:]) * lengths, (1, 0)).amax(dim=1)
    return drawn.verdict(num_accepted, reach, uniforms[:, -1])


def verify_tree(tree: DraftTree, choices: torch.Tensor, best: torch.Tensor) -> Verdict:
    """Follows a row's choices, each made behind the path to its column, down the tree; `best` as in `verify_match`."""
    token_of = to_host(torch.where(best.isfinite(), choices, TARGET_BROKE)[0])()
    columns = [0]
    while (child := tree.children[columns[-1]].get(token_of[columns[-1]])) is not None:
        columns.append(child)
    token_ids = [token_of[column] for column in columns]
    num_accepted = TARGET_BROKE if token_ids[-1] == TARGET_BROKE else len(columns) - 1
    return Verdict(torch.tensor([num_accepted]), torch.tensor([token_ids]), columns=columns)


class Verifier:
    """Processes blocks of logits as plain `generate` would, for `batch_size` rows, and says which proposals stand.

    Without `noise` decoding is greedy, and its rule "match". "auto" is that too, or "block" for drawn proposals.
    """

    def __init__(
        self, processors: Any, batch_size: int, noise: PositionNoise | None, verification: str, keeps_scores: bool
    ) -> None:
        self.processors, self.batch_size = processors, batch_size
        self.noise: Any = noise
        self.verification = "match" if noise is None else verification
        self.takes_drawn_proposals = self.verification != "match"  # and accepts more of them than of argmaxes
        self._keeps_scores = keeps_scores
        self.ends: Any = lambda text_ids: False  # whether a text [1, S] stops where it is
        self._is_prefix_free = all(type(processor) in PREFIX_FREE_PROCESSORS for processor in processors)
        self._samplers: dict[torch.device, Sampler | None] = {}

    def sampler(self, device: torch.device) -> Sampler | None:
        """How to draw on a device without transformers' processors, where that is the same."""
        if self.noise is None or self._keeps_scores:
            return None
        if device not in self._samplers:
            self._samplers[device] = Sampler.of(self.processors, device)
        return self._samplers[device]

    def is_fusible(self, device: torch.device) -> bool:
        """Whether "match" on a chain needs the logits alone: one compiled function may draft, verify and accept."""
        if self.noise is None:
            return not self.processors and not self._keeps_scores
        return self.verification in ("auto", "match") and self.sampler(device) is not None

    def accept(self, logits: torch.Tensor, rows: list[Row], proposals: Proposals) -> Verdict:
        """What of the proposals stands by logits [B, n + 1, V]: column i is processed behind [text, proposals 1..i]."""
        scores, tree = logits.to(proposals.token_ids.device), proposals.tree
        rule = self.verification
        if rule == "auto":
            rule = "match" if proposals.probabilities is None else "block"
        if self.processors and (rule != "match" or self.sampler(scores.device) is None):
            scores = self._process(scores.float(), rows, proposals, rule)
        if rule != "match":
            uniforms = torch.stack([self.noise.fresh(row.index, scores.shape[1]) for row in rows])
            verify = verify_rejection if rule == "rejection" else verify_block
            return verify(proposals, scores, to_device(uniforms, scores.device))
        choices = self._choose(scores, rows, list(range(scores.shape[1])) if tree is None else tree.depths)
        best = scores.gather(-1, choices[..., None]).squeeze(-1) if self.noise is None else scores.amax(dim=-1)
        verdict = verify_match(proposals, choices, best) if tree is None else verify_tree(tree, choices, best)
        if not self._keeps_scores:
            return verdict
        return replace(verdict, scores=scores if tree is None else scores[:, verdict.columns])

    def uniforms(self, rows: list[Row], count: int, device: torch.device) -> torch.Tensor:
        """The uniforms [B, count] of each row's next positions."""
        return to_device(torch.stack([self.noise(row.index, len(row.new_ids), count) for row in rows]), device)

    def _choose(self, scores: torch.Tensor, rows: list[Row], depths: list[int]) -> torch.Tensor:
        """The target's choices [B, N] by scores [B, N, V] of columns that stand `depths` tokens behind the anchor."""
        if self.noise is None:
            return choose_greedy(scores)
        uniforms = [self.noise(row.index, len(row.new_ids), max(depths) + 1)[depths] for row in rows]
        return (self.sampler(scores.device) or choose_sampled)(scores, to_device(torch.stack(uniforms), scores.device))

    def _process(self, scores: torch.Tensor, rows: list[Row], proposals: Proposals, rule: str) -> torch.Tensor:
        """The processors' scores [B, n + 1, V]: in one call if none looks at the prefix, else column by column.

        No further than a row's proposals can stand: a grammar has no answer after a text that is never written.
        """
        if self._is_prefix_free:
            return self.processors(proposals.token_ids, scores.flatten(0, 1)).view_as(scores)
        processed, count = scores.clone(), self.batch_size
        trees = [proposals.tree or DraftTree(ids, list(range(len(ids))), []) for ids in proposals.token_ids.tolist()]
        for row, tree, of_row, raw in zip(rows, trees, processed, scores, strict=True):
            if row.is_done:
                continue
            reached = [(0, list[int]())]
            for column, path in reached:  # which grows
                # A processor may hold something for each row (the repetition penalty does: its padding), and prefixes
                # differ in length. So each row asks as all rows of the batch, and takes the answer in its place.
                text_ids = row.text(path).expand(count, -1)
                of_row[column] = self.processors(text_ids, of_row[column].repeat(count, 1))[row.index]
                if not of_row[column].max() > -torch.inf:  # NaN is no more
                    if self.ends(row.text(path)) or not raw[column].max().isfinite():
                        of_row[column] = raw[column]  # never written; or the target's own fault, said when it is read
                        continue
                    names = ", ".join(type(processor).__name__ for processor in self.processors)
                    raise ValueError(
                        f"The logits processors ({names}) left no token possible behind {text_ids.shape[1]} tokens "
                        "(scores are NaN or all -inf): remove or correct the one that does."
                    )
                children, chosen = tree.children[column], None
                if rule == "match" and children:
                    chosen = int(self._choose(of_row[None, column, None], [row], [len(path)]))
                for token_id, child in children.items():
                    if token_id == chosen or (rule != "match" and of_row[column, token_id] > -torch.inf):
                        reached.append((child, [*path, token_id]))
        return processed
