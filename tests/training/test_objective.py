"""The whole loss of a batch, from the target's states to the sum, against block-by-block decoding with whole logits."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import make_drafter, make_target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash import DFlashDraftModel, spec_generate
from dflash.model import modeling_dflash
from dflash.training import LOSSES, Batch, DrafterLoss, Example, FrozenTarget, TrainingSettings, collate, objective
from dflash.training.block_attention import BLOCKWISE, FLEX, blockwise_attention


VOCAB, BLOCK, MASK_ID = 48, 5, 47
SELECTOR = {"selector_rank": 3, "selector_top_k": 24, "conv_kernel_size": 2, "conv_group_size": 8}
# Two turns, of which the first ends inside a block; the second reaches the end.
EXAMPLE = Example([3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 32, 38, 41, 6], [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1])
ANCHORS = [2, 3, 8, 9, 12]


def drafter_of(**fields: Any) -> DFlashDraftModel:
    return make_drafter(vocab_size=VOCAB, block_size=BLOCK, mask_token_id=MASK_ID, **fields).double()


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("qwen3", vocab_size=VOCAB).double()


def batch_of(*examples: Example) -> Batch:
    return collate(examples, [ANCHORS] * len(examples), pad_token_id=0)


def decoded_rows(
    drafter: DFlashDraftModel, target: PreTrainedModel, anchor: int, ahead: int
) -> list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]]:
    """Of each learned row of the block at `anchor`: the drafter's and the target's logits, the label's column, its state."""
    ids, learned = EXAMPLE.input_ids, EXAMPLE.loss_mask
    input_ids = torch.tensor([ids])
    output = target(input_ids, output_hidden_states=True)
    features = torch.cat([output.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    block_ids = torch.tensor([[ids[anchor]] + [MASK_ID] * (BLOCK - 1)])
    hidden = drafter(
        noise_embeds=target.get_input_embeddings()(block_ids), context_hidden_states=features[:, :anchor].double()
    ).last_hidden_state[0]
    logits = target.get_output_embeddings()(hidden)
    if drafter.config.output_multiplier is not None:
        logits = logits * drafter.config.output_multiplier
    rows = []
    for offset in range(1 - ahead, BLOCK):
        column = anchor + offset + ahead
        if column >= len(ids) or not learned[column]:
            break
        # What the target says of a column stands at the one before it.
        rows.append((logits[offset], output.logits[0, column - 1], column, hidden[offset]))
    return rows


def row_loss(name: str, q: torch.Tensor, p: torch.Tensor, label: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a row by its logits, and the probability of what it was told."""
    log_q, log_p = q.log_softmax(0), p.log_softmax(0)
    losses = {
        "ce": -log_q[label],
        "forward_kl": (log_p.exp() * (log_p - log_q)).sum(),
    }
    return losses[name], log_q[label].exp().detach()


def naive_loss(
    drafter: DFlashDraftModel, target: PreTrainedModel, loss: str, weights: str, gamma: float
) -> tuple[torch.Tensor, float, list[int]]:
    """Sum, weight, and by block how many proposals are right in a row."""
    ahead = int(drafter.config.sample_from_anchor)
    total, weight_sum, runs = torch.zeros((), dtype=torch.float64), 0.0, []
    for anchor in ANCHORS:
        rows = decoded_rows(drafter, target, anchor, ahead)
        found = [row_loss(loss, q, p, EXAMPLE.input_ids[column]) for q, p, column, _ in rows]
        chances = [0.5 * confidence.item() + 0.5 for _, confidence in found]
        for k, (value, _) in enumerate(found):
            weight = {
                "decay": 2.718281828459045 ** (-k / gamma),
                "dpace": sum(torch.tensor(chances[: m + 1]).prod().item() for m in range(k, len(rows))),
            }[weights]
            total, weight_sum = total + weight * value, weight_sum + weight
        right = [int(q.argmax()) == EXAMPLE.input_ids[column] for q, _, column, _ in rows]
        runs.append(right.index(False) if False in right else len(right))
    return total, weight_sum, runs


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("weights", "fields"),
    [
        ("decay", {}),
        ("dpace", {}),
        ("decay", {"sample_from_anchor": True}),
        ("dpace", {"sample_from_anchor": True, "output_multiplier": 0.5}),
    ],
    ids=["decay", "dpace", "decay, from the anchor", "dpace, from the anchor, scaled"],
)
def test_loss_equals_the_loss_of_decoded_blocks(
    loss: str, weights: str, fields: dict[str, Any], target: PreTrainedModel
) -> None:
    """Labels, the target's columns and the drafter's rows: one of them off by one shows here."""
    drafter = drafter_of(**fields)
    settings = TrainingSettings(gamma=3.0, chunk_rows=4, loss=loss, position_weights=weights)
    loss_of = DrafterLoss(FrozenTarget(target, drafter), settings)
    found, counts = loss_of(batch_of(EXAMPLE))
    expected, weight_sum, runs = naive_loss(drafter, target, loss, weights, 3.0)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert counts.weight_sum.item() == pytest.approx(weight_sum, rel=1e-6)
    assert counts.accepted.item() == sum(runs)
    assert counts.blocks.item() == len(ANCHORS)
    parameters = list(drafter.parameters())
    ours, theirs = torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters)
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)  # norms compute in fp32


def head_learns(
    drafter: DFlashDraftModel, target: PreTrainedModel, own: list[torch.nn.Parameter], scores_of: Any, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss with a causal head and without it, after the head's share was compared with a naive one, gradients too.

    `own` are the head's parameters. `scores_of(rows)` gives the head's scores [V] of each of a block's rows.
    """
    for parameter in own:
        torch.nn.init.normal_(parameter)
    pair = FrozenTarget(target, drafter)
    found, counts = DrafterLoss(pair, TrainingSettings(gamma=3.0, selector_weight=0.25))(batch_of(EXAMPLE))
    without, _ = DrafterLoss(pair, TrainingSettings(gamma=3.0, selector_weight=0.0))(batch_of(EXAMPLE))

    expected, num_hits = torch.zeros((), dtype=torch.float64), 0
    for anchor in ANCHORS:
        rows = decoded_rows(drafter, target, anchor, int(drafter.config.sample_from_anchor))
        assert EXAMPLE.input_ids[rows[0][2] - 1] == EXAMPLE.input_ids[anchor]
        for k, ((q, _, column, _), scores) in enumerate(zip(rows, scores_of(rows), strict=True)):
            ids, label = q.topk(top_k).indices.tolist(), EXAMPLE.input_ids[column]
            if label in ids:  # rows without it are left out
                num_hits += 1
                expected = expected - 2.718281828459045 ** (-k / 3.0) * scores[ids].log_softmax(0)[ids.index(label)]
    assert 0 < num_hits < counts.rows.sum()
    assert (found - without).item() == pytest.approx(0.25 * expected.item(), rel=1e-5)
    gradients = torch.autograd.grad(found, own, retain_graph=True)
    for gradient, other in zip(gradients, torch.autograd.grad(0.25 * expected, own), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
    return found, without


def test_a_selector_learns_beside_the_drafter_and_changes_nothing_in_it(target: PreTrainedModel) -> None:
    """DFlash2: cross entropy among the row's candidates after the true token, rows without the label left out."""
    drafter = drafter_of(**SELECTOR)
    selector: Any = drafter.candidate_selector

    def scores_of(rows: Any) -> list[torch.Tensor]:
        before = [selector.predecessor_codebook[EXAMPLE.input_ids[column - 1]] for _, _, column, _ in rows]
        vectors = [
            one * (selector.hidden_projection.weight @ row[3].detach()) for one, row in zip(before, rows, strict=True)
        ]
        return [
            row[0].detach() + selector.successor_codebook @ vector for row, vector in zip(rows, vectors, strict=True)
        ]

    found, without = head_learns(drafter, target, list(selector.parameters()), scores_of, 24)
    others = [parameter for name, parameter in drafter.named_parameters() if "candidate_selector" not in name]
    for gradient, other in zip(*(torch.autograd.grad(loss, others) for loss in (found, without)), strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_dominos_head_reads_the_true_tokens_from_the_anchor_on(target: PreTrainedModel, from_anchor: bool) -> None:
    """Against torch's GRU over each block's own tokens; the first proposal keeps its logits."""
    drafter = drafter_of(gru_hidden_dim=6, emb_dim=4, pure_draft_prefix_len=1, sample_from_anchor=from_anchor)
    assert drafter.config.shift_label == from_anchor
    mix, _, table = drafter.embed_proj
    gru = torch.nn.GRU(drafter.config.hidden_size, 6, bias=False, batch_first=True)
    for name, weight in drafter.prefix_gru.named_parameters():
        gru.register_parameter(name, weight)

    def scores_of(rows: Any) -> list[torch.Tensor]:
        tokens = torch.tensor([[EXAMPLE.input_ids[column - 1] for _, _, column, _ in rows]])
        states = gru(target.get_input_embeddings()(tokens))[0][0]
        inputs = [torch.cat([row[3].detach(), state]) for row, state in zip(rows, states, strict=True)]
        deltas = [table(torch.nn.functional.silu(mix(one))) for one in inputs]
        return [
            row[0].detach() + (delta if k else 0.0 * delta)
            for k, (row, delta) in enumerate(zip(rows, deltas, strict=True))
        ]

    own = [*drafter.prefix_gru.parameters(), mix.weight, table.weight]
    head_learns(drafter, target, own, scores_of, 16)


@pytest.mark.parametrize(
    "head",
    [
        {"selector_rank": 3, "selector_top_k": 4},
        {"gru_hidden_dim": 6, "emb_dim": 4},
        {"markov_rank": 3, "markov_head_type": "gated", "enable_confidence_head": True},
    ],
    ids=["selector", "domino", "dspark"],
)
def test_a_head_learns_the_same_under_autocast(head: dict[str, Any]) -> None:
    """Known bug: Domino's state was in float32 and its gates in bfloat16, so that training with mixed precision raised."""
    loss_of = DrafterLoss(FrozenTarget(make_target("qwen3", vocab_size=VOCAB), drafter_of(**head).float()))
    loss, _ = loss_of(batch_of(EXAMPLE))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = loss_of(batch_of(EXAMPLE))
    mixed.backward()
    assert mixed.item() == pytest.approx(loss.item(), rel=0.1)


def test_states_read_before_give_the_same_loss(target: PreTrainedModel) -> None:
    pair, batch, settings = FrozenTarget(target, drafter_of()), batch_of(EXAMPLE), TrainingSettings(loss="forward_kl")
    states, online = pair(batch, wants_states=True), DrafterLoss(pair, settings)(batch)[0]
    target.forward = None  # it is not read again
    assert torch.equal(DrafterLoss(pair, settings, states_of=lambda *_: states)(batch)[0], online)


class MatrixProducts(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fields", [{}, SELECTOR], ids=["plain", "convolutions"])
def test_mlps_keep_two_tensors_of_their_width_and_every_gradient(
    target: PreTrainedModel, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activation and the product are computed again, without another matrix product, and forwards are left as they were."""
    drafter = drafter_of(intermediate_size=40, **fields)
    pair, batch = FrozenTarget(target, drafter), batch_of(EXAMPLE)
    found = []
    for lean in (objective.lean_mlps, lambda _: nullcontext()):
        monkeypatch.setattr(objective, "lean_mlps", lean)
        kept: list[torch.Tensor] = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda one, kept=kept: kept.append(one) or one, lambda one: one),
            MatrixProducts() as products,
        ):
            loss, _ = DrafterLoss(pair)(batch)
            loss.backward()
        gradients = [parameter.grad for parameter in drafter.parameters()]
        drafter.zero_grad(set_to_none=True)
        wide = {one.data_ptr() for one in kept if one.shape[-1:] == (40,) and one.numel() == 40 * len(ANCHORS) * BLOCK}
        found.append((len(wide) / len(drafter.layers), products.count, loss, *gradients))
    (ours, work, *lean_gradients), (whole, least_work, *gradients) = found
    assert (ours, work) == (2, least_work)
    assert whole == 4
    for one, other in zip(lean_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert not any("forward" in vars(module) for module in drafter.modules())


def test_mlps_are_lean_for_the_loss_alone(target: PreTrainedModel) -> None:
    """Not beside layers that are computed again, which would find another forward; nor where something else has replaced it."""
    drafter, seen = drafter_of(), []
    pair, batch, mlps = FrozenTarget(target, drafter), batch_of(EXAMPLE), [layer.mlp for layer in drafter.layers]

    def network(**inputs: Any) -> Any:
        seen.append(["forward" in vars(mlp) for mlp in mlps])
        return drafter(**inputs)

    loss, _ = DrafterLoss(pair)(batch)
    loss.backward()
    first = [parameter.grad.clone() for parameter in drafter.parameters()]
    DrafterLoss(pair, network=network)(batch)
    drafter.zero_grad()
    drafter.train()
    for layer in drafter.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = (
            True,
            partial(checkpoint, use_reentrant=False),
        )
    loss, _ = DrafterLoss(pair)(batch)
    loss.backward()
    for parameter, one in zip(drafter.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, one)
    for layer in drafter.layers:
        layer.gradient_checkpointing = False
    assert seen == [[False] * len(mlps)]

    mlps[0].forward = replaced = mlps[0].forward
    with pytest.raises(KeyError), objective.lean_mlps(drafter), objective.lean_mlps(drafter):
        drafter.layers[1].mlp.forward({}["raised inside"])
    assert mlps[0].forward is replaced
    assert "forward" not in vars(mlps[1])


@pytest.mark.compiler
def test_a_compiled_network_takes_any_number_of_blocks() -> None:
    """Once the backward pass raised at the first batch of another number, where heads share keys."""
    target = make_target("qwen3", vocab_size=VOCAB)
    drafter = drafter_of(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, head_dim=8).float()
    pair = FrozenTarget(target, drafter)
    eager, compiled = DrafterLoss(pair), DrafterLoss(pair, network=torch.compile(drafter))
    for count in (5, 4, 3, 2):
        batch = collate([EXAMPLE] * 2, [ANCHORS[:count]] * 2, pad_token_id=0)
        gradients = []
        for loss_of in (compiled, eager):
            loss, _ = loss_of(batch)
            gradients.append(torch.autograd.grad(loss, list(drafter.parameters())))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_batch_without_anchors_has_no_loss_and_a_gradient(target: PreTrainedModel) -> None:
    """A process with no share of a batch must still meet the others."""
    drafter = drafter_of()
    loss_of = DrafterLoss(FrozenTarget(target, drafter), TrainingSettings(position_weights="dpace"))
    loss, counts = loss_of(batch_of(EXAMPLE).micro_batch(3, 4))
    loss.backward()
    assert loss.item() == counts.weight_sum.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_training_takes_an_attention_of_its_own_and_leaves_the_drafters(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are trained with what passes over keys that nobody sees, and drafted with what the drafter was loaded with."""
    drafter = drafter_of()
    drafter.set_attn_implementation("eager")
    loss_of = DrafterLoss(FrozenTarget(target, drafter))
    seen = []

    def watched(name: str) -> Any:
        def attend(*arguments: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return own[name](*arguments, **kwargs)

        return attend

    own = {BLOCKWISE: blockwise_attention, "eager": modeling_dflash.qwen3.eager_attention_forward}
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, BLOCKWISE, watched(BLOCKWISE))
    monkeypatch.setattr(modeling_dflash.qwen3, "eager_attention_forward", watched("eager"))
    loss_of(batch_of(EXAMPLE))
    assert set(seen) == {BLOCKWISE}
    seen.clear()
    spec_generate(drafter, target, torch.tensor([[3, 4, 5]]), max_new_tokens=6, temperature=0.0)
    assert set(seen) == {"eager"}


def test_a_gpu_takes_flex_attention_where_it_has_kernels(target: PreTrainedModel) -> None:
    def attention(device: str, **fields: Any) -> str:
        drafter = drafter_of(**fields)
        return DrafterLoss(FrozenTarget(target, drafter)).attention(torch.device(device))

    assert attention("cuda", head_dim=16) == FLEX
    assert attention("cuda", head_dim=8) == attention("cuda", head_dim=16, attention_dropout=0.1) == BLOCKWISE
    assert attention("cpu", head_dim=16) == BLOCKWISE


def test_a_drafter_with_a_head_of_its_own_is_refused(target: PreTrainedModel) -> None:
    drafter = drafter_of(draft_vocab_size=20)
    with pytest.raises(ValueError, match=r"a head of its own over 20 tokens, which is not trained here"):
        DrafterLoss(FrozenTarget(target, drafter))
