"""Checkpoints as other tools write them, made here by those tools' rules and not by our own writer.

For each: nothing missing or unexpected, the forward and the logits of a plain restatement of that dialect, and the same
drafter again after it was converted. Known bugs that these guard: taps off by one, windows that are dropped, an anchor
row that is thrown away, a head over part of the vocabulary that is ignored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_configuration import yarn_frequencies
from test_modeling import naive_forward
from tiny_models import make_drafter, make_prompt, make_target, remembered_greedy
from transformers import PreTrainedModel, TorchAoConfig
from transformers import __version__ as transformers_version
from typer.testing import CliRunner

from dflash import DFlashConfig, DFlashDraftModel
from dflash.checkpoints import (
    DOMINO_NAME,
    TARGET_NAME,
    check,
    convert_checkpoint,
    embedded_path,
    export_checkpoint,
)
from dflash.cli import app as cli
from dflash.dialects import (
    ASSISTANT,
    DEEPSPEC,
    SPECULATORS,
    ZLAB,
    _read_speculators,
    dialect_of,
    portable_fields,
)


D, VOCAB, B, CONTEXT = 16, 40, 5, 9
HEADS, GROUPS, HEAD, INNER, LAYERS = 4, 2, 8, 24, 2
TAPS = [0, 2]
MASK = 39
WINDOW = 4
TARGET_LAYERS = 5

DECODER: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 512,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
    "vocab_size": VOCAB,
}
FULL, SLIDING = ["full_attention"] * LAYERS, ["sliding_attention"] * LAYERS
MIXED = ["sliding_attention", "full_attention"]


@dataclass
class Checkpoint:
    """A dialect's files, and what they mean, said apart from any class of ours.

    Attributes:
        fields: config.json.
        tensors: The weights under the dialect's own names.
        meant: The same weights under z-lab's names.
        layer_types: Of the drafter's layers; windows are `window` wide.
        is_causal: `None`: sliding layers are causal inside the block, full ones are not.
        first_row: The first row of the block that proposes: the anchor's is row 0.
        head: Logits over the target's vocabulary, of a hidden state and of the target's head.
        embeds: The block's rows, of the target's embedding matrix and what its module makes of it.
    """

    dialect: str
    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    meant: dict[str, torch.Tensor]
    layer_types: list[str] = field(default_factory=lambda: list(FULL))
    window: int = WINDOW
    is_causal: bool | None = None
    theta: float = 10000.0
    frequencies: list[float] | None = None
    rope_scaling: float = 1.0
    first_row: int = 1
    head: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda hidden, head: hidden @ head.T
    embeds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda raw, module: module
    shape: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The folder, with one weights file."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.fields))
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def hidden(self, block: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The plain restatement's hidden states [N, D], in double precision."""
        config = SimpleNamespace(
            rms_norm_eps=1e-5,
            head_dim=self.shape.get("head_dim", HEAD),
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            num_hidden_layers=LAYERS,
            layer_types=self.layer_types,
            sliding_window=self.window,
            is_causal=self.is_causal,
        )
        weights = {name: tensor.double() for name, tensor in self.meant.items()}
        return naive_forward(
            config, weights, block.double(), features.double(), self.theta, self.frequencies, self.rope_scaling
        )


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers of that shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def canonical(head_dim: int = HEAD, bias: bool = False) -> dict[str, torch.Tensor]:
    """11 tensors per layer and 3, under z-lab's names; norms away from 1, where a forgotten one would not show."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, len(TAPS) * D),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    for i in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "mlp.gate_proj.weight": (INNER, D),
            "mlp.up_proj.weight": (INNER, D),
            "mlp.down_proj.weight": (D, INNER),
        }
        for kind, rows in (("q", HEADS * head_dim), ("k", GROUPS * head_dim), ("v", GROUPS * head_dim)):
            own[f"self_attn.{kind}_proj.weight"] = (rows, D)
            if bias:
                own[f"self_attn.{kind}_proj.bias"] = (rows,)
        own["self_attn.o_proj.weight"] = (D, HEADS * head_dim)
        if bias:
            own["self_attn.o_proj.bias"] = (D,)
        shapes.update({f"layers.{i}.{name}": shape for name, shape in own.items()})
    weights = {}
    for place, (name, shape) in enumerate(sorted(shapes.items())):
        weights[name] = 0.3 * noise(*shape, seed=100 * place) + (1.0 if "norm" in name else 0.0)
    return weights


def dflash2_tensors(rank: int = 6, group: int = 4, num_taps: int = 2) -> dict[str, torch.Tensor]:
    """What DFlash2 adds."""
    added = {
        "candidate_selector.hidden_projection.weight": noise(rank, D, seed=1),
        "candidate_selector.predecessor_codebook": noise(VOCAB, rank, seed=2),
        "candidate_selector.successor_codebook": noise(VOCAB, rank, seed=3),
    }
    for i in range(LAYERS):
        for kind in ("attention", "mlp"):
            name = f"layers.{i}.{kind}_conv"
            added[f"{name}.base_kernel"] = noise(2, num_taps, D, seed=10 * i + len(kind))
            added[f"{name}.kernel_projection.weight"] = 0.3 * noise(2 * num_taps * D // group, D, seed=i + len(kind))
    return added


def zlab(**fields: Any) -> dict[str, Any]:
    """z-lab's first form: block size and rope at the top, mask and taps nested."""
    form = {
        **DECODER,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": B,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
        "dtype": "float32",
        "layer_types": FULL,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_target_layers": TARGET_LAYERS,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    }
    return {name: value for name, value in {**form, **fields}.items() if value is not ...}


def softcapped(multiplier: float, cap: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A head whose logits are scaled, then squeezed into (-cap, cap)."""
    return lambda hidden, head: cap * torch.tanh(multiplier * (hidden @ head.T) / cap)


def zlab_v1() -> Checkpoint:
    weights = canonical()
    return Checkpoint(ZLAB, zlab(), weights, weights, theta=1e6)


def zlab_mixed_windows() -> Checkpoint:
    """Qwen3.6's: sliding layers causal in the block, the full one not, said by absence."""
    weights = canonical()
    fields = zlab(layer_types=MIXED, sliding_window=WINDOW, use_sliding_window=True)
    return Checkpoint(ZLAB, fields, weights, weights, MIXED, theta=1e6)


def zlab_gemma() -> Checkpoint:
    """Gemma 4's: the head's logits are soft-capped; embeddings come scaled out of the target's module."""
    weights = canonical()
    nested = {"mask_token_id": MASK, "target_layer_ids": TAPS, "block_size": B, "final_logit_softcapping": 3.0}
    fields = zlab(
        block_size=..., dflash_config=nested, layer_types=MIXED, sliding_window=WINDOW, use_sliding_window=True
    )
    return Checkpoint(ZLAB, fields, weights, weights, MIXED, theta=1e6, head=softcapped(1.0, 3.0))


def zlab_gpt_oss() -> Checkpoint:
    """gpt-oss': biases, heads of 64, YaRN, another model_type, no layer_types and no depth."""
    weights = canonical(head_dim=64, bias=True)
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    fields = zlab(
        attention_bias=True, head_dim=64, model_type="gpt_oss", rope_theta=150000, rope_scaling=yarn, layer_types=...,
        num_target_layers=..., auto_map=..., max_position_embeddings=131072, initial_context_length=4096,
    )  # fmt: skip
    frequencies, scaling = yarn_frequencies(150000.0, 64, 32.0, 4096)
    return Checkpoint(
        ZLAB, fields, weights, weights, frequencies=frequencies.tolist(), rope_scaling=scaling, shape={"head_dim": 64}
    )


def zlab_dflash2() -> Checkpoint:
    """Own fields nested alone, rope_parameters alone, windows without causality, convolutions and a selector."""
    weights = {**canonical(), **dflash2_tensors()}
    nested = {
        "block_size": B, "mask_token_id": MASK, "target_layer_ids": TAPS, "conv_group_size": 4, "conv_kernel_size": 2,
        "selector_rank": 6, "selector_top_k": 4, "output_multiplier": 0.25, "final_logit_softcapping": 2.0,
        "input_embedding_scale": 0.5,
    }  # fmt: skip
    fields = zlab(
        architectures=["DFlash2DraftModel"], auto_map=..., block_size=..., rope_theta=..., rope_scaling=...,
        dflash_config=nested, is_causal=False, layer_types=SLIDING, sliding_window=WINDOW, use_sliding_window=True,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    )  # fmt: skip
    return Checkpoint(
        ZLAB, fields, weights, weights, SLIDING, is_causal=False, theta=1e6, head=softcapped(0.25, 2.0),
        embeds=lambda raw, module: 0.5 * raw,
    )  # fmt: skip


def specforge() -> Checkpoint:
    """SpecForge's export: z-lab's form with both spellings of rope, and fields of its own."""
    weights = canonical()
    nested = {"mask_token_id": MASK, "target_layer_ids": TAPS, "pure_draft_prefix_len": 0, "shift_label": False}
    fields = zlab(
        dflash_config=nested, layer_types=SLIDING, sliding_window=WINDOW, use_sliding_window=True,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"}, tie_word_embeddings=False,
    )  # fmt: skip
    return Checkpoint(ZLAB, fields, weights, weights, SLIDING, theta=1e6)


def domino(shift_label: bool = True) -> Checkpoint:
    """SpecForge's with Domino's head: with `shift_label`, the anchor's row proposes too."""
    gru, emb = 5, 4
    weights = canonical() | {
        "prefix_gru.weight_ih_l0": noise(3 * gru, D, seed=51),
        "prefix_gru.weight_hh_l0": noise(3 * gru, gru, seed=52),
        "embed_proj.0.weight": noise(emb, D + gru, seed=53),
        "embed_proj.2.weight": noise(VOCAB, emb, seed=54),
    }
    nested = {
        "mask_token_id": MASK, "target_layer_ids": TAPS, "projector_type": "domino", "pure_draft_prefix_len": 1,
        "emb_dim": emb, "gru_hidden_dim": gru, "shift_label": shift_label,
    }  # fmt: skip
    fields = zlab(
        architectures=["DominoDraftModel"], auto_map={"AutoModel": "domino.DominoDraftModel"}, emb_dim=emb,
        dflash_config=nested, tie_word_embeddings=False,
    )  # fmt: skip
    return Checkpoint(ZLAB, fields, weights, weights, theta=1e6, first_row=0 if shift_label else 1)


def early_domino() -> Checkpoint:
    """The head's tensors below `logit_head`, as the first checkpoints have them."""
    checkpoint = domino(shift_label=False)
    named = {
        f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name: tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=named)


DSPARK_RANK = 3


def dspark_tensors(is_gated: bool = False, size: int = VOCAB) -> dict[str, torch.Tensor]:
    """DSpark's head under the names of DeepSpec, speculators and SpecForge."""
    tensors = {
        "markov_head.markov_w1.weight": noise(VOCAB, DSPARK_RANK, seed=61),
        "markov_head.markov_w2.weight": noise(size, DSPARK_RANK, seed=62),
        "confidence_head.proj.weight": noise(1, D + DSPARK_RANK, seed=63),
        "confidence_head.proj.bias": noise(1, seed=64),
    }
    if is_gated:
        tensors["markov_head.gate_proj.weight"] = noise(DSPARK_RANK, D + DSPARK_RANK, seed=65)
        tensors["markov_head.gate_proj.bias"] = noise(DSPARK_RANK, seed=66)
    return tensors


def specforge_dspark() -> Checkpoint:
    """SpecForge's DSpark, whose anchor proposes without a word about it; the gate reads hidden states."""
    weights = canonical() | dspark_tensors(is_gated=True)
    nested = {
        "mask_token_id": MASK, "target_layer_ids": TAPS, "projector_type": "dspark", "attention_mode": "gqa",
        "markov_rank": DSPARK_RANK, "markov_head_type": "gated", "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    fields = zlab(architectures=["DSparkDraftModel"], auto_map=..., dflash_config=nested, tie_word_embeddings=False)
    return Checkpoint(ZLAB, fields, weights, weights, theta=1e6, first_row=0)


def modelopt_dspark() -> Checkpoint:
    """ModelOpt's DSpark, whose tensors have no prefix."""
    weights = canonical() | dspark_tensors()
    nested = {
        "mask_token_id": MASK, "target_layer_ids": TAPS, "projector_type": "dspark", "shift_label": True, "causal": False,
        "markov_rank": DSPARK_RANK, "markov_head_type": "vanilla", "use_confidence_head": True,
    }  # fmt: skip
    fields = zlab(dflash_config=nested, auto_map=..., tie_word_embeddings=False)
    tensors = {
        name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj"): tensor
        for name, tensor in weights.items()
    }
    return Checkpoint(ZLAB, fields, tensors, weights, is_causal=False, theta=1e6, first_row=0)


def modelopt_dflash2() -> Checkpoint:
    """ModelOpt's DFlash2, which also calls its head by a name."""
    first = zlab_dflash2()
    nested = first.fields["dflash_config"] | {"projector_type": "dflash2"}
    return replace(first, fields=first.fields | {"dflash_config": nested})


def modelopt() -> Checkpoint:
    """ModelOpt's export: all layers are called full, and two nested fields say that they slide and are not causal."""
    weights = canonical()
    nested = {
        "mask_token_id": MASK, "target_layer_ids": TAPS, "use_swa": True, "swa_window_size": WINDOW, "causal": False
    }  # fmt: skip
    fields = zlab(dflash_config=nested, auto_map=..., tie_word_embeddings=False)
    return Checkpoint(ZLAB, fields, weights, weights, SLIDING, is_causal=False, theta=1e6)


def modelopt_causal() -> Checkpoint:
    """ModelOpt's without windows: `causal` alone makes every layer causal in the block."""
    weights = canonical()
    nested = {"mask_token_id": MASK, "target_layer_ids": TAPS, "causal": True}
    return Checkpoint(ZLAB, zlab(dflash_config=nested, auto_map=...), weights, weights, is_causal=True, theta=1e6)


def jetspec(causal_head: bool = True, **fields: Any) -> Checkpoint:
    """JetSpec's, by the rules of its `DFlashDraftModel`: `causal_head` holds for every layer, and false if it is absent."""
    weights = canonical()
    nested = {
        "mask_token_id": MASK, "target_layer_ids": TAPS, "causal_head": causal_head, "target_hidden_size": D
    }  # fmt: skip
    fields = zlab(dflash_config=nested, auto_map=..., tie_word_embeddings=False, **fields)
    return Checkpoint(ZLAB, fields, weights, weights, fields["layer_types"], is_causal=causal_head, theta=1e6)


def jetspec_bidirectional() -> Checkpoint:
    """JetSpec's with windows, which are not causal unless it says so."""
    return jetspec(False, layer_types=SLIDING, sliding_window=WINDOW, use_sliding_window=True)


def speculators_config(layer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The decoder one level down, taps counted from the embedding's output."""
    form = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
        "block_size": B,
        "draft_vocab_size": VOCAB,
        "dtype": "float32",
        "has_no_defaults_at_init": False,
        "mask_token_id": MASK,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **DECODER,
            "architectures": ["Qwen3ForCausalLM"],
            "layer_types": FULL,
            "max_window_layers": LAYERS,
            "model_type": "qwen3",
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            "sliding_window": None,
            "use_sliding_window": False,
            **layer,
        },
    }
    return {**form, **fields}


WINDOWED_LAYER = {"layer_types": MIXED, "sliding_window": WINDOW, "use_sliding_window": True}
SAID = torch.tensor([1, 2, 5, 8, 13, 21, 34])  # ids of the target that a reduced head can say


def speculators_reduced() -> Checkpoint:
    """A head of its own over 7 tokens, with offsets into the target's vocabulary; frozen copies lie beside it."""
    weights, head = canonical(), noise(len(SAID), D, seed=5)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[SAID] = True
    tensors = {
        **weights,
        "lm_head.weight": head,
        "d2t": SAID - torch.arange(len(SAID)),
        "t2d": known,
        "embed_tokens.weight": noise(VOCAB, D, seed=6),
        "verifier_norm.weight": torch.ones(D),
        "verifier_lm_head.weight": head.clone(),
    }

    def say(hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*hidden.shape[:-1], VOCAB), -torch.inf, dtype=hidden.dtype)
        for place, token_id in enumerate(SAID.tolist()):
            logits[..., token_id] = hidden @ head[place].to(hidden.dtype)
        return logits

    fields = speculators_config({**WINDOWED_LAYER, "tie_word_embeddings": True}, draft_vocab_size=len(SAID))
    return Checkpoint(SPECULATORS, fields, tensors, weights, MIXED, theta=5e5, head=say)


def speculators_full() -> Checkpoint:
    """The whole vocabulary (its head is the target's), no causality anywhere, and an anchor that predicts."""
    weights = canonical()
    fields = speculators_config(WINDOWED_LAYER, sliding_window_non_causal=True, sample_from_anchor=True)
    tensors = {**weights, "embed_tokens.weight": noise(VOCAB, D, seed=6), "lm_head.weight": noise(VOCAB, D, seed=7)}
    return Checkpoint(
        SPECULATORS, fields, tensors, weights, MIXED, is_causal=False, theta=5e5, first_row=0
    )  # fmt: skip


def speculators_dflash2() -> Checkpoint:
    """DFlash2's fields flat at the top; a layer of another family, which leaves out what follows from the heads."""
    weights = {**canonical(head_dim=D // HEADS), **dflash2_tensors()}
    layer = {**WINDOWED_LAYER, "layer_types": SLIDING, "model_type": "llama"}
    fields = speculators_config(
        layer, speculators_model_type="dflash2", architectures=["DFlash2DraftModel"], sliding_window_non_causal=True,
        conv_group_size=4, conv_kernel_size=2, selector_rank=6, selector_top_k=4,
    )  # fmt: skip
    del fields["transformer_layer_config"]["head_dim"]
    return Checkpoint(
        SPECULATORS, fields, weights, weights, SLIDING, is_causal=False, theta=5e5, shape={"head_dim": D // HEADS},
        embeds=lambda raw, module: raw,
    )  # fmt: skip


def deepspec() -> Checkpoint:
    """DeepSeek's: flat, frozen copies of embedding and head, and not a word about its anchor, which predicts."""
    weights = canonical()
    fields = zlab(
        architectures=["Qwen3DSparkModel"], auto_map=..., dflash_config=..., mask_token_id=MASK, target_layer_ids=TAPS,
        num_anchors=512, enable_confidence_head=False, markov_rank=0, tie_word_embeddings=False,
    )  # fmt: skip
    tensors = {**weights, "embed_tokens.weight": noise(VOCAB, D, seed=6), "lm_head.weight": noise(VOCAB, D, seed=7)}
    return Checkpoint(DEEPSPEC, fields, tensors, weights, theta=1e6, first_row=0)


def speculators_dspark() -> Checkpoint:
    """A reduced vocabulary, which the second matrix has, too; the anchor proposes."""
    first = speculators_reduced()
    own = dspark_tensors(size=len(SAID))
    form = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "markov_rank": DSPARK_RANK}
    fields = first.fields | form | {"sample_from_anchor": True}
    return replace(first, fields=fields, tensors=first.tensors | own, meant=first.meant | own, first_row=0)


def deepspec_dspark() -> Checkpoint:
    """DeepSeek's: flat; its confidence does not read the previous token."""
    first = deepspec()
    own = dspark_tensors()
    own["confidence_head.proj.weight"] = noise(1, D, seed=63)
    form = {
        "markov_rank": DSPARK_RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": False,
    }  # fmt: skip
    return replace(first, fields=first.fields | form, tensors=first.tensors | own, meant=first.meant | own)


def assistant() -> Checkpoint:
    """transformers' own layout: flat, no vocabulary, `encoder.` names, raw embedding rows, no causality."""
    weights = canonical()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    fields = zlab(
        architectures=["MuseGlimmerAssistantModel"], auto_map=..., dflash_config=..., mask_token_id=MASK,
        target_layer_ids=TAPS, model_type="muse_glimmer_assistant", vocab_size=..., num_target_layers=..., layer_types=SLIDING,
        sliding_window=WINDOW, use_sliding_window=..., max_window_layers=..., rope_theta=..., rope_scaling=...,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    )  # fmt: skip
    tensors = {renamed.get(name, name): tensor for name, tensor in weights.items()}
    return Checkpoint(
        ASSISTANT, fields, tensors, weights, SLIDING, is_causal=False, theta=5e5, embeds=lambda raw, module: raw
    )  # fmt: skip


DIALECTS: dict[str, Callable[[], Checkpoint]] = {
    maker.__name__: maker
    for maker in (
        zlab_v1,
        zlab_mixed_windows,
        zlab_gemma,
        zlab_gpt_oss,
        zlab_dflash2,
        domino,
        early_domino,
        specforge,
        specforge_dspark,
        modelopt,
        modelopt_dspark,
        modelopt_dflash2,
        modelopt_causal,
        jetspec,
        jetspec_bidirectional,
        speculators_reduced,
        speculators_full,
        speculators_dflash2,
        speculators_dspark,
        deepspec,
        deepspec_dspark,
        assistant,
    )
}


@pytest.fixture(params=DIALECTS)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """One of each."""
    return DIALECTS[request.param]()


def block_and_features() -> tuple[torch.Tensor, torch.Tensor]:
    """A block [1, N, D] and context features [1, C, L * D]; the context is longer than the window."""
    return noise(1, B, D, seed=21), noise(1, CONTEXT, len(TAPS) * D, seed=22)


def hidden_states(drafter: DFlashDraftModel) -> torch.Tensor:
    """Those of one forward, [1, N, D]."""
    with torch.no_grad():
        return drafter(*block_and_features()).last_hidden_state


def target_head() -> torch.Tensor:
    """The target's head matrix, [V, D]."""
    return noise(VOCAB, D, seed=31)


# Reading.


def test_dialect_loads_and_computes_what_it_means(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Promise: every dialect fills the network exactly, and its forward is the plain restatement's, to 1e-5."""
    folder = checkpoint.write(tmp_path / "drafter")
    drafter, info = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert drafter.config.dialect == checkpoint.dialect
    assert drafter.config.block_size == B
    assert drafter.config.mask_token_id == MASK
    assert drafter.config.target_layer_ids == TAPS
    assert drafter.config.num_proposals == B - checkpoint.first_row
    block, features = block_and_features()
    expected = checkpoint.hidden(block[0], features[0])[None]
    torch.testing.assert_close(hidden_states(drafter).double(), expected, rtol=0, atol=1e-5)


def test_logits_are_those_of_the_dialect(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Promise: multiplier, soft cap and a head over part of the vocabulary are applied; tokens it lacks are impossible."""
    drafter = DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path / "drafter"), dtype=torch.float32)
    states, head = hidden_states(drafter), target_head()
    with torch.no_grad():
        logits = drafter.compute_logits(states, lambda hidden: hidden @ head.T)
    assert logits.shape == (1, B, VOCAB)
    torch.testing.assert_close(logits.double(), checkpoint.head(states.double(), head.double()), rtol=0, atol=1e-5)
    embed = torch.nn.Embedding(VOCAB, D)
    asked = states[:, checkpoint.first_row :], torch.tensor([[3]]), lambda hidden: hidden @ head.T
    proposals = drafter.propose(*asked, embed=embed)
    assert proposals.candidate_ids is None
    if drafter.causal_head(embed) is None:
        assert torch.equal(proposals.token_ids, logits[:, checkpoint.first_row :].argmax(dim=-1))


def test_block_rows_are_read_as_the_dialect_reads_them(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Promise: raw rows where the drafter was trained on raw rows, else what the target's module makes of them."""

    class Scaled(torch.nn.Embedding):
        def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(token_ids) * 4.0

    drafter = DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path / "drafter"), dtype=torch.float32)
    embedding, token_ids = Scaled(VOCAB, D), torch.tensor([[3, MASK, MASK]])
    raw = embedding.weight[token_ids]
    assert torch.equal(drafter.embed(token_ids, embedding), checkpoint.embeds(raw, 4.0 * raw))


def test_taps_of_every_dialect_are_the_same_layers() -> None:
    """Known bug: off by one costs 0.1 to 0.3 tau and no error. The same drafter names the same layers in each."""
    forms = [
        zlab(),
        zlab(dflash_config={"mask_token_id": MASK}, target_layer_ids=TAPS),
        zlab(dflash_config={"mask_token_id": MASK}, eagle_aux_hidden_state_layer_ids=[i + 1 for i in TAPS]),
        speculators_config({}),
        deepspec().fields,
        assistant().fields,
    ]
    for fields in forms:
        assert DFlashConfig(**portable_fields(fields)).target_layer_ids == TAPS


NO, YES = False, True


@pytest.mark.parametrize(
    ("fields", "windows", "causal"),
    [
        (zlab(), [None, None], [NO, NO]),
        (zlab(is_causal=True), [None, None], [YES, YES]),
        (zlab(layer_types=MIXED, sliding_window=4, use_sliding_window=True), [4, None], [YES, NO]),
        (zlab(layer_types=SLIDING, sliding_window=4, use_sliding_window=True), [4, 4], [YES, YES]),
        (zlab(layer_types=SLIDING, sliding_window=4, use_sliding_window=True, is_causal=False), [4, 4], [NO, NO]),
        (modelopt().fields, [4, 4], [NO, NO]),
        (modelopt_causal().fields, [None, None], [YES, YES]),
        # MiMo's: the flag alone, no layer types and nothing about causality.
        (zlab(layer_types=..., dflash_config={**modelopt().fields["dflash_config"], "causal": None}), [4, 4], [NO, NO]),
        # The flag beside layer types that slide already: they keep the legacy causality, and the flag's window wins.
        (
            zlab(layer_types=MIXED, sliding_window=9, use_sliding_window=True, dflash_config={**zlab()["dflash_config"], "use_swa": True, "swa_window_size": 4}),
            [4, None],
            [YES, NO],
        ),
        (zlab(sliding_window=6, dflash_config={**zlab()["dflash_config"], "use_swa": True, "causal": True}), [6, 6], [YES, YES]),
        # In both places, where the inner one wins, and beside layers that slide without the flag.
        (zlab(swa_window_size=9, dflash_config=modelopt().fields["dflash_config"]), [4, 4], [NO, NO]),
        (
            zlab(layer_types=SLIDING, sliding_window=9, use_sliding_window=True, swa_window_size=4),
            [4, 4],
            [YES, YES],
        ),
        (speculators_config(WINDOWED_LAYER), [4, None], [YES, NO]),
        (speculators_config(WINDOWED_LAYER, sliding_window_non_causal=True), [4, None], [NO, NO]),
        (deepspec().fields, [None, None], [NO, NO]),
        (assistant().fields, [4, 4], [NO, NO]),
    ],
)  # fmt: skip
def test_windows_and_causality_of_every_dialect(
    fields: dict[str, Any], windows: list[Any], causal: list[bool]
) -> None:
    """Promise: who sees whom is what the tool that trained the drafter meant, layer by layer."""
    config = DFlashConfig(**portable_fields(fields))
    assert [config.layer_window(i) for i in range(LAYERS)] == windows
    assert [config.is_layer_causal(i) for i in range(LAYERS)] == causal


@pytest.mark.parametrize(
    ("fields", "names", "dialect"),
    [
        (zlab(), (), ZLAB),
        (zlab(dflash_config={}), (), ZLAB),
        (speculators_config({}), (), SPECULATORS),
        (deepspec().fields, (), DEEPSPEC),
        (deepspec().fields, ("fc.weight",), DEEPSPEC),
        (assistant().fields, (), ASSISTANT),
        (assistant().fields, ("encoder.fc.weight",), ASSISTANT),
        # Tensors decide where the fields are alike.
        ({**assistant().fields, "model_type": "qwen3"}, ("encoder.fc.weight",), ASSISTANT),
        ({**deepspec().fields, "model_type": "odd_assistant"}, ("fc.weight",), DEEPSPEC),
        (DECODER, (), ZLAB),
    ],
)
def test_dialects_are_told_by_fields_and_tensors(fields: dict[str, Any], names: tuple[str, ...], dialect: str) -> None:
    """Promise: never by the checkpoint's name."""
    assert dialect_of(fields, names) == dialect


def test_a_flat_drafter_may_say_that_its_anchor_does_not_predict(tmp_path: Path) -> None:
    """Promise: what is declared wins over what the dialect implies."""
    checkpoint = deepspec()
    checkpoint.fields["sample_from_anchor"] = False
    config = DFlashConfig.from_pretrained(checkpoint.write(tmp_path))
    assert config.num_proposals == B - 1


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        (zlab(logit_scale=0.5, output_multiplier=None), "output_multiplier", 0.5),
        (assistant().fields | {"vocab_size": None}, "vocab_size", 0),
        (assistant().fields | {"input_embedding_scale": None}, "input_embedding_scale", 1.0),
        (deepspec().fields | {"sample_from_anchor": None}, "sample_from_anchor", True),
    ],
)
def test_a_null_is_no_value(fields: dict[str, Any], name: str, value: Any) -> None:
    """Bug: a null took the place of what a dialect implies."""
    assert portable_fields(fields)[name] == value


def test_a_tensor_of_another_dtype_is_cast_as_when_it_is_loaded(tmp_path: Path) -> None:
    """Promise: a converted drafter has one dtype, the config's, whatever its norms were stored as."""
    checkpoint = zlab_v1()
    checkpoint.fields["dtype"] = "bfloat16"
    for name, tensor in checkpoint.tensors.items():
        if "norm" not in name:
            checkpoint.tensors[name] = tensor.bfloat16()
    source = checkpoint.write(tmp_path / "theirs")
    written = load_file(convert_checkpoint(source, tmp_path / "ours") / "model.safetensors")
    loaded = DFlashDraftModel.from_pretrained(source, dtype="auto").state_dict()
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in written.items())


def test_sharded_and_half_precision_checkpoints(tmp_path: Path) -> None:
    """Promise: shards and `dtype="auto"` work in a dialect as in our own form; rotary tables and offsets keep their dtype."""
    checkpoint = speculators_reduced()
    half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in checkpoint.tensors.items()}
    checkpoint.fields["dtype"] = "bfloat16"
    folder = checkpoint.write(tmp_path)
    (folder / "model.safetensors").unlink()
    names = sorted(half)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: half[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    drafter = DFlashDraftModel.from_pretrained(folder, dtype="auto")
    assert drafter.dtype == torch.bfloat16
    assert drafter.d2t.dtype == torch.long
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, half[name])


def test_quantised_drafter(tmp_path: Path) -> None:
    """Promise: transformers' own quantisers work, and what they save is read again (known trap: torchao asks for an embedding).

    Their packages are no dependency; torchao is the one tried, where it is installed. transformers 4 cannot save it as safetensors.
    """
    folder = zlab_v1().write(tmp_path / "drafter")
    plain = DFlashDraftModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert plain.get_input_embeddings() is None
    torchao = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    small = DFlashDraftModel.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    assert type(small.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    expected, got = hidden_states(plain), hidden_states(small)
    assert (got - expected).norm() < 0.05 * expected.norm()
    if transformers_version.startswith("4"):
        return
    small.save_pretrained(tmp_path / "small")
    assert torch.equal(hidden_states(DFlashDraftModel.from_pretrained(tmp_path / "small")), got)


def test_the_real_assistant_of_transformers(tmp_path: Path) -> None:
    """Promise: transformers' own DFlash drafter, saved by its own class, is the same network here."""
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    config = muse.MuseGlimmerAssistantConfig(
        **{name: value for name, value in DECODER.items() if name not in ("vocab_size", "use_cache", "attention_bias")},
        block_size=B, mask_token_id=MASK, target_layer_ids=TAPS, sliding_window=64, layer_types=SLIDING,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    theirs = muse.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.3 * noise(*parameter.shape, seed=parameter.numel())
    theirs.save_pretrained(tmp_path)
    ours, info = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert ours.config.dialect == ASSISTANT
    block, features = block_and_features()
    with torch.no_grad():
        expected = theirs(noise_embeds=block, context_hidden_states=features).last_hidden_state
    torch.testing.assert_close(hidden_states(ours), expected, rtol=0, atol=1e-5)


# DFlash2.


def naive_walk(
    weights: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    logits: torch.Tensor,
    anchor: int,
    top_k: int,
    uniforms: Any,
) -> tuple[list[int], list[list[int]], list[list[float]]]:
    """The selector's path after an anchor, of hidden states [R, D] and logits [R, V], and each row's candidates and distribution."""
    projection = weights["candidate_selector.hidden_projection.weight"].double()
    before = weights["candidate_selector.predecessor_codebook"].double()
    after = weights["candidate_selector.successor_codebook"].double()
    path, candidates, distributions = [], [], []
    for row in range(len(hidden)):
        ids = sorted(range(logits.shape[1]), key=lambda token: -float(logits[row, token]))[:top_k]
        projected = projection @ hidden[row].double()
        scores = [
            float(logits[row, token]) + sum(float(a * h * b) for a, h, b in zip(before[anchor], projected, after[token], strict=True))
            for token in ids
        ]  # fmt: skip
        distribution = torch.tensor(scores, dtype=torch.float64).div(0.7).softmax(dim=0).tolist()
        place = scores.index(max(scores))
        if uniforms is not None:
            place = next(i for i in range(top_k) if sum(distribution[: i + 1]) > float(uniforms[row]))
        anchor = ids[place]
        path.append(anchor)
        candidates.append(ids)
        distributions.append(distribution)
    return path, candidates, distributions


@pytest.mark.parametrize("maker", [zlab_dflash2, speculators_dflash2])
def test_selector_walks_as_written(maker: Callable[[], Checkpoint], tmp_path: Path) -> None:
    """Promise: greedy and drawn paths, candidates and the distribution q are those of the formula, row by row of a batch."""
    checkpoint = maker()
    drafter = DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path), dtype=torch.float32)
    states, head = noise(6, B - 1, D, seed=41), target_head()
    anchors = torch.tensor([[0], [3], [7], [11], [30], [39]])
    uniforms = torch.rand(6, B - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    logits = checkpoint.head(states, head)
    greedy = drafter.propose(states, anchors, lambda hidden: hidden @ head.T)
    drawn = drafter.propose(states, anchors, lambda hidden: hidden @ head.T, (0.7, uniforms))
    assert greedy.probabilities is None
    for place, anchor in enumerate(anchors[:, 0].tolist()):
        path, _, _ = naive_walk(checkpoint.meant, states[place], logits[place], anchor, 4, None)
        assert greedy.token_ids[place].tolist() == path
        path, ids, distributions = naive_walk(
            checkpoint.meant, states[place], logits[place], anchor, 4, uniforms[place]
        )
        assert drawn.token_ids[place].tolist() == path
        assert drawn.candidate_ids[place].tolist() == ids
        torch.testing.assert_close(drawn.probabilities[place].tolist(), distributions, rtol=0, atol=1e-5)
    assert not torch.equal(greedy.token_ids, logits.argmax(dim=-1))  # the selector changes something
    assert not torch.equal(greedy.token_ids, drawn.token_ids)


@pytest.mark.parametrize("maker", [domino, early_domino])
def test_dominos_head_walks_as_written(maker: Callable[[], Checkpoint], tmp_path: Path) -> None:
    """Promise: a step of torch's GRU for each token chosen, the table's row added to the logits, but for the first proposal."""
    checkpoint = maker()
    drafter = DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path), dtype=torch.float32)
    states, head, embeddings = noise(6, B - 1, D, seed=41), target_head(), noise(VOCAB, D, seed=42)
    anchors = torch.tensor([[0], [3], [7], [11], [30], [39]])
    greedy = drafter.propose(states, anchors, lambda hidden: hidden @ head.T, embed=lambda ids: embeddings[ids])
    gru = torch.nn.GRU(D, 5, bias=False, batch_first=True)
    gru.load_state_dict({name: checkpoint.meant[f"prefix_gru.{name}"] for name, _ in gru.named_parameters()})
    mix, table = (checkpoint.meant[f"embed_proj.{i}.weight"] for i in (0, 2))
    changed = 0
    for place, anchor in enumerate(anchors[:, 0].tolist()):
        read, path = [anchor], []
        for row in range(B - 1):
            state = gru(embeddings[torch.tensor([read])])[0][0, -1]
            logits = states[place, row] @ head.T
            delta = table @ torch.nn.functional.silu(mix @ torch.cat([states[place, row], state]))
            best = logits.topk(16).indices
            path.append(int(best[(logits + delta if row else logits)[best].argmax()]))
            changed += path[-1] != int(logits.argmax())
            read.append(path[-1])
        assert greedy.token_ids[place].tolist() == path
    assert changed


@pytest.mark.parametrize("maker", [specforge_dspark, modelopt_dspark, speculators_dspark, deepspec_dspark])
def test_dsparks_head_computes_what_its_tools_compute(maker: Callable[[], Checkpoint], tmp_path: Path) -> None:
    """Promise: logits with the bias of the previous token, the path, q and the confidence are those of the formula, to 1e-5."""
    checkpoint = maker()
    drafter = DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path), dtype=torch.float32)
    weights = {name: tensor.double() for name, tensor in checkpoint.meant.items()}
    before, after = (weights[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    states, head = noise(6, B, D, seed=41), target_head()
    anchors = torch.tensor([[0], [3], [7], [11], [30], [39]])
    uniforms = torch.rand(6, B, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    causal_head = drafter.causal_head(None)
    assert causal_head is not None
    causal_head.top_k = len(after)  # all tokens that the drafter can say, as the tools do
    drafter.causal_head = lambda embed: causal_head  # type: ignore[method-assign, misc, assignment]
    greedy = drafter.propose(states, anchors, lambda hidden: hidden @ head.T)
    drawn = drafter.propose(states, anchors, lambda hidden: hidden @ head.T, (0.7, uniforms))
    assert greedy.confidences is not None
    assert drawn.candidate_ids is not None
    assert drawn.probabilities is not None
    changed = 0
    for place, anchor in enumerate(anchors[:, 0].tolist()):
        for proposals in (greedy, drawn):
            previous = anchor
            for row in range(B):
                hidden = states[place, row].double()
                rank = before[previous]
                if "markov_head.gate_proj.weight" in weights:
                    read = torch.cat([hidden, rank])
                    gate = weights["markov_head.gate_proj.weight"] @ read + weights["markov_head.gate_proj.bias"]
                    rank = gate.sigmoid() * rank
                logits = checkpoint.head(hidden, head.double())
                plain = int(logits.argmax())
                own = SAID if len(after) < VOCAB else slice(None)
                logits[own] = logits[own] + after @ rank
                known = hidden
                if len(weights["confidence_head.proj.weight"][0]) > D:
                    known = torch.cat([hidden, before[previous]])
                confidence = (
                    weights["confidence_head.proj.weight"][0] @ known + weights["confidence_head.proj.bias"][0]
                )
                assert proposals.confidences is not None
                torch.testing.assert_close(
                    proposals.confidences[place, row].double(), confidence.sigmoid(), rtol=0, atol=1e-5
                )
                previous = int(proposals.token_ids[place, row])
                if proposals is greedy:
                    assert previous == int(logits.argmax())
                    changed += previous != plain
                else:
                    q = torch.zeros(VOCAB, dtype=torch.float64)
                    q[drawn.candidate_ids[place, row]] = drawn.probabilities[place, row].double()
                    torch.testing.assert_close(q, (logits / 0.7).softmax(0), rtol=0, atol=1e-5)
    assert changed
    assert not torch.equal(greedy.token_ids, drawn.token_ids)


def test_convolutions_stay_inside_their_block() -> None:
    """Promise: rows of two blocks in one forward (training) are two forwards of one block; a narrower block works too."""
    drafter = make_drafter(conv_kernel_size=3, conv_group_size=4, selector_rank=2, selector_top_k=2)
    conv, size = drafter.layers[0].mlp_conv, drafter.config.block_size
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter += noise(*parameter.shape)
        rows = noise(2, 2 * size, 32)
        together = conv(rows, torch.tanh)
        for part in (slice(0, size), slice(size, None)):
            torch.testing.assert_close(together[:, part], conv(rows[:, part], torch.tanh))
        for width in (1, 2, size - 1):
            torch.testing.assert_close(together[:, :width], conv(rows[:, :width], torch.tanh))


def test_a_new_dflash2_drafter_begins_as_dflash() -> None:
    """Promise: fresh convolutions change nothing, so training starts from the plain drafter."""
    plain = make_drafter()
    fresh = make_drafter(conv_kernel_size=2, conv_group_size=4, selector_rank=2, selector_top_k=2)
    fresh.load_state_dict(plain.state_dict(), strict=False)
    block, features = noise(1, 6, 32), noise(1, 7, 64)
    with torch.no_grad():
        states = [model(block, features).last_hidden_state for model in (plain, fresh)]
    torch.testing.assert_close(states[0], states[1])


# Writing.


def test_converted_checkpoint_is_the_same_drafter(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Promise: read, written and read again: the same tensors under z-lab's names, the same fields, the same forward."""
    folder = checkpoint.write(tmp_path / "theirs")
    first = DFlashDraftModel.from_pretrained(folder, dtype="auto")
    asked = {} if first.config.vocab_size else {"target": write_target(tmp_path / "target")}
    written = convert_checkpoint(folder, tmp_path / "ours", **asked)
    assert written == tmp_path / "ours"
    stored = load_file(written / "model.safetensors")
    own = {"lm_head.weight", "d2t"} if checkpoint.fields.get("draft_vocab_size", VOCAB) < VOCAB else set()
    assert set(stored) == set(checkpoint.meant) | own
    for name, tensor in stored.items():
        expected = checkpoint.tensors[name] if name in own else checkpoint.meant[name]
        assert torch.equal(tensor, expected)
        assert tensor.dtype == expected.dtype
    again = DFlashDraftModel.from_pretrained(written, dtype="auto")
    assert again.config.dialect == ZLAB
    filled = ("vocab_size", "num_target_layers", "dflash_config") if asked else ()
    changing = ("_name_or_path", "architectures", "auto_map", "transformers_version", "dialect", *filled)
    before, after = (
        {name: value for name, value in model.config.to_dict().items() if name not in changing}
        for model in (first, again)
    )
    assert after == before
    assert torch.equal(hidden_states(again), hidden_states(first))
    fields = json.loads((written / "config.json").read_text())
    is_second = "candidate_selector.successor_codebook" in stored
    name = "DFlash2DraftModel" if is_second else "DFlashDraftModel"
    if "markov_head.markov_w1.weight" in stored:
        name = "DSparkDraftModel"
    assert fields["architectures"] == [name]
    assert fields["auto_map"]["AutoModel"] == "modeling_dflash.DFlashDraftModel"
    assert fields["model_type"] == "qwen3"
    for gone in (
        "transformer_layer_config",
        "aux_hidden_state_layer_ids",
        "num_anchors",
        "attention_mode",
        "use_swa",
        "dialect",
    ):
        assert gone not in fields
        assert gone not in fields["dflash_config"]
    assert (written / "modeling_dflash.py").is_file()
    # Converting what is converted already changes nothing.
    twice = convert_checkpoint(written, tmp_path / "twice")
    assert json.loads((twice / "config.json").read_text()) == fields


def test_resaving_a_model_of_another_dialect_writes_the_portable_names(tmp_path: Path) -> None:
    """Known trap: transformers 5 saves a model under the names that it was read from, which no engine then finds."""
    for name, checkpoint in (("assistant", assistant()), ("prefixed", zlab_v1())):
        if name == "prefixed":
            checkpoint.tensors = {f"model.{key}": tensor for key, tensor in checkpoint.tensors.items()}
        drafter = DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path / name))
        drafter.save_pretrained(tmp_path / f"{name}-again")
        assert set(load_file(tmp_path / f"{name}-again" / "model.safetensors")) == set(checkpoint.meant)


def write_target(folder: Path, **fields: Any) -> Path:
    """A target's folder, of which the config is what is read."""
    make_target(vocab_size=VOCAB, hidden_size=D, num_hidden_layers=TARGET_LAYERS, **fields).config.save_pretrained(
        folder
    )
    return folder


def test_the_target_fills_in_what_a_dialect_leaves_out(tmp_path: Path) -> None:
    """Promise: depth and vocabulary come from the target's config, and a target that does not fit is refused."""
    source, target = assistant().write(tmp_path / "theirs"), write_target(tmp_path / "target")
    written = json.loads((convert_checkpoint(source, tmp_path / "ours", target) / "config.json").read_text())
    assert written["num_target_layers"] == written["dflash_config"]["num_target_layers"] == TARGET_LAYERS
    assert written["vocab_size"] == VOCAB
    with pytest.raises(ValueError, match=r"theirs does not say vocab_size: pass target \(--target\)"):
        convert_checkpoint(source, tmp_path / "never")
    other = write_target(tmp_path / "other", intermediate_size=32)
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace(f'"hidden_size": {D}', '"hidden_size": 64')
    )
    with pytest.raises(ValueError, match=r"hidden_size is 16 for the drafter and 64 .* another target"):
        convert_checkpoint(source, tmp_path / "never", other)
    assert not (tmp_path / "never").exists()


@cache
def their_target() -> PreTrainedModel:
    """A target for drafters of all dialects; read-only."""
    return make_target(vocab_size=VOCAB, hidden_size=D, num_hidden_layers=TARGET_LAYERS)


def test_every_dialect_drafts_losslessly(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Promise: once its target has filled in what it leaves out, a drafter of any dialect runs, and the text is the target's."""
    target = their_target()
    target.config.save_pretrained(tmp_path / "target")
    source = checkpoint.write(tmp_path / "theirs")
    drafter = DFlashDraftModel.from_pretrained(convert_checkpoint(source, tmp_path / "ours", tmp_path / "target"))
    prompt_ids = make_prompt(vocab_size=VOCAB)
    text = drafter.spec_generate(prompt_ids, target=target, max_new_tokens=16, temperature=0.0)
    assert torch.equal(text, remembered_greedy(target, prompt_ids, max_new_tokens=16))


def test_commands_convert_and_export(tmp_path: Path) -> None:
    """Promise: the commands print where they wrote, and refuse a source that is none."""
    source, target = deepspec().write(tmp_path / "theirs"), write_target(tmp_path / "target")
    runner = CliRunner()
    done = runner.invoke(cli.app, ["convert", str(source), str(tmp_path / "ours"), "--target", str(target)])
    assert done.output.split("\n")[-2] == str(tmp_path / "ours")
    assert DFlashConfig.from_pretrained(tmp_path / "ours").num_proposals == B
    done = runner.invoke(
        cli.app, ["export", str(tmp_path / "ours"), str(tmp_path / "x-DFlash"), "--target", str(target)]
    )
    assert "sample_from_anchor=True" in str(done.exception)
    done = runner.invoke(cli.app, ["convert", str(tmp_path), str(tmp_path / "never")])
    assert "SOURCE" in str(done.exception)
    for command in ("convert", "export"):
        words = [command, str(source), str(tmp_path / "never-DFlash"), "--target"]
        assert "--target ./nope is not a folder" in str(runner.invoke(cli.app, [*words, "./nope"]).exception)
        said = str(runner.invoke(cli.app, [*words, "no/such-target"]).exception)
        # An export of this drafter is refused before its target is asked for.
        assert ("the target no/such-target cannot be read" if command == "convert" else "sample_from_anchor") in said
    assert not (tmp_path / "never-DFlash").exists()
    assert not (tmp_path / "never").exists()


def test_export_is_what_every_engine_reads(tmp_path: Path) -> None:
    """Promise: a card and a name with DFlash in it, or a reason why some engine could not read the drafter."""
    target = write_target(tmp_path / "target")
    folder = export_checkpoint(zlab_v1().write(tmp_path / "theirs"), tmp_path / "tiny-DFlash", target)
    assert "trust_remote_code=True" in (folder / "README.md").read_text()
    assert DFlashDraftModel.from_pretrained(folder).config.num_target_layers == TARGET_LAYERS
    for name, checkpoint, said in (
        ("other", zlab_v1(), r"'other' does not contain 'DFlash'.*rename"),
        ("a-DFlash", deepspec(), r"sample_from_anchor=True.*dflash convert"),
        ("b-DFlash", speculators_reduced(), r"draft_vocab_size=7.*dflash convert"),
    ):
        with pytest.raises(ValueError, match=said):
            export_checkpoint(checkpoint.write(tmp_path / f"{name}-source"), tmp_path / name, target)
        assert not (tmp_path / name).exists()


def test_export_refuses_what_some_engine_fails_on(tmp_path: Path) -> None:
    """Promise: the engines by name and the way out; nothing is written, nothing half done stays."""
    source, target = zlab_dflash2().write(tmp_path / "theirs"), write_target(tmp_path / "target")
    with pytest.raises(ValueError, match=r"SGLang.* cannot run this drafter \(.*dflash convert"):
        export_checkpoint(source, tmp_path / "tiny-DFlash", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "theirs"]


def test_export_names_the_engine_that_reads_a_domino_drafter_as_it_is(tmp_path: Path) -> None:
    """Promise: the way out names SGLang and the trained folder. "Use dflash convert" alone led nowhere near an engine."""
    folders = [str(embedded_path(name)) for name in (DOMINO_NAME, TARGET_NAME)]
    with pytest.raises(ValueError, match=r" cannot run this drafter \(projector_type: ") as error:
        export_checkpoint(folders[0], tmp_path / "tiny-DFlash", folders[1])
    failing, _, way = str(error.value).partition(" cannot run ")
    assert ("vLLM" in failing, "SGLang" in failing) == (True, False)
    assert (
        "for this library and, by the rules of `dflash check`, for SGLang; a folder that `dflash train` wrote" in way
    )


def test_export_reads_a_pickle_when_asked_for(tmp_path: Path) -> None:
    checkpoint, target = zlab_v1(), write_target(tmp_path / "target")
    source = checkpoint.write(tmp_path / "theirs")
    (source / "model.safetensors").unlink()
    torch.save(checkpoint.tensors, source / "pytorch_model.bin")
    words = ["export", str(source), str(tmp_path / "x-DFlash"), "--target", str(target)]
    assert "--weights-only" in str(CliRunner().invoke(cli.app, words).exception)
    assert CliRunner().invoke(cli.app, [*words, "--weights-only"]).exit_code == 0


def test_speculators_layers_share_the_rope_of_the_sliding_ones(tmp_path: Path) -> None:
    """Promise: of a base for each layer type all layers take the sliding layers', as the drafters were trained."""
    checkpoint = speculators_full()
    bases = {"sliding_attention": 3000.0, "full_attention": 500000.0}
    checkpoint.fields["transformer_layer_config"]["rope_parameters"] = {
        kind: {"rope_theta": base, "rope_type": "default"} for kind, base in bases.items()
    }
    drafter = DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path / "drafter"), dtype=torch.float32)
    block, features = block_and_features()
    expected = replace(checkpoint, theta=3000.0).hidden(block[0], features[0])[None]
    torch.testing.assert_close(hidden_states(drafter).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("maker", [speculators_reduced, deepspec])
def test_copies_that_a_dialect_stores_are_no_fault(maker: Callable[[], Checkpoint], tmp_path: Path) -> None:
    """The loader leaves them out, so the linter does not call them unknown."""
    report = check(maker().write(tmp_path / "drafter-DFlash"))
    assert [finding.field for finding in report.findings if finding.rule == "tensors"] == []


def test_tensors_that_only_this_package_renames_fail_for_the_others(tmp_path: Path) -> None:
    """Bug: of ModelOpt's names of DSpark's head it was said that this package refuses them."""
    report = check(modelopt_dspark().write(tmp_path / "drafter-DFlash"))
    (finding,) = [finding for finding in report.findings if finding.rule == "tensors"]
    assert finding.field == "confidence_proj.bias, confidence_proj.weight, markov_w1.weight and 1 more kinds"
    assert "remote-code" not in finding.engines


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_converted(value: float, tmp_path: Path) -> None:
    """Promise: neither `convert` nor `export` writes them, out of a pickle either."""
    checkpoint, target = zlab_v1(), write_target(tmp_path / "target")
    checkpoint.tensors["norm.weight"] = checkpoint.tensors["norm.weight"].clone()
    checkpoint.tensors["norm.weight"][1] = value
    source = checkpoint.write(tmp_path / "theirs")
    with pytest.raises(
        ValueError, match=r"theirs are NaN or infinite \(norm\.weight\): take a checkpoint from before"
    ):
        convert_checkpoint(source, tmp_path / "ours")
    (source / "model.safetensors").unlink()
    torch.save(checkpoint.tensors, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match="NaN or infinite"):
        export_checkpoint(source, tmp_path / "x-DFlash", target, weights_only=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "theirs"]


def test_a_conversion_into_its_own_source_is_refused(tmp_path: Path) -> None:
    folder = convert_checkpoint(deepspec().write(tmp_path / "theirs"), tmp_path / "ours")
    with pytest.raises(ValueError, match="is the source and the folder to write"):
        convert_checkpoint(folder, tmp_path / "theirs" / ".." / "ours")


def test_an_interrupted_conversion_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: written aside and renamed: the old folder stands until the new one is complete, and nothing half done stays."""
    source, folder = deepspec().write(tmp_path / "theirs"), tmp_path / "ours"
    convert_checkpoint(source, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def stop(self: Any, aside: Any, **kwargs: Any) -> None:
        Path(aside).mkdir()
        (Path(aside) / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(DFlashDraftModel, "save_pretrained", stop)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        convert_checkpoint(source, tmp_path / "mine")


# Bad input.


def spoiled(change: Callable[[Checkpoint], Any], maker: Callable[[], Checkpoint] = zlab_v1) -> Checkpoint:
    """A checkpoint with something wrong in it."""
    checkpoint = maker()
    change(checkpoint)
    return checkpoint


def transposed(name: str) -> Callable[[Checkpoint], None]:
    """The change that transposes a tensor."""
    return lambda checkpoint: checkpoint.tensors.update({name: checkpoint.tensors[name].T.contiguous()})


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (spoiled(lambda c: c.fields["dflash_config"].update(attention_sink_bias=True)), "attention_sink_bias=True"),
        (spoiled(lambda c: c.fields["dflash_config"].update(attention_value_scale=0.6)), "attention_value_scale=0.6"),
        (spoiled(lambda c: c.fields.update(partial_rotary_factor=0.5)), "partial_rotary_factor=0.5"),
        (spoiled(lambda c: c.fields.update(markov_head_type="rnn"), deepspec_dspark), "markov_head_type='rnn': it is not supported"),
        (spoiled(lambda c: c.fields.update(markov_rank=4), deepspec_dspark), "mismatched keys: .*markov_head.markov_w1.weight"),
        (spoiled(lambda c: c.fields.update(markov_rank=3), deepspec), "missing keys: markov_head.markov_w1.weight"),
        (spoiled(transposed("markov_head.markov_w2.weight"), deepspec_dspark), "mismatched keys: .*markov_head.markov_w2.weight"),
        (spoiled(lambda c: c.tensors.update({"markov_head.markov_w1.weight": noise(VOCAB + 1, 3)}), deepspec_dspark), "mismatched keys: .*markov_head.markov_w1"),
        (spoiled(lambda c: c.tensors.pop("confidence_head.proj.weight"), deepspec_dspark), "missing keys: confidence_head.proj.weight"),
        (spoiled(lambda c: c.fields["dflash_config"].pop("markov_rank"), specforge_dspark), "projector_type=dspark, .* markov_rank=None"),
        (spoiled(lambda c: c.fields["dflash_config"].update(shift_label=True), specforge), "shift_label=True"),
        (spoiled(lambda c: c.tensors.update(sinks=torch.zeros(HEADS))), "unexpected keys: sinks"),
        (spoiled(lambda c: c.tensors.update({"embed_tokens.weight": torch.zeros(VOCAB, D)})), "unexpected keys: embed_tokens"),
        (spoiled(lambda c: c.fields.update(speculators_model_type="eagle3"), speculators_full), "'eagle3' is not a DFlash"),
        (spoiled(lambda c: c.fields.update(target_hidden_size=64), speculators_full), "target_hidden_size=64"),
        (spoiled(lambda c: c.fields.update(aux_hidden_state_layer_ids=[0, 2]), speculators_full), r"\[-1, 1\]: use .* 0-based"),
        (spoiled(lambda c: c.tensors.pop("d2t"), speculators_reduced), "missing keys: d2t"),
        (spoiled(lambda c: c.fields.update(draft_vocab_size=99), speculators_reduced), "draft_vocab_size=99 is more than"),
        (spoiled(lambda c: c.fields["dflash_config"].pop("conv_group_size"), zlab_dflash2), "conv_group_size=None"),
        (spoiled(lambda c: c.fields["dflash_config"].pop("selector_rank"), zlab_dflash2), "selector_rank=None"),
        (spoiled(lambda c: c.fields["dflash_config"].update(conv_group_size=5), zlab_dflash2), "conv_group_size=5 does not divide"),
        (spoiled(lambda c: c.fields.update(mask_token_id=None), speculators_full), "config holds no mask_token_id"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(checkpoint: Checkpoint, said: str, tmp_path: Path) -> None:
    """Promise: never run wrong: the field or tensor is named."""
    with pytest.raises(ValueError, match=said):
        DFlashDraftModel.from_pretrained(checkpoint.write(tmp_path))


# Where a dialect's own fields stand.
PLACES: list[tuple[Callable[[], Checkpoint], str]] = [
    (zlab_v1, ""),
    (zlab_v1, "dflash_config"),
    (speculators_full, ""),
    (speculators_full, "transformer_layer_config"),
    (assistant, ""),
    (deepspec, ""),
]


@pytest.mark.parametrize(
    ("maker", "place"), PLACES, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_a_field_that_nothing_reads_is_found_and_warned_about_once(
    maker: Callable[[], Checkpoint], place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Known bug: six published drafters said `causal_head`, ran bidirectionally, and `check` had nothing to say."""
    checkpoint = maker()
    assert not [f for f in check(checkpoint.write(tmp_path / "as-written")).findings if f.rule == "unused"]
    # One name for each place: a warning is given once in a process.
    name = f"unheard_of_{maker.__name__}"
    held = checkpoint.fields[place] if place else checkpoint.fields
    held[name] = True
    folder = checkpoint.write(tmp_path / "drafter")
    finding = next(finding for finding in check(folder).findings if finding.rule == "unused")
    full_name = f"{place}.{name}" if place else name
    assert (finding.severity, finding.field, finding.value) == ("warning", full_name, True)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            DFlashDraftModel.from_pretrained(folder)
    assert [full_name in record.getMessage() for record in caplog.records if name in record.getMessage()] == [True]


def test_weights_that_are_integers_are_refused(tmp_path: Path) -> None:
    """Known bug: int8 weights without their scales were cast, drafted nothing (tau 1.00), and nobody said why."""
    checkpoint = zlab_v1()
    for name, tensor in checkpoint.tensors.items():
        if tensor.dim() == 2:
            checkpoint.tensors[name] = (tensor / tensor.abs().max() * 127).round().to(torch.int8)
    folder = checkpoint.write(tmp_path)
    with pytest.raises(ValueError, match=r"integers as weights|cannot be read \(RuntimeError"):  # the latter: 4.57
        DFlashDraftModel.from_pretrained(folder)
    finding = next(finding for finding in check(folder).findings if finding.rule == "dtype" and finding.value == "I8")
    assert finding.severity == "error"


def test_pickles_are_read_only_when_asked_for(tmp_path: Path) -> None:
    """Promise: a pickle can run code, so it is refused unless its tensors alone are asked for."""
    checkpoint = zlab_v1()
    folder = checkpoint.write(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(checkpoint.tensors, folder / "pytorch_model.bin")
    save_file(checkpoint.tensors, folder / "other.safetensors")  # which transformers does not read
    for asked in ({}, {"weights_only": False}):
        with pytest.raises(ValueError, match=r"pickle \(pytorch_model.bin\).*weights_only=True"):
            DFlashDraftModel.from_pretrained(folder, **asked)
    drafter = DFlashDraftModel.from_pretrained(folder, weights_only=True)
    assert all(torch.equal(tensor, checkpoint.meant[name]) for name, tensor in drafter.state_dict().items())
    # A pickle beside the safetensors is not looked at.
    checkpoint.write(tmp_path / "both")
    shutil.copy(folder / "pytorch_model.bin", tmp_path / "both")
    assert DFlashDraftModel.from_pretrained(tmp_path / "both").config.block_size == B


def test_a_mask_row_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    """Known trap: drafters with a separate mask embedding run with the target's row, and propose little."""
    folder = zlab_v1().write(tmp_path)
    torch.save({"embedding": torch.zeros(D)}, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "name",
    [
        "block_size", "mask_token_id", "draft_vocab_size", "target_hidden_size", "sample_from_anchor", "conv_kernel_size",
        "conv_group_size", "selector_rank", "selector_top_k", "projector_type", "gru_hidden_dim", "emb_dim",
        "pure_draft_prefix_len", "shift_label", "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
        "dtype", "torch_dtype", "quantization_config",
    ],
)  # fmt: skip
def test_fields_beside_a_speculators_layer_are_read(name: str) -> None:
    """Promise: each means beside `transformer_layer_config` what it means in a flat config."""
    fields = speculators_config({}, **{name: "marked"})
    assert _read_speculators(fields)[name] == "marked"
