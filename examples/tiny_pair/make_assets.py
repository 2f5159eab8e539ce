"""Puts a trained pair into the package: weights, tokenizer, cards and held-out problems, and no code.

    python make_assets.py --target target --drafter drafter --domino domino --assets ../../dflash/assets

The cards' figures come out of each `training.json`, so that they cannot drift from what was measured.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

from evaluate_target import EVALUATION_SEED
from problems import generate

from dflash.checkpoints import replace_folder


TARGET_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "training.json",
)
DRAFTER_FILES = ("config.json", "model.safetensors", "training.json")
HELD_OUT_PROBLEMS = 100

TARGET_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
datasets:
- openai/gsm8k
---
# tiny-target

A Qwen3 of {parameters:,} parameters that answers grade-school word problems in GSM8K's form, trained from nothing on two CPU
cores. It is the target of `tiny-DFlash` and stands in for a real one where nothing can be downloaded; it knows nothing else.

| greedy, held to the last number | problems | right | ended by itself |
|---|---|---|---|
{scores}

*Trained templates* have new numbers and names; *held-out wordings* are templates of known stories that no training row
has; *held-out stories* are stories of which no wording was trained on.

Data: GSM8K train (MIT, {gsm8k_rows} rows) and problems of `examples/tiny_pair/problems.py` (trained templates alone).
Command: `{command}`; the steps and the curve are in `training.json`. Weights are bf16, Apache-2.0.
"""

FRONT_MATTER = """---
license: apache-2.0
library_name: transformers
tags:
- dflash
- speculative-decoding
datasets:
- openai/gsm8k
---
"""

DRAFTER_CARD = (
    FRONT_MATTER
    + """# tiny-DFlash

The DFlash drafter (arXiv 2602.06036) of `tiny-target`: {parameters:,} parameters in {layers} layers, block size {block_size}, taps
on the target's layers {taps}, mask token {mask_token_id}. Its code is saved beside it by `dflash export-demo FOLDER`, and it then
loads with `AutoModel.from_pretrained(folder, trust_remote_code=True)`.

| greedy, fp32 | prompts | texts equal to `target.generate` | tau | tokens per step |
|---|---|---|---|---|
{scores}

Data: what the target answers to GSM8K train (MIT) and to problems of `examples/tiny_pair/problems.py` (trained templates
alone), {examples} answers. Trained by the recipe `short`: it began with weights of the target's layers; Muon trained the
matrices and AdamW the norms, at random anchors with D-PACE's weights, here towards the target's distribution (`forward_kl`).
Settings, versions and curve are in `training.json`. Command: `{command}`. Weights are bf16, Apache-2.0.
"""
)

SET_NAMES = {
    "trained_templates": "trained templates",
    "heldout_templates": "held-out wordings",
    "heldout_frames": "held-out stories",
    "gsm8k_test": "GSM8K test",
}


DOMINO_CARD = (
    FRONT_MATTER
    + """# tiny-DFlash-Domino

`tiny-DFlash`, a DFlash drafter (arXiv 2602.06036) of `tiny-target`, with Domino's head: {parameters:,} parameters, of which
{trained:,} are the head's. A GRU of width {gru_hidden_dim} reads the tokens that were chosen before in the block, so that each one
but the first is chosen after those. The other weights are those of `tiny-DFlash`, bit for bit. Its code is saved beside it by `dflash
export-demo FOLDER`, and it then loads with `AutoModel.from_pretrained(folder, trust_remote_code=True)`.

| greedy, fp32 | prompts | texts equal to `target.generate` | tau | tokens per step |
|---|---|---|---|---|
{scores}

Data: what the target answers to GSM8K train (MIT) and to problems of `examples/tiny_pair/problems.py` (trained templates
alone), {examples} answers. The head was trained on the frozen drafter: Muon for its matrices, AdamW for its table, cross entropy
among the 16 most probable tokens of each position. Settings, versions and curve are in `training.json`. Command: `{command}`. Weights are bf16,
Apache-2.0.
"""
)


def target_card(folder: Path) -> str:
    facts = json.loads((folder / "training.json").read_text())
    lines = [
        f"| {SET_NAMES[name]} | {score['count']} | {score['accuracy']:.1%} | {score['eos_rate']:.1%} |"
        for name, score in facts["scores"].items()
    ]
    return TARGET_CARD.format(
        parameters=facts["parameters"],
        scores="\n".join(lines),
        gsm8k_rows=facts["gsm8k"]["rows"],
        command=command_of(facts),
    )


def drafter_card(folder: Path, form: str = DRAFTER_CARD, **fields: Any) -> str:
    facts, config = (json.loads((folder / name).read_text()) for name in ("training.json", "config.json"))
    names = SET_NAMES | {"heldout_templates": "held-out templates (wordings and stories)"}
    lines = [
        f"| {names[name]} | {figures['prompts']} | {figures['identical']} | {figures['tau']:.2f} | "
        f"{figures['tokens_per_step']:.2f} |"
        for name, figures in facts["figures"].items()
    ]
    return form.format(
        parameters=facts["parameters"],
        layers=config["num_hidden_layers"],
        block_size=config["block_size"],
        taps=", ".join(map(str, config["target_layer_ids"])),
        mask_token_id=config["mask_token_id"],
        scores="\n".join(lines),
        examples=facts["data"]["examples"],
        command=command_of(facts),
        **fields,
    )


def domino_card(folder: Path, drafter: Path) -> str:
    facts, begun = (json.loads((one / "training.json").read_text()) for one in (folder, drafter))
    state_size = json.loads((folder / "config.json").read_text())["gru_hidden_dim"]
    trained = facts["parameters"] - begun["parameters"]
    return drafter_card(folder, DOMINO_CARD, trained=trained, gru_hidden_dim=state_size)


def command_of(facts: dict[str, Any]) -> str:
    command = facts["command"]
    return command if isinstance(command, str) else "python " + " ".join(command)


def install(source: Path, files: tuple[str, ...], card: str, folder: Path) -> None:
    """Replaces `folder` by the named files of `source` and a card, in one rename."""
    aside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    aside.mkdir(parents=True)
    for name in files:
        shutil.copyfile(source / name, aside / name)
    (aside / "README.md").write_text(card)
    replace_folder(aside, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--domino", type=Path, required=True, help="the drafter with a head")
    parser.add_argument("--assets", type=Path, required=True)
    arguments = parser.parse_args()
    install(arguments.target, TARGET_FILES, target_card(arguments.target), arguments.assets / "tiny-target")
    install(arguments.drafter, DRAFTER_FILES, drafter_card(arguments.drafter), arguments.assets / "tiny-DFlash")
    card = domino_card(arguments.domino, arguments.drafter)
    install(arguments.domino, DRAFTER_FILES, card, arguments.assets / "tiny-DFlash-Domino")
    rows = [
        json.dumps({"question": problem.question, "answer": problem.answer})
        for problem in generate(HELD_OUT_PROBLEMS, EVALUATION_SEED, "heldout")
    ]
    (arguments.assets / "heldout.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
