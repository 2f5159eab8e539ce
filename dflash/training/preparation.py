"""From names to a run: the target, its tokenizer, the data and the drafter, loaded and fitted to each other."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from dflash.common.fingerprints import model_fingerprint
from dflash.common.manifest import manifest_path, read_manifest
from dflash.common.provenance import public_name
from dflash.model.generation_dflash import max_positions
from dflash.model.modeling_dflash import DFlashDraftModel
from dflash.model.step_dflash import check_pair

from .checks import check_mask_token, check_tokenizer, usable
from .data import Example, load_examples
from .initialization import find_mask_token, new_drafter, window_fields
from .record import TrainingRecord
from .running import train
from .settings import TrainingSettings


# A text without a prompt is continued, where acceptance is measured, from so many of its first tokens.
SHORTEST_PROMPT = 8

# Settings of a shape that weights are made for, which only a new drafter can be given.
NEW_DRAFTER_FIELDS = (
    "num_hidden_layers",
    "intermediate_size",
    "num_taps",
    "target_layer_ids",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)


@dataclass
class Prepared:
    """What a run needs: the models, the data to train on, and prompts that nothing is trained on."""

    target: PreTrainedModel
    tokenizer: Any
    drafter: DFlashDraftModel
    examples: list[Example]
    held_out: list[list[int]]


def train_drafter(
    target: str | os.PathLike[str],
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    settings: TrainingSettings | None = None,
    **arguments: Any,
) -> TrainingRecord:
    """Trains a drafter for `target` on `data`: what `dflash train` does.

    Args:
        target: Folder or Hub id of any `AutoModelForCausalLM`.
        data: What it is trained on; best the target's own answers.
        output: Folder of the checkpoint.
        settings: The recipe; the paper's by default.
        arguments: Passed on to `train`: `resume`, `overwrite`, `provenance`, `on_point`, `show_progress`, `announce`.

    Example:
        >>> record = train_drafter("Qwen/Qwen3-4B", "answers.jsonl", "Qwen3-4B-DFlash", TrainingSettings(epochs=2))
    """
    settings = settings or TrainingSettings()
    ready = prepare(target, data, settings, arguments.get("announce"))
    known = {
        "target_name": public_name(target),
        "target_is_local": os.path.exists(target),
        "data_name": public_name(data),
        "answers": answers_of(data, ready.target, arguments.get("announce")),
    }
    arguments["provenance"] = known | (arguments.get("provenance") or {})
    return train(ready.drafter, ready.target, ready.examples, ready.held_out, settings, output, **arguments)


def prepare(
    target: str | os.PathLike[str],
    data: str | os.PathLike[str],
    settings: TrainingSettings,
    announce: Callable[[str], None] | None = None,
) -> Prepared:
    """Loads both models and the data; `announce` is told in a sentence what of it is left out.

    Raises:
        ValueError: for a target, a drafter or data that cannot be read, or that do not belong together.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=settings.target_dtype, device_map=settings.device_map
        )
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:  # a name that the Hub would not have is a ValueError
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"The target {target} cannot be loaded ({reason}): give a local folder, or an id on the Hub that can be reached."
        ) from error
    lengths = [length for length in (settings.max_length, max_positions(model)) if length is not None]
    examples = load_examples(
        data,
        tokenizer,
        split=settings.split,
        max_length=min(lengths, default=None),
        enable_thinking=settings.thinking,
    )
    check_tokenizer(tokenizer, model.config.get_text_config(decoder=True).vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        drafter = make_drafter(model, tokenizer, settings)
    check_pair(model, drafter)
    check_mask_token(
        drafter.config.mask_token_id or 0,
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_ids={tokenizer.eos_token_id} - {None},
    )
    usable_ones = usable(examples, drafter, model, announce)  # of all, so that what is refused is named by its row
    examples, held_out = hold_out(usable_ones, settings.held_out, settings.seed)
    if settings.held_out and not held_out and announce is not None:
        announce(
            f"The data has {len(examples)} usable sequences, of which a tenth may be held out: true acceptance is not measured, and the "
            "last weights are kept."
        )
    return Prepared(model, tokenizer, drafter, examples, held_out)


def answers_of(
    data: str | os.PathLike[str], target: PreTrainedModel, announce: Callable[[str], None] | None = None
) -> dict[str, Any] | None:
    """What `dflash regenerate` recorded of the answers in `data`; `None` for data that it did not write.

    `announce` is told if they are not all there, or another target's.
    """
    path = Path(data).expanduser()
    if not path.is_file() or not manifest_path(path).is_file():
        return None
    manifest = read_manifest(path)
    weights = manifest["settings"].get("weights")
    if announce is not None and not manifest.get("complete"):
        announce(f"{path.name} is unfinished: dflash regenerate --resume writes the rest of it.")
    if announce is not None and weights not in (None, model_fingerprint(target)):
        announce(
            f"{path.name} holds the answers of another target ({manifest.get('target')}, weights {weights}): a drafter "
            "learns more from the answers of its own."
        )
    return {name: value for name, value in manifest.items() if name != "complete"}


def make_drafter(target: PreTrainedModel, tokenizer: Any, settings: TrainingSettings) -> DFlashDraftModel:
    """A new drafter of the shape that the settings ask for, or the one that they name, in fp32."""
    asked: dict[str, Any] = {
        name: getattr(settings, name) for name in NEW_DRAFTER_FIELDS if getattr(settings, name) is not None
    }
    changeable: dict[str, Any] = {
        name: getattr(settings, name)
        for name in ("block_size", "mask_token_id", "is_causal")
        if getattr(settings, name) is not None
    }
    if settings.init is None:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        mask: dict[str, Any] = (
            {} if "mask_token_id" in changeable else {"mask_token_id": find_mask_token(tokenizer, vocab_size)}
        )
        return new_drafter(target, sliding_window=settings.sliding_window, **asked, **changeable, **mask)
    if asked:
        raise ValueError(
            f"init={settings.init!r} has weights of its own shape: leave out {', '.join(asked)}, or leave out init to begin "
            "with a new drafter."
        )
    drafter: DFlashDraftModel = DFlashDraftModel.from_pretrained(settings.init, dtype=torch.float32)
    if settings.sliding_window is not None:
        changeable |= window_fields(drafter.config.num_hidden_layers, settings.sliding_window)
    return _reshaped(drafter, changeable) if changeable else drafter


def _reshaped(drafter: DFlashDraftModel, fields: dict[str, Any]) -> DFlashDraftModel:
    """The same weights in a drafter whose block or attention differs."""
    config = drafter.config
    for name, value in fields.items():
        setattr(config, name, value)
    config.dflash_config = {}  # the older copy of the same fields
    other = DFlashDraftModel(config)
    other.load_state_dict(drafter.state_dict())
    return other


def hold_out(examples: Sequence[Example], count: int, seed: int) -> tuple[list[Example], list[list[int]]]:
    """The examples to train on, and the prompts of `count` others, but of no more than a tenth of all."""
    count = min(count, len(examples) // 10)
    chosen = set(random.Random(f"held-out-{seed}").sample(range(len(examples)), count))
    kept = [example for index, example in enumerate(examples) if index not in chosen]
    return kept, [prompt_of(examples[index]) for index in sorted(chosen)]


def prompt_of(example: Example) -> list[int]:
    """What an example gives to continue: all before its first supervised token, or the beginning of a text."""
    begin = example.loss_mask.index(1) if 1 in example.loss_mask else len(example.input_ids)
    return example.input_ids[: max(begin, min(SHORTEST_PROMPT, len(example.input_ids) // 2), 1)]
