# ruff: noqa: RUF009 (every field is made by `_setting`, which calls `field`)
"""The recipe of a run as one dataclass, which a YAML file and the command's flags also spell. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


LossName = Literal["ce", "argmax", "forward_kl", "reverse_kl", "tv", "mix"]
PositionWeights = Literal["decay", "dpace", "uniform"]
AnchorScheme = Literal["random", "fixed"]
Precision = Literal["bf16", "no"]
TargetDtype = Literal["auto", "float32", "bfloat16", "float16"]


def _setting(default: Any, help: str, is_free: bool = False) -> Any:
    """A field with its help text; a free one may differ from one start of a run to the next."""
    return field(default=default, metadata={"help": help, "is_free": is_free})


@dataclass(frozen=True)
class TrainingSettings:
    """The recipe; the defaults are the paper's (DFlash, appendix A.1), where it states them.

    What each field means stands in its `help`, which the command line shows too. `None` leaves a choice to what the field
    says there.

    Raises:
        ValueError: for a value of another type, or out of range.
    """

    steps: int | None = _setting(
        None, "Optimiser steps; the data is passed over as often as that takes. Default: --epochs."
    )
    epochs: int = _setting(6, "Passes over the data, where --steps is not given.")
    # The drafter's shape.
    init: str | None = _setting(
        None, "Start from this drafter, of any published dialect: a folder or an id on the Hub."
    )
    num_hidden_layers: int | None = _setting(None, "Depth of the drafter. Default: 5, or that of --init.")
    intermediate_size: int | None = _setting(None, "Width of its MLPs. Default: the target's.")
    num_taps: int | None = _setting(None, "Layers of the target that it reads, by the paper's spread. Default: 5.")
    target_layer_ids: list[int] | None = _setting(None, "The very layers, 0-based and without the last, as in 1,9,17.")
    block_size: int | None = _setting(None, "Tokens of a block, anchor included. Default: 16, or that of --init.")
    sliding_window: int | None = _setting(None, "Every layer of the drafter sees so many positions. Default: all.")
    is_causal: bool | None = _setting(
        None, "Causal inside the block. Default: full layers are not, sliding layers are."
    )
    conv_kernel_size: int | None = _setting(
        None, "DFlash2: rows that a row is mixed of, its own included. Default: no mixing."
    )
    conv_group_size: int | None = _setting(None, "DFlash2: channels that share a mixture.")
    selector_rank: int | None = _setting(None, "DFlash2: width of the choice among candidates. Default: no selector.")
    selector_top_k: int | None = _setting(None, "DFlash2: candidates that the selector chooses among.")
    mask_token_id: int | None = _setting(
        None, "Id that fills a block. Default: the tokenizer's mask, or an unused row."
    )
    # The target.
    target_dtype: TargetDtype = _setting("auto", "dtype of the target's weights; auto: as the checkpoint is stored.")
    device_map: str | None = _setting(None, "auto: spread a target larger than one device over all.", is_free=True)
    # What is learned.
    loss: LossName = _setting(
        "ce", "ce: the data's tokens; argmax: the target's; the others: the target's distribution."
    )
    position_weights: PositionWeights = _setting("decay", "Weights along a block: exp decay, D-PACE, or all the same.")
    gamma: float | None = _setting(None, "Decay of the position weights. Default: the paper's for the block size.")
    dpace_alpha: float = _setting(
        0.5, "Smoothing of D-PACE: a share of every token's chance that is taken for granted."
    )
    selector_weight: float = _setting(1.0, "Weight of the loss of a DFlash2 drafter's selector.")
    anchors: AnchorScheme = _setting("random", "random: drawn anew each epoch; fixed: every block_size-th position.")
    num_anchors: int = _setting(512, "Blocks per sequence.")
    seed: int = _setting(0, "Of the drafter's first weights, the order of the data and the anchors.")
    # The data.
    max_length: int | None = _setting(3072, "Longer sequences are cut to so many tokens.")
    pack_length: int | None = _setting(
        None, "Short sequences stand side by side in rows of so many tokens. Default: one to a row."
    )
    split: str = _setting("train", "Split of a data set that has several.")
    thinking: bool = _setting(False, "Let the chat template ask for thinking.")
    batch_tokens: int = _setting(
        4096, "Tokens of a batch, padding included, over all processes and accumulated parts."
    )
    held_out: int = _setting(8, "Sequences taken out of the data, whose prompts true acceptance is measured on.")
    # The optimiser.
    learning_rate: float = _setting(6e-4, "Peak rate of AdamW.")
    muon_learning_rate: float | None = _setting(None, "Peak rate of Muon, which then trains the matrices.")
    warmup_ratio: float = _setting(0.04, "Share of the steps that the rate climbs, before it falls along a cosine.")
    weight_decay: float = _setting(0.0, "AdamW's.")
    max_grad_norm: float = _setting(1.0, "Gradients are clipped to this norm.")
    # How it is computed.
    mixed_precision: Precision = _setting("bf16", "bf16 computes in bf16 over fp32 weights, no in fp32.")
    gradient_accumulation_steps: int = _setting(1, "A batch is computed in so many parts: less memory, the same step.")
    gradient_checkpointing: bool = _setting(False, "Compute the layers' activations again in the backward pass.")
    compile: bool = _setting(False, "Compile the drafter's training forward.")
    shard: bool = _setting(False, "Spread the drafter's weights and optimiser over the processes (FSDP2).")
    shard_target: bool = _setting(False, "Spread the target's layers over the processes too.")
    features: str | None = _setting(
        None, "Folder of the target's features, written first, by one process, if new. Default: online."
    )
    chunk_rows: int | None = _setting(None, "Rows whose logits exist at a time. Default: 256 MiB of them in fp32.")
    # What is measured and kept.
    eval_every: int = _setting(500, "Steps between measurements on the held-out prompts, and after the last step.")
    eval_new_tokens: int = _setting(256, "Length of the texts they are measured on.")
    save_every: int = _setting(500, "Steps between training states, from which --resume goes on.", is_free=True)
    log_every: int = _setting(10, "Steps between lines in the trackers.", is_free=True)
    log_with: str | None = _setting(
        None, "tensorboard, wandb, trackio or another tracker of accelerate's.", is_free=True
    )
    license: str | None = _setting(None, "Licence of the drafter, for its card, such as apache-2.0.", is_free=True)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for one in fields(self):
            value, hint = getattr(self, one.name), hints[one.name]
            if type(value) is int and float in _options(hint):
                object.__setattr__(self, one.name, value := float(value))
            if value is False and hint == Precision:  # YAML 1.1 reads `no` as false
                object.__setattr__(self, one.name, value := "no")
            if not _fits(value, hint):
                raise ValueError(f"{one.name}={value!r} is not {_name(hint)}: {one.metadata['help']}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give 1 or more.")
        for name in ("learning_rate", "muon_learning_rate", "max_grad_norm", "gamma"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: give a number above 0.")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio={self.warmup_ratio}: give a share of the steps, from 0 to 1.")
        if self.features is not None and self.shard_target:
            raise ValueError(
                f"features={self.features!r} and shard_target: one process writes features with the whole target; leave "
                "either out."
            )
        if self.num_taps is not None and self.target_layer_ids is not None:
            raise ValueError(
                f"num_taps={self.num_taps} and target_layer_ids={self.target_layer_ids}: give the number or the layers."
            )

    def changed_from(self, saved: dict[str, Any]) -> list[str]:
        """`name: saved value, now value` of each setting that decides what is learned and differs from a saved one."""
        now = asdict(self)
        return [
            f"{one.name}: {saved.get(one.name)!r}, now {now[one.name]!r}"
            for one in fields(self)
            if not one.metadata["is_free"] and saved.get(one.name, _default(one)) != now[one.name]
        ]


_AT_LEAST_ONE = (
    "steps", "epochs", "num_hidden_layers", "intermediate_size", "num_taps", "sliding_window", "conv_kernel_size",
    "conv_group_size", "selector_rank", "selector_top_k", "num_anchors", "max_length",
    "batch_tokens", "pack_length", "gradient_accumulation_steps", "chunk_rows", "eval_every", "eval_new_tokens", "save_every",
    "log_every"
)  # fmt: skip


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a YAML file, with `-` and `_` in their names alike; ValueError for what is none."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path} is not YAML ({str(error).splitlines()[0]}): write one `name: value` a line."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings: write one `name: value` a line.")
    return {str(name).replace("-", "_"): _as_meant(value) for name, value in found.items()}


def _as_meant(value: Any) -> Any:
    """YAML 1.1 reads a rate of 6e-4 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _default(one: Any) -> Any:
    return None if one.default is MISSING else one.default


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for option in _options(hint):
        if get_origin(option) is Literal:
            if value in get_args(option):
                return True
        elif get_origin(option) is list:
            if isinstance(value, list) and all(type(item) is get_args(option)[0] for item in value):
                return True
        elif option is NoneType:
            if value is None:
                return True
        elif type(value) is option:  # True is no number
            return True
    return False


def _name(hint: Any) -> str:
    """A type in words."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list[int]: "a list of numbers",
    }
    options = [option for option in _options(hint) if option is not NoneType]
    return " or ".join(
        f"one of {', '.join(get_args(option))}" if get_origin(option) is Literal else words[option]
        for option in options
    )
