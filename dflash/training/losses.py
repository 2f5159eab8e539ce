"""Computes the losses of a drafter, the weights of positions and acceptance counts, from tensors alone.

It imports no model and no data. Dimensions: M rows (positions with a label), D hidden size, V vocabulary, G blocks, P
proposing positions of a block, K candidates. Results are kept as sums and counts, so that they do not depend on how
data is cut into batches, processes and steps.
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


# Largest number of logits in a chunk: 256 MiB in fp32.
CHUNK_LOGITS = 2**26

# The paper's decay for its block sizes.
PAPER_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}

# Names of the losses that `_losses_of_rows` computes. ce, as in the paper: -log q(label). forward_kl, as in JetSpec:
# KL(p || q) from the drafter's distribution q to the target's p.
LOSSES = get_args(LossName)

Head = Callable[[Tensor], Tensor]
# A rule that weighs positions: a function of the drafter's probability of each label [G, P] and of whether the position
# is trained, bool [G, P], that returns the weights [G, P].
PositionWeights = Callable[[Tensor, Tensor], Tensor]


def reads_target(loss: str) -> bool:
    """Whether the loss of this name needs the target's logits; ValueError for a name that is not in `LOSSES`."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is unknown: choose one of {', '.join(LOSSES)}.")
    return loss != "ce"


def default_gamma(block_size: int) -> float:
    """Returns the paper's gamma for this block size if it gives one, else half the block size."""
    return PAPER_GAMMAS.get(block_size, block_size / 2)


def decay_weights(gamma: float) -> PositionWeights:
    """Returns the paper's rule: the k-th proposal weighs exp(-(k - 1) / gamma).

    An early token weighs more, because a wrong token wastes all later ones. Positions that are not trained weigh 0.
    """

    def weights(label_probs: Tensor, is_trained: Tensor) -> Tensor:
        places = torch.arange(is_trained.shape[1], device=is_trained.device)
        return torch.exp(-places / gamma) * is_trained

    return weights


def dpace_weights(alpha: float) -> PositionWeights:
    """Returns D-PACE's rule (arXiv 2605.18810): tokens are weighted by their effect on the accepted length.

    The weight of a token is the derivative of the expected accepted length with respect to the logarithm of its
    acceptance probability. Token k is assumed to be accepted with probability (1 - alpha) q_k + alpha, where q_k is the
    drafter's probability of its label, and the first m tokens with the product of their probabilities. The weight of
    token k is the sum of these products over m >= k. No gradient flows through the weights.
    """

    def weights(label_probs: Tensor, is_trained: Tensor) -> Tensor:
        # A position that is not trained ends its block: no token from there on can be accepted.
        chances = (1.0 - alpha) * label_probs.detach() + alpha
        accepted = (chances * is_trained).cumprod(dim=1)
        return accepted.flip(1).cumsum(dim=1).flip(1)

    return weights


@dataclass(frozen=True)
class Teacher:
    """What losses read of the target: its last hidden states, and the function that computes logits from them."""

    states: Tensor  # [M, D of the target], at the tokens before the labels
    logits: Head  # from states [m, D] to logits [m, V]


@dataclass(frozen=True)
class Candidates:
    """The K most probable tokens of each row and their logits, without gradient."""

    logits: Tensor  # [M, K]
    token_ids: Tensor  # [M, K]


@dataclass(frozen=True)
class RowLosses:
    """The sum of the weighted losses of some rows, the sum of the weights, and which rows were predicted correctly."""

    loss_sum: Tensor  # scalar with gradient
    weight_sum: Tensor  # scalar
    is_correct: Tensor  # bool [M], whether the row's argmax is its label
    weights: Tensor  # [M]
    candidates: Candidates | None = None  # if they were asked for


def chunked_loss(
    hidden_states: Tensor,  # [M, D]
    labels: Tensor,  # [M]
    weights: Tensor | Callable[[Tensor], Tensor],  # [M], or a function of the log-probabilities [M] that returns [M]
    head: Head,
    chunk_rows: int | None = None,
    *,
    loss: str = "ce",
    teacher: Teacher | None = None,
    num_candidates: int = 0,
) -> RowLosses:
    """Returns the weighted loss of `head(hidden_states)`, computed `chunk_rows` rows at a time to save memory.

    The loss of a row depends on no other row. So the gradient of a chunk is computed for weights of 1 as soon as its
    logits exist, and is scaled by the weights in the backward pass. No logits are kept or recomputed, and weights may
    depend on all rows.

    Args:
        hidden_states: The drafter's hidden states.
        labels: The token of the data that each row should predict.
        weights: The weights of the rows, or a function that computes them from the log-probabilities of all labels.
        head: Function from hidden states [m, D] to logits [m, V]. Its weights must be frozen: only `hidden_states`
            gets a gradient.
        chunk_rows: Number of rows in a chunk. Default: `rows_of_chunk(V)`, so that memory does not grow with V.
        loss: One of `LOSSES`.
        teacher: The target, for losses that read its logits.
        num_candidates: Number K of `Candidates` to return for each row; 0 returns none.

    Raises:
        ValueError: for an unknown loss, a loss that needs a `teacher` if there is none, or a head with trainable
            weights.
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
    """Returns the vocabulary size V of `head`; ValueError if its weights are trainable."""
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
    """Computes the losses [m], logits [m, V] and labels [m] of the slice `rows`, all on the head's device."""
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
    """Computes the losses and the candidates of all rows, in chunks.

    `apply` returns, for each row, the loss, the log-probability of the label, and whether the argmax is the label, all
    [M]; then the logits and the token ids of the candidates, both [M, K]. Only the losses have a gradient, which goes
    to `hidden_states`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, compute: Any, chunk_rows: int, is_ce: bool, num_candidates: int
    ) -> tuple[Tensor, ...]:
        wants_gradient = ctx.needs_input_grad[0]
        gradients = torch.empty_like(hidden_states if wants_gradient else hidden_states[:0])

        def run(begin: int) -> tuple[Tensor, ...]:  # a function, so that a chunk's logits are freed when it returns
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

        num_rows = max(1, len(hidden_states))  # without rows there is one empty chunk
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
    """Returns the logits in fp32, or in their own dtype if it is wider. Argmax is slow in bf16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def head_loss(
    head: Any,  # heads_dflash.CausalHead
    hidden_states: Tensor,  # [M, D]
    states: Tensor,  # [M, H], the head's states after it has read the true tokens before the labels
    positions: Tensor,  # [M] of the labels in their blocks
    candidates: Candidates,
    labels: Tensor,  # [M]
    weights: Tensor,  # [M]
    previous: Tensor,  # [M], the true tokens before the labels
) -> Tensor:
    """Returns the summed loss of a causal head: the weighted cross entropy of its choice among each row's candidates.

    The loss of a row is 0 if its label is not among its candidates. If the head predicts a confidence, a binary cross
    entropy is added for every row; its label is whether the head's greedy choice is right. Only the head gets a
    gradient: the rest of the drafter learns what it would learn without a head.
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
    """Returns the largest number of rows with at most `CHUNK_LOGITS` logits in all; at least 1."""
    return max(1, CHUNK_LOGITS // vocab_size)


@dataclass
class DraftCounts:
    """Counts of teacher-forced blocks. `a + b` are the counts over the blocks of both."""

    loss_sum: Tensor  # sum of weighted losses
    weight_sum: Tensor  # sum of their weights
    correct: Tensor  # [P], number of correct predictions at each position of a draft
    rows: Tensor  # [P], number of trained positions there
    accepted: Tensor  # number of correct predictions before a block's first wrong one, over all blocks
    blocks: Tensor  # number of blocks with a trained position

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(*map(torch.add, vars(self).values(), vars(other).values()))

    def each(self, change: Callable[[Tensor], Tensor]) -> "DraftCounts":
        """Returns new counts, with `change` applied to each tensor."""
        return DraftCounts(*map(change, vars(self).values()))

    def summary(self) -> Facts:
        """Returns mean loss, accuracy at each position of a draft, and accepted tokens per block.

        It also has the two counts of that quotient, `accepted` and `blocks`.
        """
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
    is_trained: Tensor,  # bool [..., P]
    loss_sum: Tensor,
    weight_sum: Tensor,
) -> DraftCounts:
    """Returns the counts of some blocks, without gradient. Leading dimensions of the masks are flattened.

    Accepted tokens are counted block by block. A product of mean accuracies would be far too low, because the proposals
    of a block depend on each other.
    """
    trained = is_trained.flatten(0, -2)
    right = is_correct.flatten(0, -2) & trained
    return DraftCounts(
        loss_sum=loss_sum.detach(),
        weight_sum=weight_sum.detach(),
        correct=right.sum(dim=0),
        rows=trained.sum(dim=0),
        accepted=right.long().cumprod(dim=1).sum(),
        blocks=trained.any(dim=1).sum(),
    )
