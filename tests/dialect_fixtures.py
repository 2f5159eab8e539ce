"""Drafters written by the packages that define a dialect, read by this one: the same tensors, the same forward.

    python3 -m venv dialects && dialects/bin/pip install speculators==0.9.0 dflash-transformers
    dialects/bin/pip install --no-deps specforge==0.2.0
    dialects/bin/python tests/dialect_fixtures.py --output benchmarks/results/dialect_fixtures.json

Each package builds a tiny random drafter by its own classes, runs one block after a context by its own forward, and saves
it as it saves checkpoints; then `DFlashDraftModel.from_pretrained` reads the folder and runs the same block, and once more
from what `convert_checkpoint` made of it. A package that is not installed is reported as such. Exit status 1 unless all that
are installed agree to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from dflash import DFlashDraftModel
from dflash.checkpoints import convert_checkpoint
from dflash.common.provenance import record, write_result


TOLERANCE = 1e-5
VOCAB, D, B, CONTEXT, MASK, ANCHOR = 48, 16, 5, 9, 47, 11
TAPS = [0, 2, 3]
MIXED = ["sliding_attention", "full_attention"]
# Wider than the context: at a window's edge the tools themselves differ by a row (training counts from the anchor).
WINDOW = 32


def layer_config(**fields: Any) -> Qwen3Config:
    """A tiny Qwen3 decoder."""
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, attn_implementation="eager", **fields,
    )  # fmt: skip


def randomise(model: torch.nn.Module) -> Any:
    """Every parameter drawn anew, norms around 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return model.eval()


def features() -> torch.Tensor:
    """Tapped states of a text of CONTEXT tokens and of a block after it, [1, S, L * D]."""
    return torch.randn(1, CONTEXT + 2 * B, len(TAPS) * D, generator=torch.Generator().manual_seed(8))


def saved_block(folder: Path) -> torch.Tensor:
    """Random embeddings of a block, [1, B, D], kept beside the drafter."""
    block = torch.randn(1, B, D, generator=torch.Generator().manual_seed(9))
    torch.save(block, folder / "block.tensor")
    return block


def speculators_drafter(folder: Path, algorithm: str, is_reduced: bool = False, **fields: Any) -> torch.Tensor:
    """Saved by speculators' own class; what its forward gives for the block at position CONTEXT, [1, B, D]."""
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel as First
    from speculators.models.dflash2.config import DFlash2SpeculatorConfig
    from speculators.models.dflash2.core import DFlash2DraftModel as Second
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel as Spark

    said = torch.arange(3, VOCAB, 5)
    classes = {
        "dflash": (DFlashSpeculatorConfig, First),
        "dflash2": (DFlash2SpeculatorConfig, Second),
        "dspark": (DSparkSpeculatorConfig, Spark),
    }[algorithm]
    sliding = {"layer_types": MIXED, "sliding_window": WINDOW, "use_sliding_window": True}
    config = classes[0](
        transformer_layer_config=layer_config(**sliding), draft_vocab_size=len(said) if is_reduced else VOCAB,
        block_size=B, aux_hidden_state_layer_ids=[i + 1 for i in TAPS], mask_token_id=MASK, **fields,
    )  # fmt: skip
    model = randomise(classes[1](config))
    if is_reduced:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[said] = True
        model.load_vocab_mappings(known, said - torch.arange(len(said)))
    model.save_pretrained(folder)
    states = features()
    loss_mask = torch.zeros(1, states.shape[1])
    loss_mask[0, CONTEXT] = 1  # the one anchor that may be drawn
    input_ids = torch.full((1, states.shape[1]), ANCHOR)
    last, documents = torch.zeros(1, states.shape[1], D), torch.zeros(1, states.shape[1], dtype=torch.long)
    with torch.no_grad():
        hidden = model._backbone_forward(states, input_ids, loss_mask, last, documents, max_anchors=1)[0]
    torch.save(model.embed_tokens.weight.detach()[[ANCHOR] + [MASK] * (B - 1)][None], folder / "block.tensor")
    return with_markov_logits(model, hidden, folder) if algorithm == "dspark" else hidden


def specforge_drafter(folder: Path, layer_types: list[str], **head: Any) -> torch.Tensor:
    """Saved and mirrored by SpecForge's own code; the block sees what its layers allow, as that package masks it."""
    from specforge.export.checkpoint_io import apply_legacy_rope_scaling
    from specforge.modeling.draft.dflash import DFlashDraftModel as First
    from specforge.modeling.draft.dspark import DSparkDraftModel as Spark

    config = layer_config(layer_types=layer_types, sliding_window=WINDOW, use_sliding_window=True)
    config.update({"block_size": B, "num_target_layers": 6, "architectures": ["DFlashDraftModel"]})
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": TAPS, **head}
    model = randomise((Spark if head else First)(config))
    model.save_pretrained(folder)
    apply_legacy_rope_scaling(str(folder))
    block = saved_block(folder)
    context = torch.ones(B, CONTEXT, dtype=torch.bool)
    masks = {"full_attention": torch.cat([context, torch.ones(B, B, dtype=torch.bool)], dim=1)}
    masks["sliding_attention"] = torch.cat([context, torch.ones(B, B).tril().bool()], dim=1)
    with torch.no_grad():
        hidden = model(
            position_ids=torch.arange(CONTEXT + B)[None],
            attention_mask={name: mask[None, None] for name, mask in masks.items()},
            noise_embedding=block,
            target_hidden=features()[:, :CONTEXT],
        )
    return with_markov_logits(model, hidden, folder) if head else hidden


def with_markov_logits(model: Any, hidden: torch.Tensor, folder: Path) -> torch.Tensor:
    """`hidden` [1, B, D]; beside the drafter, what its own heads make of it after PREVIOUS: bias [B, V] and confidence [B]."""
    previous = torch.tensor([PREVIOUS])
    head = model.markov_head
    with torch.no_grad():
        if hasattr(head, "block_bias"):  # speculators
            bias = head.block_bias(prev_token_ids=previous, hidden_states=hidden)
            known = torch.cat([hidden, head.prev_embeddings(previous)], dim=-1)
            confidence = model.confidence_head(known)
        else:
            bias = head.apply_block_logits(torch.zeros(1, B, VOCAB), token_ids=previous, hidden_states=hidden)
            confidence = model.predict_confidence(hidden, prev_token_ids=previous)
    torch.save({"bias": bias[0], "confidence": confidence[0]}, folder / "markov.tensor")
    return hidden


def assistant_drafter(folder: Path) -> torch.Tensor:
    """transformers' own DFlash drafter."""
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=D, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        block_size=B, mask_token_id=MASK, target_layer_ids=TAPS, sliding_window=WINDOW, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = randomise(MuseGlimmerAssistantModel(config))
    model.save_pretrained(folder)
    block = saved_block(folder)
    with torch.no_grad():
        return model(noise_embeds=block, context_hidden_states=features()[:, :CONTEXT]).last_hidden_state


DFLASH2 = {"conv_group_size": 4, "conv_kernel_size": 2, "selector_rank": 6, "selector_top_k": 4}
PREVIOUS = [ANCHOR, 3, 8, 13, 18]  # before each position of the block
DSPARK = {
    "projector_type": "dspark", "markov_rank": 6, "markov_head_type": "gated", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
NON_CAUSAL = {"sliding_window_non_causal": True, "sample_from_anchor": True}
# By the name of the package and what is special.
FIXTURES: dict[str, Callable[[Path], torch.Tensor]] = {
    "speculators, reduced vocabulary": partial(speculators_drafter, algorithm="dflash", is_reduced=True),
    "speculators, non-causal, anchor predicts": partial(speculators_drafter, algorithm="dflash", **NON_CAUSAL),
    "speculators, DFlash2": partial(speculators_drafter, algorithm="dflash2", **DFLASH2),
    "speculators, DSpark": partial(
        speculators_drafter, algorithm="dspark", is_reduced=True, markov_rank=6, sample_from_anchor=True
    ),
    "SpecForge, DSpark": partial(specforge_drafter, layer_types=["full_attention"] * 2, **DSPARK),
    "SpecForge, full": partial(specforge_drafter, layer_types=["full_attention"] * 2),
    "SpecForge, mixed windows": partial(specforge_drafter, layer_types=MIXED),
    "transformers, Muse assistant": assistant_drafter,
}


@torch.no_grad()
def markov_logits(drafter: Any, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bias [B, V] of each token that the drafter can say and the confidence [B], by this package's head, after PREVIOUS."""
    head = drafter.causal_head(None)
    own = torch.arange(VOCAB) if drafter.d2t is None else drafter.d2t + torch.arange(len(drafter.d2t))
    previous = torch.tensor(PREVIOUS)
    rows = head.rows(own.expand(B, -1), torch.arange(B))
    state = head.read(head.inputs(previous), torch.zeros(B, head.state_size))
    bias = head.scores(head.features(states[0]), torch.zeros(B, len(own)), rows, state)
    return {"bias": bias, "confidence": head.confidences(states[0], previous)}


def outcome(package: str, write: Callable[[Path], torch.Tensor], folder: Path) -> dict[str, Any]:
    """What became of one package's drafter."""
    try:
        version = metadata.version(package)
        expected = write(folder)
    except (metadata.PackageNotFoundError, ModuleNotFoundError) as error:
        return {"package": package, "ran": False, "reason": str(error)}
    block = torch.load(folder / "block.tensor", weights_only=True)
    found: dict[str, Any] = {"package": package, "version": version, "ran": True}
    for name, path in (("read", folder), ("converted", folder.with_name(f"{folder.name}-DFlash"))):
        if name == "converted":
            convert_checkpoint(folder, path)
        drafter, info = DFlashDraftModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        with torch.no_grad():
            states = drafter(block, features()[:, :CONTEXT]).last_hidden_state
        heads = {}
        if (folder / "markov.tensor").exists():
            of_theirs = torch.load(folder / "markov.tensor", weights_only=True)
            heads = {
                key: float((ours - of_theirs[key]).abs().max()) for key, ours in markov_logits(drafter, states).items()
            }
        found[name] = {
            **{f"largest_difference_of_{key}": difference for key, difference in heads.items()},
            "dialect": drafter.config.dialect,
            "missing_keys": sorted(info["missing_keys"]),
            "unexpected_keys": sorted(info["unexpected_keys"]),
            "target_layer_ids": drafter.config.target_layer_ids,
            "num_proposals": drafter.config.num_proposals,
            "largest_difference": float((states - expected).abs().max()),
        }
    is_whole = not (found["read"]["missing_keys"] or found["read"]["unexpected_keys"])
    is_near = all(
        value <= TOLERANCE
        for name in ("read", "converted")
        for key, value in found[name].items()
        if "difference" in key
    )
    return {**found, "agrees": is_whole and is_near and found["read"]["target_layer_ids"] == TAPS}


def main() -> None:
    """Writes, reads, compares, and says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        results = {
            name: outcome(name.split(",")[0].lower(), write, Path(root) / f"fixture-{index}")
            for index, (name, write) in enumerate(FIXTURES.items())
        }
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    result = record("dialects", versions, tolerance=TOLERANCE, fixtures=results)
    json.dump(result, sys.stdout, indent=1)
    if args.output is not None:
        write_result(args.output, result)
    sys.exit(0 if all(fixture.get("agrees", True) for fixture in results.values()) else 1)


if __name__ == "__main__":
    main()
