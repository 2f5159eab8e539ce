"""The drafter's configuration: every published form is read right, the portable form is written, bad values are said."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, DIMENSIONS, MASK_TOKEN_ID, NUM_TARGET_LAYERS, drafter_config, make_drafter
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash import DFlashConfig, default_target_layer_ids


# z-lab/Qwen3-8B-DFlash-b16, as published: flat rope, block size at the top, mask and layers in dflash_config.
QWEN3_8B = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
# z-lab/gpt-oss-20b-DFlash, as published: another model_type, biases, YaRN, no layer_types, no num_target_layers.
GPT_OSS_20B = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "block_size": 8,
    "bos_token_id": 199998,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "dtype": "bfloat16",
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 7680,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": YARN,
    "vocab_size": 201088,
}
# The newer form: block size inside dflash_config, rope_parameters alone, windows on every layer, causality spelled out.
NEWER = {
    "architectures": ["DFlashDraftModel"],
    "is_causal": False,
    "dflash_config": {"block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]},
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}

# What some engine needs of one checkpoint for all.
RECOMMENDED_FIELDS = {
    "architectures",
    "auto_map",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "use_cache",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "num_target_layers",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "dflash_config",
    "dtype",
    "torch_dtype",
}


def read(tmp_path: Path, fields: dict[str, Any]) -> DFlashConfig:
    """The configuration out of a folder whose config.json holds `fields`."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return DFlashConfig.from_pretrained(tmp_path)


def inverse_frequencies(config: DFlashConfig) -> tuple[torch.Tensor, float]:
    """What the drafter's rotary embedding makes of a configuration, on whatever version of transformers runs."""
    rotary = Qwen3RotaryEmbedding(config)
    return rotary.inv_freq.float(), float(rotary.attention_scaling)


def default_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """theta ** (-2 i / head_dim)."""
    return torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])


def yarn_frequencies(theta: float, head_dim: int, factor: float, original: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023), written out: interpolated below 1 rotation, extrapolated above 32, a ramp between."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_dim - 1)
    frequencies = []
    for i in range(head_dim // 2):
        plain = theta ** (-2 * i / head_dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(plain / factor * ramp + plain * (1 - ramp))
    return torch.tensor(frequencies), 0.1 * math.log(factor) + 1.0


# Reading.


def test_published_qwen3_form(tmp_path: Path) -> None:
    """Promise: z-lab's first form loads: its block size at the top, its other fields nested, both readable at the top."""
    config = read(tmp_path, QWEN3_8B)
    assert config.block_size == 16
    assert config.mask_token_id == 151669
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.num_target_layers == 36
    assert config.layer_types == ["full_attention"] * 5
    assert config.model_type == "qwen3"
    torch.testing.assert_close(inverse_frequencies(config)[0], default_frequencies(1e6, 128))


def test_published_gpt_oss_form(tmp_path: Path) -> None:
    """Promise: the form with another model_type, biases, YaRN and neither layer_types nor num_target_layers loads."""
    config = read(tmp_path, GPT_OSS_20B)
    assert config.block_size == 8
    assert config.mask_token_id == 200000
    assert config.target_layer_ids == [1, 6, 11, 16, 21]
    assert config.num_target_layers is None
    assert config.attention_bias is True
    assert config.layer_types == ["full_attention"] * 8
    frequencies, scaling = inverse_frequencies(config)
    expected, expected_scaling = yarn_frequencies(150000.0, 64, 32.0, 4096)
    torch.testing.assert_close(frequencies, expected)
    assert scaling == pytest.approx(expected_scaling)


def test_newer_form(tmp_path: Path) -> None:
    """Promise: block size inside dflash_config, rope_parameters alone and explicit causality load."""
    config = read(tmp_path, NEWER)
    assert config.block_size == 8
    assert [config.is_layer_causal(i) for i in range(5)] == [False] * 5
    assert [config.layer_window(i) for i in range(5)] == [2048] * 5
    torch.testing.assert_close(inverse_frequencies(config)[0], default_frequencies(1e7, 128))


@pytest.mark.parametrize("place", ["top", "nested", "both"])
def test_fields_are_read_in_either_place_and_written_in_both(tmp_path: Path, place: str) -> None:
    """Known trap: engines read one place or the other; z-lab and dflash-mlx need the top, vLLM and SpecForge the nest."""
    own = {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [0, 1], "num_target_layers": 4}
    fields: dict[str, Any] = {**DIMENSIONS, "num_hidden_layers": 2}
    if place != "nested":
        fields.update(own)
    if place != "top":
        fields["dflash_config"] = dict(own)
    config = DFlashConfig(**fields)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name, value in own.items():
        assert getattr(config, name) == value
        assert written[name] == value
        assert written["dflash_config"][name] == value


@pytest.mark.parametrize(
    ("name", "top", "nested"),
    [
        ("block_size", 8, 16),
        ("mask_token_id", 3, 4),
        ("target_layer_ids", [0, 2], [0, 1]),
        ("num_target_layers", 4, 5),
    ],
)
def test_doubles_that_disagree_are_refused(name: str, top: Any, nested: Any) -> None:
    """Promise: no engine-dependent winner: both values are named."""
    with pytest.raises(ValueError, match=name) as error:
        drafter_config(**{name: top, "dflash_config": {name: nested}})
    assert str(top) in str(error.value)
    assert str(nested) in str(error.value)


def test_causality_doubles_that_disagree_are_refused() -> None:
    """Promise: so for causality, which engines read from `is_causal` or from `dflash_config.causal`."""
    with pytest.raises(ValueError, match="causal"):
        drafter_config(is_causal=True, dflash_config={"causal": False})
    assert drafter_config(is_causal=True, dflash_config={"causal": True}).is_layer_causal(0)


def test_unknown_nested_fields_survive(tmp_path: Path) -> None:
    """Promise: what other tools wrote into dflash_config is kept through a round trip."""
    drafter_config(dflash_config={"num_anchors": 512}).save_pretrained(tmp_path)
    assert DFlashConfig.from_pretrained(tmp_path).dflash_config["num_anchors"] == 512


SPELLINGS = {
    "v4": lambda theta, scaling: {"rope_theta": theta, "rope_scaling": scaling},
    "v5": lambda theta, scaling: {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}},
    "both": lambda theta, scaling: {**SPELLINGS["v4"](theta, scaling), **SPELLINGS["v5"](theta, scaling)},
    "v4, old key": lambda theta, scaling: {
        "rope_theta": theta,
        "rope_scaling": scaling and {("type" if name == "rope_type" else name): scaling[name] for name in scaling},
    },
}


@pytest.mark.parametrize("scaling", [None, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_is_read_in_every_spelling(tmp_path: Path, spelling: str, scaling: dict[str, Any] | None) -> None:
    """Known bug: transformers 4.57 reads a config that 5.x saved silently with theta 10000; the drafter then proposes junk.

    Checked on the frequencies themselves, right after reading and after a round trip.
    """
    base = {**DIMENSIONS, "head_dim": 32, "max_position_embeddings": 131072, "num_hidden_layers": 2}
    base.update(model_type="qwen3", block_size=6, mask_token_id=3, target_layer_ids=[0])
    config = read(tmp_path, {**base, **SPELLINGS[spelling](5000000.0, scaling)})
    if scaling is None:
        expected, expected_scaling = default_frequencies(5e6, 32), 1.0
    else:
        expected, expected_scaling = yarn_frequencies(5e6, 32, YARN["factor"], 4096)
    again = tmp_path / "again"
    config.save_pretrained(again)
    for read_config in (config, DFlashConfig.from_pretrained(again)):
        frequencies, attention_scaling = inverse_frequencies(read_config)
        torch.testing.assert_close(frequencies, expected)
        assert attention_scaling == pytest.approx(expected_scaling)
    written = json.loads((again / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e6
    if scaling is None:
        assert written["rope_scaling"] is None
        assert written["rope_parameters"]["rope_type"] == "default"
    else:
        for name, value in scaling.items():
            assert written["rope_scaling"][name] == written["rope_parameters"][name] == value


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    ids=["partial rotary", "by layer type"],
)
def test_rope_that_is_not_computed_is_refused(parameters: dict[str, Any]) -> None:
    """Promise: a rope that this class would silently replace by another one is refused by name."""
    with pytest.raises(ValueError, match=r"partial_rotary_factor|rope_parameters"):
        drafter_config(rope_parameters=parameters)


# Writing.


def test_round_trip(tmp_path: Path) -> None:
    """Promise: what is saved is what is loaded, twice over."""
    config = drafter_config(
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_theta=5e5,
        is_causal=True,
        attention_bias=True,
    )
    config.save_pretrained(tmp_path / "one")
    again = DFlashConfig.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "two")
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert first == second
    expected, got = config.to_dict(), again.to_dict()
    for fields in (expected, got):
        fields.pop("_name_or_path", None)
    assert {name: value for name, value in got.items() if name in expected} == expected


def test_every_recommended_field_is_written(tmp_path: Path) -> None:
    """Promise: one checkpoint for all engines: each field that some engine needs is in the saved config.json."""
    drafter = make_drafter().to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        drafter.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not RECOMMENDED_FIELDS - set(written)
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["model_type"] == "qwen3"
    assert written["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert written["max_window_layers"] == written["num_hidden_layers"] == len(written["layer_types"])
    for name, value in (
        ("block_size", BLOCK_SIZE),
        ("mask_token_id", MASK_TOKEN_ID),
        ("target_layer_ids", [0, 2]),
        ("num_target_layers", NUM_TARGET_LAYERS),
    ):
        assert written[name] == written["dflash_config"][name] == value
    assert "sample_from_anchor" not in written
    assert "draft_vocab_size" not in written


def test_undeclared_causality_is_not_written(tmp_path: Path) -> None:
    """Known trap: some engines read `is_causal: null` as false; the published rule is said by absence."""
    drafter_config().save_pretrained(tmp_path)
    assert "is_causal" not in json.loads((tmp_path / "config.json").read_text())


# Windows and causality.


@pytest.mark.parametrize(
    ("fields", "windows", "causal"),
    [
        ({}, [None, None], [False, False]),
        ({"is_causal": True}, [None, None], [True, True]),
        ({"dflash_config": {"causal": True}}, [None, None], [True, True]),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, [8, None], [True, False]),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, [8, 8], [True, True]),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False}, [8, 8], [False, False]),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "is_causal": True},
            [8, None],
            [True, True],
        ),
        ({"sliding_window": 8, "max_window_layers": 0}, [8, 8], [True, True]),
        ({"sliding_window": 8, "max_window_layers": 1}, [None, 8], [False, True]),
    ],
)
def test_windows_and_causality_by_layer(fields: dict[str, Any], windows: list[Any], causal: list[bool]) -> None:
    """Promise: `is_causal` decides for all layers; without it sliding layers are causal and full ones are not."""
    config = drafter_config(**{"use_sliding_window": "sliding_window" in fields, **fields})
    assert [config.layer_window(i) for i in range(2)] == windows
    assert [config.is_layer_causal(i) for i in range(2)] == causal


def test_a_window_that_is_not_used_is_no_window() -> None:
    """Promise: transformers' rule: `sliding_window` counts only with `use_sliding_window`."""
    config = drafter_config(sliding_window=8, max_window_layers=0)
    assert config.layer_types == ["full_attention"] * 2
    assert [config.layer_window(i) for i in range(2)] == [None, None]


# The default spread of taps.


@pytest.mark.parametrize(
    ("num_layers", "ids"),
    [
        (36, [1, 9, 17, 25, 33]),
        (32, [1, 8, 15, 22, 29]),
        (64, [1, 16, 31, 46, 61]),
        (40, [1, 10, 19, 28, 37]),
        (24, [1, 6, 11, 16, 21]),
        (52, [1, 13, 25, 37, 49]),
        (8, [1, 2, 3, 4, 5]),
    ],
)
def test_default_taps_are_the_published_ones(num_layers: int, ids: list[int]) -> None:
    """Promise: the spread of the published checkpoints, by the depth of their targets."""
    assert default_target_layer_ids(num_layers) == ids
    assert drafter_config(target_layer_ids=None, num_target_layers=num_layers).target_layer_ids == ids


@pytest.mark.parametrize("num_taps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_layers", range(2, 24))
def test_default_taps_are_always_valid(num_layers: int, num_taps: int) -> None:
    """Promise: ascending, distinct, never the last layer, and never none, for any depth."""
    ids = default_target_layer_ids(num_layers, num_taps)
    assert 1 <= len(ids) <= num_taps
    assert ids == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] < num_layers - 1
    drafter_config(target_layer_ids=ids, num_target_layers=num_layers)


# Bad values: the value and the remedy.


@pytest.mark.parametrize(
    ("fields", "phrases"),
    [
        ({"block_size": 1}, ["block_size=1", "2 or more"]),
        ({"block_size": 0}, ["block_size=0", "2 or more"]),
        ({"mask_token_id": 96}, ["mask_token_id=96", "vocabulary of 96"]),
        ({"mask_token_id": -1}, ["mask_token_id=-1", "vocabulary of 96"]),
        ({"target_layer_ids": []}, ["target_layer_ids=[]", "ascending"]),
        ({"target_layer_ids": [2, 0]}, ["[2, 0]", "ascending"]),
        ({"target_layer_ids": [1, 1]}, ["[1, 1]", "repeats"]),
        ({"target_layer_ids": [-1, 1]}, ["[-1, 1]", "0-based"]),
        ({"target_layer_ids": [0, 3]}, ["[0, 3]", "last of 4", "up to 2"]),
        ({"target_layer_ids": [0, 9]}, ["[0, 9]", "up to 2"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["sliding_window=None", "use_sliding_window=True"]),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": False},
            ["sliding_window", "use_sliding_window=True"],
        ),
        ({"layer_types": ["chunked_attention"] * 2}, ["chunked_attention", "sliding_attention"]),
        ({"target_layer_ids": None, "num_target_layers": 1}, ["num_target_layers=1", "at least 2"]),
        ({"sample_from_anchor": True, "block_size": 0}, ["block_size=0"]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 1024}}, ["use_swa=True", "dflash.DFlashDraftModel"]),
        ({"dflash_config": {"attention_sink_bias": True}}, ["attention_sink_bias=True"]),
        ({"dflash_config": {"attention_value_scale": 0.612}}, ["attention_value_scale=0.612"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"dflash_config": {"conv_kernel_size": 2}}, ["conv_kernel_size=2", "conv_group_size=None"]),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, ["conv_group_size=5", "hidden_size=32"]),
        ({"dflash_config": {"selector_rank": 256}}, ["selector_rank=256", "selector_top_k=None"]),
        ({"selector_rank": 4, "selector_top_k": 97}, ["selector_top_k=97", "96"]),
        ({"draft_vocab_size": 97}, ["draft_vocab_size=97", "vocab_size=96"]),
        ({"target_hidden_size": 64}, ["target_hidden_size=64", "hidden_size=32"]),
        ({"output_multiplier": 2.0, "dflash_config": {"output_multiplier": 3.0}}, ["output_multiplier", "2.0", "3.0"]),
        ({"final_logit_softcapping": 0.0}, ["final_logit_softcapping=0.0"]),
        ({"markov_rank": 8, "markov_head_type": "rnn"}, ["markov_head_type='rnn'", "not supported"]),
        (
            {"markov_rank": 8, "selector_rank": 4, "selector_top_k": 4},
            ["markov_rank=8", "selector_rank=4", "one of both"],
        ),
        ({"enable_confidence_head": True}, ["enable_confidence_head=True", "markov_rank=None"]),
        ({"dflash_config": {"projector_type": "domino"}}, ["projector_type=domino", "gru_hidden_dim=None"]),
        ({"dflash_config": {"projector_type": "dspark"}}, ["projector_type=dspark", "markov_rank=None"]),
        ({"gru_hidden_dim": 8}, ["gru_hidden_dim=8", "emb_dim=None"]),
        (
            {"gru_hidden_dim": 8, "emb_dim": 4, "pure_draft_prefix_len": "2"},
            ["pure_draft_prefix_len='2'", "whole number"],
        ),
        ({"gru_hidden_dim": 8, "emb_dim": 4, "pure_draft_prefix_len": -1}, ["pure_draft_prefix_len=-1", "from 0 on"]),
        ({"gru_hidden_dim": 8, "emb_dim": 4, "shift_label": "false"}, ["shift_label='false'", "without quotes"]),
        ({"gru_hidden_dim": 8, "emb_dim": 0}, ["emb_dim=0", "above 0"]),
        ({"dflash_config": {"projector_type": "xpress"}}, ["projector_type='xpress'", "not supported"]),
        ({"shift_label": True}, ["shift_label=True", "Domino"]),
        (
            {"gru_hidden_dim": 8, "emb_dim": 4, "selector_rank": 4, "selector_top_k": 4},
            ["selector_rank=4", "gru_hidden_dim=8", "one of both"],
        ),
        ({"is_neox_style": False}, ["is_neox_style=False"]),
        ({"rope_is_neox_style": False}, ["rope_is_neox_style=False"]),
        ({"is_causal": "false"}, ["is_causal='false'", "without quotes"]),
        ({"mask_token_id": True}, ["mask_token_id=True", "whole number"]),
        ({"target_layer_ids": ["a", 2]}, ["['a', 2]", "list of layer numbers"]),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": -8, "use_sliding_window": True},
            ["sliding_window=-8", "above 0"],
        ),
        ({"final_logit_softcapping": "30"}, ["final_logit_softcapping='30'", "without quotes"]),
        ({"conv_kernel_size": 0, "conv_group_size": 4}, ["conv_kernel_size=0", "above 0"]),
        ({"conv_kernel_size": 2, "conv_group_size": 0}, ["conv_group_size=0", "above 0"]),
        ({"rope_scaling": {"rope_type": "foo"}}, ["rope_type='foo'", "yarn"]),
        ({"transformer_layer_config": {"hidden_size": 32}}, ["transformer_layer_config", "dflash.DFlashDraftModel"]),
    ],
    ids=lambda value: None if isinstance(value, list) else json.dumps(value),
)
def test_bad_values_are_said(fields: dict[str, Any], phrases: list[str]) -> None:
    """Promise: ValueError with the value and the remedy, when the configuration is built."""
    with pytest.raises(ValueError, match=r".") as error:
        drafter_config(**fields)
    for phrase in phrases:
        assert phrase in str(error.value)


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        ({"rope_theta": 5.0}, ["rope_theta=5.0", "1000000", "in both"]),
        ({"rope_scaling": YARN}, ["rope_scaling=", "yarn", "in both"]),
        ({"rope_theta": None, "rope_parameters": None}, ["rope_theta=None", "training run"]),
        ({"block_size": None}, ["holds no block_size", "training run"]),
        ({"dflash_config": {"mask_token_id": 151669}}, ["holds no target_layer_ids", "training run"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 17, 25, 33]}, ["[1, 9, 17, 25, 33]", "plus one"]),
        ({"dflash_config": [1]}, ["dflash_config=[1]", "object"]),
        ({"rope_parameters": [1]}, ["rope_parameters=[1]", "object"]),
        ({"target_layer_ids": "0,2"}, ["target_layer_ids='0,2'", "[1, 9, 17]"]),
        ({"hidden_size": "16"}, ["hidden_size='16'", "without quotes"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps='1e-6'", "without quotes"]),
        ({"dtype": "bf16"}, ["dtype='bf16'", "bfloat16"]),
    ],
    ids=lambda value: None if isinstance(value, list) else json.dumps(value)[:40],
)
def test_what_a_checkpoint_leaves_open_or_says_wrong_is_refused(
    tmp_path: Path, change: dict[str, Any], phrases: list[str]
) -> None:
    """Promise: reading never guesses what the drafter was trained with, and says the field, the value and the remedy."""
    parameters = {"rope_type": "default", "rope_theta": 1000000}
    with pytest.raises(ValueError, match=r".") as error:
        read(tmp_path, {**QWEN3_8B, "rope_parameters": parameters, **change})
    for phrase in phrases:
        assert phrase in str(error.value)


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json holds (a list and )?no object"):
        DFlashConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("fields", [{"sample_from_anchor": False}, {"dflash_config": {"use_swa": False}}])
def test_fields_that_are_switched_off_are_accepted(fields: dict[str, Any]) -> None:
    """Promise: a field that says "absent" refuses nothing."""
    assert drafter_config(**fields).block_size == BLOCK_SIZE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample_from_anchor", True),
        ("draft_vocab_size", 7),
        ("input_embedding_scale", 2.0),
        ("output_multiplier", 0.5),
        ("final_logit_softcapping", 30.0),
    ],
)
def test_optional_fields_are_written_twice_where_they_say_something(tmp_path: Path, name: str, value: Any) -> None:
    """Promise: engines look for them in either place; a drafter without them has neither, for some read a null as a value."""
    drafter_config().save_pretrained(tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert name not in plain
    assert name not in plain["dflash_config"]
    for fields in ({name: value}, {"dflash_config": {name: value}}):
        drafter_config(**fields).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written[name] == written["dflash_config"][name] == value
        assert getattr(DFlashConfig.from_pretrained(tmp_path), name) == value


def test_number_of_proposals() -> None:
    """Promise: every row proposes but the anchor's, unless it is declared to; then even a block of one row is a block."""
    assert drafter_config().num_proposals == BLOCK_SIZE - 1
    assert drafter_config(sample_from_anchor=True).num_proposals == BLOCK_SIZE
    assert drafter_config(sample_from_anchor=True, block_size=1).num_proposals == 1


def test_a_head_over_the_whole_vocabulary_is_no_reduced_head() -> None:
    """Promise: `draft_vocab_size` equal to the target's says nothing, and nothing is made of it."""
    assert drafter_config(draft_vocab_size=DIMENSIONS["vocab_size"]).draft_vocab_size is None
