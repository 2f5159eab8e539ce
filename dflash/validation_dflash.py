"""What is refused and how it is said: one sentence with the value and the remedy, before any compute.

Pairs of models, prompts and requests that the loop cannot run exactly. It runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel


# Layer types of transformers that keep a running state instead of keys and values: it cannot be rolled back by a
# length.
RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "conv", "recurrent", "hybrid"}


# Rotary embeddings that change with the length of the text.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}

# What a tokenizer may return beside the ids and their mask, if it says nothing (all zero).
IGNORABLE_INPUTS = {"token_type_ids"}


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    for owner in (decoder, getattr(decoder, "model", None), getattr(target, "model", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(
        f"{type(target).__name__} shows no list of decoder layers, so its hidden states cannot be tapped."
    )


def check_pair(target: Any, drafter: PreTrainedModel) -> None:
    """Raises ValueError, with the value and the remedy, unless `drafter` can draft for `target`."""
    if target is drafter:
        raise ValueError(
            "drafter and target are the same object: pass the drafter's target, loaded by "
            "AutoModelForCausalLM.from_pretrained, as target."
        )
    name = type(target).__name__
    if getattr(getattr(target, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: DFlash drafts for decoder-only causal models.")
    head = target.get_output_embeddings() if hasattr(target, "get_output_embeddings") else None
    if head is None or not hasattr(target, "generate"):
        raise ValueError(
            f"{name} is not a causal language model (it has no language-model head to generate with): load the target by "
            "AutoModelForCausalLM.from_pretrained."
        )
    config = target.config.get_text_config(decoder=True)
    recurrent = RECURRENT_LAYER_TYPES & set(getattr(config, "layer_types", None) or ())
    if recurrent or getattr(target, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state ({', '.join(sorted(recurrent)) or 'stateful'}) that cannot be rolled back "
            "behind rejected tokens: DFlash would not be lossless on it. Use target.generate."
        )

    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaling in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise ValueError(
                f"{name} has rope_type={kind!r}, whose rotation depends on the longest position of a forward: a block and "
                "single tokens would be rotated differently and the text could differ. Use target.generate."
            )
    if getattr(getattr(target, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{name} has a prompt-learning adapter, whose virtual tokens only its own generate adds: merge or unload it."
        )

    own = drafter.config
    if own.hidden_size != config.hidden_size:
        raise ValueError(
            f"The drafter's hidden_size is {own.hidden_size} and the target's is {config.hidden_size}: this drafter was "
            "trained for another target."
        )
    if own.vocab_size != config.vocab_size:
        raise ValueError(
            f"The drafter's vocab_size is {own.vocab_size} and the target's is {config.vocab_size}: this drafter was "
            "trained for another target, or the target's embedding was resized."
        )
    num_layers = len(decoder_layers(target))
    if own.num_target_layers is not None and own.num_target_layers != num_layers:
        raise ValueError(
            f"The drafter was trained for a target of {own.num_target_layers} layers and this one has {num_layers}: use "
            "the target that the drafter's card names."
        )
    if own.target_layer_ids[-1] >= num_layers - 1:
        raise ValueError(
            f"target_layer_ids={own.target_layer_ids} reaches the last of the target's {num_layers} layers or beyond: "
            f"taps go up to layer {num_layers - 2}."
        )


def check_batch(target: PreTrainedModel, drafter: PreTrainedModel, num_rows: int) -> None:
    """Raises ValueError unless both models take the masks that rows of different lengths need."""
    if num_rows == 1:
        return
    for name, model in (("target", target), ("drafter", drafter)):
        implementation = model.config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"The {name}'s attn_implementation={implementation!r} takes no 4-D mask, which {num_rows} rows of different "
                f"lengths need: load the {name} with attn_implementation='sdpa', or pass one prompt at a time."
            )
    types = set(getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ())
    unknown = types - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"{type(target).__name__} has layers of type {', '.join(sorted(unknown))}, whose masks for {num_rows} rows of "
            "different lengths are not known here: pass one prompt at a time."
        )


def max_positions(target: PreTrainedModel) -> int | None:
    """How many positions the target can tell apart, rope scaling counted in; `None` where its config does not say."""
    config = target.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if limit is not None and isinstance(scaling.get("factor"), (int, float)):
        original = scaling.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * scaling["factor"]))
    return limit


def read_prompt(
    input_ids: Any, attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The prompt's ids [1, S] and its mask, out of a tensor or of what a tokenizer returns; ValueError if it is none."""
    if isinstance(input_ids, Mapping):
        if "input_ids" not in input_ids:
            raise ValueError(
                f"The prompt holds {sorted(input_ids)} and no input_ids: pass what the tokenizer returns."
            )
        for name in set(input_ids) - {"input_ids", "attention_mask"}:
            if name not in IGNORABLE_INPUTS or bool(torch.as_tensor(input_ids[name]).any()):
                raise ValueError(f"The prompt holds {name}, which this loop cannot feed to the target: leave it out.")
        attention_mask = input_ids.get("attention_mask") if attention_mask is None else attention_mask
        input_ids = input_ids["input_ids"]
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        shown = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(
            f"input_ids is {shown}: pass a tensor of token ids [1, S], or what the tokenizer returns for 'pt'."
        )
    if 0 in input_ids.shape:
        raise ValueError(
            f"The prompt is empty (input_ids is {list(input_ids.shape)}): give at least one token, for example bos_token_id."
        )
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask is {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}: they must be equal."
            )
        check_padding(attention_mask)
    return input_ids, attention_mask


def check_request(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompt_ids: torch.Tensor,
    block_size: int,
    temperature: float | None,
    do_sample: bool | None,
    kwargs: Mapping[str, Any],
) -> None:
    """Raises ValueError, with the value and the remedy, for a request that cannot be run exactly."""
    if not 2 <= block_size <= drafter.config.block_size:
        raise ValueError(
            f"block_size={block_size}: use 2 to {drafter.config.block_size}, the block that the drafter was trained for."
        )
    vocab_size, smallest, largest = drafter.config.vocab_size, int(prompt_ids.min()), int(prompt_ids.max())
    if largest >= vocab_size or smallest < 0:
        raise ValueError(
            f"Token id {smallest if smallest < 0 else largest} is outside the target's vocabulary of {vocab_size}: use the target's tokenizer."
        )
    limit = max_positions(target)
    if limit is not None and prompt_ids.shape[1] >= limit:
        raise ValueError(
            f"The prompt has {prompt_ids.shape[1]} tokens and the target can tell {limit} positions apart: shorten the prompt."
        )
    for name in ("max_new_tokens", "max_length"):
        value = kwargs.get(name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value}: ask for at least one new token.")
    if temperature is not None and not temperature >= 0:
        raise ValueError(f"temperature={temperature}: use 0 for greedy decoding or a number above 0 to sample.")
    if temperature == 0 and do_sample:
        raise ValueError("temperature=0.0 asks for greedy decoding and do_sample=True for sampling: pass one of them.")
    top_p, top_k = kwargs.get("top_p"), kwargs.get("top_k")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: use a probability above 0 and up to 1 (1 keeps every token).")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k={top_k}: use the number of tokens to keep, or 0 to keep every token.")
    if kwargs.get("streamer") is not None:
        raise ValueError("generate_blocks yields the blocks themselves: pass the streamer to spec_generate.")
    for name in (
        "position_ids",
        "assistant_model",
        "prompt_lookup_num_tokens",
        "past_key_values",
        "custom_generate",
        "inputs_embeds",
    ):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} cannot be used inside spec_generate: it decodes by itself. Leave it out.")


def check_prepared(generation_config: Any, attention_mask: torch.Tensor | None) -> None:
    """Refuses what `generate` has prepared and speculation by blocks cannot do exactly or does not return."""
    for name, plain in (
        ("num_beams", 1),
        ("penalty_alpha", None),
        ("dola_layers", None),
        ("force_words_ids", None),
        ("constraints", None),
        ("guidance_scale", 1),
        ("watermarking_config", None),
        ("output_scores", False),
        ("output_logits", False),
        ("output_attentions", False),
        ("output_hidden_states", False),
        ("cache_implementation", None),
    ):
        value = getattr(generation_config, name, None)
        if value is not None and value != plain:
            raise ValueError(
                f"{name}={value!r} is not supported by spec_generate: leave it out (or set {name}={plain} if the target's "
                "generation config holds it), or use target.generate."
            )
    check_padding(attention_mask)


def check_padding(attention_mask: torch.Tensor | None) -> None:
    """Raises ValueError if a prompt ends in padding: its last column could not choose a token."""
    if attention_mask is not None and not attention_mask[:, -1].all():
        raise ValueError("The prompt ends in padding: pad on the left (tokenizer.padding_side = 'left').")
