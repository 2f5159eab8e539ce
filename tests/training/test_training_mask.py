"""The layout of all blocks of a batch: against double loops, and against decoding block by block with a cache."""

from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash import DFlashConfig, DFlashDraftModel
from dflash.model.cache_dflash import PreallocatedCache
from dflash.training import block_attention, lay_out_blocks
from dflash.training.block_attention import BLOCKWISE, FLEX, MOST_SCORES, blockwise_attention
from dflash.training.layout import BlockLayout, packed_causal_mask


MASK_ID = 49


def drafter_config(**fields: Any) -> DFlashConfig:
    return DFlashConfig(
        **{
            "vocab_size": 50,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "initializer_range": 0.3,
            "block_size": 4,
            "mask_token_id": MASK_ID,
            "target_layer_ids": [1, 2],
            "num_target_layers": 5,
        }
        | fields
    )


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "full causal": {"is_causal": True},
    "sliding causal": SLIDING,
    "sliding non-causal": SLIDING | {"is_causal": False},
}


# Row 0: prompt of 4, response of 8. Row 1: two documents (the second with a prompt of 2), then padding.
INPUT_IDS = torch.tensor([[*range(1, 13)], [*range(21, 31), 0, 0]])
LOSS_MASK = torch.tensor([[0] * 4 + [1] * 8, [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0]]).bool()
DOCUMENT_IDS = torch.tensor([[0] * 12, [0] * 5 + [1] * 5 + [-1] * 2])
# Overlapping anchors in row 0; in row 1 an absent one at the end.
ANCHORS = torch.tensor([[4, 5, 9], [2, 7, -1]])


def lay_out(config: DFlashConfig, attention: str = "sdpa") -> BlockLayout:
    return lay_out_blocks(INPUT_IDS, LOSS_MASK, DOCUMENT_IDS, ANCHORS, config, attention)


def document_start(row: int, column: int) -> int:
    return min(c for c in range(12) if DOCUMENT_IDS[row, c] == DOCUMENT_IDS[row, column])


def test_rows_labels_and_positions_equal_a_double_loop() -> None:
    """Labels stand at their row's own position: a shift by one trains the drafter to repeat the anchor."""
    config = drafter_config()
    layout = lay_out(config)
    assert layout.position_ids[0, :12].tolist() == list(range(12))
    assert layout.position_ids[1, :10].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    for row in range(2):
        for block, anchor in enumerate(ANCHORS[row].tolist()):
            is_response = anchor >= 0
            for offset in range(4):
                r = block * 4 + offset
                column = anchor + offset
                if anchor >= 0:
                    is_response = (
                        is_response
                        and column < 12
                        and bool(LOSS_MASK[row, column])
                        and bool(DOCUMENT_IDS[row, column] == DOCUMENT_IDS[row, anchor])
                    )
                    expected_id = INPUT_IDS[row, anchor] if offset == 0 else MASK_ID
                    assert layout.token_ids[row, r] == expected_id
                    assert layout.position_ids[row, 12 + r] == column - document_start(row, anchor)
                assert layout.is_trained[row, r] == (is_response and offset > 0)
                if layout.is_trained[row, r]:
                    assert layout.labels[row, r] == INPUT_IDS[row, column]
                    assert layout.previous[row, r] == column - 1


def test_queries_that_propose_the_next_token_have_their_labels_there() -> None:
    """Checkpoints whose anchor row proposes too: trained on the token at their own position, they draft nothing right."""
    layout = lay_out(drafter_config(sample_from_anchor=True))
    for row in range(2):
        for block, anchor in enumerate(ANCHORS[row].tolist()):
            for offset in range(4):
                r, column = block * 4 + offset, anchor + offset + 1
                is_trained = (
                    anchor >= 0
                    and column < 12
                    and bool(LOSS_MASK[row, anchor + 1 : column + 1].all())
                    and bool(DOCUMENT_IDS[row, column] == DOCUMENT_IDS[row, anchor])
                )
                assert layout.is_trained[row, r] == is_trained
                if is_trained:
                    assert layout.labels[row, r] == INPUT_IDS[row, column]
                    assert layout.previous[row, r] == column - 1
                if anchor >= 0:
                    assert layout.token_ids[row, r] == (INPUT_IDS[row, anchor] if offset == 0 else MASK_ID)
                    assert layout.position_ids[row, 12 + r] == anchor + offset - document_start(row, anchor)
    assert layout.is_trained.view(2, 3, 4).sum(dim=2).tolist() == [[4, 4, 2], [2, 2, 0]]


def test_blocks_end_with_the_response() -> None:
    learned = lay_out(drafter_config()).is_trained.view(2, 3, 4).sum(dim=2)
    assert learned.tolist() == [[3, 3, 2], [2, 2, 0]]


@pytest.mark.parametrize("shape", SHAPES)
def test_visibility_equals_a_double_loop(shape: str) -> None:
    """Overlapping blocks must not see each other, nor another document, nor padding, nor the anchor's own feature."""
    config = drafter_config(**SHAPES[shape])
    layout = lay_out(config)
    for layer, layer_type in enumerate(config.layer_types):
        mask = layout.attention_mask[layer_type]
        assert mask.shape == (2, 1, 12, 24)
        for row in range(2):
            for r in range(12):
                block, offset = divmod(r, 4)
                anchor = int(ANCHORS[row, block])
                if anchor < 0:
                    assert not mask[row, 0, r, :12].any()
                    continue
                for key in range(24):
                    if key < 12:
                        sees = key < anchor and bool(DOCUMENT_IDS[row, key] == DOCUMENT_IDS[row, anchor])
                        distance = anchor + offset - key
                    else:
                        other_block, other_offset = divmod(key - 12, 4)
                        distance = offset - other_offset
                        sees = other_block == block and not (config.is_layer_causal(layer) and distance < 0)
                    if config.layer_window(layer) is not None:
                        sees = sees and abs(distance) < 5
                    assert mask[row, 0, r, key] == sees, (row, r, key)


@pytest.mark.parametrize("window", [None, 3])
def test_a_target_sees_each_document_as_if_alone(window: int | None) -> None:
    mask = packed_causal_mask(DOCUMENT_IDS, window, torch.float32)
    assert mask.shape == (2, 1, 12, 12)
    for row in range(2):
        for query in range(12):
            for key in range(12):
                sees = key <= query and bool(DOCUMENT_IDS[row, query] == DOCUMENT_IDS[row, key])
                sees = sees and (window is None or query - key < window)
                assert mask[row, 0, query, key].item() == (0.0 if sees else torch.finfo(torch.float32).min)


@pytest.mark.parametrize("shape", SHAPES)
def test_flex_attention_sees_what_the_dense_mask_shows(shape: str) -> None:
    """The same predicate builds both; here the blocks it was sorted into are taken apart again."""
    from torch.nn.attention.flex_attention import create_mask

    config = drafter_config(**SHAPES[shape])
    dense, flex = lay_out(config).attention_mask, lay_out(config, FLEX).attention_mask
    assert dense.keys() == flex.keys()
    for name, mask in flex.items():
        assert mask.shape == (2, 1, 12, 24)
        assert torch.equal(create_mask(mask.mask_mod, 2, 1, 12, 24, device="cpu"), dense[name])


@pytest.mark.parametrize("shape", SHAPES)
def test_flex_attention_gives_the_drafters_same_states(shape: str) -> None:
    torch.manual_seed(0)
    # Kernels of flex attention ask for heads of 16.
    config = drafter_config(**SHAPES[shape], head_dim=16)
    drafter = DFlashDraftModel(config).eval()
    noise_embeds, features = torch.randn(2, 12, 16), torch.randn(2, 12, 32)
    states = {}
    for attention in ("sdpa", FLEX):
        layout = lay_out(config, attention)
        drafter.set_attn_implementation(attention)
        # Not compiled: what the kernel computes is not asked here, and a compiler may be missing.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            states[attention] = drafter(
                noise_embeds, features, layout.position_ids, layout.attention_mask
            ).last_hidden_state
    exists = (ANCHORS >= 0).repeat_interleave(4, dim=1)  # what rows that nobody sees come to is theirs
    torch.testing.assert_close(states[FLEX][exists], states["sdpa"][exists], rtol=0, atol=1e-5)


def test_flex_attention_takes_its_kernel_for_any_number_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known bug: torch's kernel for fewer than 128 queries did not compile for 96 of two heads that share keys."""
    seen: list[Any] = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", lambda *args, **kwargs: seen.append((args, kwargs)))
    ALL_ATTENTION_FUNCTIONS[FLEX](1, 2, scaling=0.5)
    assert seen == [((1, 2), {"scaling": 0.5, "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}})]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_blockwise_mask_is_the_dense_one_without_other_blocks(shape: str) -> None:
    config = drafter_config(**SHAPES[shape])
    dense, blockwise = lay_out(config).attention_mask, lay_out(config, BLOCKWISE).attention_mask
    assert dense.keys() == blockwise.keys()
    for name, mask in blockwise.items():
        assert mask.shape == (2, 1, 12, 16)
        for block in range(3):
            rows, own = slice(4 * block, 4 * block + 4), slice(12 + 4 * block, 16 + 4 * block)
            assert torch.equal(mask[:, :, rows, :12], dense[name][:, :, rows, :12])
            assert torch.equal(mask[:, :, rows, 12:], dense[name][:, :, rows, own])
            assert dense[name][:, :, rows].sum() == mask[:, :, rows].sum()  # of other blocks it sees nothing


@pytest.mark.parametrize("most_scores", ["fused", None, 1, 2 * 2 * 2 * 4 * 16])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_blockwise_attention_gives_the_same_states_and_gradients(
    shape: str, heads: tuple[int, int], most_scores: int | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fused kernel, all blocks at once, and some after others."""
    torch.manual_seed(0)
    if most_scores != "fused":
        monkeypatch.setattr(block_attention, "FUSED", ())
    if isinstance(most_scores, int):
        monkeypatch.setattr(block_attention, "MOST_SCORES", most_scores)
    config = drafter_config(**SHAPES[shape], num_attention_heads=heads[0], num_key_value_heads=heads[1])
    drafter = DFlashDraftModel(config)
    noise_embeds, features = torch.randn(2, 12, 16), torch.randn(2, 12, 32)
    exists = (ANCHORS >= 0).repeat_interleave(4, dim=1)
    weights = torch.randn(2, 12, 16) * exists[..., None]  # what rows that nobody sees come to is theirs
    states, gradients = {}, {}
    for attention in ("sdpa", BLOCKWISE):
        layout = lay_out(config, attention)
        states[attention] = drafter(
            noise_embeds, features, layout.position_ids, layout.attention_mask, attn_implementation=attention
        ).last_hidden_state
        gradients[attention] = torch.autograd.grad((states[attention] * weights).sum(), list(drafter.parameters()))
    torch.testing.assert_close(states[BLOCKWISE][exists], states["sdpa"][exists], rtol=0, atol=1e-5)
    for ours, theirs in zip(gradients[BLOCKWISE], gradients["sdpa"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [("cpu",), ()], ids=["fused", "parts"])
def test_scores_of_many_blocks_are_never_held_whole(fused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd keeps of them grows with rows and not with rows times keys."""
    monkeypatch.setattr(block_attention, "FUSED", fused)
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.numel())
        return tensor

    batch, heads, length, blocks, block_size = 1, 2, 512, 1024, 16
    query = torch.randn(batch, heads, blocks * block_size, 4, requires_grad=True)
    key = torch.randn(batch, heads, length + blocks * block_size, 4, requires_grad=True)
    mask = torch.zeros(batch, 1, blocks * block_size, length + block_size)
    assert batch * heads * mask.numel() > MOST_SCORES
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = blockwise_attention(torch.nn.Identity(), query, key, key, mask)
    assert max(held) <= mask.numel()
    output.sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_heads_that_share_keys_keep_them_once_and_layers_keep_one_mask() -> None:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    query = torch.randn(1, 8, 32, 4, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(1, 2, 4096 + 32, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask = torch.zeros(1, 1, 32, 4096 + 16)  # fp32, as under autocast
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = [blockwise_attention(torch.nn.Identity(), query, key, value, mask) for _ in range(2)]
    assert len(outputs) == 2
    assert kept[mask.untyped_storage().data_ptr()] == mask.nbytes
    assert sum(kept.values()) < 1.1 * (key.nbytes + value.nbytes + mask.nbytes)


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_fused_attention_of_other_dtypes(
    dtype: torch.dtype, mask_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients are those of the scores written out, also of a block without context and under autocast (fp32 mask)."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, 12, 8, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, 2, 9 + 12, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    mask, least = torch.zeros(2, 1, 12, 9 + 4, dtype=mask_dtype), torch.finfo(mask_dtype).min
    mask[:, :, :4, :9] = least  # the first block has no context
    mask[:, :, 4:8, 5:9] = least
    mask[:, :, :, 9:] += torch.full((4, 4), least, dtype=mask_dtype).triu(1).repeat(3, 1)
    found = []
    for fused in (("cpu",), ()):
        monkeypatch.setattr(block_attention, "FUSED", fused)
        output, _ = blockwise_attention(torch.nn.Identity(), query, key, value, mask)
        output.square().sum().backward()
        found.append([output, *(tensor.grad for tensor in (query, key, value))])
        query.grad = key.grad = value.grad = None
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-6
    for fused_one, written_out in zip(*found, strict=True):
        assert fused_one.dtype == dtype
        torch.testing.assert_close(fused_one, written_out, rtol=tolerance, atol=tolerance)


def test_under_autocast_attention_takes_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms come out in fp32 there, and flex attention refuses a mixture."""
    dtypes = []

    def watched(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        dtypes.append({query.dtype, key.dtype, value.dtype})
        return blockwise_attention(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "watched", watched)
    config = drafter_config()
    layout, drafter = lay_out(config, BLOCKWISE), DFlashDraftModel(config)
    arguments = torch.randn(2, 12, 16), torch.randn(2, 12, 32), layout.position_ids, layout.attention_mask
    with torch.autocast("cpu", torch.bfloat16):
        drafter(*arguments, attn_implementation="watched").last_hidden_state.sum().backward()
    assert dtypes == [{torch.bfloat16}] * 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["eager", "sdpa", BLOCKWISE])
def test_training_forward_equals_decoding_block_by_block(shape: str, attention: str) -> None:
    torch.manual_seed(0)
    config = drafter_config(**SHAPES[shape])
    drafter = DFlashDraftModel(config).eval()
    drafter.set_attn_implementation("sdpa" if attention == BLOCKWISE else attention)
    embedding = torch.randn(50, 16)
    features = torch.randn(2, 12, 32)
    layout = lay_out(config, attention)
    with torch.no_grad():
        trained = drafter(
            noise_embeds=embedding[layout.token_ids],
            context_hidden_states=features,
            position_ids=layout.position_ids,
            attention_mask=layout.attention_mask,
            attn_implementation=attention,
        ).last_hidden_state
        for row in range(2):
            start, cache = None, None
            for block, anchor in enumerate(ANCHORS[row].tolist()):
                if anchor < 0:
                    continue
                if start != document_start(row, anchor):
                    start = document_start(row, anchor)
                    cache = PreallocatedCache(config.num_hidden_layers, 8)
                known = start + cache.get_seq_length()
                block_ids = torch.tensor([[INPUT_IDS[row, anchor], MASK_ID, MASK_ID, MASK_ID]])
                decoded = drafter(
                    noise_embeds=embedding[block_ids],
                    context_hidden_states=features[row : row + 1, known:anchor],
                    past_key_values=cache,
                ).last_hidden_state
                cache.rollback(4)
                ours = trained[row, 4 * block : 4 * block + 4]
                torch.testing.assert_close(ours, decoded[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", BLOCKWISE])
def test_another_blocks_tokens_change_nothing(attention: str) -> None:
    """Blocks at 4 and 5 overlap; what stands in the second must not reach the first."""
    torch.manual_seed(0)
    config = drafter_config()
    drafter = DFlashDraftModel(config).eval()
    layout = lay_out(config, attention)
    noise_embeds = torch.randn(2, 12, 16)
    features = torch.randn(2, 12, 32)

    def run(embeds: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output = drafter(
                embeds, features, layout.position_ids, layout.attention_mask, attn_implementation=attention
            )
            return output.last_hidden_state

    changed = noise_embeds.clone()
    changed[:, 4:8] += 1.0
    before, after = run(noise_embeds), run(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert torch.equal(before[:, 8:], after[:, 8:])
    assert not torch.equal(before[:, 4:8], after[:, 4:8])
