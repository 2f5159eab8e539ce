# ruff: noqa: RUF009 (`_setting` makes every field with `field`)
"""Holds the settings of a training run, in a dataclass that YAML files and flags fill in. It imports no torch."""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dflash.common.messages import first_line


Facts = dict[str, Any]  # names and values, as JSON holds them

LossName = Literal["ce", "forward_kl"]
PositionWeightsName = Literal["decay", "dpace"]
RecipeName = Literal["short", "paper", "jetspec"]
HeadName = Literal["selector", "domino", "dspark"]
MarkovHeadType = Literal["vanilla", "gated"]
Precision = Literal["bf16", "no"]
TargetDtype = Literal["auto", "float32", "bfloat16", "float16"]

# The defaults that a recipe gives to fields that are `None` unless set. Muon's learning rate is for a drafter of
# hidden size `RECIPE_WIDTH`. short: for runs of hundreds or thousands of steps. paper: appendix A.1 of DFlash, for 800
# K samples and 6 epochs.
RECIPES: dict[str, Facts] = {
    "short": {
        "learning_rate": 2e-3,
        "muon_learning_rate": 2e-2,
        "loss": "ce",
        "position_weights": "dpace",
        "from_target": True,
    },
    "paper": {
        "learning_rate": 6e-4,
        "muon_learning_rate": 0.0,
        "loss": "ce",
        "position_weights": "decay",
        "from_target": False,
    },
}
# jetspec: short, for a drafter that is causal in its block and learns the target's distribution, as in JetSpec.
RECIPES["jetspec"] = RECIPES["short"] | {"is_causal": True, "loss": "forward_kl"}
RECIPE_WIDTH = 128
# The published size of each head.
HEAD_SIZES: dict[str, Facts] = {
    "selector": {"selector_rank": 256, "selector_top_k": 16},
    "domino": {"gru_hidden_dim": 1024, "emb_dim": 256},
    "dspark": {"markov_rank": 256, "markov_head_type": "vanilla", "confidence": True},
}
# Settings whose defaults depend on the drafter too, so that they stay `None` in the settings.
RESOLVED_WITH_DRAFTER = ("muon_learning_rate", "from_target")
POSITIVE = ("learning_rate", "max_grad_norm", "gamma")

DRAFTER = "The drafter's shape"
PARTS = "Its parts of DFlash2, Domino or DSpark"
TARGET = "The target"
LOSS = "What is learned"
DATA = "The data"
STEPS = "Steps and optimiser"
COMPUTE = "Memory, precision and processes"
KEPT = "What is measured and kept"


def _setting(default: Any, topic: str, help: str, least: int | None = None, is_free: bool = False) -> Any:
    """Returns a dataclass field with topic, help text and least value. A free setting may change in a resumed run."""
    return field(default=default, metadata={"topic": topic, "help": help, "least": least, "is_free": is_free})


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a run. `recipe` decides the defaults of some settings; a value that is set wins over the recipe.

    The `help` of each field says what the field means and what `None` leads to. The values of the recipe are filled in
    when an instance is made, so `dataclasses.replace(settings, recipe=…)` keeps the values of the old recipe.
    `changed(recipe=…)` replaces them.

    Raises:
        ValueError: for a value of a wrong type or out of range, or settings that contradict each other.
    """

    recipe: RecipeName = _setting(
        None,
        STEPS,
        "short: Muon, D-PACE; paper: AdamW, for 800 K texts or --init; jetspec: short, causal in the block, forward "
        "KL. Default: short, or paper with --init.",
    )
    steps: int | None = _setting(None, STEPS, "Number of optimiser steps. Default: as many as --epochs take.", 1)
    epochs: int = _setting(6, STEPS, "Passes over the data, if --steps is not given.", 1)
    init: str | None = _setting(None, DRAFTER, "Start from this drafter, of any dialect: a folder or a Hub id.")
    from_target: bool | None = _setting(
        None, DRAFTER, "Begin with copies of the target's layers. Default: by recipe; never with --init."
    )
    num_hidden_layers: int | None = _setting(None, DRAFTER, "Number of layers. Default: 5, or as in --init.", 1)
    intermediate_size: int | None = _setting(None, DRAFTER, "Width of its MLPs. Default: the target's.", 1)
    num_taps: int | None = _setting(
        None, DRAFTER, "Number of target layers that it reads, spread as in the paper. Default: 5.", 1
    )
    target_layer_ids: list[int] | None = _setting(
        None,
        DRAFTER,
        "The target layers that it reads, such as 1,9,17, counted from 0; the last layer is not "
        "allowed. Default: by --num-taps.",
    )
    block_size: int | None = _setting(
        None, DRAFTER, "Tokens of a block, anchor included. Default: 16, or as in --init.", 1
    )
    sliding_window: int | None = _setting(
        None, DRAFTER, "Attention window of each layer. Default: none, or as in --init.", 1
    )
    is_causal: bool | None = _setting(
        None, DRAFTER, "Causal attention inside the block. Default: in layers with a sliding window only."
    )
    head: HeadName | None = _setting(
        None,
        PARTS,
        "Add a head that chooses token by token, in its published size unless the settings below say otherwise.",
    )
    conv_kernel_size: int | None = _setting(
        None,
        PARTS,
        "DFlash2: kernel size of its convolutions over positions; published: 2. Default: none, or as in --init.",
        1,
    )
    conv_group_size: int | None = _setting(
        None, PARTS, "DFlash2: channels that share a kernel's dynamic part; published: 16.", 1
    )
    selector_rank: int | None = _setting(
        None, PARTS, "DFlash2: rank of the selector; published: 256. Default: no selector, or as in --init.", 1
    )
    selector_top_k: int | None = _setting(
        None, PARTS, "DFlash2: candidates that the selector chooses among; published: 16.", 1
    )
    gru_hidden_dim: int | None = _setting(
        None,
        PARTS,
        "Domino: width of the GRU that reads the block's tokens; published: 1024. Default: no such head.",
        1,
    )
    emb_dim: int | None = _setting(None, PARTS, "Domino: width of its token table; published: 256.", 1)
    pure_draft_prefix_len: int | None = _setting(
        None,
        PARTS,
        "Domino: number of first proposals that its head does not change. Default: 1, as published and in SGLang.",
        0,
    )
    markov_rank: int | None = _setting(
        None, PARTS, "DSpark: rank of the biases of pairs of tokens; published: 256. Default: no such head.", 1
    )
    markov_head_type: MarkovHeadType | None = _setting(
        None, PARTS, "DSpark: gated, if the biases also depend on the hidden state, or vanilla. Default: vanilla."
    )
    confidence: bool | None = _setting(
        None, PARTS, "DSpark: learn the probability that a proposal is accepted. Default: with --head dspark."
    )
    freeze_init: bool = _setting(
        False,
        PARTS,
        "With --init: train only the added parts, such as a head. If none is added, train those that it already has.",
    )
    mask_token_id: int | None = _setting(
        None,
        DRAFTER,
        "Token id that fills a block. Default: as in --init, the tokenizer's mask token, or an unused id.",
    )
    target_dtype: TargetDtype = _setting(
        "auto", TARGET, "dtype of the target's weights; auto: as stored, but fp32 on a CPU without bf16."
    )
    device_map: str | None = _setting(
        None, TARGET, "Device of the target, such as cuda:0; auto spreads it over all devices.", is_free=True
    )
    trust_remote_code: bool = _setting(
        False, TARGET, "Run code that the target's repository holds. Read it first.", is_free=True
    )
    loss: LossName = _setting(
        None, LOSS, "ce: the data's tokens; forward_kl: the target's distribution. Default: ce, or by recipe."
    )
    position_weights: PositionWeightsName = _setting(
        None, LOSS, "Weights along a block: decay (exponential) or dpace (D-PACE). Default: by recipe."
    )
    gamma: float | None = _setting(
        None,
        LOSS,
        "Length of the exponential decay in tokens; implies --position-weights decay unless that is given. Default: "
        "the paper's, or half of another block size.",
    )
    dpace_alpha: float = _setting(0.5, LOSS, "D-PACE: smallest probability of acceptance that is assumed, above 0.")
    selector_weight: float = _setting(1.0, LOSS, "Weight of the loss of the head that chooses token by token.", 0)
    num_anchors: int = _setting(512, LOSS, "Largest number of blocks per document.", 1)
    rejected_share: float = _setting(
        0.0,
        LOSS,
        "Share of the blocks that begin at rejected drafts; needs a trace (dflash regenerate --trace) as data.",
        0,
    )
    seed: int = _setting(0, LOSS, "Seed of the initial weights, the order of the data and the anchors.", 0)
    max_length: int | None = _setting(3072, DATA, "Longer sequences are cut to this many tokens.", 1)
    min_length: int | None = _setting(None, DATA, "Shorter sequences are left out. Default: shorter than a block.", 1)
    drop_long: bool = _setting(False, DATA, "Leave out sequences longer than --max-length instead of cutting them.")
    deduplicate: bool = _setting(True, DATA, "Leave out sequences that repeat another one.")
    pack_length: int | None = _setting(
        None, DATA, "Pack documents into sequences of this many tokens. Default: no packing.", 1
    )
    samples: int | None = _setting(
        None, DATA, "Usable rows to take from the beginning of each source. Default: all.", 1
    )
    streaming: bool = _setting(
        False, DATA, "Read data sets only as far as --samples asks, without downloading them.", is_free=True
    )
    split: str = _setting("train", DATA, "Split of a data set that has several.")
    thinking: bool = _setting(False, DATA, "Let the chat template ask for thinking.")
    batch_tokens: int = _setting(4096, STEPS, "Tokens of a batch with padding, over all processes and parts.", 1)
    held_out: int = _setting(8, DATA, "Sequences to measure acceptance on, at most a tenth of --data.", 0)
    eval_data: str | None = _setting(
        None, DATA, "Data to take the held-out sequences from. Default: --data, which is then trained on without them."
    )
    lora_rank: int | None = _setting(
        None, STEPS, "Train a low-rank update (LoRA) of this rank for each linear layer. Default: all weights.", 1
    )
    learning_rate: float = _setting(None, STEPS, "Peak learning rate of AdamW. Default: by recipe.")
    muon_learning_rate: float | None = _setting(
        None,
        STEPS,
        "Peak learning rate of Muon for the matrices; 0: AdamW trains them. Default: by recipe and width.",
        0,
    )
    warmup_ratio: float = _setting(
        0.04, STEPS, "Share of the steps in which the learning rate warms up; then it falls along a cosine."
    )
    weight_decay: float = _setting(0.0, STEPS, "Weight decay of matrices, codebooks and tables.", 0)
    max_grad_norm: float = _setting(1.0, STEPS, "Gradients are clipped to this norm.")
    mixed_precision: Precision | None = _setting(
        None,
        COMPUTE,
        "bf16: compute in bf16 with fp32 weights; no: compute in fp32. Default: bf16 if the hardware has fast bf16 "
        "products.",
    )
    gradient_accumulation_steps: int = _setting(
        1, STEPS, "Parts into which a batch is cut: less memory, the same step.", 1
    )
    gradient_checkpointing: bool = _setting(False, COMPUTE, "Recompute activations in the backward pass.")
    compile: bool = _setting(False, COMPUTE, "Compile the drafter's training forward.")
    shard: bool = _setting(False, COMPUTE, "Shard the drafter's weights and optimiser over the processes (FSDP2).")
    shard_target: bool = _setting(False, COMPUTE, "Shard the target's layers over the processes too.")
    features: str | None = _setting(
        None, COMPUTE, "Folder of the target's features, written if new. Default: compute them at each step."
    )
    chunk_rows: int | None = _setting(
        None, COMPUTE, "Number of positions whose logits exist at a time. Default: what fills 256 MiB.", 1
    )
    patience: int | None = _setting(
        None, KEPT, "End after this many measurements in a row without a better one. Default: never.", 1
    )
    eval_every: int | None = _setting(
        None, KEPT, "Steps between measurements on held-out prompts. Default: a tenth of the run, at most 500.", 1
    )
    eval_new_tokens: int = _setting(256, KEPT, "Largest number of tokens to decode after a held-out prompt.", 1)
    save_every: int | None = _setting(
        None,
        KEPT,
        "Steps between training states, from which --resume goes on. Default: a tenth of the run, at most 500.",
        1,
        True,
    )
    log_every: int = _setting(10, KEPT, "Steps between entries in the tracker.", 1, True)
    log_with: str | None = _setting(
        None, KEPT, "Tracker of the curves: tensorboard, wandb, trackio or another of accelerate's.", is_free=True
    )
    publish_to: str | None = _setting(
        None, KEPT, "Upload each better checkpoint here on the Hub: namespace/name.", is_free=True
    )
    license: str | None = _setting(
        None, KEPT, "Licence of the drafter, for its model card, such as apache-2.0.", is_free=True
    )

    def __post_init__(self) -> None:
        self._fill_in()
        hints = get_type_hints(type(self))
        for setting in fields(self):
            self._check(setting, hints[setting.name])
        for is_wrong, sentence in self._refusals():
            if is_wrong:
                raise ValueError(sentence)

    def _fill_in(self) -> None:
        """Sets the recipe, and the fields still `None` that the recipe or the head decides."""
        if self.recipe is None:
            self._set("recipe", "short" if self.init is None else "paper")
        if self.gamma is not None and self.position_weights is None:
            self._set("position_weights", "decay")
        sizes = HEAD_SIZES.get(self.head or "", {})
        usual = sizes | RECIPES.get(self.recipe, {})
        for name, value in usual.items():
            if getattr(self, name) is None and name not in RESOLVED_WITH_DRAFTER:
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self, setting: Field[Any], hint: Any) -> None:
        """Converts the value of a field to its type, and checks it.

        An int becomes a float where the field is a float, and `False` becomes `"no"` for a precision. ValueError for an
        empty text, a wrong type, or a value out of range.
        """
        name = setting.name
        help = setting.metadata["help"]
        least = setting.metadata["least"]
        value = getattr(self, name)
        options = _options(hint)
        if type(value) is int and float in options:
            value = float(value)
        if value is False and Precision in options:  # YAML 1.1 reads `no` as false
            value = "no"
        self._set(name, value)
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{name} is empty: give a value, or leave it out. {help}")
        is_fit = any(_fits(value, option) for option in options)
        if not is_fit:
            raise ValueError(f"{name}={value!r} is not {_in_words(hint)}: {help}")
        if value is None:
            return
        if least is not None and not least <= value < math.inf:
            raise ValueError(f"{name}={value}: give {least} or more.")
        if name in POSITIVE and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: give a number above 0.")

    def _refusals(self) -> list[tuple[bool, str]]:
        """Returns a pair for each forbidden combination: whether these settings have it, and the error's message."""
        lora = f"lora_rank={self.lora_rank}"
        has_lora = self.lora_rank is not None
        has_init = self.init is not None
        taps = f"num_taps={self.num_taps} and target_layer_ids={self.target_layer_ids}"
        return [
            (self.seed >= 2**63, f"seed={self.seed}: give less than 2**63."),
            (
                not 0 <= self.warmup_ratio <= 1,
                f"warmup_ratio={self.warmup_ratio}: give a share of the steps, from 0 to 1.",
            ),
            (self.rejected_share > 1, f"rejected_share={self.rejected_share}: give a share, from 0 to 1."),
            (has_lora and self.shard, f"{lora} and shard: a low-rank update is small; leave shard out."),
            (
                not 0 < self.dpace_alpha <= 1,
                f"dpace_alpha={self.dpace_alpha}: give a probability above 0 and up to 1.",
            ),
            (
                self.streaming and self.samples is None,
                "streaming needs a number of rows to stop at: give samples (--samples) too.",
            ),
            (
                self.features is not None and self.shard_target,
                f"features={self.features!r} and shard_target: one process writes features with the whole target; "
                "leave one of them out.",
            ),
            (
                bool(self.from_target) and has_init,
                f"init={self.init!r} and from_target: a drafter begins with one of them; leave one of them out.",
            ),
            (
                self.freeze_init and has_lora,
                f"{lora} and freeze_init: one changes the weights of init and the other keeps them; leave one of them "
                "out.",
            ),
            (
                self.freeze_init and self.shard,
                "freeze_init and shard: what is added is small, and frozen layers are not sharded; leave shard out.",
            ),
            (
                self.num_taps is not None and self.target_layer_ids is not None,
                f"{taps}: give the number or the layers, not both.",
            ),
        ]

    def muon_rate(self, width: int) -> float:
        """Returns Muon's peak learning rate for a drafter of hidden size `width`; 0 if AdamW trains the matrices.

        It is `muon_learning_rate` or, by default, the recipe's rate times sqrt(`RECIPE_WIDTH` / width). Muon's updates
        are scaled to the RMS of AdamW's (Moonlight, arXiv 2502.16982), so their spectral norm would grow with the
        square root of the width. Features are learned equally well at all widths if this norm does not grow (A Spectral
        Condition for Feature Learning, arXiv 2310.17813).
        """
        if self.muon_learning_rate is not None:
            return self.muon_learning_rate
        rate = RECIPES[self.recipe]["muon_learning_rate"]
        return rate * math.sqrt(RECIPE_WIDTH / width)

    def changed(self, **settings: Any) -> "TrainingSettings":
        """Returns a copy with these `settings` changed. A new `recipe` also resets all fields that recipes decide."""
        by_recipe: Facts = dict.fromkeys(RECIPES[self.recipe]) if "recipe" in settings else {}
        return replace(self, **by_recipe | settings)

    @property
    def drop_above(self) -> int | None:
        """The length above which sequences are left out; `None` if sequences are cut instead."""
        return self.max_length if self.drop_long else None

    @property
    def begins_at_target(self) -> bool:
        """Whether a new drafter begins with the target's weights."""
        if self.from_target is not None:
            return self.from_target
        return RECIPES[self.recipe]["from_target"]

    def recipe_text(self) -> str:
        """Returns the recipe's name and the values that differ from it, such as `short with learning_rate=0.001`."""
        changes = []
        for name, usual in RECIPES[self.recipe].items():
            value = getattr(self, name)
            if value not in (None, usual):
                changes.append(f"{name}={value}")
        return f"{self.recipe} with {', '.join(changes)}" if changes else self.recipe

    def interval(self, name: str, steps: int) -> int:
        """Returns the setting `name` (`eval_every` or `save_every`), by default a tenth of `steps` and at most 500."""
        default = max(1, min(500, steps // 10))
        return getattr(self, name) or default

    def chosen(self, names: Collection[str]) -> Facts:
        """Returns the settings among `names` that are not `None`, by name."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def decisive(self) -> Facts:
        """Returns the settings that are not free (`is_free`), by name. A resumed run must have the same values."""
        names = [setting.name for setting in fields(self) if not setting.metadata["is_free"]]
        return {name: getattr(self, name) for name in names}


LINE_FORM = "write one `name: value` a line"


def read_yaml(path: Path, others: Collection[str] = ()) -> Facts:
    """Reads a YAML file; returns its values by field name, with `-` read as `_`. Names in `others` are allowed too.

    Raises:
        ValueError: for a file that cannot be read, an unknown name, or a name that is given twice.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"{path} is not a file: {LINE_FORM}, with the names of the flags.")
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: save the file in UTF-8.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML ({first_line(error)}): {LINE_FORM}.") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read: {LINE_FORM}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings: {LINE_FORM}.")
    names = [_field_name(key.value) for key, _ in yaml.compose(text).value]  # with repeated names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{path} gives {', '.join(repeated)} more than once: keep one line of each.")
    hints = get_type_hints(TrainingSettings)
    known = {setting.name for setting in fields(TrainingSettings)}
    numbers = {name for name in known if float in _options(hints[name])}
    unknown = sorted({*names} - known - {*others})
    if unknown:
        raise ValueError(f"{path} holds {', '.join(unknown)}: `dflash train --help` lists the settings.")
    named = {_field_name(key): value for key, value in values.items()}
    return {name: _number_of(value) if name in numbers else value for name, value in named.items()}


def _field_name(key: Any) -> str:
    return str(key).replace("-", "_")


def _number_of(value: Any) -> Any:
    """Converts a text that is a number to float; returns other values unchanged. YAML 1.1 reads 6e-4 as text."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or a tuple of the type itself."""
    is_union = get_origin(hint) in (Union, UnionType)
    return get_args(hint) if is_union else (hint,)


def _fits(value: Any, option: Any) -> bool:
    if get_origin(option) is Literal:
        return value in get_args(option)
    if get_origin(option) is list:
        return isinstance(value, list) and all(type(item) is int for item in value)
    return type(value) is option  # `True` is not an int here


def _in_words(hint: Any) -> str:
    """Describes a type for an error, without its `None`: `a whole number`, `one of bf16, no`."""
    (option,) = (option for option in _options(hint) if option is not NoneType)
    if get_origin(option) is Literal:
        return f"one of {', '.join(get_args(option))}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(option, "a list of numbers")


# The default settings of `dflash adapt`.
ADAPTATION = TrainingSettings(
    recipe="paper",
    steps=600,
    position_weights="dpace",
    num_anchors=64,
    learning_rate=1.5e-4,
    held_out=24,
    eval_every=50,
    patience=4,
)
