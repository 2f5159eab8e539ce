"""The configuration of a DFlash drafter: its shape, its block, and the layers of the target that it reads.

`model_type` is "qwen3", the published form that every serving engine reads. Fields that some engines read at the top level
and others in `dflash_config` are written in both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging


# Engines read these at the top level or in `dflash_config`.
DOUBLED_FIELDS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
# Written in both, too, unless they have the value given here, which means "absent".
OPTIONAL_FIELDS: dict[str, Any] = {
    "sample_from_anchor": False,
    "draft_vocab_size": None,
    "input_embedding_scale": None,
    "output_multiplier": None,
    "final_logit_softcapping": None,
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "projector_type": None,
    "gru_hidden_dim": None,
    "emb_dim": None,
    "pure_draft_prefix_len": 0,
    "shift_label": False,
}
# Fields that change the computation and are not implemented here. Ignoring them would be silently wrong, so they are refused,
# unless they have one of the values given here, which mean "absent".
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attention_value_scale": (None, 1, 1.0),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "attention_sink_bias": (None, False),
    "enable_confidence_head": (None, False),
    "markov_rank": (None, 0),
}
# Causality inside the block in `dflash_config`, as ModelOpt and NeMo, and as JetSpec name it.
CAUSALITY_FIELDS = ("causal", "causal_head")
# Fields of `dflash_config` that describe the training. They do not change what a drafter computes.
TRAINING_FIELDS = ("loss_decay_gamma", "num_anchors")
# Fields of other tools' formats, which have no meaning in this one.
DIALECT_FIELDS = ("use_swa", "swa_window_size", "transformer_layer_config", "aux_hidden_state_layer_ids")
# All fields of `dflash_config` that are read or refused.
NESTED_FIELDS = {
    *DOUBLED_FIELDS,
    *OPTIONAL_FIELDS,
    *UNSUPPORTED_FIELDS,
    *CAUSALITY_FIELDS,
    *TRAINING_FIELDS,
    *DIALECT_FIELDS,
    "target_hidden_size",
}
LARGEST_BLOCK = 1024  # published blocks have 4 to 32 positions; a forward over a million takes all memory

logger = logging.get_logger(__name__)


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether `value` is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is an integer or a float, and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def default_target_layer_ids(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """The default `target_layer_ids`: spread evenly from the second layer to the third from the end, ascending.

    This is the paper's choice (section 4; `build_target_layer_ids` of z-lab/dflash): `[1, 9, 17, 25, 33]` for 36 layers. A
    target with fewer than `num_taps` such layers gets one id for each. Raises ValueError for fewer than 2 layers.
    """
    if num_target_layers < 2:
        raise ValueError(f"num_target_layers={num_target_layers}: the last layer is never tapped, so use at least 2.")
    last = max(num_target_layers - 3, min(1, num_target_layers - 2))
    first = min(1, last)
    if num_taps == 1:
        return [min(num_target_layers // 2, num_target_layers - 2)]
    distance = (last - first) / (num_taps - 1)
    ids = {round(first + i * distance) for i in range(num_taps)}
    return sorted(ids)


# What a value has to be, if there is one.
WHOLE_NUMBERS = ("block_size", "mask_token_id", "num_target_layers", "pure_draft_prefix_len")
COUNTS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "draft_vocab_size",
    "gru_hidden_dim",
    "emb_dim",
)
FLAGS = ("shift_label", "is_causal")
NUMBERS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


class DFlashConfig(Qwen3Config):
    """The configuration of a [`DFlashDraftModel`]: the dimensions of a Qwen3 decoder, the block, and the layers to read.

    Args:
        block_size (`int`, defaults to 16): Positions of a block, anchor included (N).
        mask_token_id (`int`): Id that fills the block after the anchor. It must not occur in text.
        target_layer_ids (`list[int]`): Layers of the target that the drafter reads, 0-based and ascending: id i is
            `hidden_states[i + 1]`. Default: `default_target_layer_ids(num_target_layers)`.
        num_target_layers (`int`, *optional*): Number of the target's layers. The last one cannot be read.
        is_causal (`bool`, *optional*): Causality inside the block. `None`: sliding layers are causal, full ones are not.
        dflash_config (`dict[str, Any]`, *optional*): A nested copy of the above, as in published checkpoints.
        rope_theta (`float`, *optional*): Base of the rotary embedding, as in transformers 4.
        rope_scaling (`dict[str, Any]`, *optional*): Scaling of the rotary embedding, as in transformers 4.
        rope_parameters (`dict[str, Any]`, *optional*): Both, as in transformers 5. They take precedence.
        kwargs: Fields of `Qwen3Config` (`vocab_size` is the target's, or 0 if unknown), and:

            - **sample_from_anchor** (`bool`, defaults to `False`): Each position, the anchor's too, proposes the next token.
              Otherwise each position after the anchor proposes its own token.
            - **draft_vocab_size** (`int`): Size of the drafter's own head, if it has one.
            - **input_embedding_scale** (`float`): Factor of the target's raw embeddings. Default: its embedding module.
            - **output_multiplier**, **final_logit_softcapping** (`float`): Applied to the logits, in this order.
            - **conv_kernel_size**, **conv_group_size** (`int`): DFlash2's convolutions inside the block.
            - **selector_rank**, **selector_top_k** (`int`): DFlash2's selector among the most probable tokens.
            - **gru_hidden_dim**, **emb_dim** (`int`): Domino's head, whose GRU reads the tokens chosen before each position.
            - **pure_draft_prefix_len** (`int`, defaults to 0): Proposals at the beginning that Domino's head leaves alone.

    Raises:
        ValueError: for a value that no drafter can run with, naming the value and the remedy.

    Example:
        >>> config = DFlashConfig(block_size=16, mask_token_id=151669, num_target_layers=36, num_hidden_layers=5)
    """

    model_type = "qwen3"
    # `dflash.dialects`, which reads other tools' formats and completes cards; `None` in shipped copies.
    reader: ClassVar[Any] = None

    if TYPE_CHECKING:  # Qwen3Config allows None here; this class leaves none
        layer_types: list[str]
        num_key_value_heads: int
        head_dim: int
        sample_from_anchor: bool
        draft_vocab_size: int | None
        input_embedding_scale: float | None
        output_multiplier: float | None
        final_logit_softcapping: float | None
        conv_kernel_size: int | None
        conv_group_size: int | None
        selector_rank: int | None
        selector_top_k: int | None
        projector_type: str | None
        shift_label: bool
        gru_hidden_dim: int | None
        emb_dim: int | None
        pure_draft_prefix_len: int

    def __init__(
        self,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        target_layer_ids: list[int] | None = None,
        num_target_layers: int | None = None,
        is_causal: bool | None = None,
        dflash_config: dict[str, Any] | None = None,
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        rope_parameters: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        nested = dict(dflash_config or {})
        _refuse_unsupported({**kwargs, **nested, **(rope_scaling or {}), **(rope_parameters or {})})
        for name in UNSUPPORTED_FIELDS:  # absent, as is now known
            kwargs.pop(name, None)
            nested.pop(name, None)
        block_size = _agreed("block_size", block_size, nested)
        mask_token_id = _agreed("mask_token_id", mask_token_id, nested)
        target_layer_ids = _agreed("target_layer_ids", target_layer_ids, nested)
        num_target_layers = _agreed("num_target_layers", num_target_layers, nested)
        for name in CAUSALITY_FIELDS:
            declared = {"is_causal": nested.pop(name, None)}
            is_causal = _agreed("is_causal", is_causal, declared)
        width = _agreed("target_hidden_size", kwargs.pop("target_hidden_size", None), nested)
        if width is not None:
            kwargs["target_hidden_size"] = width
        unused = [f"dflash_config.{name}" for name in sorted(nested) if name not in NESTED_FIELDS]
        if unused:
            logger.warning_once(unused_fields_message(unused))
        optional = dict(OPTIONAL_FIELDS)
        for name in OPTIONAL_FIELDS:
            top_level = kwargs.pop(name, None)
            value = _agreed(name, top_level, nested)
            if value is not None:
                optional[name] = value
        dialect = kwargs.pop("dialect", None)
        # Without `layer_types` all layers are full: Qwen3's default of 28 `max_window_layers` does that to shallow drafters.
        kwargs.setdefault("max_window_layers", kwargs.get("num_hidden_layers", 32))
        kwargs.setdefault("tie_word_embeddings", False)
        theta, scaling = _rope_fields(rope_theta, rope_scaling, rope_parameters)
        kwargs.setdefault("rope_theta", theta)
        kwargs.setdefault("rope_scaling", scaling)
        if "dtype" in kwargs:
            kwargs.pop("torch_dtype", None)
        super().__init__(**kwargs)
        if target_layer_ids is None and num_target_layers is not None:
            target_layer_ids = default_target_layer_ids(num_target_layers)
        self.block_size = 16 if block_size is None else block_size
        self.mask_token_id = mask_token_id
        self.target_layer_ids = None if target_layer_ids is None else list(target_layer_ids)
        self.num_target_layers = num_target_layers
        if is_causal is not None:  # absent means the published rule, and some engines read a null as false
            self.is_causal = is_causal
        for name, value in optional.items():
            setattr(self, name, value)
        self._complete()
        self.dialect = dialect
        self.dflash_config = {**nested, **self._doubled()}
        self.check()

    def _complete(self) -> None:
        """Sets the optional fields that follow from others."""
        if self.gru_hidden_dim is not None:  # Domino's name for what `sample_from_anchor` says is written beside it
            self.projector_type = self.projector_type or "domino"
            self.shift_label = self.shift_label or self.sample_from_anchor
            self.sample_from_anchor = self.shift_label
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        if self.draft_vocab_size is not None:
            self.tie_word_embeddings = False  # its head is its own, and it has no embedding to tie it to
        if self.conv_kernel_size is not None and self.input_embedding_scale is None:
            self.input_embedding_scale = 1.0  # DFlash2 reads raw embeddings

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """The fields of a checkpoint as this class takes them, and the unused keywords."""
        read: Any = super().get_config_dict
        if cls.reader is None:
            return read(pretrained_model_name_or_path, **kwargs)
        return cls.reader.read_config(read, pretrained_model_name_or_path, **kwargs)

    @property
    def num_proposals(self) -> int:
        """Tokens that one draft proposes: one per position, except the anchor's unless `sample_from_anchor`."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def check(self) -> None:
        """Raises ValueError for a wrong field; `None` is allowed, since transformers builds configs without arguments."""
        self._check_kinds()
        self._check_block()
        self._check_taps()
        self._check_layers()
        self._check_variants()

    def _check_kinds(self) -> None:
        for name in WHOLE_NUMBERS + COUNTS:
            value = getattr(self, name, None)
            if value is not None and not is_whole_number(value):
                raise ValueError(f"{name}={value!r} is not a whole number: write it without quotes.")
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not a whole number above 0: leave it out for none.")
        for name in FLAGS:
            value = getattr(self, name, None)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is neither true nor false: write it without quotes.")
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise ValueError(f"{name}={value!r} is not a number: write it without quotes, or leave it out.")
        cap = self.final_logit_softcapping
        if cap is not None and cap <= 0:
            raise ValueError(f"final_logit_softcapping={cap} is not a number above 0: leave it out for none.")
        if self.pure_draft_prefix_len < 0:
            raise ValueError(f"pure_draft_prefix_len={self.pure_draft_prefix_len} is not a whole number from 0 on.")
        if self.projector_type not in (None, "domino"):
            raise ValueError(f"projector_type={self.projector_type!r} is not supported: use an engine that reads it.")

    def _check_block(self) -> None:
        if self.num_proposals < 1:
            raise ValueError(f"block_size={self.block_size}: a block is an anchor and drafted tokens; use 2 or more.")
        if self.block_size > LARGEST_BLOCK:
            remedy = f"write that of the training run, at most {LARGEST_BLOCK}"
            raise ValueError(f"block_size={self.block_size} is no block of a drafter: {remedy}.")
        mask = self.mask_token_id
        vocab_size = self.vocab_size or float("inf")
        if mask is not None and not 0 <= mask < vocab_size:
            fault = f"mask_token_id={mask} is outside the vocabulary of {self.vocab_size}"
            raise ValueError(f"{fault}: choose an id of the target's embedding that never occurs in text.")

    def _check_taps(self) -> None:
        ids = self.target_layer_ids
        depth = self.num_target_layers
        if ids is None:
            return
        if not all(map(is_whole_number, ids)):
            raise ValueError(f"target_layer_ids={ids!r} is not a list of layer numbers, as [1, 9].")
        is_ascending = all(first < second for first, second in pairwise(ids))
        if not ids or ids[0] < 0 or not is_ascending:
            # Engines read the columns of fc in this order, and some sort the ids.
            raise ValueError(f"target_layer_ids={ids} must be 0-based, strictly ascending and without repeats.")
        # The last layer's output is normed in transformers and raw in engines.
        if depth is not None and ids[-1] >= depth - 1:
            raise ValueError(f"target_layer_ids={ids} reaches the last of {depth} layers: use up to {depth - 2}.")

    def _check_layers(self) -> None:
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(unknown)}: only full_attention and sliding_attention exist.")
        window = self.sliding_window
        has_window = is_whole_number(window) and window > 0
        if "sliding_attention" in self.layer_types and not has_window:
            fault = f"layer_types holds sliding_attention but sliding_window={window!r}"
            raise ValueError(f"{fault}: set it to that of the training run, above 0, and use_sliding_window=True.")

    def _check_variants(self) -> None:
        """Raises ValueError for a convolution, a selector or a head that cannot be built."""
        self._check_both("conv_kernel_size", "conv_group_size")
        self._check_both("selector_rank", "selector_top_k")
        self._check_both("gru_hidden_dim", "emb_dim")
        for name in ("projector_type", "shift_label"):
            if getattr(self, name) and self.gru_hidden_dim is None:
                fault = f"{name}={getattr(self, name)} and gru_hidden_dim=None, so Domino's head is not there"
                raise ValueError(f"{fault}: write its gru_hidden_dim and emb_dim, or use an engine that reads it.")
        if self.selector_rank is not None and self.gru_hidden_dim is not None:
            fields = f"selector_rank={self.selector_rank} and gru_hidden_dim={self.gru_hidden_dim}"
            raise ValueError(f"{fields}: use one of both.")
        size = self.conv_group_size
        if size is not None and self.hidden_size % size:
            raise ValueError(f"conv_group_size={size} does not divide hidden_size={self.hidden_size}: correct one.")
        for name in ("selector_top_k", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and value > self.vocab_size:
                raise ValueError(f"{name}={value} is more than the target's tokens, vocab_size={self.vocab_size}.")
        width = getattr(self, "target_hidden_size", None)
        if width not in (None, self.hidden_size):
            fault = f"target_hidden_size={width} differs from hidden_size={self.hidden_size}"
            raise ValueError(f"{fault}, which is not supported: serve this drafter with an engine that reads it.")

    def _check_both(self, first: str, second: str) -> None:
        value = getattr(self, first)
        other = getattr(self, second)
        if (value is None) != (other is None):
            raise ValueError(f"{first}={value} and {second}={other}: a drafter has both or neither.")

    def _doubled(self) -> dict[str, Any]:
        """The current values of the fields that are written twice."""
        names = list(DOUBLED_FIELDS)
        for name, absent in OPTIONAL_FIELDS.items():
            if getattr(self, name) != absent:
                names.append(name)
        return {name: getattr(self, name) for name in names}

    def is_layer_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block: `is_causal` if given, else sliding layers are."""
        declared = getattr(self, "is_causal", None)
        if declared is None:
            return self.layer_types[layer_idx] == "sliding_attention"
        return bool(declared)

    def layer_window(self, layer_idx: int) -> int | None:
        """The window W of layer `layer_idx` (queries see keys less than W positions away), `None` for a full layer."""
        if self.layer_types[layer_idx] != "sliding_attention":
            return None
        return self.sliding_window

    def to_dict(self) -> dict[str, Any]:
        """All fields, with rope in both spellings: transformers 4 silently takes theta 10000 from the newer one alone."""
        fields = super().to_dict()
        doubled = self._doubled()
        nested = dict(self.dflash_config)
        for name in OPTIONAL_FIELDS:
            nested.pop(name, None)
        fields["dflash_config"] = nested | doubled
        fields.pop("dialect", None)
        for name in OPTIONAL_FIELDS:
            if name not in doubled:
                fields.pop(name, None)
        is_second = self.conv_kernel_size is not None or self.selector_rank is not None
        if is_second and fields.get("architectures"):
            fields["architectures"] = ["DFlash2DraftModel"]  # the name by which engines build DFlash2's parts
        theta, scaling = _rope_fields(
            fields.get("rope_theta"),
            fields.get("rope_scaling"),
            fields.get("rope_parameters"),
        )
        fields["rope_theta"] = theta
        fields["rope_scaling"] = scaling
        fields["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: the fields that are not transformers' defaults, with dtype in both spellings."""
        fields = super().to_diff_dict()
        dtype = fields.get("dtype") or fields.get("torch_dtype")
        if dtype is not None:
            fields["dtype"] = dtype
            fields["torch_dtype"] = dtype
        return fields


def unused_fields_message(names: list[str]) -> str:
    """The warning about fields of a drafter's config that nothing here reads."""
    remedy = "if one of them changes what the drafter computes, use the tool that wrote it"
    return f"The drafter's config holds {', '.join(names)}, which this library does not read: {remedy}."


def _agreed(name: str, top_level: Any, nested: dict[str, Any]) -> Any:
    """The value of a field that is written at the top level and in `dflash_config`; the two must be equal."""
    inner = nested.get(name)
    if isinstance(top_level, tuple):
        top_level = list(top_level)
    if isinstance(inner, tuple):
        inner = list(inner)
    if top_level is None:
        return inner
    if inner is not None and top_level != inner:
        raise ValueError(f"{name} is {top_level} at the top level and {inner} in dflash_config: write one value.")
    return top_level


def _rope_fields(
    theta: float | None, scaling: dict[str, Any] | None, parameters: dict[str, Any] | None
) -> tuple[float, dict[str, Any] | None]:
    """`(rope_theta, rope_scaling)` out of either spelling; `parameters` wins, as in transformers 5."""
    if parameters:
        for value in parameters.values():
            if isinstance(value, dict):
                raise ValueError("rope_parameters differ by layer type: write one rope_theta and rope_type for all.")
        scaling = dict(parameters)
        theta = scaling.pop("rope_theta", theta)
    theta = 10000.0 if theta is None else float(theta)
    if scaling is None:
        return theta, None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise ValueError(f"rope_type={kind!r} is unknown: use one of default, {known}.")
    return theta, scaling


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name in DIALECT_FIELDS:
        if fields.get(name):
            raise ValueError(f"{name}={fields[name]!r} is another tool's: load it by dflash.DFlashDraftModel.")
    for name, absent in UNSUPPORTED_FIELDS.items():
        if fields.get(name) not in absent:
            raise ValueError(f"{name}={fields[name]!r} is not supported: use an engine that reads it.")


DFlashConfig.register_for_auto_class()
