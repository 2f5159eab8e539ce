"""How other tools write a DFlash checkpoint, and what that is in the form that this library writes.

A dialect is recognised by the fields of `config.json` and, in doubt, by the names of the tensors; never by the name of
the checkpoint. The shipped files read their own form alone. `dflash.drafter` gives them this module, by which they read the
others (`DFlashConfig.reader`).

| dialect | recognised by | written by |
|---|---|---|
| z-lab | `dflash_config` | z-lab (DFlash and DFlash2), SpecForge and ModelOpt (DFlash, Domino, DSpark), JetSpec, this library |
| speculators | `transformer_layer_config` | speculators (DFlash, DFlash2, DSpark), RedHat |
| assistant | the own fields at the top, tensors under `encoder.` | transformers 5 |
| DeepSpec | the own fields at the top, no `encoder.` | DeepSeek |
"""

import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from transformers import GenerationConfig, Qwen3Config
from transformers.utils import logging

from dflash.common.cards import complete_card  # noqa: F401  the reader's, for uploads
from dflash.common.files import adapter_fault
from dflash.common.json_text import parsed_json
from dflash.model.configuration_dflash import (
    CAP,
    CAUSALITY_FIELDS,
    COUNT,
    COUNT_OR_ZERO,
    FIELDS,
    NUMBER,
    UNSUPPORTED_FIELDS,
    WHOLE,
    is_number,
    is_whole_number,
)


logger = logging.get_logger(__name__)

ZLAB, SPECULATORS, ASSISTANT, DEEPSPEC = "z-lab", "speculators", "assistant", "DeepSpec"

# What a drafter cannot do without. All three at the top and no `dflash_config`: a flat dialect.
OWN_FIELDS = ("block_size", "mask_token_id", "target_layer_ids")

# Names of tensors in some dialect, as regular expressions, and what this library calls them.
TENSOR_NAMES = {
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
    r"^logit_head\.(prefix_gru|embed_proj|markov_head|confidence_head)\.": r"\1.",  # early checkpoints of SpecForge
    r"^(markov_w1|markov_w2|gate_proj)\.": r"markov_head.\1.",  # ModelOpt's DSpark
    r"^confidence_proj\.": "confidence_head.proj.",
}

# Tensors that a dialect stores although they are copies of the target's, frozen in training, or follow from others; as
# regular expressions, of tensors that the drafter does not hold itself.
COPIES_OF_THE_TARGET = {
    SPECULATORS: [r"^embed_tokens\.weight$", r"^(verifier_)?lm_head\.weight$", r"^verifier_norm\.weight$", r"^t2d$"],
    DEEPSPEC: [r"^embed_tokens\.weight$", r"^lm_head\.weight$"],
}

# Fields of a speculators config that stand beside its `transformer_layer_config` and mean here what they mean there.
BESIDE_THE_LAYER_CONFIG = (
    *(name for name in FIELDS if name not in ("target_layer_ids", "num_target_layers")),
    "target_hidden_size", "dtype", "torch_dtype", "quantization_config",
)  # fmt: skip

# Fields of a layer's config in other places than a drafter's: what the layer was, or what it was trained as.
NOT_A_DRAFTERS = ("architectures", "auto_map", "model_type", "transformers_version", "_attn_implementation")

# What a field of a config.json has to be, in any dialect and place, if it is there and no null.
OBJECTS = ("dflash_config", "rope_parameters", "rope_scaling", "transformer_layer_config", "auto_map")
WHOLE_NUMBERS = (
    *(name for name, check in FIELDS.items() if check in (WHOLE, COUNT, COUNT_OR_ZERO)),
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_window_layers", "max_position_embeddings", "swa_window_size",
)  # fmt: skip
NUMBERS = (
    *(name for name, check in FIELDS.items() if check in (NUMBER, CAP)),
    "rope_theta", "rms_norm_eps", "initializer_range", "attention_dropout", "logit_scale",
)  # fmt: skip
LISTS_OF_LAYERS = ("target_layer_ids", "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
DTYPE_FIELDS = ("dtype", "torch_dtype")
DTYPES = ("bfloat16", "float16", "half", "float32", "float", "float64", "double", "auto")


def is_list_of_layers(value: Any) -> TypeGuard[list[int]]:
    """Whether `value` is a list of integers."""
    return isinstance(value, (list, tuple)) and all(map(is_whole_number, value))


KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str, str], ...] = (
    (OBJECTS, lambda value: isinstance(value, Mapping), "an object", "write it as one, or leave it out"),
    (WHOLE_NUMBERS, is_whole_number, "a whole number", "write it without quotes"),
    (NUMBERS, is_number, "a number", "write it without quotes"),
    (LISTS_OF_LAYERS, is_list_of_layers, "a list of layer numbers", "write it as [1, 9, 17]"),
)

# What DeepSpec writes about its training.
DEEPSPEC_TRAINING_FIELDS = ("num_anchors",)
# What speculators' DSpark has where its config does not say.
DSPARK_DEFAULTS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}

# Fields at the top of a config that are read or refused, or that do not change what a drafter computes.
# Of any dialect: those of a Qwen3 decoder and of this library, and what transformers writes beside them.
TOP_LEVEL_FIELDS = {
    *Qwen3Config().to_dict(),
    *GenerationConfig().to_dict(),
    *FIELDS,
    *DTYPE_FIELDS,
    *UNSUPPORTED_FIELDS,
    *OBJECTS,
    "_attn_implementation", "attn_implementation", "dialect", "initial_context_length", "is_causal",
    "quantization_config", "rope_theta", "target_hidden_size",
    "mlp_bias", "pretraining_tp",  # of Llama's layers: the tensors show the one, and the other changes nothing
}  # fmt: skip
# All fields of `dflash_config` that are read or refused, and two that describe the training.
NESTED_FIELDS = {
    *FIELDS,
    *UNSUPPORTED_FIELDS,
    *CAUSALITY_FIELDS,
    "target_hidden_size", "loss_decay_gamma", "num_anchors", "attention_mode", "confidence_head_alpha", "use_confidence_head",
}  # fmt: skip
# Of one dialect.
DIALECT_TOP_LEVEL_FIELDS: dict[str, tuple[str, ...]] = {
    ZLAB: ("eagle_aux_hidden_state_layer_ids", "logit_scale", "swa_window_size", "use_swa"),
    SPECULATORS: (
        "aux_hidden_state_layer_ids", "has_no_defaults_at_init", "sliding_window_non_causal", "speculators_config",
        "speculators_model_type", "speculators_version",
    ),
    ASSISTANT: (),
    DEEPSPEC: DEEPSPEC_TRAINING_FIELDS,
}  # fmt: skip


def unused_fields(fields: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    """The fields of a config.json that are not null and that no reader of this library uses: their values, by place and name."""
    places = {
        "": (fields, TOP_LEVEL_FIELDS.union(DIALECT_TOP_LEVEL_FIELDS[dialect])),
        "dflash_config.": (fields.get("dflash_config"), NESTED_FIELDS),
        "transformer_layer_config.": (fields.get("transformer_layer_config"), TOP_LEVEL_FIELDS),
    }
    unused = {}
    for place, (content, known) in places.items():
        if isinstance(content, Mapping):
            for name, value in content.items():
                if value is not None and name not in known:
                    unused[place + name] = value
    return unused


def dialect_of(fields: dict[str, Any], tensor_names: Collection[str] = ()) -> str:
    """The dialect of a config.json; `tensor_names` may be empty where they are not known."""
    if "transformer_layer_config" in fields:
        return SPECULATORS
    if fields.get("dflash_config") is not None or any(fields.get(name) is None for name in OWN_FIELDS):
        return ZLAB
    if tensor_names:
        return ASSISTANT if any(name.startswith("encoder.") for name in tensor_names) else DEEPSPEC
    return ASSISTANT if str(fields.get("model_type")).endswith("_assistant") else DEEPSPEC


def portable_fields(fields: dict[str, Any], tensor_names: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a config.json of any dialect as [`DFlashConfig`] takes them, its `dialect` among them.

    Raises:
        ValueError: for a field of the wrong kind, fields that contradict each other, a config without its block, its
            taps or its rotary base, and a speculators checkpoint of another kind than DFlash.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"config.json holds a {type(fields).__name__} and no object: fetch or write the file again.")
    check_kinds(fields)
    for name in DTYPE_FIELDS:
        dtype = fields.get(name)
        if isinstance(dtype, str) and dtype.removeprefix("torch.") not in DTYPES and not dtype.startswith("float8"):
            raise ValueError(f"{name}={dtype!r} is no dtype of torch: write the stored one, such as bfloat16.")
    dialect = dialect_of(fields, tensor_names)
    unused = unused_fields(fields, dialect)
    if unused:
        logger.warning_once(
            f"The drafter's config holds {', '.join(unused)}, which this library does not read: if one of them changes what "
            "the drafter computes, use the tool that wrote it."
        )
    _check_decoder(fields.get("transformer_layer_config") or fields)
    read = {**_READERS[dialect](fields), "dialect": dialect}
    absent = [name for name in OWN_FIELDS if read.get(name) is None and read["dflash_config"].get(name) is None]
    if absent:
        raise ValueError(
            f"The drafter's config holds no {', '.join(absent)}, at the top level or in dflash_config: take it from "
            "the drafter's training run and write it into config.json."
        )
    return read


def _check_decoder(decoder: Mapping[str, Any]) -> None:
    """Raises ValueError for the layers' fields without a rotary base, or with two values for one thing."""
    by_layer = any(isinstance(value, dict) for value in (decoder.get("rope_parameters") or {}).values())
    if rope_theta(decoder) is None and not by_layer:
        raise ValueError(
            "rope_theta=None, and readers then guess 10000 or 1000000: write the base of the training run as "
            "rope_theta and in rope_parameters."
        )
    for name, value, place, other in doubles(decoder):
        raise ValueError(
            f"{name}={value}, and {place} says {other}: engines read one or the other, so write that of the training run "
            "in both."
        )


def check_kinds(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of another kind than readers expect."""
    for name, value, kind, remedy in kind_faults(fields):
        raise ValueError(f"{name}={value!r} is not {kind}: {remedy}.")


def kind_faults(fields: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Fields of another kind than readers expect: the field, its value, what it should be, and the remedy."""
    for names, is_right, kind, remedy in KINDS:
        for name in names:
            if fields.get(name) is not None and not is_right(fields[name]):
                yield place + name, fields[name], kind, remedy
    for name in OBJECTS:
        if isinstance(fields.get(name), Mapping):
            yield from kind_faults(fields[name], f"{name}.")


def doubles(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, Any]]:
    """Values in two spellings that differ: a field and its value, the other spelling and its value."""
    parameters = fields.get("rope_parameters")
    if isinstance(parameters, Mapping):
        older = fields.get("rope_theta")
        newer = parameters.get("rope_theta", older)
        if None not in (older, newer) and older != newer:
            yield "rope_theta", older, "rope_parameters", newer
        is_by_layer = any(isinstance(value, Mapping) for value in parameters.values())
        if "rope_scaling" in fields and not is_by_layer:
            older = rope_scaling(fields["rope_scaling"])
            newer = rope_scaling(parameters)
            if older != newer:
                yield "rope_scaling", older or "default", "rope_parameters", newer or "default"
    nested = fields.get("dflash_config")
    taps = fields.get("target_layer_ids") or (nested.get("target_layer_ids") if isinstance(nested, Mapping) else None)
    states = fields.get("eagle_aux_hidden_state_layer_ids")
    if is_list_of_layers(taps) and is_list_of_layers(states) and _layers_of_states(states) != list(taps):
        yield "eagle_aux_hidden_state_layer_ids", states, "target_layer_ids plus one", [i + 1 for i in taps]


def rope_theta(fields: Mapping[str, Any]) -> float | None:
    """The rotary base of a decoder's fields in either spelling; that of transformers 5 wins, as there."""
    parameters = fields.get("rope_parameters")
    theta = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    if theta is None:
        theta = fields.get("rope_theta")
    return float(theta) if theta is not None and is_number(theta) else None


def rope_scaling(fields: Any) -> dict[str, Any] | None:
    """Scaling of a rotary embedding without its base, `None` for none; `type` is the older name of `rope_type`."""
    if not isinstance(fields, Mapping):
        return None
    named = {"rope_type" if name == "type" else name: value for name, value in fields.items() if name != "rope_theta"}
    return None if named.get("rope_type", "default") == "default" else named


def tensor_names(folder: str | os.PathLike[str]) -> set[str]:
    """Names of the tensors in a local folder's safetensors; empty if it holds none or they cannot be read."""
    from safetensors import SafetensorError, safe_open

    path = os.path.join(folder, "model.safetensors")
    with suppress(OSError, ValueError, TypeError, KeyError, SafetensorError):  # the loader will say what is wrong
        if os.path.isfile(f"{path}.index.json"):
            with open(f"{path}.index.json", "rb") as index:
                return set(parsed_json(index.read())["weight_map"])
        with safe_open(path, "pt") as file:
            return set(file.keys())
    return set()


def _completed(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The fields, with a default where one is absent or null."""
    absent = {name: value for name, value in defaults.items() if fields.get(name) is None}
    return fields | absent


def _read_zlab(fields: dict[str, Any]) -> dict[str, Any]:
    """Own fields in `dflash_config` or at the top; ModelOpt's and MiMo's windows become layer types."""
    nested = dict(fields.get("dflash_config") or {})
    read = {**fields, "dflash_config": nested}
    if read.get("logit_scale") is not None:
        read = _completed(read, {"output_multiplier": read.pop("logit_scale")})
    if read.get("target_layer_ids") is None and nested.get("target_layer_ids") is None:
        read["target_layer_ids"] = _layers_of_states(read.pop("eagle_aux_hidden_state_layer_ids", None))
    for fields_of_place in (read, nested):
        if fields_of_place.get("projector_type") == "dflash2":  # ModelOpt's name for what the selector's fields say
            del fields_of_place["projector_type"]
    if nested.get("projector_type", read.get("projector_type")) == "dspark":
        _complete_dspark(read, nested)
    uses_windows = any([nested.pop("use_swa", False), read.pop("use_swa", False)])
    windows = [nested.pop("swa_window_size", None), read.pop("swa_window_size", None)]
    if any(windows):
        read["sliding_window"] = windows[0] or windows[1]
    if not uses_windows:
        return read
    if "sliding_attention" not in (read.get("layer_types") or ()):
        # The flag then means all layers, which see the whole block unless a field says that they are causal.
        depth = read.get("num_hidden_layers") or 32  # Qwen3's default
        read["layer_types"] = ["sliding_attention"] * depth
        declared = [nested.get(name) for name in CAUSALITY_FIELDS]
        if all(value is None for value in (read.get("is_causal"), *declared)):
            read["is_causal"] = False
    return _with_windows(read)


def _complete_dspark(read: dict[str, Any], nested: dict[str, Any]) -> None:
    """SpecForge's and ModelOpt's DSpark: the anchor proposes, too, which neither says by our name, and a confidence."""
    weight = nested.pop("confidence_head_alpha", None)
    has_confidence = nested.pop("use_confidence_head", None)
    nested.pop("attention_mode", None)
    if has_confidence is not None:  # ModelOpt's name
        nested |= {"enable_confidence_head": has_confidence, "confidence_head_with_markov": has_confidence}
    elif weight is not None:
        nested |= _completed(nested, {"enable_confidence_head": weight > 0})
    if read.get("sample_from_anchor") is None:
        nested |= _completed(nested, {"sample_from_anchor": True})


def _read_speculators(fields: dict[str, Any]) -> dict[str, Any]:
    """The decoder's fields one level down, taps that count from the embedding, sliding layers causal by default."""
    kind = fields.get("speculators_model_type", "dflash")
    if kind not in ("dflash", "dflash2", "dspark"):
        raise ValueError(
            f"speculators_model_type={kind!r} is not a DFlash drafter: serve it with vLLM, which reads this kind."
        )
    layer = fields["transformer_layer_config"]
    read = {name: value for name, value in layer.items() if name not in NOT_A_DRAFTERS}
    if layer.get("model_type", "qwen3") != "qwen3" and "num_attention_heads" in layer:
        # Where other families leave these out they follow from the heads; Qwen3 has numbers of its own.
        num_heads = layer["num_attention_heads"]
        read = _completed(read, {"num_key_value_heads": num_heads, "head_dim": layer["hidden_size"] // num_heads})
    rope = read.get("rope_parameters") or {}
    if isinstance(rope.get("sliding_attention"), dict):  # its drafters take this one for all layers
        read["rope_parameters"] = rope["sliding_attention"]
    read |= {name: fields[name] for name in BESIDE_THE_LAYER_CONFIG if fields.get(name) is not None}
    if kind == "dspark":
        read = _completed(read, {**DSPARK_DEFAULTS, "sample_from_anchor": _anchor_proposes(fields)})
    read["target_layer_ids"] = _layers_of_states(fields.get("aux_hidden_state_layer_ids"))
    if fields.get("sliding_window_non_causal"):
        read["is_causal"] = False
    return _with_windows({**read, "model_type": "qwen3", "dflash_config": {}})


def _anchor_proposes(fields: dict[str, Any]) -> bool:
    """What the number of proposals says of a DSpark drafter's anchor: it is silent if they are one fewer than positions."""
    num_proposals = None
    with suppress(AttributeError, IndexError, KeyError, TypeError):  # a file may hold anything there
        num_proposals = fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    block_size: Any = fields.get("block_size")
    if not is_whole_number(num_proposals) or not is_whole_number(block_size):
        return True
    return num_proposals != block_size - 1


def _read_assistant(fields: dict[str, Any]) -> dict[str, Any]:
    """Flat; every layer bidirectional; takes the target's embeddings unscaled; knows no vocabulary."""
    read = _completed(fields, {"vocab_size": 0, "input_embedding_scale": 1.0})
    return _with_windows({**read, "model_type": "qwen3", "is_causal": False, "dflash_config": {}})


def _read_deepspec(fields: dict[str, Any]) -> dict[str, Any]:
    """Flat; its anchor proposes a token too, which the config does not say."""
    if "sample_from_anchor" not in fields and "markov_rank" not in fields:
        logger.warning(
            "This DFlash config has its fields at the top and no dflash_config, as DeepSpec writes it, so its anchor "
            "is taken to propose a token. If few drafts are accepted, write sample_from_anchor: false into config.json."
        )
    kept = {name: value for name, value in fields.items() if name not in DEEPSPEC_TRAINING_FIELDS}
    return {**_completed(kept, {"sample_from_anchor": True}), "dflash_config": {}}


def _layers_of_states(ids: list[int] | None) -> list[int] | None:
    """0-based decoder layers, of ids that count hidden states: 0 is the embedding's output, i that of layer i - 1."""
    return None if ids is None else [i - 1 for i in ids]


def _with_windows(fields: dict[str, Any]) -> dict[str, Any]:
    """With `use_sliding_window` where a layer slides, because transformers drops the window otherwise."""
    slides = "sliding_attention" in (fields.get("layer_types") or ())
    return {**fields, "use_sliding_window": True} if slides else fields


_READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    ZLAB: _read_zlab,
    SPECULATORS: _read_speculators,
    ASSISTANT: _read_assistant,
    DEEPSPEC: _read_deepspec,
}


def check_folder(name: str, subfolder: str, weights_only: bool | None) -> None:
    """Refuses a local folder that is no checkpoint, or whose files `DFlashDraftModel` does not read."""
    folder = os.path.join(name, subfolder)
    if not os.path.isdir(name):
        return
    if fault := adapter_fault(folder):
        raise ValueError(f"{name} {fault}")
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise OSError(f"{name} holds no config.json: give the folder of a DFlash checkpoint or its id on the Hub.")
    files = sorted(os.listdir(folder))
    if "mask_embedding.pt" in files:
        raise ValueError(
            f"{name} holds mask_embedding.pt, a mask row of its own that DFlashDraftModel does not read: serve this "
            "checkpoint with an engine that does."
        )
    has_safetensors = "model.safetensors" in files or "model.safetensors.index.json" in files
    pickles = [file for file in files if file.endswith((".bin", ".pt", ".pth")) and file != "training_args.bin"]
    if pickles and not weights_only and not has_safetensors:
        raise ValueError(
            f"The weights of {name} are a pickle ({pickles[0]}), which can run code when it is read: pass "
            "weights_only=True (--weights-only of `dflash convert` and `dflash export`) to read its tensors alone."
        )


def read_config(
    read: Callable[..., tuple[dict[str, Any], Any]], name: str | os.PathLike[str], **kwargs: Any
) -> tuple[dict[str, Any], Any]:
    """The fields of a drafter's config in any dialect, portable; `read` is transformers' `get_config_dict`.

    Raises:
        ValueError: for a config.json that holds no object, and for fields that `portable_fields` refuses.
    """
    folder = os.path.join(name, kwargs.get("subfolder") or "")
    try:
        fields, unused = read(name, **kwargs)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{folder}: config.json holds no object: fetch or write the file again.") from error
    return portable_fields(fields, tensor_names(folder)), unused


def load(loader: Callable[..., Any], name: str | os.PathLike[str], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The model and the loading info of a drafter in any dialect; `loader` is transformers' `from_pretrained`.

    Raises:
        ValueError: for a checkpoint that cannot be read, or whose weights are quantised without a config that says so.
        OSError: for a folder without a checkpoint.
    """
    check_folder(str(name), kwargs.get("subfolder") or "", kwargs.get("weights_only"))
    kwargs.setdefault("key_mapping", dict(TENSOR_NAMES))
    try:
        model, info = loader(name, *args, **kwargs)
    except Exception as error:
        if not _is_of_a_malformed_checkpoint(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{name} cannot be read ({type(error).__name__}: {reason}): its config.json is wrong or its weights are "
            "truncated; correct or fetch it again. `dflash check` says what is wrong."
        ) from error
    if getattr(model, "_weight_conversions", None):  # else transformers 5 saves under the names that it read
        converters = [step for step in model._weight_conversions if type(step).__name__ == "WeightConverter"]
        model._weight_conversions = converters
    if _holds_integers(model):
        raise ValueError(
            f"{name} holds integers as weights (fc.weight), so it is quantised: load the weights that were trained, or "
            "the checkpoint with its quantization_config."
        )
    return model, info


def _is_of_a_malformed_checkpoint(error: Exception) -> bool:
    if isinstance(error, (AttributeError, LookupError, TypeError, ArithmeticError, pickle.UnpicklingError)):
        return True
    kind = type(error).__name__
    return kind.startswith(("StrictDataclass", "SafetensorError")) or "Only Tensors of floating point" in str(error)


def _holds_integers(model: Any) -> bool:
    """Whether the weights of a model that is not called quantised are whole numbers."""
    weight = model.fc.weight
    is_quantised = getattr(model.config, "quantization_config", None) is not None
    if is_quantised or weight.device.type == "meta":
        return False
    are_whole = weight == weight.round()
    are_large = weight.abs() > 1
    return bool(are_whole.all()) and bool(are_large.any())
