"""The configuration of a DFlash drafter: its shape, its block, and the layers of the target that it reads.

`model_type` is "qwen3", the published form that every serving engine reads. Fields that some engines read at the top level
and others in `dflash_config` are written in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging


logger = logging.get_logger(__name__)

ABOVE_ZERO = math.ulp(0.0)  # the smallest number above 0
LARGEST_BLOCK = 1024  # published blocks have 4 to 32 positions; a forward over a million takes all memory

# For each name: whether a value is valid, and the remedy.
Checks = Mapping[str, tuple[Callable[[Any], bool], str]]


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether `value` is a real number from `least` to `most`, and no boolean."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and least <= value <= most


def is_whole_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether `value` is a whole number from `least` to `most`, and no boolean."""
    return isinstance(value, Integral) and is_number(value, least, most)


def check_values(values: Mapping[str, Any], checks: Checks) -> None:
    """Raises ValueError for a value that its name cannot have, with the remedy; `None` passes."""
    for name, (is_valid, remedy) in checks.items():
        value = values.get(name)
        if value is None or is_valid(value):
            continue
        raise ValueError(f"{name}={value!r:.80}: {remedy}.")


def is_a(kind: type) -> Callable[[Any], bool]:
    """The check whether a value is a `kind`."""
    return lambda value: isinstance(value, kind)


def _are_layers(value: Any) -> bool:
    # Engines read the columns of fc in this order, and some sort the ids.
    if not isinstance(value, list | tuple):
        return False
    has_layers = bool(value) and all(is_whole_number(layer, 0) for layer in value)
    return has_layers and list(value) == sorted(set(value))


WHOLE = (is_whole_number, "use a whole number, without quotes")
COUNT = (partial(is_whole_number, least=1), "use a whole number above 0, without quotes, or leave it out")
COUNT_OR_ZERO = (partial(is_whole_number, least=0), "use a whole number from 0 on, without quotes")
NUMBER = (is_number, "use a number, without quotes, or leave it out")
CAP = (partial(is_number, least=ABOVE_ZERO), "use a number above 0, without quotes, or leave it out")
FLAG = (is_a(bool), "use true or false, without quotes")
# Fields that engines read at the top level or in `dflash_config`, and what a value has to be.
FIELDS: Checks = {
    "block_size": WHOLE,
    "mask_token_id": WHOLE,
    "target_layer_ids": (_are_layers, "use a list of layer numbers, 0-based, ascending, without repeats, as [1, 9]"),
    "num_target_layers": WHOLE,
    "shift_label": FLAG,
    "sample_from_anchor": FLAG,
    "draft_vocab_size": COUNT,
    "input_embedding_scale": NUMBER,
    "output_multiplier": NUMBER,
    "final_logit_softcapping": CAP,
    "conv_kernel_size": COUNT,
    "conv_group_size": COUNT,
    "selector_rank": COUNT,
    "selector_top_k": COUNT,
    "projector_type": (("domino", "dspark").__contains__, "it is not supported, use an engine that reads it"),
    "gru_hidden_dim": COUNT,
    "emb_dim": COUNT,
    "pure_draft_prefix_len": COUNT_OR_ZERO,
    "markov_rank": COUNT,
    "markov_head_type": (("vanilla", "gated").__contains__, "it is not supported, use an engine that reads it"),
    "enable_confidence_head": FLAG,
    "confidence_head_with_markov": FLAG,
}
# Their values where a drafter has none. They are written in both places, unless they are absent.
ABSENT = {
    **dict.fromkeys(FIELDS),
    "sample_from_anchor": False,
    "pure_draft_prefix_len": 0,
    "shift_label": False,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
# Fields that a drafter has together or not at all.
TOGETHER = (
    ("conv_kernel_size", "conv_group_size"),
    ("selector_rank", "selector_top_k"),
    ("gru_hidden_dim", "emb_dim"),
)
# The names of heads in `projector_type`, and the field that a drafter with such a head has.
PROJECTORS = {"domino": "gru_hidden_dim", "dspark": "markov_rank"}
HEAD_FIELDS = ("selector_rank", *PROJECTORS.values())
# The class by which engines build a drafter, by a field that it has.
ARCHITECTURES = {
    "conv_kernel_size": "DFlash2DraftModel",
    "selector_rank": "DFlash2DraftModel",
    "markov_rank": "DSparkDraftModel",
}
# Fields that change the computation and are not implemented here. Ignoring them would be silently wrong, so they are refused,
# unless they are null or have the value given here, which means "absent".
UNSUPPORTED_FIELDS = {
    "partial_rotary_factor": 1,
    "attention_value_scale": 1,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "attention_sink_bias": False,
    # Of other tools' formats.
    "use_swa": False,
    "swa_window_size": 0,
    "transformer_layer_config": None,
    "aux_hidden_state_layer_ids": None,
}
# Causality inside the block in `dflash_config`, as ModelOpt and NeMo, and as JetSpec name it.
CAUSALITY_FIELDS = ("causal", "causal_head")
# Fields that are read in `dflash_config`, and written at the top level alone, by this name.
WRITTEN_ONCE = {**dict.fromkeys(CAUSALITY_FIELDS, "is_causal"), "target_hidden_size": "target_hidden_size"}


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


class DFlashConfig(Qwen3Config):
    """The configuration of a [`DFlashDraftModel`]: the dimensions of a Qwen3 decoder, the block, and the layers to read.

    Args:
        dflash_config (`dict[str, Any]`, *optional*): A nested copy of the fields below, as in published checkpoints.
        kwargs: Fields of `Qwen3Config` (`vocab_size` is the target's, or 0 if unknown), and:

            - **block_size** (`int`, defaults to 16): Positions of a block, anchor included (N).
            - **mask_token_id** (`int`): Id that fills the block after the anchor. It must not occur in text.
            - **target_layer_ids** (`list[int]`): Layers of the target that the drafter reads, 0-based and ascending: id i is
              `hidden_states[i + 1]`. Default: `default_target_layer_ids(num_target_layers)`.
            - **num_target_layers** (`int`): Number of the target's layers. The last one cannot be read.
            - **is_causal** (`bool`): Causality inside the block. `None`: sliding layers are causal, full ones are not.
            - **rope_theta** (`float`), **rope_scaling** (`dict`): The rotary embedding, as in transformers 4.
            - **rope_parameters** (`dict`): Both, as in transformers 5. They take precedence.
            - **sample_from_anchor** (`bool`, defaults to `False`): Each position, the anchor's too, proposes the next token.
              Otherwise each position after the anchor proposes its own token.
            - **draft_vocab_size** (`int`): Size of the drafter's own head, if it has one.
            - **input_embedding_scale** (`float`): Factor of the target's raw embeddings. Default: its embedding module.
            - **output_multiplier**, **final_logit_softcapping** (`float`): Applied to the logits, in this order.
            - **conv_kernel_size**, **conv_group_size** (`int`): DFlash2's convolutions inside the block.
            - **selector_rank**, **selector_top_k** (`int`): DFlash2's selector among the most probable tokens.
            - **gru_hidden_dim**, **emb_dim** (`int`): Domino's head, whose GRU reads the tokens chosen before each position.
            - **pure_draft_prefix_len** (`int`, defaults to 0): Proposals at the beginning that Domino's head leaves alone.
            - **markov_rank** (`int`), **markov_head_type** (`str`, `"vanilla"` or `"gated"`): DSpark's head, a bias of each
              token after the one before it.
            - **enable_confidence_head**, **confidence_head_with_markov** (`bool`, defaults to `False`): DSpark's confidence, and
              whether it reads the token before, too.

    Raises:
        ValueError: for a value that no drafter can run with, naming the value and the remedy.

    Example:
        >>> config = DFlashConfig(block_size=16, mask_token_id=151669, num_target_layers=36, num_hidden_layers=5)
    """

    model_type = "qwen3"
    # `dflash.dialects`, which reads other tools' formats and completes cards; `None` in shipped copies.
    reader: ClassVar[Any] = None

    if TYPE_CHECKING:  # transformers 5 would take annotations for fields of a dataclass
        layer_types: list[str]
        num_key_value_heads: int
        head_dim: int
        block_size: int
        mask_token_id: int  # this and the next one are None only in a config that no model is built of
        target_layer_ids: list[int]
        sample_from_anchor: bool
        draft_vocab_size: int | None
        input_embedding_scale: float | None
        projector_type: str | None
        shift_label: bool
        markov_rank: int | None
        markov_head_type: str | None

    def __init__(self, dflash_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        nested = dict(dflash_config or {})
        _take_out_unsupported(kwargs, nested)
        own = {}
        for name, absent in ABSENT.items():
            value = _agreed(name, kwargs.pop(name, None), nested.pop(name, None))
            own[name] = absent if value is None else value
        for nested_name, name in WRITTEN_ONCE.items():
            value = _agreed(name, kwargs.pop(name, None), nested.pop(nested_name, None))
            if value is not None:  # absent means the published rule, and some engines read a null as false
                kwargs[name] = value
        self.dialect = kwargs.pop("dialect", None)
        # Without `layer_types` all layers are full: Qwen3's default of 28 `max_window_layers` does that to shallow drafters.
        kwargs.setdefault("max_window_layers", kwargs.get("num_hidden_layers", 32))
        kwargs.setdefault("tie_word_embeddings", False)
        kwargs |= _rope_of(kwargs)
        if "dtype" in kwargs:
            kwargs.pop("torch_dtype", None)
        super().__init__(**kwargs)
        for name, value in own.items():
            setattr(self, name, value)
        self.complete()
        self.dflash_config = {**nested, **_present(vars(self))}  # and what other tools wrote there
        self.check()

    def complete(self) -> None:
        """Sets the fields that follow from others."""
        if self.block_size is None:
            self.block_size = 16
        depth = self.num_target_layers
        if self.target_layer_ids is None and depth is not None:
            self.target_layer_ids = default_target_layer_ids(depth)
        self.markov_rank = self.markov_rank or None  # DeepSpec's 0 is no head
        if self.markov_rank is not None:
            self.markov_head_type = self.markov_head_type or "vanilla"
        for projector, field in PROJECTORS.items():
            if getattr(self, field) is not None:
                # `shift_label` is these heads' name for what `sample_from_anchor` says.
                self.projector_type = self.projector_type or projector
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
        if cls.reader is not None:
            read = partial(cls.reader.read_config, read)
        return read(pretrained_model_name_or_path, **kwargs)

    @property
    def num_proposals(self) -> int:
        """Tokens that one draft proposes: one per position, except the anchor's unless `sample_from_anchor`."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def check(self) -> None:
        """Raises ValueError for a wrong field; `None` is allowed, since transformers builds configs without arguments."""
        check_values(vars(self), {**FIELDS, "is_causal": FLAG})
        self._check_target()
        self._check_layers()
        self._check_heads()

    def _check_target(self) -> None:
        """Raises ValueError for a block, a mask token or taps that no target has."""
        if self.num_proposals < 1 or self.block_size > LARGEST_BLOCK:
            remedy = f"a block is an anchor and drafted tokens; use 2 or more, up to {LARGEST_BLOCK}"
            raise ValueError(f"block_size={self.block_size}: {remedy}.")
        mask = self.mask_token_id
        vocab_size = self.vocab_size or math.inf
        if mask is not None and not 0 <= mask < vocab_size:
            remedy = "choose an id of the target's embedding that never occurs in text"
            raise ValueError(f"mask_token_id={mask} is outside the vocabulary of {vocab_size}: {remedy}.")
        ids = self.target_layer_ids
        depth = self.num_target_layers or math.inf
        # The last layer's output is normed in transformers and raw in engines.
        if ids and ids[-1] >= depth - 1:
            raise ValueError(f"target_layer_ids={ids} reaches the last of {depth} layers: use up to {depth - 2}.")
        size = self.hidden_size
        width = getattr(self, "target_hidden_size", size)
        if width != size:
            remedy = "which is not supported: serve this drafter with an engine that reads it"
            raise ValueError(f"target_hidden_size={width} differs from hidden_size={size}, {remedy}.")

    def _check_layers(self) -> None:
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(unknown)}: only full_attention and sliding_attention exist.")
        window = self.sliding_window
        if "sliding_attention" in self.layer_types and not is_whole_number(window, 1):
            fault = f"layer_types holds sliding_attention but sliding_window={window!r}"
            raise ValueError(f"{fault}: set it to that of the training run, above 0, and use_sliding_window=True.")

    def _check_heads(self) -> None:
        """Raises ValueError for a convolution, a selector or a head that cannot be built."""
        for first, second in TOGETHER:
            value = getattr(self, first)
            other = getattr(self, second)
            if (value is None) != (other is None):
                raise ValueError(f"{first}={value} and {second}={other}: a drafter has both or neither.")
        heads = [f"{name}={getattr(self, name)}" for name in HEAD_FIELDS if getattr(self, name) is not None]
        if len(heads) > 1:
            raise ValueError(f"{' and '.join(heads)}: use one of both.")
        projector = self.projector_type
        has_own_field = projector is None or getattr(self, PROJECTORS[projector]) is not None
        if not has_own_field or (self.shift_label and projector is None):
            field = PROJECTORS.get(projector or "domino")
            fault = f"projector_type={projector}, shift_label={self.shift_label} and {field}=None, so its head is not there"
            raise ValueError(
                f"{fault}: write the fields of Domino's or DSpark's head, or use an engine that reads it."
            )
        if self.enable_confidence_head and self.markov_rank is None:
            fault = "enable_confidence_head=True and markov_rank=None, so DSpark's head is not there"
            raise ValueError(f"{fault}: write its markov_rank, or use an engine that reads it.")
        width = self.hidden_size
        size = self.conv_group_size or 1
        if width % size:
            raise ValueError(f"conv_group_size={size} does not divide hidden_size={width}: correct one.")
        most = self.vocab_size
        for name in ("selector_top_k", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name}={value} is more than the target's tokens, vocab_size={most}.")

    def is_layer_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block: `is_causal` if given, else sliding layers are."""
        declared = getattr(self, "is_causal", None)
        if declared is None:
            return self.layer_types[layer_idx] == "sliding_attention"
        return declared

    def layer_window(self, layer_idx: int) -> int | None:
        """The window W of layer `layer_idx` (queries see keys less than W positions away), `None` for a full layer.

        `layer_types` says which layers slide.
        """
        if self.layer_types[layer_idx] != "sliding_attention":
            return None
        return self.sliding_window

    def to_dict(self) -> dict[str, Any]:
        """All fields, with rope in both spellings: transformers 4 silently takes theta 10000 from the newer one alone."""
        fields = super().to_dict()
        fields.pop("dialect", None)
        own = _present(fields)
        nested = _without_own(self.dflash_config)
        fields = _without_own(fields) | own
        fields["dflash_config"] = nested | own
        for name, architecture in ARCHITECTURES.items():
            if getattr(self, name) is not None and fields.get("architectures"):
                fields["architectures"] = [architecture]
        return fields | _rope_of(fields)

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: the fields that are not transformers' defaults, with dtype in both spellings."""
        fields = super().to_diff_dict()
        dtype = fields.get("dtype") or fields.get("torch_dtype")
        if dtype is not None:
            fields |= {"dtype": dtype, "torch_dtype": dtype}
        return fields


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are written in both places."""
    present = {name: fields[name] for name, absent in ABSENT.items() if fields.get(name, absent) != absent}
    if fields.get("markov_rank"):  # other tools' anchors propose by default if there is such a head
        present["sample_from_anchor"] = fields["sample_from_anchor"]
    return present


def _without_own(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ABSENT}


def _agreed(name: str, top_level: Any, nested: Any) -> Any:
    """The value of a field that is written at the top level and in `dflash_config`; the two must be equal."""
    if top_level is None:
        return nested
    if nested is not None and top_level != nested:
        raise ValueError(f"{name} is {top_level} at the top level and {nested} in dflash_config: write one value.")
    return top_level


def _rope_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rope in both spellings, out of either one; `rope_parameters` wins, as in transformers 5."""
    spelled = fields.get("rope_parameters") or fields.get("rope_scaling")
    scaling = dict(spelled or {})
    for value in scaling.values():
        if isinstance(value, dict):
            raise ValueError("rope_parameters differ by layer type: write one rope_theta and rope_type for all.")
    theta = scaling.pop("rope_theta", fields.get("rope_theta"))
    theta = 10000.0 if theta is None else float(theta)
    older = scaling.pop("type", "default")  # the older name of `rope_type`
    kind = scaling.setdefault("rope_type", older)
    is_plain = kind == "default"
    if not is_plain and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise ValueError(f"rope_type={kind!r} is unknown: use one of default, {known}.")
    return {
        "rope_theta": theta,
        "rope_scaling": None if is_plain else scaling,
        "rope_parameters": {**scaling, "rope_theta": theta},
    }


def _take_out_unsupported(top_level: dict[str, Any], nested: dict[str, Any]) -> None:
    """Takes out fields that change the computation and are not implemented, where they say "absent"; else ValueError."""
    fields = {**top_level, **nested}
    for name in ("rope_scaling", "rope_parameters"):
        fields |= top_level.get(name) or {}
    for name, absent in UNSUPPORTED_FIELDS.items():
        if fields.get(name) not in (None, absent):
            fault = f"{name}={fields[name]!r} is not supported"
            raise ValueError(f"{fault}: load it by dflash.DFlashDraftModel, or use an engine that reads it.")
        top_level.pop(name, None)
        nested.pop(name, None)


DFlashConfig.register_for_auto_class()
