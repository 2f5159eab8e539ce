"""What the drafter is trained to lower, and what is counted meanwhile. It knows tensors, no model and no data.

Dimensions: M rows, D hidden size, V vocabulary, G blocks, P rows of a block that propose, K candidates.
Counted figures travel as sum and count, so that batches, processes and steps add up to the same figure however they were cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


# Logits of a chunk: 256 MiB in fp32.
CHUNK_LOGITS = 2**26

Head = Callable[[torch.Tensor], torch.Tensor]
# From the drafter's logits [M, V], the labels [M] and the target's logits [M, V] (or `None`) to each row's loss [M].
RowLoss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
# From how sure the drafter is of each label [G, P] and the rows that are learned [G, P] to the rows' weights [G, P].
PositionWeights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# --- losses of a row ---


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, teacher: Any) -> torch.Tensor:
    """-log q(token of the data): the paper's."""
    return functional.cross_entropy(logits, labels, reduction="none")


def argmax_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, teacher: Any) -> torch.Tensor:
    """-log q(the target's most probable token), whatever the data says."""
    return functional.cross_entropy(logits, teacher.argmax(dim=-1), reduction="none")


def forward_kl(logits: torch.Tensor, labels: torch.Tensor, teacher: Any) -> torch.Tensor:
    """KL(p || q) of the target's law p and the drafter's q: to cover what the target may say (JetSpec)."""
    return functional.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(
        -1
    )


def reverse_kl(logits: torch.Tensor, labels: torch.Tensor, teacher: Any) -> torch.Tensor:
    """KL(q || p): to say nothing that the target would not (AdaFlash)."""
    return functional.kl_div(teacher.log_softmax(-1), logits.log_softmax(-1), reduction="none", log_target=True).sum(
        -1
    )


def total_variation(logits: torch.Tensor, labels: torch.Tensor, teacher: Any) -> torch.Tensor:
    """Sum |p - q| / 2, which is the probability that a token drawn from q is rejected."""
    return 0.5 * (teacher.softmax(-1) - logits.softmax(-1)).abs().sum(-1)


def mix(logits: torch.Tensor, labels: torch.Tensor, teacher: Any) -> torch.Tensor:
    """DSpark's: 0.1 of the cross entropy on the data's token and 0.9 of sum |p - q|."""
    return 0.1 * cross_entropy(logits, labels, teacher) + 1.8 * total_variation(logits, labels, teacher)


LOSSES: dict[str, RowLoss] = {
    "ce": cross_entropy,
    "argmax": argmax_cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "mix": mix,
}
# Those that read nothing of the target but its features.
HARD_ON_DATA = frozenset({"ce"})


def reads_target(loss: str) -> bool:
    """Whether the loss needs the target's logits.

    Raises:
        ValueError: for a name that is none of `LOSSES`.
    """
    _check_name("loss", loss, LOSSES)
    return loss not in HARD_ON_DATA


def _check_name(what: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{what}={name!r} is unknown: choose one of {', '.join(known)}.")


# --- weights of a position ---

# The paper's decay for its block sizes.
PAPER_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """The paper's gamma where it gives one, else half the block."""
    return PAPER_GAMMAS.get(block_size, block_size / 2)


def decay_weights(gamma: float) -> PositionWeights:
    """exp(-(k - 1) / gamma) for the k-th proposal (the paper's): a wrong early token wastes all later ones."""

    def weights(confidences: torch.Tensor, is_learned: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.arange(is_learned.shape[1], device=is_learned.device) / gamma) * is_learned

    return weights


def dpace_weights(alpha: float) -> PositionWeights:
    """D-PACE (arXiv 2605.18810): what a little more confidence in a token adds to the tokens accepted of its block.

    With q_k the drafter's probability of the k-th label, (1 - alpha) q_k + alpha is taken for the chance that it is
    accepted, the product of these up to m for the chance that m are, and the sum of such products from k on is the weight
    of k. So an early token weighs more, the more so the surer the drafter is of those behind it. No gradient flows through
    the weights.
    """

    def weights(confidences: torch.Tensor, is_learned: torch.Tensor) -> torch.Tensor:
        # A row that is not learned ends its block: nothing from it on can be accepted, nor is waited for.
        accepted = (((1.0 - alpha) * confidences.detach() + alpha) * is_learned).cumprod(dim=1)
        return accepted.flip(1).cumsum(dim=1).flip(1)

    return weights


def uniform_weights(confidences: torch.Tensor, is_learned: torch.Tensor) -> torch.Tensor:
    """Every learned row weighs the same."""
    return is_learned.to(confidences.dtype)


POSITION_WEIGHTS: dict[str, Callable[[float, float], PositionWeights]] = {
    "decay": lambda gamma, alpha: decay_weights(gamma),
    "dpace": lambda gamma, alpha: dpace_weights(alpha),
    "uniform": lambda gamma, alpha: uniform_weights,
}


def position_weights(name: str, *, gamma: float, alpha: float = 0.5) -> PositionWeights:
    """The weights called `name`; `gamma` is that of "decay", `alpha` that of "dpace".

    Raises:
        ValueError: for an unknown name, a gamma that is not positive or an alpha outside (0, 1].
    """
    _check_name("position_weights", name, POSITION_WEIGHTS)
    if not gamma > 0:
        raise ValueError(f"gamma={gamma} is not a decay: give a positive one, such as half the block size.")
    if not 0 < alpha <= 1:
        raise ValueError(f"dpace_alpha={alpha} is outside (0, 1]: D-PACE's own is 0.5.")
    return POSITION_WEIGHTS[name](gamma, alpha)


# --- the loss of many rows ---


@dataclass(frozen=True)
class Candidates:
    """Each row's most probable tokens, without gradient.

    Attributes:
        logits: Theirs, [M, K].
        token_ids: Their ids, [M, K].
    """

    logits: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True)
class RowLosses:
    """Weighted loss of some rows as a sum, its weight, and which rows were right.

    Attributes:
        loss_sum: Sum of weight times loss, a scalar with gradient.
        weight_sum: Sum of the weights, a scalar.
        is_correct: Whether the row's argmax is its label, bool [M].
        weights: What each row weighed, [M].
        candidates: The rows' candidates, if they were asked for.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    is_correct: torch.Tensor
    weights: torch.Tensor
    candidates: Candidates | None = None


def chunked_loss(
    hidden_states: torch.Tensor,  # [M, D]
    labels: torch.Tensor,  # [M]
    weights: torch.Tensor
    | Callable[[torch.Tensor], torch.Tensor],  # [M], or to it from the labels' log-probabilities [M]
    head: Head,
    chunk_rows: int | None = None,
    *,
    loss: str = "ce",
    teacher_states: torch.Tensor | None = None,  # [M, D of the target]
    teacher_head: Head | None = None,
    num_candidates: int = 0,
) -> RowLosses:
    """Weighted loss of `head(hidden_states)`, of whose logits at most `chunk_rows` rows exist at a time.

    A row's loss depends on no other row. So a chunk's gradient is taken as soon as its logits are there, for a weight of 1,
    and scaled in the backward pass: no logits are kept or computed again, and weights may depend on what all rows said.

    Args:
        hidden_states: The drafter's rows.
        labels: The data's token of each row.
        weights: The rows' weights, or a function that gives them once each label's log-probability is known.
        head: From [m, D] to logits [m, V]. It is frozen: the gradient goes to `hidden_states` alone.
        chunk_rows: Rows at a time; `None`: as many as have `CHUNK_LOGITS` logits, so that memory does not grow with V.
        loss: A key of `LOSSES`.
        teacher_states: The target's last hidden states where it says what the rows should, for losses that read them.
        teacher_head: From them to the target's logits [m, V].
        num_candidates: K of the `Candidates` to give back; 0 gives none.

    Raises:
        ValueError: for an unknown loss, one that lacks the target's states, or a head with trainable weights.
    """
    if reads_target(loss) and (teacher_states is None or teacher_head is None):
        raise ValueError(f"loss={loss!r} reads the target's logits: pass teacher_states and teacher_head.")
    if not reads_target(loss):
        teacher_states = None
    with torch.enable_grad():
        no_logits = head(hidden_states[:0].detach())
    if no_logits.requires_grad:
        raise ValueError(
            "The head's weights require a gradient, which chunked_loss does not give: freeze the target "
            "(target.requires_grad_(False))."
        )
    chunk_rows = chunk_rows or rows_of_chunk(no_logits.shape[-1])
    losses, log_probs, is_correct, logits, token_ids = _ChunkedRows.apply(
        hidden_states, labels, head, chunk_rows, loss, teacher_states, teacher_head, num_candidates
    )
    chosen = weights(log_probs) if callable(weights) else weights
    candidates = Candidates(logits, token_ids) if num_candidates else None
    return RowLosses((losses * chosen).sum(), chosen.sum(), is_correct, chosen, candidates)


class _ChunkedRows(torch.autograd.Function):
    """Each row's loss [M], its label's log-probability [M], whether it is right [M], and its K candidates."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        head: Head,
        chunk_rows: int,
        loss: str,
        teacher_states: torch.Tensor | None,
        teacher_head: Head,
        num_candidates: int,
    ) -> tuple[torch.Tensor, ...]:
        wants_gradient, device = ctx.needs_input_grad[0], hidden_states.device
        gradients = torch.empty_like(hidden_states) if wants_gradient else hidden_states.new_zeros(0)

        def run(begin: int) -> tuple[torch.Tensor, ...]:  # a function, so that a chunk's logits die with it
            rows = slice(begin, begin + chunk_rows)
            teacher = None if teacher_states is None else _wide(teacher_head(teacher_states[rows]))
            with torch.set_grad_enabled(wants_gradient):
                states = hidden_states[rows].detach().requires_grad_(wants_gradient)
                logits = _wide(head(states))  # [m, V], where the head is
                wanted = labels[rows].to(logits.device)
                losses = LOSSES[loss](logits, wanted, None if teacher is None else teacher.to(logits.device))
                if wants_gradient:
                    gradients[rows] = torch.autograd.grad(losses.sum(), states)[0]
            losses, logits = losses.detach(), logits.detach()
            told = teacher.argmax(dim=-1).to(logits.device) if loss == "argmax" and teacher is not None else wanted
            log_probs = (
                -losses if loss in ("ce", "argmax") else -functional.cross_entropy(logits, told, reduction="none")
            )
            found = losses, log_probs, logits.argmax(dim=-1) == wanted, *logits.topk(num_candidates, dim=-1)
            return tuple(part.to(device) for part in found)

        parts = [run(begin) for begin in range(0, len(hidden_states), chunk_rows)] or [run(0)]
        results = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0][:, None].to(gradients.dtype), *[None] * 7


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """In fp32 at least, before argmax too, which is slow in bf16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def selector_loss(
    selector: Any,  # modeling_dflash.CandidateSelector
    hidden_states: torch.Tensor,  # [M, D]
    candidates: Candidates,
    labels: torch.Tensor,  # [M]
    previous: torch.Tensor,  # [M] the data's token before the label
    weights: torch.Tensor,  # [M]
) -> torch.Tensor:
    """DFlash2: weighted cross entropy, summed, of the selector's choice among each row's candidates behind the true token.

    A row whose label is not among its candidates has nothing to choose and counts nothing. It trains the selector alone:
    the rest of the drafter learns what it would without one.
    """

    def chunk(
        states: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor, *told: torch.Tensor
    ) -> torch.Tensor:
        wanted, before, weight = told
        scores = _wide(selector.scores(selector.hidden_projection(states), logits.to(states.dtype), token_ids, before))
        hits = token_ids == wanted[:, None]  # [m, K]
        losses = functional.cross_entropy(scores, hits.int().argmax(dim=1), reduction="none")
        return (losses * weight * hits.any(dim=1)).sum()

    columns = hidden_states.detach(), candidates.logits, candidates.token_ids, labels, previous, weights
    total = hidden_states.new_zeros((), dtype=torch.float32)
    rank, num_candidates = selector.successor_codebook.shape[1], candidates.token_ids.shape[1]
    chunk_rows = max(1, CHUNK_LOGITS // (rank * num_candidates))
    for parts in zip(*(column.split(chunk_rows) for column in columns), strict=True):
        total = total + checkpoint(
            chunk, *parts, use_reentrant=False
        )  # [m, K, rank] is not kept for the backward pass
    return total


def rows_of_chunk(vocab_size: int) -> int:
    """As many as have `CHUNK_LOGITS` logits."""
    return max(1, CHUNK_LOGITS // vocab_size)


# --- what is counted ---


@dataclass
class DraftCounts:
    """Teacher-forced counts of drafted blocks; `a += b` joins those of two batches.

    Attributes:
        loss_sum: Weighted loss, summed.
        weight_sum: Its weights, summed.
        correct: Right rows by proposal 1..P, [P].
        rows: Trained rows by proposal, [P].
        accepted: Rows right in an unbroken run from the first one, over all blocks.
        blocks: Blocks with a trained row.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    correct: torch.Tensor
    rows: torch.Tensor
    accepted: torch.Tensor
    blocks: torch.Tensor

    def __iadd__(self, other: DraftCounts) -> DraftCounts:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def summary(self) -> dict[str, float | list[float]]:
        """The means: loss, accuracy of each proposal, and accepted proposals per block."""
        return {
            "loss": (self.loss_sum / self.weight_sum.clamp(min=1e-9)).item(),
            "accuracy": [round(value, 4) for value in (self.correct / self.rows.clamp(min=1)).tolist()],
            "accepted_per_block": (self.accepted / self.blocks.clamp(min=1)).item(),
        }


def count_drafts(
    is_correct: torch.Tensor,  # bool [..., P]
    is_learned: torch.Tensor,  # bool [..., P]
    loss_sum: torch.Tensor,
    weight_sum: torch.Tensor,
) -> DraftCounts:
    """The counts of some blocks. A run is counted block by block, never as a product of mean accuracies.

    (Accuracies of different proposals are strongly dependent, and their product is far below what is accepted.)
    """
    learned = is_learned.reshape(-1, is_learned.shape[-1])
    right = is_correct.reshape(-1, is_correct.shape[-1]) & learned
    return DraftCounts(
        loss_sum=loss_sum.detach(),
        weight_sum=weight_sum.detach(),
        correct=right.sum(dim=0),
        rows=learned.sum(dim=0),
        accepted=right.long().cumprod(dim=1).sum(),
        blocks=learned.any(dim=1).sum(),
    )
