"""What each engine takes from a drafter's config.json: its own reading rules, restated without the engine.

A reading is compared with what the checkpoint means; where the two differ, that engine runs another drafter than the
one that was trained. Dictionaries in, values out: nothing here opens a file or imports a model.

Versions that the rules were read from: vLLM 0.32 and 0.33, SGLang 0.5.23, TensorRT-LLM 1.4.0rc1, dflash-mlx 0.1.8,
transformers 5.23 and 5.24.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dflash.dialects import ASSISTANT, SPECULATORS, ZLAB, dialect_of, is_list_of_layers, rope_theta
from dflash.model.configuration_dflash import is_whole_number


Config = Mapping[str, Any]

ENGINES = {
    "remote-code": "transformers (remote code)",
    "native": "transformers (native)",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "mlx": "MLX",
}


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends: causal inside the block or not, and the window W (keys less than W away), if any."""

    is_causal: bool
    window: int | None


@dataclass(frozen=True)
class Reading:
    """What a reader takes from a config; `None` is a value that it does not find.

    `target_layer_ids` are 0-based decoder layers whose outputs are tapped, in the order of fc's column groups, however
    the field that was read counts.
    """

    block_size: int | None
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...] | None
    rope_theta: float | None
    attention: tuple[LayerAttention, ...]


def mapping(value: Any) -> Config:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def nested_fields(config: Config) -> Config:
    """`dflash_config`, empty if there is none."""
    return mapping(config.get("dflash_config"))


def nested_first(config: Config, name: str) -> Any:
    """A field of `dflash_config`, else of the top level. A null in `dflash_config` hides the top level."""
    return nested_fields(config).get(name, config.get(name))


def either(config: Config, name: str) -> Any:
    """A field of `dflash_config` or of the top level, whichever is not null."""
    value = nested_fields(config).get(name)
    return config.get(name) if value is None else value


def whole_number(value: Any) -> int | None:
    """`value` if it is an integer."""
    return value if is_whole_number(value) else None


def layer_ids(value: Any, offset: int = 0) -> tuple[int, ...] | None:
    """A list of integers, each moved by `offset`; `None` for anything else."""
    return tuple(index + offset for index in value) if value and is_list_of_layers(value) else None


def decoder_fields(config: Config) -> Config:
    """The fields of the drafter's own layers: the whole config, or the part that speculators keeps them in."""
    layer = config.get("transformer_layer_config")
    return layer if isinstance(layer, Mapping) else config


def num_layers(config: Config) -> int:
    """The drafter's depth; 0 where the config does not say. Beyond a thousand is a typing error, not a drafter."""
    depth = whole_number(decoder_fields(config).get("num_hidden_layers")) or 0
    return depth if 0 < depth <= 1000 else 0


def declared_layer_types(config: Config) -> list[str] | None:
    """`layer_types` as the file holds them, if there is one for each layer."""
    types = decoder_fields(config).get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers(config):
        return None
    return list(map(str, types))


def transformers_window(config: Config) -> int | None:
    """`sliding_window` as Qwen3Config reads it: dropped unless `use_sliding_window` is set, 4096 if absent."""
    fields = decoder_fields(config)
    if fields.get("model_type", config.get("model_type")) != "qwen3":
        return whole_number(fields.get("sliding_window"))
    return whole_number(fields.get("sliding_window", 4096)) if fields.get("use_sliding_window") else None


def transformers_layer_types(config: Config) -> list[str]:
    """`layer_types` as Qwen3Config reads them: if absent, layers from `max_window_layers` (28) on are sliding."""
    declared = declared_layer_types(config)
    if declared is not None:
        return declared
    num_full = num_layers(config)
    if transformers_window(config) is not None:
        first = whole_number(decoder_fields(config).get("max_window_layers"))
        num_full = 28 if first is None else first
    return ["sliding_attention" if layer >= num_full else "full_attention" for layer in range(num_layers(config))]


def _own_fields(look: Callable[[str], Any]) -> dict[str, Any]:
    """The block, the mask and the taps of a [`Reading`], each read by `look`."""
    return {
        "block_size": whole_number(look("block_size")),
        "mask_token_id": whole_number(look("mask_token_id")),
        "target_layer_ids": layer_ids(look("target_layer_ids")),
    }


def meant(config: Config) -> Reading:
    """What the checkpoint means to those who published it; the engines' readings are compared with this one."""
    own = _own_fields(partial(either, config))
    if dialect_of(dict(config)) == SPECULATORS:
        own["target_layer_ids"] = layer_ids(config.get("aux_hidden_state_layer_ids"), offset=-1)
    elif own["target_layer_ids"] is None:
        own["target_layer_ids"] = layer_ids(config.get("eagle_aux_hidden_state_layer_ids"), offset=-1)
    base = rope_theta(decoder_fields(config))
    attention = _meant_attention(config)
    return Reading(**own, rope_theta=base, attention=attention)


def _attention(types: list[str], window: int | None, is_causal: Any) -> tuple[LayerAttention, ...]:
    """Layers of which the sliding ones have the window, all causal or none; if that is `None` the sliding ones are."""
    layers = []
    for name in types:
        is_sliding = name == "sliding_attention"
        is_layer_causal = is_sliding if is_causal is None else bool(is_causal)
        layers.append(LayerAttention(is_layer_causal, window if is_sliding else None))
    return tuple(layers)


def _declared_types(config: Config) -> list[str]:
    return declared_layer_types(config) or ["full_attention"] * num_layers(config)


def _meant_attention(config: Config) -> tuple[LayerAttention, ...]:
    kind = dialect_of(dict(config))
    types = _declared_types(config)
    window = whole_number(decoder_fields(config).get("sliding_window"))
    if kind == ASSISTANT:
        return _attention(types, window, False)
    if kind == SPECULATORS:  # sliding layers are causal unless it says otherwise; full layers never are
        return _attention(types, window, False if config.get("sliding_window_non_causal") else None)
    nested = nested_fields(config)
    if config.get("is_causal") is None:  # JetSpec's name, which no engine reads
        config = {**config, "is_causal": nested.get("causal_head")}
    if kind == ZLAB:  # engines read these in `dflash_config` alone
        flags = {name: nested.get(name) or config.get(name) for name in ("use_swa", "swa_window_size")}
        config = {**config, "dflash_config": {**nested, **flags}}
    return _vllm_attention(config, types, window)


def _vllm_attention(config: Config, types: list[str], sliding_window: int | None) -> tuple[LayerAttention, ...]:
    """A declared causality holds for all layers, else sliding ones are causal; `use_swa` gives all the window."""
    nested = nested_fields(config)
    window = whole_number(nested.get("swa_window_size")) or sliding_window
    is_causal = config.get("is_causal")
    if is_causal is None:
        is_causal = nested.get("causal")
    layers = _attention(types, window, is_causal)
    if nested.get("use_swa") and "sliding_attention" not in types:
        return tuple(replace(layer, window=window) for layer in layers)
    return layers


def _read_as_vllm(config: Config) -> Reading:
    """vLLM: taps of `eagle_aux_hidden_state_layer_ids`, else of `dflash_config`, else of the top level.

    It reads no block size, which a flag gives, so the one that is meant counts. In a speculators config one flag makes all layers causal.
    """
    published = meant(config)
    if dialect_of(dict(config)) == SPECULATORS:
        is_causal = not config.get("sliding_window_non_causal", True)  # one flag, for full layers too
        attention = tuple(replace(layer, is_causal=is_causal) for layer in published.attention)
        return replace(published, attention=attention)
    states = config.get("eagle_aux_hidden_state_layer_ids")
    nested = nested_fields(config).get("target_layer_ids")
    return replace(
        published,
        mask_token_id=whole_number(nested_first(config, "mask_token_id")),
        target_layer_ids=layer_ids(states, offset=-1)
        or layer_ids(nested)
        or layer_ids(config.get("target_layer_ids")),
        attention=_vllm_attention(config, transformers_layer_types(config), transformers_window(config)),
    )


def _read_as_sglang(config: Config) -> Reading:
    """SGLang: `dflash_config`, then the top level; `causal`, `use_swa` and `swa_window_size` are not looked at."""
    window = transformers_window(config)
    attention = _attention(transformers_layer_types(config), window, config.get("is_causal"))
    own = _own_fields(partial(nested_first, config))
    return replace(meant(config), **own, attention=attention)


def _read_as_trtllm(config: Config) -> Reading:
    """TensorRT-LLM: ids from `dflash_config` alone, sorted; sliding layers causal, `is_causal` not read."""
    nested = nested_fields(config)
    taps = layer_ids(nested.get("target_layer_ids"))
    if taps:
        taps = tuple(sorted(taps))
    window = whole_number(nested.get("swa_window_size"))
    if nested.get("use_swa") and window is not None:
        attention = (LayerAttention(False, window),) * num_layers(config)
    else:
        attention = _attention(transformers_layer_types(config), transformers_window(config), None)
    return replace(meant(config), target_layer_ids=taps, attention=attention)


def _read_as_mlx(config: Config) -> Reading:
    """MLX: the block and the rotary base from the top level, the rest from `dflash_config`; sliding layers causal."""
    nested = nested_fields(config)
    own = _own_fields(nested.get)
    own["block_size"] = whole_number(config.get("block_size"))
    window = whole_number(config.get("sliding_window"))
    attention = _attention(_declared_types(config), window, None)
    base = rope_theta({"rope_theta": config.get("rope_theta")})
    return Reading(**own, rope_theta=base, attention=attention)


READERS: dict[str, Callable[[Config], Reading]] = {
    # `generate(speculation_type="dflash")`: the three fields at the top level; the drafter's class does the rest.
    "native": lambda config: replace(meant(config), **_own_fields(config.get)),
    "vllm": _read_as_vllm,
    "sglang": _read_as_sglang,
    "trtllm": _read_as_trtllm,
    "mlx": _read_as_mlx,
}
