"""The network against a plain re-implementation of it, and what loading promises about a checkpoint."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BLOCK_SIZE, DIMENSIONS, HIDDEN_SIZE, drafter_config, make_drafter
from transformers import DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dflash import DFlashDraftModel
from dflash.common.files import adapter_fault
from dflash.model import modeling_dflash
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.layers_dflash import DFlashRMSNorm


N = BLOCK_SIZE
NUM_TAPS = 2
WINDOWED = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
MIXED = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}


def inputs(context: int = 11, batch_size: int = 1, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A block [B, N, D] and context features [B, context, L * D]."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(batch_size, N, HIDDEN_SIZE, generator=generator)
    return block, torch.randn(batch_size, context, NUM_TAPS * HIDDEN_SIZE, generator=generator)


def outputs(drafter: DFlashDraftModel, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The hidden states of one forward."""
    with torch.no_grad():
        return drafter(*args, **kwargs).last_hidden_state


# The oracle: the same network in plain torch, with Python loops for who sees whom.


def naive_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm."""
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def naive_rope(x: torch.Tensor, position: int, frequencies: list[float], scaling: float) -> torch.Tensor:
    """One head's vector [E] turned by its position: pairs (i, i + E / 2)."""
    half = x.shape[-1] // 2
    turned = torch.empty_like(x)
    for i in range(half):
        angle = position * frequencies[i]
        cos, sin = scaling * math.cos(angle), scaling * math.sin(angle)
        turned[i] = x[i] * cos - x[i + half] * sin
        turned[i + half] = x[i + half] * cos + x[i] * sin
    return turned


def naive_conv(rows: torch.Tensor, source: torch.Tensor, weights: dict[str, torch.Tensor], side: int) -> torch.Tensor:
    """DFlash2's convolution of one block's rows [N, D], whose kernels come from `source` [N, D]; side 0 is the input's."""
    base, projection = (
        weights["base_kernel"],
        weights["kernel_projection.weight"],
    )  # [2, taps, D], [2 * taps * groups, D]
    _, num_taps, width = base.shape
    num_groups = len(projection) // (2 * num_taps)
    mixed = torch.zeros_like(rows)
    for i, tap, channel in itertools.product(range(len(rows)), range(num_taps), range(width)):
        if i >= tap:
            group = channel // (width // num_groups)
            delta = projection[(side * num_taps + tap) * num_groups + group] @ source[i]
            mixed[i, channel] += (base[side, tap, channel] + delta) * rows[i - tap, channel]
    return mixed


def naive_forward(
    config: Any,
    weights: dict[str, torch.Tensor],
    block: torch.Tensor,
    features: torch.Tensor,
    theta: float = 10000.0,
    frequencies: list[float] | None = None,
    rope_scaling: float = 1.0,
) -> torch.Tensor:
    """DFlash's forward of one block [N, D] after its context features [C, L * D], by the published rules."""
    eps, head_dim = config.rms_norm_eps, config.head_dim
    frequencies = frequencies or [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    num_heads, num_groups = config.num_attention_heads, config.num_key_value_heads
    context = naive_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    num_context, x = len(context), block
    positions = range(num_context + len(block))
    for layer in range(config.num_hidden_layers):
        here = {
            name.removeprefix(f"layers.{layer}."): w
            for name, w in weights.items()
            if name.startswith(f"layers.{layer}.")
        }

        def project(rows: torch.Tensor, kind: str, here: dict[str, torch.Tensor] = here) -> torch.Tensor:
            made = rows @ here[f"self_attn.{kind}_proj.weight"].T
            return made + here.get(f"self_attn.{kind}_proj.bias", torch.zeros(made.shape[-1], dtype=made.dtype))

        def conv(rows: torch.Tensor, source: torch.Tensor, kind: str, side: int, here: Any = here) -> torch.Tensor:
            own = {
                name.removeprefix(f"{kind}_conv."): w for name, w in here.items() if name.startswith(f"{kind}_conv.")
            }
            return naive_conv(rows, source, own, side) if own else rows

        normed = naive_norm(x, here["input_layernorm.weight"], eps)
        h = conv(normed, normed, "attention", 0)
        states = torch.cat([context, h])  # the context skips input_layernorm
        query = naive_norm(project(h, "q").view(len(h), num_heads, head_dim), here["self_attn.q_norm.weight"], eps)
        key = naive_norm(project(states, "k").view(-1, num_groups, head_dim), here["self_attn.k_norm.weight"], eps)
        value = project(states, "v").view(-1, num_groups, head_dim)

        sliding = config.layer_types[layer] == "sliding_attention"
        declared = getattr(config, "is_causal", None)
        causal = sliding if declared is None else declared
        turned_key = [
            [naive_rope(key[position, group], position, frequencies, rope_scaling) for group in range(num_groups)]
            for position in positions
        ]
        attended = torch.zeros(len(h), num_heads, head_dim, dtype=h.dtype)
        for row, head in itertools.product(range(len(h)), range(num_heads)):
            group = head // (num_heads // num_groups)
            q_position = num_context + row
            turned = naive_rope(query[row, head], q_position, frequencies, rope_scaling)
            scores, seen = [], []
            for k_position in positions:
                if sliding and not q_position - k_position < config.sliding_window:
                    continue
                if sliding and not causal and not k_position - q_position < config.sliding_window:
                    continue
                if causal and k_position > q_position:
                    continue
                scores.append(turned @ turned_key[k_position][group] / math.sqrt(head_dim))
                seen.append(value[k_position, group])
            attended[row, head] = torch.stack(scores).softmax(dim=0) @ torch.stack(seen)
        x = x + conv(project(attended.reshape(len(h), -1), "o"), normed, "attention", 1)
        normed = naive_norm(x, here["post_attention_layernorm.weight"], eps)
        h = conv(normed, normed, "mlp", 0)
        gate, up = h @ here["mlp.gate_proj.weight"].T, h @ here["mlp.up_proj.weight"].T
        x = x + conv((gate * torch.sigmoid(gate) * up) @ here["mlp.down_proj.weight"].T, normed, "mlp", 1)
    return naive_norm(x, weights["norm.weight"], eps)


def shuffled_norms(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """Norm weights and biases away from 1 and 0, where a forgotten one would not show."""
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return drafter


ATTENTION = [
    {},
    {"is_causal": True},
    {"attention_bias": True},
    *({**WINDOWED, "sliding_window": window} for window in (1, 2, N - 1, N, N + 3, 100)),
    *({**WINDOWED, "sliding_window": window, "is_causal": False} for window in (1, 2, N - 1, N, N + 3, 100)),
    *({**MIXED, "sliding_window": window} for window in (3, N + 1)),
    {**MIXED, "sliding_window": 4, "is_causal": False},
    {**MIXED, "sliding_window": 4, "is_causal": True},
]


def _name(overrides: dict[str, Any]) -> str:
    kinds = [kind.split("_")[0] for kind in overrides.get("layer_types", ["full_attention"])]
    rest = {k: v for k, v in overrides.items() if k not in ("layer_types", "use_sliding_window")}
    return "+".join([*kinds, *(f"{key}={value}" for key, value in rest.items())])


@pytest.mark.parametrize("overrides", ATTENTION, ids=_name)
def test_forward_equals_the_naive_one(overrides: dict[str, Any]) -> None:
    """Promise: every window and causality, by the per-row rule q - k < W (and k - q < W where not causal).

    SDPA and eager, without a cache, and with the context arriving in pieces over rolled-back blocks. Known traps: SDPA
    takes `module.is_causal` (True by default) where no mask is given, and slices the keys; windows act in
    flash attention alone unless the mask holds them; eager adds boolean masks as numbers.
    """
    drafter = shuffled_norms(make_drafter(**overrides))
    block, features = inputs()
    expected = naive_forward(drafter.config, drafter.state_dict(), block[0], features[0])[None]
    for implementation in ("sdpa", "eager"):
        drafter.set_attn_implementation(implementation)
        torch.testing.assert_close(outputs(drafter, block, features), expected, rtol=0, atol=2e-5)
        for cache in (PreallocatedCache(2, 3), DynamicCache()):
            start = 0
            for stop in (7, 8, 11):
                other = inputs(seed=stop)[0] if stop < 11 else block
                got = outputs(drafter, other, features[:, start:stop], past_key_values=cache)
                assert cache.get_seq_length() == stop + N
                if stop < 11:
                    cache.rollback(N) if isinstance(cache, PreallocatedCache) else cache.crop(-N)
                start = stop
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_windows_and_causality_change_something() -> None:
    """The test of the test: the cases above differ from each other, so agreement with the oracle is no accident."""
    block, features = inputs()
    seen = [outputs(shuffled_norms(make_drafter(**overrides)), block, features) for overrides in ATTENTION]
    # A window of 100 sees all, so it equals the full layer of the same causality.
    groups = {_name(overrides): output for overrides, output in zip(ATTENTION, seen, strict=True)}
    wide_causal, wide = "sliding+sliding+sliding_window=100", "sliding+sliding+sliding_window=100+is_causal=False"
    torch.testing.assert_close(groups[wide_causal], groups["full+is_causal=True"])
    torch.testing.assert_close(groups[wide], groups["full"])
    # A window of 1 sees the row itself, causal or not.
    narrow_causal, narrow = "sliding+sliding+sliding_window=1", "sliding+sliding+sliding_window=1+is_causal=False"
    torch.testing.assert_close(groups[narrow], groups[narrow_causal])
    distinct = [output for name, output in groups.items() if name not in (wide, wide_causal, narrow)]
    for one, other in itertools.combinations(distinct, 2):
        assert (one - other).abs().max() > 1e-3


def test_no_context_at_all(tiny_drafter: DFlashDraftModel) -> None:
    """Promise: a block whose context is empty is a block that sees itself."""
    block, features = inputs(context=0)
    expected = naive_forward(tiny_drafter.config, tiny_drafter.state_dict(), block[0], features[0])[None]
    torch.testing.assert_close(outputs(tiny_drafter, block, features), expected, rtol=0, atol=2e-5)


def test_rope_theta_reaches_the_keys() -> None:
    """Promise: another theta is another network, as the naive one says."""
    drafter = make_drafter(rope_theta=100.0)
    block, features = inputs()
    expected = naive_forward(drafter.config, drafter.state_dict(), block[0], features[0], theta=100.0)[None]
    torch.testing.assert_close(outputs(drafter, block, features), expected, rtol=0, atol=2e-5)
    assert (outputs(make_drafter(), block, features) - expected).abs().max() > 1e-3


def test_rows_of_a_batch_are_independent(tiny_drafter: DFlashDraftModel) -> None:
    """Promise: the network has a batch dimension, and rows do not mix."""
    block, features = inputs(batch_size=3)
    together = outputs(tiny_drafter, block, features)
    for row in range(3):
        alone = outputs(tiny_drafter, block[row : row + 1], features[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=2e-5)


def test_both_worlds_argument_names_agree(tiny_drafter: DFlashDraftModel) -> None:
    """Promise: native transformers' names, z-lab's names and positions mean the same."""
    block, features = inputs()
    expected = outputs(tiny_drafter, noise_embeds=block, context_hidden_states=features)
    assert torch.equal(outputs(tiny_drafter, noise_embedding=block, target_hidden=features), expected)
    assert torch.equal(outputs(tiny_drafter, block, features), expected)
    with pytest.raises(ValueError, match=r"noise_embeds.*spec_generate"):
        tiny_drafter(noise_embeds=block)
    with pytest.raises(ValueError, match=r"context_hidden_states.*spec_generate"):
        tiny_drafter(target_hidden=features)


def test_position_ids_default_to_what_follows_the_cache(tiny_drafter: DFlashDraftModel) -> None:
    """Promise: without position_ids the block follows its context, also after a filled cache."""
    block, features = inputs()
    expected = outputs(tiny_drafter, block, features, position_ids=torch.arange(11 + N)[None])
    torch.testing.assert_close(outputs(tiny_drafter, block, features), expected)
    cache = PreallocatedCache(2, 40)
    outputs(tiny_drafter, block, features[:, :6], past_key_values=cache)
    cache.rollback(N)
    got = outputs(tiny_drafter, block, features[:, 6:], past_key_values=cache)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    # Rotary distances alone count, so all positions may be shifted, and shifting some changes the result.
    shifted = outputs(tiny_drafter, block, features, position_ids=torch.arange(5, 16 + N)[None])
    torch.testing.assert_close(shifted, expected, rtol=0, atol=1e-4)
    gap = torch.cat([torch.arange(11), torch.arange(13, 13 + N)])[None]
    assert (outputs(tiny_drafter, block, features, position_ids=gap) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("overrides", [{}, {**MIXED, "sliding_window": 20}], ids=["full", "mixed"])
def test_two_dimensional_mask_hides_padding(overrides: dict[str, Any], implementation: str) -> None:
    """Promise: a mask over the keys (native decoding of a padded prompt) is the prompt without its padding.

    Also one that is longer than the keys, whose last ones it then describes.
    """
    drafter = make_drafter(**overrides)
    drafter.set_attn_implementation(implementation)
    block, features = inputs()
    expected = outputs(drafter, block, features[:, 4:])
    mask = torch.ones(1, 11 + N, dtype=torch.long)
    mask[:, :4] = 0
    longer = torch.cat([torch.zeros(1, 3, dtype=torch.long), mask], dim=1)
    for given in (mask, mask.bool(), longer):
        for cache in (None, PreallocatedCache(2, 40)):
            got = outputs(drafter, block, features, attention_mask=given, past_key_values=cache)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_four_dimensional_masks(implementation: str) -> None:
    """Known trap: eager attention adds a boolean 4-D mask as 0 and 1. Boolean, additive and by layer type agree."""
    drafter = make_drafter(**{**MIXED, "sliding_window": 4})
    drafter.set_attn_implementation(implementation)
    block, features = inputs()
    expected = outputs(drafter, block, features)
    visible = {}
    for kind, window in (("full_attention", 99), ("sliding_attention", 4)):
        rows = [
            [(q - k < window) and (kind == "full_attention" or k <= q) for k in range(11 + N)]
            for q in range(11, 11 + N)
        ]
        visible[kind] = torch.tensor(rows)[None, None]
    additive = {
        kind: torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        for kind, mask in visible.items()
    }
    for masks in (visible, additive):
        torch.testing.assert_close(
            outputs(drafter, block, features, attention_mask=masks), expected, rtol=0, atol=2e-5
        )
    # One mask for all layers is taken as it is.
    drafter = make_drafter()
    drafter.set_attn_implementation(implementation)
    narrow = outputs(drafter, block, features, attention_mask=visible["sliding_attention"])
    windowed = make_drafter(**WINDOWED, sliding_window=4)
    torch.testing.assert_close(narrow, outputs(windowed, block, features), rtol=0, atol=2e-5)


def test_the_forward_takes_the_cache_by_either_name_and_no_unknown_keyword(tiny_drafter: DFlashDraftModel) -> None:
    """Known bug: transformers 5.24 passed `cache=`, which was swallowed, and each block was drafted without context."""
    block, features = inputs()
    expected = outputs(tiny_drafter, block, features)
    for name in ("cache", "past_key_values"):
        cache = PreallocatedCache(2, 3)
        outputs(tiny_drafter, block, features[:, :6], **{name: cache})
        cache.rollback(N)
        torch.testing.assert_close(outputs(tiny_drafter, block, features[:, 6:], **{name: cache}), expected)
        assert tiny_drafter(block, features[:, :0], **{name: cache})[1] is cache
    with pytest.raises(TypeError, match="cached_keys"):
        tiny_drafter(block, features, cached_keys=cache)
    with pytest.raises(ValueError, match=r"cache and past_key_values.*pass one"):
        tiny_drafter(block, features, cache=cache, past_key_values=cache)
    assert torch.equal(
        outputs(tiny_drafter, block, features, use_cache=True, is_causal=False), expected
    )  # z-lab's loop
    for other in ({"use_cache": False}, {"is_causal": True}):
        with pytest.raises(ValueError, match=f"{next(iter(other))}=.*leave them out"):
            tiny_drafter(block, features, **other)


def test_flash_attention_refuses_a_four_dimensional_mask() -> None:
    """Promise: kernels that would ignore the mask say so."""
    drafter = make_drafter()
    drafter.config._attn_implementation = "flash_attention_2"
    block, features = inputs()
    with pytest.raises(ValueError, match=r"flash_attention_2.*sdpa"):
        drafter(block, features, attention_mask=torch.ones(1, 1, N, 11 + N, dtype=torch.bool))


def test_the_modules_are_not_causal(tiny_drafter: DFlashDraftModel) -> None:
    """Known trap: SDPA reads `module.is_causal`, True where it is absent, and then slices the keys to the block's length.

    With the attribute set, the same forward must still be right, because the call says False itself.
    """
    block, features = inputs()
    expected = outputs(tiny_drafter, block, features)
    for layer in tiny_drafter.layers:
        assert layer.self_attn.is_causal is False
    try:
        for layer in tiny_drafter.layers:
            layer.self_attn.is_causal = True
        assert torch.equal(outputs(tiny_drafter, block, features), expected)
    finally:
        for layer in tiny_drafter.layers:
            layer.self_attn.is_causal = False


@pytest.mark.parametrize("name", ["typo", "flash_attention_9"])
def test_a_forward_refuses_an_attention_that_does_not_exist(tiny_drafter: DFlashDraftModel, name: str) -> None:
    block, features = inputs()
    with pytest.raises(KeyError, match=name):
        tiny_drafter(noise_embeds=block, context_hidden_states=features, attn_implementation=name)


def test_set_attn_implementation_really_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known trap: transformers greps the source of classes named *Attention* and may leave "sdpa" with only a warning."""
    make_drafter().save_pretrained(tmp_path)
    drafter = DFlashDraftModel.from_pretrained(tmp_path)
    calls = []
    eager = modeling_dflash.qwen3.eager_attention_forward
    monkeypatch.setattr(
        modeling_dflash.qwen3, "eager_attention_forward", lambda *a, **k: (calls.append(1), eager(*a, **k))[1]
    )
    block, features = inputs()
    expected = outputs(drafter, block, features)
    assert drafter.config._attn_implementation == "sdpa"
    assert not calls
    drafter.set_attn_implementation("eager")
    assert drafter.config._attn_implementation == "eager"
    torch.testing.assert_close(outputs(drafter, block, features), expected, rtol=0, atol=2e-5)
    assert len(calls) == 2
    drafter.set_attn_implementation("sdpa")
    outputs(drafter, block, features)
    assert len(calls) == 2
    loaded = DFlashDraftModel.from_pretrained(tmp_path, attn_implementation="eager")
    outputs(loaded, block, features)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("states", "weight"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_the_norm_is_qwen3s_in_every_dtype(states: torch.dtype, weight: torch.dtype) -> None:
    """Promise: fused or not, the norm has Qwen3's values, to rounding, and its dtype (under autocast that of the weight)."""
    generator = torch.Generator().manual_seed(5)
    own, theirs = DFlashRMSNorm(32, eps=1e-3), Qwen3RMSNorm(32, eps=1e-3)
    own.weight.data = theirs.weight.data = torch.randn(32, generator=generator).to(weight)
    x = torch.randn(2, 5, 3, 32, generator=generator).to(states)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it cannot fuse
        output = own(x)
    expected = theirs(x)
    assert output.dtype == expected.dtype
    tolerance = 1e-6 if torch.bfloat16 not in (states, weight) else 2**-7
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_inputs_of_another_dtype() -> None:
    """Promise: the target may run in another dtype than the drafter: inputs are cast, the output is the drafter's dtype."""
    drafter = make_drafter().to(torch.bfloat16)
    block, features = inputs()
    got = outputs(drafter, block, features)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, outputs(drafter, block.bfloat16(), features.bfloat16()))


# The checkpoint.


def golden_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint: 11 per layer and 3."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        own = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in own.items()})
    return shapes


@pytest.mark.parametrize(
    "overrides", [{}, {"num_hidden_layers": 5, "target_layer_ids": [0, 1, 2]}, {"head_dim": 16}], ids=str
)
def test_state_dict_has_the_published_names_and_shapes(overrides: dict[str, Any], tmp_path: Path) -> None:
    """Promise: 11 L + 3 tensors, unprefixed, in memory and on disk; no embedding, no head, no buffer."""
    drafter = make_drafter(**overrides)
    expected = golden_shapes(drafter.config)
    assert len(expected) == 11 * drafter.config.num_hidden_layers + 3
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected
    drafter.save_pretrained(tmp_path)
    assert {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items()} == expected


def test_biases_only_where_attention_bias_says() -> None:
    """Promise: `attention_bias` adds a bias to all four projections, as vLLM reads it, and to nothing else."""
    drafter = make_drafter(attention_bias=True)
    added = set(drafter.state_dict()) - set(golden_shapes(drafter.config))
    assert added == {f"layers.{i}.self_attn.{kind}_proj.bias" for i in range(2) for kind in "qkvo"}


def write_published_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A folder as z-lab publishes it, written by hand: first config form and plain safetensors. Returns the weights."""
    fields = {
        **DIMENSIONS,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": N,
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]},
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 2,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(23)
    weights = {
        name: ((1.0 if len(shape) == 1 else 0.0) + 0.2 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in golden_shapes(drafter_config()).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def test_published_checkpoint_loads_and_computes_what_it_should(tmp_path: Path) -> None:
    """Promise: z-lab's format loads with nothing missing or unexpected, and its forward is the naive one's."""
    weights = write_published_checkpoint(tmp_path)
    drafter, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind]
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == golden_shapes(drafter.config)
    block, features = inputs()
    expected = naive_forward(drafter.config, weights, block[0], features[0], theta=500000.0)[None]
    torch.testing.assert_close(outputs(drafter, block, features), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [None, "auto", torch.bfloat16, torch.float32], ids=str)
def test_rotary_buffers_are_right_after_loading(tmp_path: Path, dtype: Any) -> None:
    """Known trap: transformers 5 builds models on meta, and buffers that __init__ computed come back as garbage.

    They must also stay in fp32 in a bf16 model, or far positions blur.
    """
    write_published_checkpoint(tmp_path, torch.bfloat16)
    drafter = DFlashDraftModel.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    expected = torch.tensor([500000.0 ** (-2 * i / 8) for i in range(4)])
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(drafter.rotary_emb.inv_freq, expected)
    assert all(tensor.device.type == "cpu" for tensor in (*drafter.parameters(), *drafter.buffers()))
    if dtype is not None:
        assert drafter.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    got = outputs(drafter, *inputs())
    assert got.isfinite().all()


def test_round_trip_of_the_weights(tmp_path: Path) -> None:
    """Promise: saved and loaded, in one file or in shards, it is the same network."""
    drafter = make_drafter(**{**MIXED, "sliding_window": 5})
    block, features = inputs()
    expected = outputs(drafter, block, features)
    for name, options in (("whole", {}), ("shards", {"max_shard_size": "20KB"})):
        drafter.save_pretrained(tmp_path / name, **options)
        loaded = DFlashDraftModel.from_pretrained(tmp_path / name)
        assert torch.equal(outputs(loaded, block, features), expected)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


def _spoil(folder: Path, change: Any) -> None:
    """Applies `change` to the checkpoint's weights."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        (lambda w: w.pop("fc.weight"), ["missing", "fc.weight"]),
        (lambda w: w.pop("layers.1.self_attn.k_norm.weight"), ["missing", "layers.1.self_attn.k_norm.weight"]),
        (lambda w: w.update({"embed_tokens.weight": torch.zeros(96, 32)}), ["unexpected", "embed_tokens.weight"]),
        (lambda w: w.update({"layers.2.mlp.up_proj.weight": torch.zeros(64, 32)}), ["unexpected", "layers.2.mlp"]),
        (lambda w: w.update({"fc.weight": torch.zeros(32, 96)}), ["mismatched", "fc.weight"]),
    ],
    ids=["missing", "missing norm", "unexpected", "a layer too many", "misshapen"],
)
def test_weights_that_do_not_fill_the_network_are_refused(tmp_path: Path, change: Any, phrases: list[str]) -> None:
    """Promise: never silently random: a drafter with random tensors would run and propose nothing. The tensor is named."""
    write_published_checkpoint(tmp_path)
    _spoil(tmp_path, change)
    with pytest.raises(ValueError, match="does not fill a DFlash drafter exactly") as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    for phrase in phrases:
        assert phrase in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_many_wrong_weights_are_counted_and_three_are_named(tmp_path: Path) -> None:
    """Known trap: a sentence of 5 kB that listed every tensor of a checkpoint of another kind."""
    count = len(write_published_checkpoint(tmp_path))
    _spoil(tmp_path, lambda w: [w.update({f"other.{name}": w.pop(name)}) for name in list(w)])
    with pytest.raises(ValueError, match="does not fill") as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    message = str(error.value).replace(str(tmp_path), "")
    assert f"{count} missing keys: fc.weight, hidden_norm.weight, layers.0." in message
    assert f"{count} unexpected keys: other.fc.weight" in message
    assert len(message) < 600


def test_prefixed_names_load_right(tmp_path: Path) -> None:
    """Promise: weights saved under "model." (as a training wrapper writes them) fill the same network."""
    weights = write_published_checkpoint(tmp_path)
    _spoil(tmp_path, lambda w: [w.update({"model." + name: w.pop(name)}) for name in list(w)])
    loaded = DFlashDraftModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5], ids=["empty", "no header", "half a header", "half"])
def test_truncated_weights_are_refused(tmp_path: Path, keep: float) -> None:
    """Promise: a file that cannot be read is named, with the remedy."""
    write_published_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match=r"cannot be read.*truncated.*fetch it again") as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    """Promise: a folder that holds no checkpoint is said to be one, instead of a search on the Hub."""
    write_published_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(OSError, match=r"holds no config\.json") as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_refused_with_the_way_to_merge_it(tmp_path: Path, has_config: bool) -> None:
    """Promise: a folder of peft is named as one. "Holds no config.json" sent its owner to look for a file that it never has."""
    write_published_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert adapter_fault(tmp_path) is None  # a merged model beside which the adapter was left
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    assert adapter_fault(tmp_path) is None
    (tmp_path / "pytorch_model.bin").unlink()
    if not has_config:
        (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"is a peft adapter.*merge it first \(merge_and_unload") as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [{"num_key_value_heads": 0}, {"hidden_act": "foo"}, {"layer_types": 3}],
    ids=json.dumps,
)
def test_a_config_that_cannot_be_read_is_said_in_one_sentence(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Promise: what no check foresaw is still a ValueError that names the checkpoint."""
    write_published_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ValueError, match=r"cannot be read \(\w+: .+dflash check") as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_config_without_what_a_drafter_needs_is_refused(tmp_path: Path, name: str) -> None:
    """Promise: a plain Qwen3 checkpoint, or a config that lost a field, is refused by the field's name."""
    write_published_checkpoint(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["dflash_config"][name]
    if name == "target_layer_ids":
        del fields["num_target_layers"]  # from which the ids would be derived
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"config holds no {name}"):
        DFlashDraftModel.from_pretrained(tmp_path)
