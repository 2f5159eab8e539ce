"""What a DFlash drafter is: its shape, its block, and which of the target's layers it reads.

The configuration keeps `model_type: "qwen3"`, the published form that every serving engine reads, and holds the
fields of a drafter twice where engines disagree about the place (top level and `dflash_config`). It knows nothing
about tensors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


# Engines read these at the top level or in `dflash_config`.
DOUBLED_FIELDS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")

# Fields that change what a drafter computes and that this class does not compute: running without them would be
# silently wrong, so each is refused by name. The value beside a field is the one that means "absent".
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "sample_from_anchor": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "use_swa": (None, False),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "transformer_layer_config": (None,),
}


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
        block_size: Tokens in a block, anchor included (N): the drafter proposes `block_size - 1` tokens a step.
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
        kwargs: Fields of `Qwen3Config`.

    Raises:
        ValueError: for a value that no drafter can run with, with the value and the remedy.
    """

    model_type = "qwen3"

    if TYPE_CHECKING:  # Qwen3Config allows None here; this class leaves none
        layer_types: list[str]
        num_key_value_heads: int
        head_dim: int

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
        block_size = _agreed("block_size", block_size, nested)
        mask_token_id = _agreed("mask_token_id", mask_token_id, nested)
        target_layer_ids = _agreed("target_layer_ids", target_layer_ids, nested)
        num_target_layers = _agreed("num_target_layers", num_target_layers, nested)
        is_causal = _agreed("is_causal", is_causal, {"is_causal": nested.get("causal")})
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
        self.dflash_config = nested | self._doubled()
        self.check()

    def check(self) -> None:
        """Raises ValueError for a field that no drafter can run with. Fields that are still `None` are not looked at.

        `transformers` builds a default instance of every configuration class, so absence is the model's to refuse.
        """
        for name in ("block_size", "mask_token_id", "num_target_layers"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise ValueError(f"{name}={value!r} is not a whole number: write it without quotes.")
        if self.block_size < 2:
            raise ValueError(
                f"block_size={self.block_size}: a block is the anchor and at least one drafted token; use 2 or more."
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size}: choose an id of "
                "the target's embedding matrix that never occurs in text."
            )
        ids = self.target_layer_ids
        if ids is not None:
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
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(unknown)}: only full_attention and sliding_attention exist.")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"layer_types holds sliding_attention but sliding_window={self.sliding_window}: set sliding_window and "
                "use_sliding_window=True."
            )

    def _doubled(self) -> dict[str, Any]:
        """The fields that are written in both places, as they are now."""
        return {name: getattr(self, name) for name in DOUBLED_FIELDS}

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
        fields["dflash_config"] = self.dflash_config | self._doubled()
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
    return (10000.0 if theta is None else float(theta)), scaling


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, absent in UNSUPPORTED_FIELDS.items():
        value = fields.get(name)
        if value not in absent:
            raise ValueError(
                f"{name}={value!r} is not supported by this version of DFlashDraftModel, and a drafter that needs it "
                "would propose nothing useful without it. Serve this checkpoint with an engine that reads it."
            )


DFlashConfig.register_for_auto_class()
