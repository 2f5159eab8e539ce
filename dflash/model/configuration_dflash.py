"""The configuration of a DFlash drafter: its shape, its block, and the layers of the target that it reads.

`model_type` is "qwen3", the published form that every serving engine reads. Fields that some engines read at the top level
and others in `dflash_config` are written in both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
    **dict.fromkeys(("draft_vocab_size", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")),
    **dict.fromkeys(("projector_type", "gru_hidden_dim", "emb_dim")),
    "pure_draft_prefix_len": 0,
    "shift_label": False,
}
PAIRED = (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k"), ("gru_hidden_dim", "emb_dim"))
# Fields that change the computation and are not implemented here. Ignoring them would be silently wrong, so they are refused,
# unless they have one of the values given here, which mean "absent".
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("partial_rotary_factor", "attention_value_scale"), (None, 1, 1.0)),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), (None, True)),
    **dict.fromkeys(("attention_sink_bias", "enable_confidence_head"), (None, False)),
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
        return [num_target_layers // 2 if num_target_layers // 2 < num_target_layers - 1 else last]
    return sorted({round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)})


# For each field: whether a value is valid, and what is wrong with another one.
_WHOLE = (is_whole_number, "not a whole number: write it without quotes")
_COUNT = (lambda value: is_whole_number(value) and value > 0, "not a whole number above 0: leave it out for none")
_FLAG = (lambda value: isinstance(value, bool), "neither true nor false: write it without quotes")
_NUMBER = (is_number, "not a number: write it without quotes, or leave it out")
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("block_size", "mask_token_id", "num_target_layers"), _WHOLE),
    "pure_draft_prefix_len": (lambda value: is_whole_number(value) and value >= 0, "not a whole number from 0 on"),
    **dict.fromkeys(("shift_label", "is_causal"), _FLAG),
    "target_layer_ids": (lambda ids: all(map(is_whole_number, ids)), "not a list of layer numbers, as [1, 9]"),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size"), _COUNT),
    **dict.fromkeys(("selector_rank", "selector_top_k", "draft_vocab_size", "gru_hidden_dim", "emb_dim"), _COUNT),
    "projector_type": (lambda kind: kind == "domino", "not supported: use an engine that reads it"),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), _NUMBER),
    "final_logit_softcapping": (lambda cap: is_number(cap) and cap > 0, "not a number above 0, without quotes"),
}


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
    # `dflash.checkpoints.dialects`, which reads other tools' formats and completes cards; `None` in shipped copies.
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
            is_causal = _agreed("is_causal", is_causal, {"is_causal": nested.pop(name, None)})
        target_hidden_size = _agreed("target_hidden_size", kwargs.pop("target_hidden_size", None), nested)
        if target_hidden_size is not None:
            kwargs["target_hidden_size"] = target_hidden_size
        if unused := sorted(set(nested) - NESTED_FIELDS):
            logger.warning_once(unused_fields_message([f"dflash_config.{name}" for name in unused]))
        optional = {name: _agreed(name, kwargs.pop(name, None), nested) for name in OPTIONAL_FIELDS}
        dialect = kwargs.pop("dialect", None)
        if target_layer_ids is None and num_target_layers is not None:
            target_layer_ids = default_target_layer_ids(num_target_layers)
        # Without `layer_types` all layers are full: Qwen3's default of 28 `max_window_layers` does that to shallow drafters.
        kwargs.setdefault("max_window_layers", kwargs.get("num_hidden_layers", 32))
        kwargs.setdefault("tie_word_embeddings", False)
        theta, scaling = _rope_fields(rope_theta, rope_scaling, rope_parameters)
        if "dtype" in kwargs:
            kwargs.pop("torch_dtype", None)
        super().__init__(**{"rope_theta": theta, "rope_scaling": scaling, **kwargs})
        self.block_size = 16 if block_size is None else block_size
        self.mask_token_id = mask_token_id
        self.target_layer_ids = None if target_layer_ids is None else list(target_layer_ids)
        self.num_target_layers = num_target_layers
        if is_causal is not None:  # absent means the published rule, and some engines read a null as false
            self.is_causal = is_causal
        for name, absent in OPTIONAL_FIELDS.items():
            setattr(self, name, absent if optional[name] is None else optional[name])
        if self.gru_hidden_dim is not None:  # Domino's name for what `sample_from_anchor` says is written beside it
            self.projector_type = self.projector_type or "domino"
            self.sample_from_anchor = self.shift_label = self.shift_label or self.sample_from_anchor
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        if self.draft_vocab_size is not None:
            self.tie_word_embeddings = False  # its head is its own, and it has no embedding to tie it to
        if self.conv_kernel_size is not None and self.input_embedding_scale is None:
            self.input_embedding_scale = 1.0  # DFlash2 reads raw embeddings
        self.dialect = dialect
        self.dflash_config = {**nested, **self._doubled()}
        self.check()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """The fields of a checkpoint as this class takes them, and the unused keywords."""
        name = os.path.join(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")
        try:
            fields, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{name}: config.json holds no object: fetch or write the file again.") from error
        if cls.reader is not None:
            fields = cls.reader.portable_fields(fields, cls.reader.tensor_names(name))
        return fields, unused

    @property
    def num_proposals(self) -> int:
        """Tokens that one draft proposes: one per position, except the anchor's unless `sample_from_anchor`."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def check(self) -> None:
        """Raises ValueError for a wrong field; `None` is allowed, since transformers builds configs without arguments."""
        for name, (is_right, what) in KINDS.items():
            value = getattr(self, name, None)
            if value is not None and not is_right(value):
                raise ValueError(f"{name}={value!r} is {what}.")
        if self.num_proposals < 1:
            raise ValueError(f"block_size={self.block_size}: a block is an anchor and drafted tokens; use 2 or more.")
        if self.block_size > LARGEST_BLOCK:
            remedy = f"write that of the training run, at most {LARGEST_BLOCK}"
            raise ValueError(f"block_size={self.block_size} is no block of a drafter: {remedy}.")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < (self.vocab_size or float("inf")):
            given = f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            raise ValueError(f"{given}: choose an id of the target's embedding that never occurs in text.")
        ids, depth = self.target_layer_ids, self.num_target_layers
        if ids is not None:
            if not ids or any(b <= a for a, b in pairwise(ids)) or ids[0] < 0:
                # Engines read the columns of fc in this order, and some sort the ids.
                raise ValueError(f"target_layer_ids={ids} must be 0-based, strictly ascending and without repeats.")
            # The last layer's output is normed in transformers and raw in engines.
            if depth is not None and ids[-1] >= depth - 1:
                raise ValueError(f"target_layer_ids={ids} reaches the last of {depth} layers: use up to {depth - 2}.")
        self._check_variants()
        if unknown := set(self.layer_types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"layer_types holds {sorted(unknown)}: only full_attention and sliding_attention exist.")
        window = self.sliding_window
        if "sliding_attention" in self.layer_types and not (is_whole_number(window) and window > 0):
            given = f"layer_types holds sliding_attention but sliding_window={window!r}"
            raise ValueError(f"{given}: set it to that of the training run, above 0, and use_sliding_window=True.")

    def _check_variants(self) -> None:
        """Raises ValueError for a convolution, a selector or a head that cannot be built."""
        for one, other in PAIRED:
            values = getattr(self, one), getattr(self, other)
            if (values[0] is None) != (values[1] is None):
                raise ValueError(f"{one}={values[0]} and {other}={values[1]}: a drafter has both or neither.")
        rank, state_size = self.selector_rank, self.gru_hidden_dim
        for name in ("projector_type", "shift_label"):
            if getattr(self, name) and state_size is None:
                given = f"{name}={getattr(self, name)} and gru_hidden_dim=None, so Domino's head is not there"
                raise ValueError(f"{given}: write its gru_hidden_dim and emb_dim, or use an engine that reads it.")
        if rank is not None and state_size is not None:
            raise ValueError(f"selector_rank={rank} and gru_hidden_dim={state_size}: use one of both.")
        size = self.conv_group_size
        if size is not None and self.hidden_size % size:
            raise ValueError(f"conv_group_size={size} does not divide hidden_size={self.hidden_size}: correct one.")
        for name in ("selector_top_k", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and value > self.vocab_size:
                raise ValueError(f"{name}={value} is more than the target's tokens, vocab_size={self.vocab_size}.")
        width = getattr(self, "target_hidden_size", None)
        if width not in (None, self.hidden_size):
            given = f"target_hidden_size={width} differs from hidden_size={self.hidden_size}"
            raise ValueError(f"{given}, which is not supported: serve this drafter with an engine that reads it.")

    def _doubled(self) -> dict[str, Any]:
        """The current values of the fields that are written twice."""
        said = [name for name, absent in OPTIONAL_FIELDS.items() if getattr(self, name) != absent]
        return {name: getattr(self, name) for name in (*DOUBLED_FIELDS, *said)}

    def is_layer_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block: `is_causal` if given, else sliding layers are."""
        declared = getattr(self, "is_causal", None)
        return self.layer_types[layer_idx] == "sliding_attention" if declared is None else bool(declared)

    def layer_window(self, layer_idx: int) -> int | None:
        """The window W of layer `layer_idx` (queries see keys less than W positions away), `None` for a full layer."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None

    def to_dict(self) -> dict[str, Any]:
        """All fields, with rope in both spellings: transformers 4 silently takes theta 10000 from the newer one alone."""
        fields = super().to_dict()
        doubled = self._doubled()
        others = {name: value for name, value in self.dflash_config.items() if name not in OPTIONAL_FIELDS}
        fields["dflash_config"] = {**others, **doubled}
        for name in ({"dialect"} | set(OPTIONAL_FIELDS)) - set(doubled):
            fields.pop(name, None)
        if fields.get("architectures") and (self.conv_kernel_size, self.selector_rank) != (None, None):
            fields["architectures"] = ["DFlash2DraftModel"]  # the name by which engines build DFlash2's parts
        theta, scaling = _rope_fields(*map(fields.get, ("rope_theta", "rope_scaling", "rope_parameters")))
        fields["rope_theta"], fields["rope_scaling"] = theta, scaling
        fields["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: the fields that are not transformers' defaults, with dtype in both spellings."""
        fields = super().to_diff_dict()
        if (dtype := fields.get("dtype") or fields.get("torch_dtype")) is not None:
            fields["dtype"] = fields["torch_dtype"] = dtype
        return fields


def unused_fields_message(names: list[str]) -> str:
    """The warning about fields of a drafter's config that nothing here reads."""
    remedy = "if one of them changes what the drafter computes, use the tool that wrote it"
    return f"The drafter's config holds {', '.join(names)}, which this library does not read: {remedy}."


def _agreed(name: str, top_level: Any, nested: dict[str, Any]) -> Any:
    """The value of a field that is written at the top level and in `dflash_config`; the two must be equal."""
    inner = nested.get(name)
    top_level, inner = (list(value) if isinstance(value, tuple) else value for value in (top_level, inner))
    if top_level is not None and inner is not None and top_level != inner:
        raise ValueError(f"{name} is {top_level} at the top level and {inner} in dflash_config: write one value.")
    return inner if top_level is None else top_level


def _rope_fields(
    theta: float | None, scaling: dict[str, Any] | None, parameters: dict[str, Any] | None
) -> tuple[float, dict[str, Any] | None]:
    """`(rope_theta, rope_scaling)` out of either spelling; `parameters` wins, as in transformers 5."""
    if parameters:
        if any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError("rope_parameters differ by layer type: write one rope_theta and rope_type for all.")
        theta = parameters.get("rope_theta", theta)
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    if scaling is not None and scaling.get("rope_type", scaling.get("type", "default")) == "default":
        scaling = None
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if kind is not None and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise ValueError(f"rope_type={kind!r} is unknown: use one of default, {known}.")
    return (10000.0 if theta is None else float(theta)), scaling


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name in DIALECT_FIELDS:
        if fields.get(name):
            raise ValueError(f"{name}={fields[name]!r} is another tool's: load it by dflash.DFlashDraftModel.")
    for name, absent in UNSUPPORTED_FIELDS.items():
        if fields.get(name) not in absent:
            raise ValueError(f"{name}={fields[name]!r} is not supported: use an engine that reads it.")


DFlashConfig.register_for_auto_class()
