"""How other tools write a DFlash checkpoint, and what that is in the form that this library writes.

A dialect is told by the fields of `config.json` and, where they leave a doubt, by the names of the tensors; never by the
name of the checkpoint. Everything here is tables and functions over dictionaries; it knows no model.

| dialect | told by | written by |
|---|---|---|
| z-lab | `dflash_config` | z-lab (DFlash and DFlash2), SpecForge, ModelOpt, this library |
| speculators | `transformer_layer_config` | speculators, RedHat |
| assistant | the own fields at the top, tensors under `encoder.` | transformers 5 |
| DeepSpec | the own fields at the top, no `encoder.` | DeepSeek |

What a DFlash drafter is: its shape, its block, and which of the target's layers it reads.

The configuration keeps `model_type: "qwen3"`, the published form that every serving engine reads, and holds the
fields of a drafter twice where engines disagree about the place (top level and `dflash_config`). It knows nothing
about tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging


logger = logging.get_logger(__name__)

ZLAB, SPECULATORS, ASSISTANT, DEEPSPEC = "z-lab", "speculators", "assistant", "DeepSpec"

# What a drafter cannot do without. All three at the top and no `dflash_config`: a flat dialect.
OWN_FIELDS = ("block_size", "mask_token_id", "target_layer_ids")

# Names of tensors in some dialect, as regular expressions, and what this library calls them.
TENSOR_NAMES = {r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."}

# Tensors that a dialect stores although they are copies of the target's, frozen in training, or follow from others; as
# regular expressions, of tensors that the drafter does not hold itself.
COPIES_OF_THE_TARGET = {
    SPECULATORS: [r"^embed_tokens\.weight$", r"^(verifier_)?lm_head\.weight$", r"^verifier_norm\.weight$", r"^t2d$"],
    DEEPSPEC: [r"^embed_tokens\.weight$", r"^lm_head\.weight$"],
}

# Fields of a speculators config that stand beside its `transformer_layer_config` and mean here what they mean there.
BESIDE_THE_LAYER_CONFIG = (
    "block_size",
    "mask_token_id",
    "draft_vocab_size",
    "target_hidden_size",
    "sample_from_anchor",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "dtype",
    "torch_dtype",
    "quantization_config",
)

# Fields of a layer's config in other places than a drafter's: what the layer was, or what it was trained as.
NOT_A_DRAFTERS = ("architectures", "auto_map", "model_type", "transformers_version", "_attn_implementation")

# What a field of a config.json has to be, in any dialect and place, if it is there and no null.
OBJECTS = ("dflash_config", "rope_parameters", "rope_scaling", "transformer_layer_config")
WHOLE_NUMBERS = (
    "block_size",
    "mask_token_id",
    "num_target_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_window_layers",
    "max_position_embeddings",
    "draft_vocab_size",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "swa_window_size",
)
NUMBERS = (
    "rope_theta",
    "rms_norm_eps",
    "initializer_range",
    "attention_dropout",
    "input_embedding_scale",
    "output_multiplier",
    "logit_scale",
    "final_logit_softcapping",
)
LISTS_OF_LAYERS = ("target_layer_ids", "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
DTYPES = ("bfloat16", "float16", "half", "float32", "float", "float64", "double", "auto")

# What DeepSpec writes about its training; `markov_rank` stays, because a drafter with such a head is another network.
DEEPSPEC_TRAINING_FIELDS = ("num_anchors", "confidence_head_with_markov", "markov_head_type")


def dialect_of(fields: dict[str, Any], tensor_names: Collection[str] = ()) -> str:
    """Which dialect a config.json is written in; `tensor_names` may be empty where they are not known."""
    if "transformer_layer_config" in fields:
        return SPECULATORS
    if fields.get("dflash_config") is not None or any(fields.get(name) is None for name in OWN_FIELDS):
        return ZLAB
    if tensor_names:
        return ASSISTANT if any(name.startswith("encoder.") for name in tensor_names) else DEEPSPEC
    return ASSISTANT if str(fields.get("model_type")).endswith("_assistant") else DEEPSPEC


def portable_fields(fields: dict[str, Any], tensor_names: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a config.json of any dialect, as [`DFlashConfig`] takes them, and the dialect they were written in.

    Raises:
        ValueError: for a field of the wrong kind, for two that contradict each other, for a checkpoint that leaves its
            block, its taps or its rotary base to a guess, and for a speculators checkpoint of another kind than DFlash.
    """
    _check_kinds(fields)
    dialect = dialect_of(fields, tensor_names)
    _check_rope(fields.get("transformer_layer_config") or fields)
    read = {**_READERS[dialect](fields), "dialect": dialect}
    _check_taps(read)
    absent = [name for name in OWN_FIELDS if read.get(name) is None and read["dflash_config"].get(name) is None]
    if absent:
        raise ValueError(
            f"The drafter's config holds no {', '.join(absent)}, at the top level or in dflash_config: take it from the "
            "drafter's training run and write it into config.json."
        )
    return read


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether `value` is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is an integer or a float, and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_kinds(fields: dict[str, Any]) -> None:
    """Refuses fields of another kind than readers expect, which would fail far from the file that holds them."""
    if not isinstance(fields, dict):
        raise ValueError(f"config.json holds a {type(fields).__name__} and no object: fetch or write the file again.")
    for name in OBJECTS:
        if fields.get(name) is not None and not isinstance(fields[name], dict):
            raise ValueError(f"{name}={fields[name]!r} is not an object: write it as one, or leave it out.")
    for name in WHOLE_NUMBERS:
        if fields.get(name) is not None and not is_whole_number(fields[name]):
            raise ValueError(f"{name}={fields[name]!r} is not a whole number: write it without quotes.")
    for name in NUMBERS:
        if fields.get(name) is not None and not is_number(fields[name]):
            raise ValueError(f"{name}={fields[name]!r} is not a number: write it without quotes.")
    for name in LISTS_OF_LAYERS:
        ids = fields.get(name)
        if ids is not None and not (isinstance(ids, (list, tuple)) and all(map(is_whole_number, ids))):
            raise ValueError(f"{name}={ids!r} is not a list of layer numbers: write it as [1, 9, 17].")
    for name in ("dtype", "torch_dtype"):
        dtype = fields.get(name)
        if isinstance(dtype, str) and dtype.removeprefix("torch.") not in DTYPES and not dtype.startswith("float8"):
            raise ValueError(f"{name}={dtype!r} is no dtype of torch: write the stored one, such as bfloat16.")
    for name in OBJECTS:
        if fields.get(name):
            _check_kinds(fields[name])


def _check_rope(fields: dict[str, Any]) -> None:
    """Refuses a rotary embedding whose base is not written, or that its two spellings say differently."""
    parameters = fields.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return  # a base for each layer type, for the configuration to judge
    older, newer = fields.get("rope_theta"), parameters.get("rope_theta")
    if older is None and newer is None:
        raise ValueError(
            "rope_theta=None, and readers then guess 10000 or 1000000: write the base of the training run as rope_theta and "
            "in rope_parameters."
        )
    if older is not None and newer is not None and older != newer:
        raise ValueError(
            f"rope_theta={older} and rope_parameters says {newer}: engines read one or the other, so write the base of the "
            "training run in both."
        )
    if not parameters or "rope_scaling" not in fields:
        return
    scaling, other = _scaling(fields["rope_scaling"]), _scaling(parameters)
    if scaling != other:
        raise ValueError(
            f"rope_scaling={scaling} and rope_parameters says {other}: engines read one or the other, so write the scaling "
            "of the training run in both."
        )


def _scaling(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """Scaling of a rotary embedding without its base, `None` for none; `type` is the older name of `rope_type`."""
    named = {"rope_type" if name == "type" else name: value for name, value in (fields or {}).items()}
    named.pop("rope_theta", None)
    return None if named.get("rope_type", "default") == "default" else named


def _check_taps(fields: dict[str, Any]) -> None:
    """Refuses taps that count hidden states and are not those that count layers."""
    states = _layers_of_states(fields.get("eagle_aux_hidden_state_layer_ids"))
    ids = fields.get("target_layer_ids") or fields["dflash_config"].get("target_layer_ids")
    if states is not None and ids is not None and states != list(ids):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={fields['eagle_aux_hidden_state_layer_ids']} are not target_layer_ids={ids} "
            "plus one: write the layers of the training run in both."
        )


def tensor_names(folder: str | os.PathLike[str]) -> set[str]:
    """Names of the tensors in a local folder's safetensors; empty if it holds none or they cannot be read."""
    index, path = (os.path.join(folder, f"model.safetensors{ending}") for ending in (".index.json", ""))
    text = b""
    if os.path.isfile(index):
        with open(index, "rb") as file:
            text = file.read()
    elif os.path.isfile(path):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length < os.path.getsize(path) else b""
    try:
        header = dict(json.loads(text))
    except (TypeError, ValueError):  # the loader will say what is wrong with the file
        return set()
    return set(header.get("weight_map") or header) - {"__metadata__"}


def _read_zlab(fields: dict[str, Any]) -> dict[str, Any]:
    """Own fields in `dflash_config` or at the top; ModelOpt's and MiMo's windows become layer types."""
    nested = dict(fields.get("dflash_config") or {})
    read = {**fields, "dflash_config": nested}
    if read.get("logit_scale") is not None:
        read.setdefault("output_multiplier", read.pop("logit_scale"))
    if read.get("target_layer_ids") is None and nested.get("target_layer_ids") is None:
        read["target_layer_ids"] = _layers_of_states(read.pop("eagle_aux_hidden_state_layer_ids", None))
    uses_windows, window = nested.pop("use_swa", False), nested.pop("swa_window_size", None)
    if not uses_windows:
        return read
    read["sliding_window"] = window or read.get("sliding_window")
    if "sliding_attention" not in (read.get("layer_types") or ()):
        # The flag then stands for all layers, which see the whole block unless something says that they are causal.
        read["layer_types"] = ["sliding_attention"] * read.get("num_hidden_layers", 32)  # Qwen3's default
        if read.get("is_causal") is None and nested.get("causal") is None:
            read["is_causal"] = False
    return _with_windows(read)


def _read_speculators(fields: dict[str, Any]) -> dict[str, Any]:
    """The decoder's fields one level down, taps counted from the embedding, causality as an exception to sliding layers."""
    kind = fields.get("speculators_model_type", "dflash")
    if kind not in ("dflash", "dflash2"):
        raise ValueError(
            f"speculators_model_type={kind!r} is not a DFlash drafter: serve this checkpoint with vLLM, which reads it."
        )
    layer = dict(fields["transformer_layer_config"])
    read = {name: value for name, value in layer.items() if name not in NOT_A_DRAFTERS}
    if layer.get("model_type", "qwen3") != "qwen3" and "num_attention_heads" in layer:
        # Where other families leave these out they follow from the heads; Qwen3 has numbers of its own.
        read.setdefault("num_key_value_heads", layer["num_attention_heads"])
        read.setdefault("head_dim", layer["hidden_size"] // layer["num_attention_heads"])
    rope = read.get("rope_parameters") or {}
    if isinstance(rope.get("sliding_attention"), dict):  # its drafters take this one for all layers
        read["rope_parameters"] = rope["sliding_attention"]
    read |= {name: fields[name] for name in BESIDE_THE_LAYER_CONFIG if fields.get(name) is not None}
    read["target_layer_ids"] = _layers_of_states(fields.get("aux_hidden_state_layer_ids"))
    if fields.get("sliding_window_non_causal"):
        read["is_causal"] = False
    return _with_windows({**read, "model_type": "qwen3", "dflash_config": {}})


def _read_assistant(fields: dict[str, Any]) -> dict[str, Any]:
    """Flat; bidirectional in every layer; reads raw rows of the target's embedding; knows no vocabulary."""
    read = {"vocab_size": 0, "input_embedding_scale": 1.0, **fields}
    return _with_windows({**read, "model_type": "qwen3", "is_causal": False, "dflash_config": {}})


def _read_deepspec(fields: dict[str, Any]) -> dict[str, Any]:
    """Flat; its anchor row predicts too, which the config does not say."""
    if "sample_from_anchor" not in fields and "markov_rank" not in fields:
        logger.warning(
            "This DFlash config has its fields at the top and no dflash_config, as DeepSpec writes it, so its anchor row is "
            "taken to propose a token. If few drafts are accepted, write sample_from_anchor: false into config.json."
        )
    kept = {name: value for name, value in fields.items() if name not in DEEPSPEC_TRAINING_FIELDS}
    return {"sample_from_anchor": True, **kept, "dflash_config": {}}


def _layers_of_states(ids: list[int] | None) -> list[int] | None:
    """0-based decoder layers, of ids that count hidden states: 0 is the embedding's output, i that of layer i - 1."""
    return None if ids is None else [i - 1 for i in ids]


def _with_windows(fields: dict[str, Any]) -> dict[str, Any]:
    """With `use_sliding_window` where a layer slides: transformers drops the window otherwise, and these dialects do not."""
    slides = "sliding_attention" in (fields.get("layer_types") or ())
    return {**fields, "use_sliding_window": True} if slides else fields


_READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    ZLAB: _read_zlab,
    SPECULATORS: _read_speculators,
    ASSISTANT: _read_assistant,
    DEEPSPEC: _read_deepspec,
}


# Engines read these at the top level or in `dflash_config`.
DOUBLED_FIELDS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")

# Doubled too, but only where they say something: the value beside a field is the one that means "absent".
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
}

# Fields that change what a drafter computes and that this class does not compute: running without them would be
# silently wrong, so each is refused by name. The values beside a field are those that mean "absent".
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "projector_type": (None,),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "markov_rank": (None, 0),
    "enable_confidence_head": (None, False),
    "shift_label": (None, False),
}

# Fields of other dialects, which `from_pretrained` turns into this one's and which have no meaning here.
DIALECT_FIELDS = ("use_swa", "swa_window_size", "transformer_layer_config", "aux_hidden_state_layer_ids")


def default_target_layer_ids(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """The paper's spread of tapped layers: from the second layer to the third from the end, strictly ascending.

    A target with fewer than `num_taps` such layers gives as many distinct ids as it has (DFlash paper, section 4;
    z-lab/dflash `build_target_layer_ids`).
    """
    if num_target_layers < 2:
        raise ValueError(
            f"num_target_layers={num_target_layers}: a target needs at least 2 layers, because its last one is never "
            "tapped. Choose a deeper target."
        )
    last = max(num_target_layers - 3, min(1, num_target_layers - 2))
    first = min(1, last)
    if num_taps == 1:
        return [num_target_layers // 2 if num_target_layers // 2 < num_target_layers - 1 else last]
    spread = (round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps))
    return sorted(set(spread))


class DFlashConfig(Qwen3Config):
    """Configuration of a [`DFlashDraftModel`]: a Qwen3 decoder's dimensions plus the block and the taps.

    Args:
        block_size: Rows of a block, anchor included (N).
        mask_token_id: Id of the target's vocabulary that fills the block behind the anchor; it never occurs in text.
        target_layer_ids: 0-based decoder layers of the target whose outputs are the context features, strictly
            ascending; id i is `hidden_states[i + 1]` of transformers. Default: the paper's spread over
            `num_target_layers`.
        num_target_layers: Depth of the target. The last layer is never tapped: engines disagree on what it holds.
        is_causal: Causality inside the block for every layer. `None` (the published default): full layers see the
            whole block, sliding layers are causal in it.
        dflash_config: The nested copy of the above that published checkpoints hold. Read, checked, and written back.
        rope_theta: Base of the rotary embedding, the spelling of transformers 4.
        rope_scaling: Scaling of the rotary embedding, the spelling of transformers 4.
        rope_parameters: Both of them in the spelling of transformers 5, which wins where both are given.
        kwargs: Fields of `Qwen3Config`, and those of `OPTIONAL_FIELDS`:

            - `sample_from_anchor`: The anchor's row proposes a token too, the one behind it, so that every row proposes
              the next token; else a row proposes the token at its own place and the anchor's row proposes none.
            - `draft_vocab_size`: Tokens that the drafter's own head can say, if it has one.
            - `input_embedding_scale`: The drafter reads raw rows of the target's embedding, times this. `None`: it
              reads what the embedding's forward gives.
            - `output_multiplier`, `final_logit_softcapping`: What is done to the head's logits, in this order.
            - `conv_kernel_size`, `conv_group_size`: DFlash2's convolutions inside the block.
            - `selector_rank`, `selector_top_k`: DFlash2's choice among the most probable tokens.

    `vocab_size` is the target's; 0 where a checkpoint does not say it.

    Raises:
        ValueError: for a value that no drafter can run with, with the value and the remedy.
    """

    model_type = "qwen3"

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
        is_causal = _agreed("is_causal", is_causal, {"is_causal": nested.pop("causal", None)})
        optional = {name: _agreed(name, kwargs.pop(name, None), nested) for name in OPTIONAL_FIELDS}
        dialect = kwargs.pop("dialect", None)
        if target_layer_ids is None and num_target_layers is not None:
            target_layer_ids = default_target_layer_ids(num_target_layers)

        # Without `layer_types` all layers are full, as Qwen3's default of 28 `max_window_layers` makes a shallow drafter's.
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
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        if self.draft_vocab_size is not None:
            self.tie_word_embeddings = False  # its head is its own, and it has no embedding to tie it to
        if self.conv_kernel_size is not None and self.input_embedding_scale is None:
            self.input_embedding_scale = 1.0  # DFlash2 reads raw rows
        self.dialect = dialect
        self.dflash_config = {**nested, **self._doubled()}
        self.check()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """The fields of a checkpoint of any published dialect, as this class takes them, and the unused keywords."""
        name = os.path.join(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")
        try:
            fields, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{name}: config.json holds no object: fetch or write the file again.") from error
        return portable_fields(fields, tensor_names(name)), unused

    @property
    def num_proposals(self) -> int:
        """Tokens that one draft forward proposes: one per row, but none for the anchor's unless it predicts too."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def check(self) -> None:
        """Raises ValueError for a field that no drafter can run with. Fields that are still `None` are not looked at.

        `transformers` builds a default instance of every configuration class, so absence is the model's to refuse.
        """
        for name in ("block_size", "mask_token_id", "num_target_layers"):
            value = getattr(self, name)
            if value is not None and not is_whole_number(value):
                raise ValueError(f"{name}={value!r} is not a whole number: write it without quotes.")
        declared = getattr(self, "is_causal", None)
        if declared is not None and not isinstance(declared, bool):
            raise ValueError(f"is_causal={declared!r} is neither true nor false: write it without quotes.")
        if self.num_proposals < 1:
            raise ValueError(
                f"block_size={self.block_size}: a block is the anchor and at least one drafted token; use 2 or more."
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < (self.vocab_size or float("inf")):
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size}: choose an id of "
                "the target's embedding matrix that never occurs in text."
            )
        ids = self.target_layer_ids
        if ids is not None:
            if not all(map(is_whole_number, ids)):
                raise ValueError(f"target_layer_ids={ids} is not a list of layer numbers: write it as [1, 9, 17].")
            if not ids or any(b <= a for a, b in pairwise(ids)) or ids[0] < 0:
                raise ValueError(
                    f"target_layer_ids={ids} must be 0-based, strictly ascending and without repeats: engines read the "
                    "columns of fc in this order, and some sort the ids."
                )
            if self.num_target_layers is not None and ids[-1] >= self.num_target_layers - 1:
                raise ValueError(
                    f"target_layer_ids={ids} reaches the last of {self.num_target_layers} target layers: its output is "
                    f"normed in transformers and raw in engines. Use ids up to {self.num_target_layers - 2}."
                )
        self._check_variants()
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(unknown)}: only full_attention and sliding_attention exist.")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"layer_types holds sliding_attention but sliding_window={self.sliding_window}: set sliding_window and "
                "use_sliding_window=True."
            )
        if "sliding_attention" in self.layer_types and not (
            is_whole_number(self.sliding_window) and self.sliding_window > 0
        ):
            raise ValueError(
                f"sliding_window={self.sliding_window!r} is not a whole number above 0: write the window of the training run."
            )

    def _check_variants(self) -> None:
        """Raises ValueError for a convolution, a selector or a head that cannot be built."""
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and not (is_whole_number(value) and value > 0):
                raise ValueError(f"{name}={value!r} is not a whole number above 0: leave it out for none.")
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise ValueError(f"{name}={value!r} is not a number: write it without quotes, or leave it out.")
        for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            values = getattr(self, one), getattr(self, other)
            if (values[0] is None) != (values[1] is None):
                raise ValueError(f"{one}={values[0]} and {other}={values[1]}: a drafter has both or neither.")
        if self.conv_group_size is not None and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size={self.conv_group_size} does not divide hidden_size={self.hidden_size}: take both from the "
                "drafter's training run."
            )
        if self.selector_top_k is not None and not 1 <= self.selector_top_k <= self.vocab_size:
            raise ValueError(
                f"selector_top_k={self.selector_top_k} with vocab_size={self.vocab_size}: the selector chooses among 1 to "
                "vocab_size tokens, of which it knows each one."
            )
        if self.final_logit_softcapping is not None and not self.final_logit_softcapping > 0:
            raise ValueError(
                f"final_logit_softcapping={self.final_logit_softcapping}: a cap is a number above 0; leave it out for none."
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is more than the target's vocab_size={self.vocab_size}: a reduced "
                "head says some of the target's tokens."
            )
        target_hidden_size = getattr(self, "target_hidden_size", None)
        if target_hidden_size not in (None, self.hidden_size):
            raise ValueError(
                f"target_hidden_size={target_hidden_size} differs from hidden_size={self.hidden_size}: a drafter that reads "
                "a target of another width is not supported. Serve this checkpoint with an engine that reads it."
            )

    def _doubled(self) -> dict[str, Any]:
        """The fields that are written in both places, as they are now."""
        said = [name for name, absent in OPTIONAL_FIELDS.items() if getattr(self, name) != absent]
        return {name: getattr(self, name) for name in (*DOUBLED_FIELDS, *said)}

    def is_layer_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block: `is_causal` if given, else sliding layers are."""
        declared = getattr(self, "is_causal", None)
        return self.layer_types[layer_idx] == "sliding_attention" if declared is None else bool(declared)

    def layer_window(self, layer_idx: int) -> int | None:
        """The window W of layer `layer_idx` (a row sees keys less than W positions away), `None` for a full layer."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None

    def to_dict(self) -> dict[str, Any]:
        """All fields, with rope in both spellings: transformers 4 silently takes theta 10000 from the newer one alone."""
        fields = super().to_dict()
        doubled = self._doubled()
        others = {name: value for name, value in self.dflash_config.items() if name not in OPTIONAL_FIELDS}
        fields["dflash_config"] = {**others, **doubled}
        for name in ({"dialect"} | set(OPTIONAL_FIELDS)) - set(doubled):
            fields.pop(name, None)
        if fields.get("architectures") and self.conv_kernel_size is not None:
            fields["architectures"] = ["DFlash2DraftModel"]  # the name by which engines build the convolutions
        theta, scaling = _rope_fields(
            fields.get("rope_theta"), fields.get("rope_scaling"), fields.get("rope_parameters")
        )
        fields["rope_theta"], fields["rope_scaling"] = theta, scaling
        fields["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: the fields that are not transformers' defaults, with dtype in both spellings."""
        fields = super().to_diff_dict()
        dtype = fields.get("dtype") or fields.get("torch_dtype")
        if dtype is not None:
            fields["dtype"] = fields["torch_dtype"] = dtype
        return fields


def _agreed(name: str, top_level: Any, nested: dict[str, Any]) -> Any:
    """The value of a field that is written at the top level and in `dflash_config`; the two must be equal."""
    inner = nested.get(name)
    top_level, inner = (list(value) if isinstance(value, tuple) else value for value in (top_level, inner))
    if top_level is not None and inner is not None and top_level != inner:
        raise ValueError(
            f"{name} is {top_level} at the top level and {inner} in dflash_config: engines read one or the other, so "
            "write the same value in both."
        )
    return inner if top_level is None else top_level


def _rope_fields(
    theta: float | None, scaling: dict[str, Any] | None, parameters: dict[str, Any] | None
) -> tuple[float, dict[str, Any] | None]:
    """`(rope_theta, rope_scaling)` out of either spelling; `parameters` wins, as in transformers 5."""
    if parameters:
        by_layer = [name for name, value in parameters.items() if isinstance(value, dict)]
        if by_layer:
            raise ValueError(
                f"rope_parameters differ by layer type ({', '.join(by_layer)}): a drafter has one rotary embedding for all "
                "its layers. Write rope_theta and rope_type at the top of rope_parameters."
            )
        theta = parameters.get("rope_theta", theta)
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    if scaling is not None and scaling.get("rope_type", scaling.get("type", "default")) == "default":
        scaling = None
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if kind is not None and kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"rope_type={kind!r} is not known to transformers: use one of default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}."
        )
    return (10000.0 if theta is None else float(theta)), scaling


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name in DIALECT_FIELDS:
        if fields.get(name):
            raise ValueError(
                f"{name}={fields[name]!r} is how another tool writes a checkpoint: read its folder by from_pretrained, or "
                "give layer_types, sliding_window and target_layer_ids."
            )
    for name, absent in UNSUPPORTED_FIELDS.items():
        value = fields.get(name)
        if value not in absent:
            raise ValueError(
                f"{name}={value!r} is not supported by this version of DFlashDraftModel, and a drafter that needs it "
                "would propose nothing useful without it. Serve this checkpoint with an engine that reads it."
            )


DFlashConfig.register_for_auto_class()
