"""Losses, weights and the chunked sum of them against naive ones in float64, and figures that add up however the data was cut."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash import DFlashConfig, DFlashDraftModel
from dflash.training.losses import (
    LOSSES,
    Candidates,
    DraftCounts,
    PositionWeights,
    RowLosses,
    Teacher,
    chunked_loss,
    count_drafts,
    decay_weights,
    default_gamma,
    dpace_weights,
    head_loss,
)


ROWS, WIDTH, VOCAB = 10, 6, 13


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_weights_decay_from_the_first_drafted_token(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == gamma
    is_trained = torch.ones(2, block_size - 1, dtype=torch.bool)
    is_trained[1, 3:] = False
    weights = decay_weights(gamma)(torch.rand(2, block_size - 1), is_trained)
    for row in range(2):
        for k in range(1, block_size):
            expected = math.exp(-(k - 1) / gamma) if is_trained[row, k - 1] else 0.0
            assert weights[row, k - 1].item() == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [0.5, 0.1])
def test_dpace_weights_are_what_confidence_adds_to_the_tokens_accepted(alpha: float) -> None:
    """Against the gradient of the expected accepted length, of which they are the derivative by the logarithm of a chance."""
    torch.manual_seed(0)
    confidences = torch.rand(3, 5, dtype=torch.float64)
    learned = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    weights = dpace_weights(alpha)(confidences.requires_grad_(), learned)
    assert not weights.requires_grad
    for block in range(3):
        num = int(learned[block].sum())
        log_chance = ((1 - alpha) * confidences[block, :num] + alpha).log().detach().requires_grad_()
        expected_length = sum((log_chance[: m + 1].sum().exp() for m in range(num)), torch.tensor(0.0))
        expected = [0.0] * 5
        if num:
            (gradient,) = torch.autograd.grad(expected_length, log_chance)
            expected[:num] = gradient.tolist()
        assert weights[block].tolist() == pytest.approx(expected)


def test_an_unknown_loss_and_one_without_its_target_are_refused() -> None:
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0)
    with pytest.raises(ValueError, match=r"loss='mse' is unknown: choose one of ce, forward_kl"):
        chunked_loss(*empty, lambda states: states, 8, loss="mse")
    with pytest.raises(ValueError, match="loss='forward_kl' reads the target's logits"):
        chunked_loss(*empty, lambda states: states, 8, loss="forward_kl")


def naive_row_loss(name: str, logits: torch.Tensor, label: int, teacher: torch.Tensor) -> torch.Tensor:
    """One row's loss as the formula reads, probability by probability."""
    q, p = logits.exp() / logits.exp().sum(), teacher.exp() / teacher.exp().sum()
    ids = range(len(q))
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "ce": lambda: -q[label].log(),
        "forward_kl": lambda: sum((p[i] * (p[i] / q[i]).log() for i in ids), torch.tensor(0.0)),
    }
    return losses[name]()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("weigh", [decay_weights(3.0), dpace_weights(0.5)], ids=["decay", "dpace"])
@pytest.mark.parametrize("chunk_rows", [4, 64])
def test_chunked_loss_and_gradient_equal_the_naive_ones(loss: str, weigh: PositionWeights, chunk_rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    labels, head = torch.randint(0, VOCAB, (ROWS,)), torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    teacher_states, teacher_head = torch.randn(ROWS, 4, dtype=torch.float64), torch.randn(VOCAB, 4).double()
    is_trained = torch.ones(2, 5, dtype=torch.bool)
    is_trained[1, 3:] = False

    losses = chunked_loss(
        hidden,
        labels,
        lambda log_probs: weigh(log_probs.exp().view(2, 5), is_trained).flatten(),
        lambda states: states @ head.T,
        chunk_rows,
        loss=loss,
        teacher=Teacher(teacher_states, lambda states: states @ teacher_head.T),
    )
    logits, teacher = hidden @ head.T, teacher_states @ teacher_head.T
    confidences = logits.detach().softmax(-1)[range(ROWS), labels].view(2, 5)
    weights = weigh(confidences, is_trained).flatten()
    expected = sum(
        weights[row] * naive_row_loss(loss, logits[row], int(labels[row]), teacher[row]) for row in range(ROWS)
    )
    assert losses.loss_sum.dtype == torch.float64
    torch.testing.assert_close(losses.loss_sum, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses.weights, weights)
    torch.testing.assert_close(losses.weight_sum, weights.sum())
    (gradient,) = torch.autograd.grad(3 * losses.loss_sum, hidden)
    (expected_gradient,) = torch.autograd.grad(3 * expected, hidden)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)
    assert torch.equal(losses.is_correct, logits.argmax(dim=-1) == labels)


def test_a_drafter_that_says_what_its_target_says_has_no_loss() -> None:
    hidden, head = torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH)
    losses = chunked_loss(
        hidden,
        torch.zeros(ROWS, dtype=torch.long),
        torch.ones(ROWS),
        lambda states: states @ head.T,
        4,
        loss="forward_kl",
        teacher=Teacher(hidden, lambda states: states @ head.T),
    )
    assert losses.loss_sum.item() == pytest.approx(0.0, abs=1e-5)


def test_half_precision_states_get_their_loss_in_fp32() -> None:
    hidden, head = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_(), torch.randn(VOCAB, WIDTH).bfloat16()
    labels = torch.randint(0, VOCAB, (ROWS,))
    losses = chunked_loss(hidden, labels, torch.ones(ROWS), lambda states: states @ head.T, 4)
    assert losses.loss_sum.dtype == torch.float32
    logits = (hidden @ head.T).float()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    assert losses.loss_sum.item() == pytest.approx(expected, rel=1e-5)  # the sum alone was in fp32, of losses in bf16
    (gradient,) = torch.autograd.grad(losses.loss_sum, hidden)
    assert gradient.dtype == torch.bfloat16


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    head = torch.randn(VOCAB, WIDTH)
    with torch.no_grad():
        losses = chunked_loss(
            torch.randn(ROWS, WIDTH, requires_grad=True),
            torch.zeros(ROWS, dtype=torch.long),
            torch.ones(ROWS),
            lambda states: states @ head.T,
            4,
        )
    assert not losses.loss_sum.requires_grad


def test_a_trainable_head_is_refused_because_it_would_not_be_trained() -> None:
    head = torch.randn(VOCAB, WIDTH, requires_grad=True)
    with pytest.raises(ValueError, match=r"The head's weights require a gradient.*freeze"):
        chunked_loss(
            torch.randn(ROWS, WIDTH, requires_grad=True),
            torch.zeros(ROWS, dtype=torch.long),
            torch.ones(ROWS),
            lambda states: states @ head.T,
            4,
        )


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation made; views of what was there before are none."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.most = max(self.most, made.numel())
        return result


def largest_tensor(loss: str, rows: int, vocab_size: int, chunk_rows: int | None) -> int:
    """Elements of the largest tensor made in a forward and a backward pass, the weights of the heads aside."""
    hidden = torch.randn(rows, 4, requires_grad=True)
    head, teacher_head = torch.randn(4, vocab_size), torch.randn(4, vocab_size)
    teacher_states, labels, weights = torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long), torch.ones(rows)
    with LargestTensor() as largest:
        chunked_loss(
            hidden,
            labels,
            weights,
            lambda states: states @ head,
            chunk_rows,
            loss=loss,
            teacher=Teacher(teacher_states, lambda states: states @ teacher_head),
        ).loss_sum.backward()
    assert hidden.grad is not None
    return largest.most


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tensor_is_larger_than_a_chunk_of_logits(loss: str) -> None:
    """Forward and backward, of the drafter and of the target: more rows make no larger tensor of logits."""
    assert largest_tensor(loss, rows=10, vocab_size=400, chunk_rows=5) == 5 * 400
    assert largest_tensor(loss, rows=200, vocab_size=400, chunk_rows=5) == 5 * 400
    assert (
        largest_tensor(loss, rows=200, vocab_size=400, chunk_rows=200) == 200 * 400
    )  # the instrument sees what it should


@pytest.mark.parametrize("loss", LOSSES)
def test_the_largest_tensor_is_flat_in_the_vocabulary(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told otherwise a chunk has as many rows as fit a fixed number of logits."""
    monkeypatch.setattr("dflash.training.losses.CHUNK_LOGITS", 4000)
    assert {largest_tensor(loss, 100, vocab_size, None) for vocab_size in (50, 400, 2000)} == {4000}


def test_what_is_kept_for_the_backward_pass_is_flat_in_the_vocabulary() -> None:
    """Per row it is the hidden size, whatever the vocabulary: logits are neither kept nor computed again."""
    calls: list[int] = []
    kept: dict[int, int] = {}
    for vocab_size in (50, 5000):
        hidden = torch.randn(20, 4, requires_grad=True)
        head = torch.randn(vocab_size, 4)

        def spying_head(states: torch.Tensor, head: torch.Tensor = head) -> torch.Tensor:
            calls.append(len(states))
            return states @ head.T

        losses = chunked_loss(hidden, torch.zeros(20, dtype=torch.long), torch.ones(20), spying_head, 3)
        kept[vocab_size] = saved_elements(losses.loss_sum.grad_fn)
        before = len(calls)
        losses.loss_sum.backward()
        assert len(calls) == before
    assert max(calls) == 3
    assert kept[50] == kept[5000] <= 20 * 4 + 4 * 20


def saved_elements(node: object) -> int:
    """Elements that a graph keeps from its node on."""
    if node is None:
        return 0
    own = 0
    for name in dir(node):
        if name.startswith("_saved_") and isinstance(value := getattr(node, name), torch.Tensor):
            own += value.numel()
    own += sum(tensor.numel() for tensor in getattr(node, "saved_tensors", ()))
    return own + sum(saved_elements(following) for following, _ in node.next_functions)  # type: ignore[attr-defined]


def test_no_rows_give_a_zero_loss() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    states = torch.zeros(0, 4, requires_grad=True)
    losses = chunked_loss(states, empty, torch.zeros(0), lambda states: states, 8)
    assert losses.loss_sum.item() == losses.weight_sum.item() == 0.0
    losses.loss_sum.backward()


# --- heads that choose token by token: DFlash2's and Domino's ---

SELECTOR = {"selector_rank": 3, "selector_top_k": 4}
DOMINO = {"gru_hidden_dim": 5, "emb_dim": 3, "pure_draft_prefix_len": 1}
DSPARK = {
    "markov_rank": 3,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.mark.parametrize("fields", [SELECTOR, DOMINO, DSPARK], ids=["selector", "Domino", "DSpark"])
@pytest.mark.parametrize("chunk_rows", [3, 64])
def test_a_heads_loss_and_gradients_equal_the_naive_ones(
    chunk_rows: int, fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.training.losses.CHUNK_LOGITS", chunk_rows * 4 * 3)
    monkeypatch.setattr("dflash.model.heads_dflash.TOP_K", 4)
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
    }
    taps = {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": 0, "num_target_layers": 4}
    drafter = DFlashDraftModel(DFlashConfig(**shape, **taps, **fields)).double()
    parts = {name: part for name, part in drafter.named_parameters() if name.split(".")[0] in drafter.head_names()}
    for parameter in parts.values():
        torch.nn.init.normal_(parameter)
    embeddings, gru = torch.randn(VOCAB, WIDTH).double(), torch.nn.GRU(WIDTH, 5, bias=False, batch_first=True)
    for name in dict(gru.named_parameters()):
        gru.register_parameter(name, parts.get(f"prefix_gru.{name}"))
    causal_head = drafter.causal_head(lambda token_ids: embeddings[token_ids])
    hidden, head = torch.randn(ROWS, WIDTH).double().requires_grad_(), torch.randn(VOCAB, WIDTH).double()
    labels, previous = torch.randint(0, VOCAB, (ROWS,)), torch.randint(0, VOCAB, (ROWS,))
    weights, positions = torch.rand(ROWS).double(), torch.arange(ROWS) % 3
    rows: RowLosses = chunked_loss(
        hidden, labels, weights, lambda states: states @ head.T, chunk_rows, num_candidates=4
    )
    candidates = rows.candidates
    assert isinstance(candidates, Candidates)
    assert not candidates.logits.requires_grad
    states = causal_head.read(causal_head.inputs(previous), hidden.new_zeros(ROWS, causal_head.state_size))
    total = head_loss(causal_head, hidden, states, positions, candidates, labels, weights, previous)

    expected, num_hits = torch.zeros((), dtype=torch.float64), 0
    for row in range(ROWS):
        logits, state = (head @ hidden[row]).detach(), hidden[row].detach()
        ids = logits.topk(4).indices.tolist()
        is_hit = int(labels[row]) in ids
        num_hits += is_hit
        if "markov_rank" in fields:
            rank, table = parts["markov_head.markov_w1.weight"][previous[row]], parts["markov_head.markov_w2.weight"]
            known = torch.cat([state, rank])
            gate = parts["markov_head.gate_proj.weight"] @ known + parts["markov_head.gate_proj.bias"]
            vector = gate.sigmoid() * rank
            chance = (parts["confidence_head.proj.weight"] @ known + parts["confidence_head.proj.bias"])[0].sigmoid()
            best = max(ids, key=lambda i: (logits[i] + (vector * table[i]).sum()).item())
            chance = chance if best == int(labels[row]) else 1 - chance
            expected = expected - weights[row] * chance.log()
        elif "selector_rank" in fields:
            selector = drafter.candidate_selector
            vector = selector.predecessor_codebook[previous[row]] * (selector.hidden_projection.weight @ state)
            table = selector.successor_codebook
        else:
            read = gru(embeddings[previous[row]][None, None])[0][0, 0]
            vector = torch.nn.functional.silu(parts["embed_proj.0.weight"] @ torch.cat([state, read]))
            vector, table = vector * (positions[row] >= 1), parts["embed_proj.2.weight"]
        if not is_hit:
            continue
        scores = torch.stack([logits[i] + (vector * table[i]).sum() for i in ids])
        expected = expected - weights[row] * scores.log_softmax(0)[ids.index(int(labels[row]))]
    assert 0 < num_hits < ROWS
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
    parameters = list(parts.values())
    theirs = torch.autograd.grad(
        expected, parameters, allow_unused=True
    )  # of one token the state's weights are not used
    found = torch.autograd.grad(total, [*parameters, hidden], allow_unused=True)
    for gradient, other in zip(found[:-1], theirs, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if other is None else other)
    assert found[-1] is None or not found[-1].any()  # the drafter learns nothing from it


# --- counts ---


def blocks_with_runs(runs: list[int], block_size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Proposals of blocks that are right for `runs[i]` tokens, wrong once, and right again."""
    is_correct = torch.ones(len(runs), block_size - 1, dtype=torch.bool)
    for block, run in enumerate(runs):
        if run + 1 < block_size:
            is_correct[block, run] = False
    return is_correct, torch.ones_like(is_correct)


def counts_of(runs: list[int]) -> DraftCounts:
    return count_drafts(*blocks_with_runs(runs), torch.tensor(0.0), torch.tensor(1.0))


@pytest.mark.parametrize("batching", [[[3, 2, 1, 0]], [[3], [2], [1], [0]], [[3, 2, 1], [0]], [[0], [1, 3, 2]]])
def test_accepted_runs_have_the_same_mean_for_any_batching(batching: list[list[int]]) -> None:
    """A trainer once multiplied mean accuracies and averaged batches; runs 3, 2, 1, 0 are 1.5 accepted, always."""
    total, *others = [counts_of(runs) for runs in batching]
    for other in others:
        total += other
    assert total.summary()["accepted_per_block"] == 1.5


def test_accuracy_by_proposal_counts_learned_rows_only() -> None:
    is_correct, is_trained = blocks_with_runs([4, 1, 0])
    is_trained[0, 2:] = False  # the first response ends inside its block
    summary = count_drafts(is_correct, is_trained, torch.tensor(2.0), torch.tensor(4.0)).summary()
    assert summary["accuracy"] == [pytest.approx(v, abs=1e-4) for v in (2 / 3, 2 / 3, 1.0, 1.0)]
    assert summary["accepted_per_block"] == pytest.approx((2 + 1 + 0) / 3)
    assert summary["loss"] == 0.5


def test_absent_blocks_count_for_nothing() -> None:
    is_correct, is_trained = blocks_with_runs([2, 0])
    is_trained[1] = False
    summary = count_drafts(is_correct, is_trained, torch.tensor(0.0), torch.tensor(0.0)).summary()
    assert summary["accepted_per_block"] == 2.0
    assert summary["loss"] == 0.0
