"""The losses of a drafter, their weights, and what is counted beside them. It knows tensors, no model and no data.

Dimensions: M rows, D hidden size, V vocabulary, G blocks, P positions of a block that propose, K candidates.
Figures are kept as sum and count, so that they do not depend on how data was cut into batches, processes and steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .settings import Facts, LossName


# Logits of a chunk: 256 MiB in fp32.
CHUNK_LOGITS = 2**26

# The paper's decay for its block sizes.
PAPER_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}

# Names of the losses that `_losses_of_rows` computes.
# ce, as in the paper: -log q(token of the data). forward_kl, as in JetSpec: KL(p || q) of the target's p and the drafter's q.
LOSSES = get_args(LossName)

Head = Callable[[Tensor], Tensor]
# From the drafter's probability of each label [G, P] and whether it is learned [G, P] to its weight [G, P].
PositionWeights = Callable[[Tensor, Tensor], Tensor]


def reads_target(loss: str) -> bool:
    """Whether the loss needs the target's logits; ValueError for a name that is not in `LOSSES`."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is unknown: choose one of {', '.join(LOSSES)}.")
    return loss != "ce"


def default_gamma(block_size: int) -> float:
    """The paper's gamma where it gives one, else half the block."""
    return PAPER_GAMMAS.get(block_size, block_size / 2)


def decay_weights(gamma: float) -> PositionWeights:
    """exp(-(k - 1) / gamma) for the k-th proposal, as in the paper: a wrong early token wastes all later ones."""

    def weights(confidences: Tensor, is_learned: Tensor) -> Tensor:
        places = torch.arange(is_learned.shape[1], device=is_learned.device)
        return torch.exp(-places / gamma) * is_learned

    return weights


def dpace_weights(alpha: float) -> PositionWeights:
    """D-PACE (arXiv 2605.18810): how much more confidence in a token adds to the accepted tokens of its block.

    The chance that token k is accepted is taken as (1 - alpha) q_k + alpha, q_k being the drafter's probability of the label,
    and the chance that m tokens are accepted as the product of the first m. The weight of k is the sum of these products
    from k on. No gradient flows through the weights.
    """

    def weights(confidences: Tensor, is_learned: Tensor) -> Tensor:
        # A position that is not learned ends its block: nothing from there on can be accepted.
        chances = (1.0 - alpha) * confidences.detach() + alpha
        accepted = (chances * is_learned).cumprod(dim=1)
        return accepted.flip(1).cumsum(dim=1).flip(1)

    return weights


@dataclass(frozen=True)
class Teacher:
    """The target, for losses that read its logits."""

    states: Tensor  # [M, D of the target], its last hidden states at the columns before the labels
    logits: Head  # from states to logits [m, V]


@dataclass(frozen=True)
class Candidates:
    """Each row's most probable tokens, without gradient."""

    logits: Tensor  # [M, K]
    token_ids: Tensor  # [M, K]


@dataclass(frozen=True)
class RowLosses:
    """The sum of some rows' weighted losses, the sum of their weights, and which rows were predicted correctly."""

    loss_sum: Tensor  # scalar with gradient
    weight_sum: Tensor  # scalar
    is_correct: Tensor  # bool [M], whether the row's argmax is its label
    weights: Tensor  # [M]
    candidates: Candidates | None = None  # where they were asked for


def chunked_loss(
    hidden_states: Tensor,  # [M, D]
    labels: Tensor,  # [M]
    weights: Tensor | Callable[[Tensor], Tensor],  # [M]; a function of the log-probabilities [M]
    head: Head,
    chunk_rows: int | None = None,
    *,
    loss: str = "ce",
    teacher: Teacher | None = None,
    num_candidates: int = 0,
) -> RowLosses:
    """Weighted loss of `head(hidden_states)`, of whose logits at most `chunk_rows` rows exist at a time.

    A row's loss depends on no other row. The gradient of a chunk is taken for weights of 1 as soon as its logits exist, and
    scaled in the backward pass. So no logits are kept or computed again, and weights may depend on all rows.

    Args:
        hidden_states: Of the drafter.
        labels: The data's token of each row.
        weights: Of the rows, or a function that gives them once each label's log-probability is known.
        head: From [m, D] to logits [m, V]. It is frozen: the gradient goes to `hidden_states` alone.
        chunk_rows: Rows at a time. Default: as many as have `CHUNK_LOGITS` logits, so that memory does not grow with V.
        loss: One of `LOSSES`.
        teacher: The target, for losses that read it.
        num_candidates: K of the `Candidates` to give back; 0 gives none.

    Raises:
        ValueError: for an unknown loss, one that lacks the target's states, or a head with trainable weights.
    """
    if not reads_target(loss):
        teacher = None
    elif teacher is None:
        raise ValueError(f"loss={loss!r} reads the target's logits: pass teacher.")
    vocab_size = _frozen_vocab_size(head, hidden_states)
    if chunk_rows is None:
        chunk_rows = rows_of_chunk(vocab_size)
    compute = partial(_losses_of_rows, head, labels, teacher)
    losses, log_probs, is_correct, *candidates = _ChunkedRows.apply(
        hidden_states, compute, chunk_rows, loss == "ce", num_candidates
    )
    if callable(weights):
        weights = weights(log_probs)
    return RowLosses(
        loss_sum=(losses * weights).sum(),
        weight_sum=weights.sum(),
        is_correct=is_correct,
        weights=weights,
        candidates=Candidates(*candidates) if num_candidates else None,
    )


def _frozen_vocab_size(head: Head, hidden_states: Tensor) -> int:
    """V of a head; ValueError if its weights are trainable."""
    with torch.enable_grad():
        no_logits = head(hidden_states[:0].detach())
    if no_logits.requires_grad:
        raise ValueError(
            "The head's weights require a gradient, which chunked_loss does not give: freeze the target "
            "(target.requires_grad_(False))."
        )
    return no_logits.shape[-1]


def _losses_of_rows(
    head: Head, labels: Tensor, teacher: Teacher | None, rows: slice, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses [m], logits [m, V] and labels [m] of some rows, where the head is."""
    logits = _wide(head(states))
    wanted = labels[rows].to(logits.device)
    if teacher is None:
        losses = functional.cross_entropy(logits, wanted, reduction="none")
        return losses, logits, wanted
    with torch.no_grad():
        teacher_logits = teacher.logits(teacher.states[rows])
        teacher_logits = _wide(teacher_logits)
        log_p = teacher_logits.to(logits.device).log_softmax(-1)
    log_q = logits.log_softmax(-1)
    divergence = functional.kl_div(log_q, log_p, reduction="none", log_target=True)
    losses = divergence.sum(-1)
    return losses, logits, wanted


class _ChunkedRows(torch.autograd.Function):
    """The loss of each row [M], its label's log-probability [M], whether it is right [M], and its candidates [M, K]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, compute: Any, chunk_rows: int, is_ce: bool, num_candidates: int
    ) -> tuple[Tensor, ...]:
        wants_gradient = ctx.needs_input_grad[0]
        gradients = torch.empty_like(hidden_states if wants_gradient else hidden_states[:0])

        def run(begin: int) -> tuple[Tensor, ...]:  # a function, so that a chunk's logits die with it
            rows = slice(begin, begin + chunk_rows)
            with torch.set_grad_enabled(wants_gradient):
                states = hidden_states[rows].detach().requires_grad_(wants_gradient)
                losses, logits, wanted = compute(rows, states)
                if wants_gradient:
                    (gradients[rows],) = torch.autograd.grad(losses.sum(), states)
            losses = losses.detach()
            logits = logits.detach()
            cross_entropy = losses
            if not is_ce:
                cross_entropy = functional.cross_entropy(logits, wanted, reduction="none")
            is_correct = logits.argmax(dim=-1) == wanted
            candidates = logits.topk(num_candidates, dim=-1)
            results = (losses, -cross_entropy, is_correct, *candidates)
            return tuple(result.to(hidden_states.device) for result in results)

        num_rows = max(1, len(hidden_states))  # of no rows, the chunk is empty
        parts = [run(begin) for begin in range(0, num_rows, chunk_rows)]
        results = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        scales = upstream[0][:, None].to(gradients.dtype)
        return gradients * scales, None, None, None, None


def _wide(logits: Tensor) -> Tensor:
    """Values in fp32 at least. Argmax needs it too: it is slow in bf16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def head_loss(
    head: Any,  # heads_dflash.CausalHead
    hidden_states: Tensor,  # [M, D]
    states: Tensor,  # [M, H] of the head, after the true tokens before the label
    positions: Tensor,  # [M] of the labels in their blocks
    candidates: Candidates,
    labels: Tensor,  # [M]
    weights: Tensor,  # [M]
    previous: Tensor,  # [M], the true tokens before the labels
) -> Tensor:
    """The weighted cross entropy, summed, of a causal head's choice among each row's candidates after the true tokens.

    A row counts nothing if its label is not among its candidates. If the head has a confidence, the binary cross entropy of
    its greedy choice being the label is added, for all rows. The loss trains the head alone: the rest of the drafter learns
    what it would without one.
    """

    def chunk(*parts: Tensor) -> Tensor:
        hidden, state, position, logits, token_ids, wanted, weight, before = parts
        features = head.features(hidden)
        scores = head.scores(
            features,
            logits.to(hidden.dtype),
            head.rows(token_ids, position),
            state,
        )
        hits = token_ids == wanted[:, None]  # [m, K]
        choices = hits.int().argmax(dim=1)
        losses = functional.cross_entropy(_wide(scores), choices, reduction="none") * hits.any(dim=1)
        confidences = head.confidences(hidden, before)
        if confidences is not None:
            is_right = hits.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
            confidences = _wide(confidences)
            losses = losses + functional.binary_cross_entropy_with_logits(
                confidences, is_right.to(confidences), reduction="none"
            )
        return (losses * weight).sum()

    columns = (
        hidden_states.detach(),
        states,
        positions,
        candidates.logits,
        candidates.token_ids,
        labels,
        weights,
        previous,
    )
    total = hidden_states.new_zeros((), dtype=torch.float32)
    rank = head.rows(candidates.token_ids[:1], positions[:1]).shape[-1]
    num_candidates = candidates.token_ids.shape[1]
    chunk_rows = max(1, CHUNK_LOGITS // (rank * num_candidates))
    chunks = [column.split(chunk_rows) for column in columns]
    for parts in zip(*chunks, strict=True):
        # [m, K, rank] is not kept for the backward pass.
        total = total + checkpoint(chunk, *parts, use_reentrant=False)
    return total


def rows_of_chunk(vocab_size: int) -> int:
    """The rows that have `CHUNK_LOGITS` logits."""
    return max(1, CHUNK_LOGITS // vocab_size)


@dataclass
class DraftCounts:
    """Teacher-forced counts of drafted blocks; `a + b` joins those of two batches."""

    loss_sum: Tensor  # weighted loss
    weight_sum: Tensor
    correct: Tensor  # [P], right tokens by proposal
    rows: Tensor  # [P], trained positions by proposal
    accepted: Tensor  # tokens right in an unbroken run from the first one, over all blocks
    blocks: Tensor  # blocks with a trained position

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(*map(torch.add, vars(self).values(), vars(other).values()))

    def each(self, change: Callable[[Tensor], Tensor]) -> "DraftCounts":
        """The counts after `change`, each by itself."""
        return DraftCounts(*map(change, vars(self).values()))

    def summary(self) -> Facts:
        """The means: loss, accuracy of each proposal, and accepted proposals per block, with the counts of the latter."""
        loss = self.loss_sum / self.weight_sum.clamp(min=1e-9)
        accuracy = self.correct / self.rows.clamp(min=1)
        accepted_per_block = self.accepted / self.blocks.clamp(min=1)
        return {
            "loss": loss.item(),
            "accuracy": [round(share, 4) for share in accuracy.tolist()],
            "accepted_per_block": accepted_per_block.item(),
            "accepted": int(self.accepted),
            "blocks": int(self.blocks),
        }


SUMMARY = ("loss", "accuracy", "accepted_per_block", "accepted", "blocks")  # what `DraftCounts.summary` gives


def count_drafts(
    is_correct: Tensor,  # bool [..., P]
    is_learned: Tensor,  # bool [..., P]
    loss_sum: Tensor,
    weight_sum: Tensor,
) -> DraftCounts:
    """The counts of some blocks. Runs are counted block by block.

    A product of mean accuracies would be far too low, because the proposals of a block depend on each other.
    """
    learned = is_learned.flatten(0, -2)
    right = is_correct.flatten(0, -2) & learned
    return DraftCounts(
        loss_sum=loss_sum.detach(),
        weight_sum=weight_sum.detach(),
        correct=right.sum(dim=0),
        rows=learned.sum(dim=0),
        accepted=right.long().cumprod(dim=1).sum(),
        blocks=learned.any(dim=1).sum(),
    )
