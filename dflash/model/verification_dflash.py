"""Which proposals are accepted: the accept rules and the target's choices, as functions of tensors.

Every rule is lossless: whatever is proposed, the committed text has the distribution of plain decoding. The logits of position
i are the target's after [committed text, proposals 1..i]. If these proposals are accepted, they are those of plain decoding.

 * `match`: the target chooses a token for every position, and proposals are accepted while they equal its choices, which are
   committed. A greedy choice is the argmax. A sampled one is drawn by inverse transform sampling with the uniform of its
   position (`PositionUniforms`), which the drafter never sees. The text depends only on the seed.
 * `rejection` (Leviathan et al. 2023, algorithm 1): a proposal x drawn from q is accepted with probability min(1, p(x)/q(x)).
   The first rejected one is replaced by a draw from the residual max(p - q, 0).
 * `block` (Sun et al. 2024, block verification, algorithm 2): the proposals of a block are verified together. On average it
   accepts at least as many as `rejection`, with the same distribution.

Tokens are drawn in float64, and where their uniforms lie: on the device of the logits, or on the CPU if that has no float64
(`place_uniforms`). So a seed gives the same choices everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from transformers.generation import logits_process

from .cache_dflash import to_device, to_host
from .proposals_dflash import DraftTree, TextSequence


VERIFICATIONS = ("auto", "match", "rejection", "block")
UNIFORMS_CHUNK = 256  # uniforms drawn at a time, so that a position's does not depend on how many are requested
VOCABULARY_CHUNK = 256  # tokens whose probabilities are summed together when a token is drawn
NUM_TIES = 44  # candidates beyond the k most probable, because top-k keeps every token that ties with the k-th
TARGET_BROKE, DRAFTER_BROKE = -1, -2  # values of `num_accepted` where a model's logits are NaN or infinite

WARPERS = (logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper)
# Processors that read only the scores, so that all positions of a block can share one call.
PREFIX_FREE_PROCESSORS = (
    *WARPERS,
    *(logits_process.EpsilonLogitsWarper, logits_process.EtaLogitsWarper, logits_process.MinPLogitsWarper),
    *(logits_process.SuppressTokensLogitsProcessor, logits_process.TypicalLogitsWarper),
)


class PositionUniforms:
    """One uniform number per sequence and new position. It does not depend on what is drafted, or how.

    The uniforms of sequence i depend only on i and the state of `generator` (default: torch's global one), on any device and
    in any batch. With a list of generators, one for each sequence, every text is the one that it would be alone.
    """

    def __init__(self, batch_size: int, generator: torch.Generator | Sequence[torch.Generator] | None = None) -> None:
        generators, count = (generator, 1) if isinstance(generator, Sequence) else ([generator], batch_size)
        if len(generators) * count != batch_size:
            raise ValueError(
                f"generator holds {len(generators)} for {batch_size} sequences: pass one for each, or one."
            )
        seeds: list[int] = []
        for one in generators:
            seeds += torch.randint(2**63 - 1, (count,), generator=one, device=one.device if one else "cpu").tolist()
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._drawn = [torch.empty(0, dtype=torch.float64, device="cpu")] * batch_size
        # For rules that draw per step: they must not reuse a number that has decided something.
        self._step_streams = [torch.Generator().manual_seed(seed ^ 1) for seed in seeds]

    def __call__(self, sequence: int, start: int, count: int) -> torch.Tensor:
        """Uniforms in [0, 1) of the new positions `start..start + count - 1` of a sequence, float64 [count] on the CPU."""
        while len(self._drawn[sequence]) < start + count:
            chunk = torch.rand(UNIFORMS_CHUNK, generator=self._streams[sequence], dtype=torch.float64, device="cpu")
            self._drawn[sequence] = torch.cat([self._drawn[sequence], chunk])
        return self._drawn[sequence][start : start + count]

    def fresh(self, sequences: Sequence[TextSequence], count: int, device: torch.device) -> torch.Tensor:
        """Uniforms of the sequences that no earlier call has returned, float64 [B, count], for logits on `device`."""
        streams = [self._step_streams[sequence.index] for sequence in sequences]
        drawn = [torch.rand(count, generator=stream, dtype=torch.float64, device="cpu") for stream in streams]
        return place_uniforms(torch.stack(drawn), device)


@cache
def has_float64(device: torch.device) -> bool:
    """Whether `device` computes in float64. Apple's MPS and some Intel GPUs do not."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).cumsum(dim=0)
    except (TypeError, RuntimeError):
        return False
    return True


def place_uniforms(uniforms: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Uniforms of the CPU for logits on `device`: moved there, or left on the CPU if `device` has no float64."""
    return to_device(uniforms, device) if has_float64(device) else uniforms


@dataclass(frozen=True)
class Proposals:
    """Tokens that the target verifies after the anchor, n per sequence."""

    token_ids: torch.Tensor  # [B, n]
    candidate_ids: torch.Tensor | None = None  # [B, n, K], tokens that each was drawn from; None: q has one token
    probabilities: torch.Tensor | None = None  # [B, n, K], q of the candidates
    looked_up: tuple[int, ...] = ()  # indices of the sequences that have proposals from their own text
    confidences: torch.Tensor | None = None  # [B, n], the drafter's probability of each, given those before it
    tree: DraftTree | None = None  # the tokens of a single sequence as nodes; None: a chain
    is_finite: torch.Tensor | None = None  # [B], whether the drafter's logits were finite; None: not drafted

    def first(self, count: int) -> Proposals:
        """The first `count` proposals of each sequence."""
        names = ("token_ids", "candidate_ids", "probabilities", "confidences")
        return replace(self, **{name: part[:, :count] for name in names if (part := getattr(self, name)) is not None})

    def to(self, device: torch.device) -> Proposals:
        """The proposals on `device`."""
        tensors: dict[str, Any] = {}
        for name, part in vars(self).items():
            if isinstance(part, torch.Tensor):
                tensors[name] = part.to(device)
        return replace(self, **tensors)

    def with_lookups(self, found: dict[int, tuple[int, list[int]]]) -> Proposals:
        """The proposals with `found` tokens after a number of them, by index of the sequence. Their q is one token."""
        num_drafted, device = self.token_ids.shape[1], self.token_ids.device
        width = max(num_drafted, *(count + len(token_ids) for count, token_ids in found.values()))
        looked_up = torch.full((len(self.token_ids), width), -1, device="cpu")
        looked_up[:, num_drafted:] = 0  # any token, where other sequences found more
        for index, (count, token_ids) in found.items():
            looked_up[index, count : count + len(token_ids)] = torch.tensor(token_ids)
        looked_up = to_device(looked_up, device)
        is_found, columns = looked_up >= 0, torch.arange(width, device=device).clamp(max=num_drafted - 1)
        chosen = torch.where(is_found, looked_up, self.token_ids[:, columns])
        candidate_ids, probabilities = self.candidate_ids, self.probabilities
        if candidate_ids is not None and probabilities is not None:
            candidate_ids, probabilities = candidate_ids[:, columns], probabilities[:, columns]
            # Replaces the equal candidate, or the first one, so that no candidate occurs twice.
            slot = (candidate_ids == chosen[..., None]).long().argmax(dim=-1, keepdim=True)
            candidate_ids = candidate_ids.scatter(-1, slot, chosen[..., None])
            one_token = torch.zeros_like(probabilities).scatter(-1, slot, 1.0)
            probabilities = torch.where(is_found[..., None], one_token, probabilities)
        return Proposals(chosen, candidate_ids, probabilities, tuple(found), is_finite=self.is_finite)


@dataclass(frozen=True)
class Verdict:
    """The decision of a rule. The first `num_accepted + 1` of a sequence's `token_ids` are committed."""

    num_accepted: torch.Tensor  # [B], accepted proposals, or `TARGET_BROKE` or `DRAFTER_BROKE`
    token_ids: torch.Tensor  # [B, n + 1]
    scores: torch.Tensor | None = None  # [B, n + 1, V], that they were chosen by, if requested
    columns: list[int] | None = None  # of a tree: the anchor's and the accepted ones; token i follows column i

    @property
    def num_written(self) -> torch.Tensor:
        """How many tokens are committed, [B]."""
        return self.num_accepted.clamp(min=0) + 1

    @property
    def anchors(self) -> torch.Tensor:
        """The last committed token, [B, 1], which is the anchor of the next block."""
        return self.token_ids.gather(1, self.num_accepted.clamp(min=0)[:, None])


@dataclass(frozen=True)
class Sampler:
    """Temperature, then top-k, then top-p of the rest, as numbers on the device."""

    settings: torch.Tensor  # temperature, k and p, float32 [3]
    num_candidates: int  # most probable tokens to read, k and room for ties; 0: all, without top-k

    @classmethod
    def of(cls, processors: Any, device: torch.device) -> Sampler | None:
        """The sampler of a `LogitsProcessorList`; `None` if it holds anything else, or top-p without top-k."""
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
        # A power of two, so that one compiled step serves many k.
        num_candidates = 1 << (k + NUM_TIES - 1).bit_length() if k else 0
        return cls(to_device(torch.tensor(settings, dtype=torch.float32), device), num_candidates)

    def __call__(self, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Tokens drawn by uniforms [...] from logits [..., V], equal to those after the warpers of transformers."""
        temperature, k, p = self.settings
        if not self.num_candidates:
            return choose_sampled(logits.float() / temperature, uniforms)
        values, token_ids = logits.topk(min(self.num_candidates, logits.shape[-1]), dim=-1)  # descending
        values = values.float() / temperature
        last = (k.long().clamp(max=values.shape[-1]) - 1).expand(*values.shape[:-1], 1)
        values = values.masked_fill(values < values.gather(-1, last), -torch.inf)
        tail = values.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)  # of each token and all less probable ones
        is_cut = (tail <= 1 - p) & (p < 1)
        is_cut[..., 0] = False
        token_ids, order = token_ids.sort(dim=-1)  # by id, so that rounding cannot swap two intervals
        values = values.masked_fill(is_cut, -torch.inf).gather(-1, order)
        chosen = pick(values.softmax(dim=-1), uniforms)
        return token_ids.gather(-1, chosen[..., None]).squeeze(-1)


def choose_sampled(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The target's choice for every position, [B, N] of logits [B, N, V] and uniforms [B, N]: inverse transform sampling.

    Chunks are summed in float32; the sums and the chunk that a uniform falls into are read in float64, to keep the tail.
    """
    weights = (logits.float() - logits.amax(dim=-1, keepdim=True).float()).exp()
    padding = -weights.shape[-1] % VOCABULARY_CHUNK
    chunks = functional.pad(weights, (0, padding)).unflatten(-1, (-1, VOCABULARY_CHUNK))  # [B, N, C, 256]
    sums = chunks.sum(dim=-1).to(uniforms.device).double()
    cumulative = sums.cumsum(dim=-1)
    index = pick(sums, uniforms)[..., None]  # [B, N, 1]
    size = sums.gather(-1, index)
    before = cumulative.gather(-1, index) - size
    rest = ((uniforms[..., None] * cumulative[..., -1:] - before) / size).clamp(0.0, 1.0).squeeze(-1)
    index = index.to(chunks.device)
    chunk = chunks.gather(-2, index[..., None].expand(*index.shape, VOCABULARY_CHUNK)).squeeze(-2)
    token_ids = index.squeeze(-1) * VOCABULARY_CHUNK + pick(chunk, rest)
    return token_ids.clamp(max=logits.shape[-1] - 1)  # a valid token for NaN, too


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulative `weights` [..., V] (any sum) holds the uniform [...] (float64)."""
    cumulative = weights.to(uniforms.device).double().cumsum(dim=-1)
    # Scaled by the computed sum and kept below it, so that rounding cannot move a pick past the last token.
    total = cumulative[..., -1:]
    drawn = torch.minimum(uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token_ids = (
        torch.searchsorted(cumulative, drawn, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
    )  # if NaN
    return token_ids.to(weights.device)


def accept_prefix(proposals: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Length [B] of the longest prefix in which proposals [B, N - 1] equal choices [B, N]."""
    return (proposals == choices[:, : proposals.shape[1]]).long().cumprod(dim=1).sum(dim=1)


def verify_match(proposals: Proposals, choices: torch.Tensor, best: torch.Tensor) -> Verdict:
    """Accepts proposals while they equal the target's choices; best [B, n + 1] is not finite where logits are not."""
    return Verdict(_checked(accept_prefix(proposals.token_ids, choices), best, proposals), choices)


def _checked(num_accepted: torch.Tensor, best: torch.Tensor, proposals: Proposals) -> torch.Tensor:
    """`num_accepted` [B], negative where the logits of a committed token, or the drafter's, are not finite."""
    columns = torch.arange(best.shape[1], device=best.device)
    is_broken = (~best.isfinite() & (columns <= num_accepted[:, None])).any(dim=1)
    num_accepted = torch.where(is_broken, TARGET_BROKE, num_accepted)
    if proposals.is_finite is not None:
        num_accepted = torch.where(proposals.is_finite.to(best.device), num_accepted, DRAFTER_BROKE)
    return num_accepted


class _Drawn:
    """Drawn proposals with p and q of their candidates, float64 [B, n + 1, K]; the last q is 0. All on `device`."""

    def __init__(self, proposals: Proposals, scores: torch.Tensor, device: torch.device) -> None:
        proposals, scores = proposals.to(device), scores.to(device)
        self.proposals, self.scores = proposals, scores
        token_ids, candidate_ids, q = proposals.token_ids[..., None], proposals.candidate_ids, proposals.probabilities
        if candidate_ids is None or q is None:  # q has one token
            candidate_ids, q = token_ids, torch.ones_like(token_ids)
        is_proposed = candidate_ids == token_ids
        self.candidate_ids = functional.pad(candidate_ids, (0, 0, 0, 1))
        self.target_probs = scores.float().softmax(dim=-1)  # of all tokens
        self.p = self.target_probs.gather(-1, self.candidate_ids).double()
        self.q = functional.pad(q.double(), (0, 0, 0, 1))
        self.p_of = (self.p[:, :-1] * is_proposed).sum(dim=-1)  # of the proposals themselves, [B, n]
        self.q_of = (self.q[:, :-1] * is_proposed).sum(dim=-1)

    def verdict(self, num_accepted: torch.Tensor, reach: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
        """`num_accepted` [B] proposals and a draw from the residual max(reach * p - q, 0); `reach` is [B, n + 1]."""
        last = torch.arange(len(num_accepted), device=num_accepted.device), num_accepted
        p = self.target_probs[last].double()  # [B, V]
        residual = (reach[last][:, None] * p).scatter_add(1, self.candidate_ids[last], -self.q[last]).clamp(min=0.0)
        # Empty only by rounding: a proposal is only rejected where p exceeds q for some token.
        residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
        token_ids = functional.pad(self.proposals.token_ids, (0, 1))
        token_ids[last] = pick(residual, uniforms)
        num_accepted = _checked(num_accepted, self.scores.amax(dim=-1), self.proposals)
        return Verdict(num_accepted, token_ids)


def verify_rejection(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Speculative sampling by the target's scores [B, n + 1, V], with fresh uniforms [B, n + 1] for each proposal and one more."""
    drawn = _Drawn(proposals, scores, uniforms.device)
    num_accepted = (uniforms[:, :-1] * drawn.q_of < drawn.p_of).long().cumprod(dim=1).sum(dim=1)
    return drawn.verdict(num_accepted, torch.ones_like(uniforms), uniforms[:, -1])


def verify_block(proposals: Proposals, scores: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Block verification: accepts the longest prefix that passes its test. Arguments as in `verify_rejection`."""
    drawn = _Drawn(proposals, scores, uniforms.device)
    # Probability of the first i proposals under the target, relative to the drafter, at most 1: [B, n + 1].
    reached = [torch.ones_like(uniforms[:, 0])]
    for p_of, q_of in zip(drawn.p_of.unbind(1), drawn.q_of.unbind(1), strict=True):
        reached.append((reached[-1] * p_of / q_of).clamp(max=1.0))
    reach = torch.stack(reached, dim=1)
    # The sum over all tokens of max(reach * p - q, 0), where q is 0 except for candidates.
    elsewhere = (1.0 - drawn.p.sum(dim=-1)).clamp(min=0.0)
    surplus = reach * elsewhere + (reach[..., None] * drawn.p - drawn.q).clamp(min=0.0).sum(dim=-1)
    missing = surplus + 1.0 - reach
    # Nothing missing: p equals q, and no prefix ends here.
    pass_rates = torch.where(missing > 0, surplus / missing, 1.0)
    pass_rates[:, -1] = reach[:, -1]
    lengths = torch.arange(1, uniforms.shape[1], device=uniforms.device)
    num_accepted = functional.pad((uniforms[:, :-1] < pass_rates[:, 1:]) * lengths, (1, 0)).amax(dim=1)
    return drawn.verdict(num_accepted, reach, uniforms[:, -1])


def verify_tree(tree: DraftTree, choices: torch.Tensor, best: torch.Tensor) -> Verdict:
    """Follows a single sequence's choices, each after the path to its column, down the tree; `best` as in `verify_match`."""
    token_of = to_host(torch.where(best.isfinite(), choices, TARGET_BROKE)[0])()
    columns = [0]
    while (child := tree.children[columns[-1]].get(token_of[columns[-1]])) is not None:
        columns.append(child)
    token_ids = [token_of[column] for column in columns]
    num_accepted = TARGET_BROKE if token_ids[-1] == TARGET_BROKE else len(columns) - 1
    return Verdict(torch.tensor([num_accepted]), torch.tensor([token_ids]), columns=columns)


class Verifier:
    """Processes logits as plain `generate` does and accepts proposals; "auto" is "block" for drawn ones, else "match"."""

    def __init__(self, request: Any, processors: Sequence[Any]) -> None:
        """`processors`: a list of them for each sequence. All lists do the same; some processors keep a state of a text."""
        self._processors_of = processors
        self.processors, self.batch_size = processors[0], len(request.input_ids)
        samples, self._keeps_scores = request.config.do_sample, "scores" in request.keeping
        self.uniforms_of: Any = PositionUniforms(self.batch_size, request.uniforms_generator) if samples else None
        self.verification = request.verification if samples else "match"
        self.ends: Any = lambda text_ids: False  # whether a text [1, S] stops at its end
        self._is_prefix_free = all(type(processor) in PREFIX_FREE_PROCESSORS for processor in self.processors)
        # Where it gives the same tokens as the processors of transformers, and these give no scores.
        device = request.input_ids.device
        self.sampler = Sampler.of(self.processors, device) if samples and not self._keeps_scores else None

    @property
    def is_fusible(self) -> bool:
        """Whether accepting needs only the logits, so that one compiled function can draft, verify and accept."""
        if self.uniforms_of is None:
            return not self.processors and not self._keeps_scores
        return self.verification in ("auto", "match") and self.sampler is not None

    def accept(self, logits: torch.Tensor, sequences: list[TextSequence], proposals: Proposals) -> Verdict:
        """Accepts proposals by logits [B, n + 1, V]; those of column i are processed after [text, proposals 1..i]."""
        scores, tree = logits.to(proposals.token_ids.device), proposals.tree
        auto = "match" if proposals.probabilities is None else "block"
        rule = auto if self.verification == "auto" else self.verification
        if self.processors and (rule != "match" or self.sampler is None):
            scores = self._process(scores.float(), sequences, proposals, rule)
        if rule != "match":
            uniforms = self.uniforms_of.fresh(sequences, scores.shape[1], scores.device)
            verify = verify_rejection if rule == "rejection" else verify_block
            verdict = verify(proposals, scores, uniforms)
        else:
            choices = self._choose(scores, sequences, list(range(scores.shape[1])) if tree is None else tree.depths)
            is_greedy = self.uniforms_of is None
            best = scores.gather(-1, choices[..., None]).squeeze(-1) if is_greedy else scores.amax(dim=-1)
            verdict = verify_match(proposals, choices, best) if tree is None else verify_tree(tree, choices, best)
        if not self._keeps_scores:
            return verdict
        return replace(verdict, scores=scores if tree is None else scores[:, verdict.columns])

    def uniforms(self, sequences: list[TextSequence], depths: Sequence[int], device: torch.device) -> torch.Tensor:
        """Uniforms [B, N] of the positions `depths` tokens after the last one, for logits on `device`; of a range, from 0 on."""
        drawn = [self.uniforms_of(one.index, len(one.new_ids), max(depths) + 1) for one in sequences]
        drawn = drawn if isinstance(depths, range) else [uniforms[depths] for uniforms in drawn]
        return place_uniforms(torch.stack(drawn), device)

    def _choose(self, scores: torch.Tensor, sequences: list[TextSequence], depths: list[int]) -> torch.Tensor:
        """The target's choices [B, N] by scores [B, N, V] of columns that are `depths` tokens after the anchor."""
        if self.uniforms_of is None:
            return scores.argmax(dim=-1)
        return (self.sampler or choose_sampled)(scores, self.uniforms(sequences, depths, scores.device))

    def _call_processors(self, sequence: TextSequence, text_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [B, V] after the processors of a sequence. Raises ValueError if these return another shape."""
        processed = self._processors_of[sequence.index](text_ids, scores)
        # Plain `generate` decodes this form of one text, too.
        if len(scores) == 1 and processed.shape == scores.shape[1:]:
            processed = processed[None]
        if processed.shape != scores.shape:
            names = ", ".join(type(processor).__name__ for processor in self.processors)
            given = f"The logits processors ({names}) returned {list(processed.shape)} for scores {list(scores.shape)}"
            raise ValueError(f"{given}: return scores of the same shape.")
        return processed

    def _process(
        self, scores: torch.Tensor, sequences: list[TextSequence], proposals: Proposals, rule: str
    ) -> torch.Tensor:
        """Processed scores [B, n + 1, V]: in one call if no processor reads the prefix, else of columns that may be accepted."""
        if self._is_prefix_free:
            return self.processors(proposals.token_ids, scores.flatten(0, 1)).view_as(scores)
        processed, count = scores.clone(), self.batch_size
        trees = [proposals.tree or DraftTree(ids, list(range(len(ids))), []) for ids in proposals.token_ids.tolist()]
        for sequence, tree, of_sequence, raw in zip(sequences, trees, processed, scores, strict=True):
            if sequence.is_done:
                continue
            reached = [(0, list[int]())]
            for column, path in reached:  # grows
                # A processor may keep something for each sequence, such as its padding, and prefixes differ in length. So
                # the prefix is repeated for the whole batch, and the result of this sequence is taken.
                text_ids = sequence.text(path).expand(count, -1)
                of_all = self._call_processors(sequence, text_ids, of_sequence[column].repeat(count, 1))
                of_sequence[column] = of_all[sequence.index]
                if not of_sequence[column].max() > -torch.inf:  # false for NaN, too
                    if self.ends(sequence.text(path)) or not raw[column].max().isfinite():
                        of_sequence[column] = raw[column]  # never written, or not finite: reported when it is read
                        continue
                    names = ", ".join(type(processor).__name__ for processor in self.processors)
                    given = f"The logits processors ({names}) left no token possible after {text_ids.shape[1]} tokens"
                    raise ValueError(f"{given} (scores are NaN or all -inf): remove or correct the one that does.")
                children, chosen = tree.children[column], None
                if rule == "match" and children:
                    chosen = int(self._choose(of_sequence[None, column, None], [sequence], [len(path)]))
                for token_id, child in children.items():
                    if token_id == chosen or (rule != "match" and of_sequence[column, token_id] > -torch.inf):
                        reached.append((child, [*path, token_id]))
        return processed
