"""What is refused and how it is said: one sentence with the value and the remedy, before any compute.

Pairs of models, prompts and requests that the loop cannot run exactly. It runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import __version__
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .attention_dflash import attention_of
from .recurrent_dflash import LINEAR_TYPES, is_supported
from .verification_dflash import VERIFICATIONS


logger = logging.get_logger(__name__)

# Layer types of transformers whose keys and values can be rolled back by a length.
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

# Targets that mix them with linear layers, and whose linear layers are known to replay exactly (`recurrent_dflash`).
HYBRID_FAMILIES = {
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}

# Multimodal targets whose text behind an image is known to be exact, by the model_type of their config.
IMAGE_FAMILIES = {
    "gemma3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
}

# What `generate` prepares for the forward of any model.
PREPARED_INPUTS = {
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}

# Rotary embeddings that change with the length of the text.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}

# Logits processors of transformers that remember what they were shown.
STATEFUL_PROCESSORS = {
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
}

# Arguments of `generate` that belong to other ways of decoding, or to a forward that is not ours to shape.
NO_MEANING_HERE = (
    "assistant_early_exit",
    "assistant_model",
    "assistant_tokenizer",
    "cache_implementation",
    "cache_position",
    "custom_generate",
    "inputs_embeds",
    "logits_to_keep",
    "negative_prompt_attention_mask",
    "negative_prompt_ids",
    "past_key_values",
    "position_ids",
    "speculation_type",
    "synced_gpus",
    "use_mtp",
)

# Settings that `generate` would act upon itself if it found them in a config.
KEYWORD_ONLY = ("prompt_lookup_num_tokens", "stop_strings")

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
        f"{type(target).__name__} shows no list of decoder layers, so its hidden states cannot be tapped. Use target.generate."
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
    _check_layers(target)
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

    # The property that says so has two names, one of which warns.
    if target.training and any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        raise ValueError(
            f"{name} is being trained with gradient checkpointing, which keeps no cache: call its eval() first."
        )

    own = drafter.config
    if own.hidden_size != config.hidden_size:
        raise ValueError(
            f"The drafter's hidden_size is {own.hidden_size} and the target's is {config.hidden_size}: this drafter was "
            "trained for another target."
        )
    if own.vocab_size and own.vocab_size != config.vocab_size:  # one dialect does not say it
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


def _check_layers(target: PreTrainedModel) -> None:
    """Raises ValueError if what the target keeps of its text cannot be rolled back exactly."""
    name = type(target).__name__
    config = target.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or ())
    others = types - ATTENTION_TYPES
    if config.model_type in HYBRID_FAMILIES and others <= set(LINEAR_TYPES) and types & ATTENTION_TYPES:
        if not is_supported():
            raise ValueError(
                f"{name} keeps a recurrent state ({', '.join(sorted(others))}) that transformers {__version__} cannot roll back "
                "behind rejected tokens: install transformers 5, or use target.generate."
            )
        return
    others |= set(getattr(config, "layers_block_type", None) or ()) - {"attention"}  # an older name
    if others or getattr(target, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a state of its text ({', '.join(sorted(others)) or 'stateful'}) that cannot be rolled back "
            "exactly behind rejected tokens: DFlash would not be lossless on it. Use target.generate."
        )
    supports_caches = getattr(target, "_supports_default_dynamic_cache", None)
    if supports_caches is not None and not supports_caches():
        raise ValueError(
            f"{name} keeps its text in a cache of its own, which cannot be rolled back behind rejected tokens. Use "
            "target.generate."
        )
    if getattr(config, "altup_num_inputs", None) is not None:
        raise ValueError(
            f"{name} carries altup_num_inputs={config.altup_num_inputs} streams of hidden states from layer to layer, and a "
            "drafter reads one. Use target.generate."
        )
    if getattr(config, "index_topk", None) is not None:
        raise ValueError(
            f"{name} attends to the index_topk={config.index_topk} keys that an indexer picks, and may pick others for a "
            "block than for single tokens: DFlash would not be lossless on it. Use target.generate."
        )


def check_batch(target: PreTrainedModel, drafter: PreTrainedModel, num_rows: int) -> None:
    """Raises ValueError unless both models take the masks that rows of different lengths need."""
    if num_rows == 1:
        return
    for name, model in (("target", target), ("drafter", drafter)):
        implementation = attention_of(model)
        if implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"The {name}'s attn_implementation={implementation!r} takes no 4-D mask, which {num_rows} rows of different "
                f"lengths need: load the {name} with attn_implementation='sdpa', or pass one prompt at a time."
            )
    types = set(getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ())
    unknown = types - {"full_attention", "sliding_attention", *LINEAR_TYPES}
    if unknown:
        raise ValueError(
            f"{type(target).__name__} has layers of type {', '.join(sorted(unknown))}, whose masks for {num_rows} rows of "
            "different lengths are not known here: pass one prompt at a time."
        )


def check_tree(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    num_rows: int,
    verification: str,
    prompt_inputs: Mapping[str, Any],
) -> None:
    """Raises ValueError unless a draft tree can be verified exactly: by a 4-D mask, and choice by choice."""
    if num_rows > 1:
        raise ValueError(
            f"draft_tree takes one prompt at a time, not {num_rows}: pass them one by one, or leave it out."
        )
    if verification not in ("auto", "match"):
        raise ValueError(
            f"draft_tree with verification={verification!r}: a tree is walked along the target's own choices, so use 'match'."
        )
    if drafter.config.selector_rank is not None:
        raise ValueError(
            "draft_tree needs a drafter whose positions are independent, and this one has a candidate selector: leave it out."
        )
    name = type(target).__name__
    if prompt_inputs:
        raise ValueError(
            f"draft_tree came with {', '.join(sorted(prompt_inputs))}: it knows token ids alone, leave it out."
        )
    if attention_of(target) not in ("sdpa", "eager"):
        raise ValueError(
            f"{name}'s attn_implementation={attention_of(target)!r} takes no 4-D mask, which a draft tree "
            "needs: load the target with attn_implementation='sdpa'."
        )
    others = set(getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ())
    others -= {"full_attention", "sliding_attention"}
    if others:
        raise ValueError(
            f"{name} has layers of type {', '.join(sorted(others))}, which read a tree's columns one behind the other: "
            "leave draft_tree out."
        )


def read_prompt_inputs(
    target: PreTrainedModel,
    model_kwargs: Mapping[str, Any],
    input_ids: torch.Tensor,
    conversation: Any = None,
    chunk_size: int | None = None,
) -> dict[str, Any]:
    """What a request holds for the prompt's forward beside ids and mask: images, and nothing for a text.

    Raises:
        ValueError: if there is something, and the target is not known to be exact behind it, or the prompt is not a
            single one without padding, without a conversation and in one piece.
    """
    inputs = {
        name: value
        for name, value in model_kwargs.items()
        if name not in PREPARED_INPUTS and not _says_nothing(name, value)
    }
    if not inputs:
        return {}
    named = ", ".join(sorted(inputs))
    if target.config.model_type not in IMAGE_FAMILIES:
        raise ValueError(
            f"{type(target).__name__} was given more than token ids ({named}), and its text behind that is not known to be "
            "exact here: leave it out, or use target.generate."
        )
    attention_mask = model_kwargs.get("attention_mask")
    if len(input_ids) > 1 or (attention_mask is not None and not bool(attention_mask.all())):
        raise ValueError(
            f"{named} came with {len(input_ids)} rows or with padding: pass one prompt at a time, unpadded."
        )
    if chunk_size is not None:
        raise ValueError(f"{named} came with prefill_chunk_size={chunk_size}: an image cannot be cut, leave it out.")
    if conversation is not None:
        raise ValueError(f"{named} came with a conversation, which knows token ids alone: leave the conversation out.")
    if model_kwargs.get("position_ids") is not None:  # of three axes, where an image has them
        inputs["position_ids"] = model_kwargs["position_ids"]
    return inputs


def _says_nothing(name: str, value: Any) -> bool:
    # Types that are all zero mean text; where there is no image, transformers 5 passes an empty dict of encoded ones.
    return (
        value is None
        or (name.endswith("token_type_ids") and not bool(value.any()))
        or (isinstance(value, dict) and not value)
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
    input_ids: Any, attention_mask: torch.Tensor | None = None, target: PreTrainedModel | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids [B, S] and their mask, out of a tensor, of what a tokenizer returns, or of a list of prompts.

    Raises:
        ValueError: if it is none of these, is empty, or its mask does not fit.
    """
    if isinstance(input_ids, Mapping):
        if "input_ids" not in input_ids:
            raise ValueError(
                f"The prompt holds {sorted(input_ids)} and no input_ids: pass what the tokenizer returns."
            )
        for name in set(input_ids) - {"input_ids", "attention_mask"}:
            if name not in IGNORABLE_INPUTS or any_nonzero(input_ids[name]):
                raise ValueError(f"The prompt holds {name}, which this loop cannot feed to the target: leave it out.")
        # A list of prompts is padded here, where lengths tell what is padding.
        if attention_mask is None and isinstance(input_ids["input_ids"], torch.Tensor):
            attention_mask = input_ids.get("attention_mask")
        input_ids = input_ids["input_ids"]
    if isinstance(input_ids, (list, tuple)) and len(input_ids) and not isinstance(input_ids[0], str):
        if attention_mask is not None:
            raise ValueError(
                "A list of prompts needs no attention_mask: leave it out, or pass a padded tensor with it."
            )
        input_ids, attention_mask = pad_prompts(input_ids, target)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        shown = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(
            f"input_ids is {shown}: pass a tensor of token ids [B, S], what the tokenizer returns, or a list of prompts' ids."
        )
    if 0 in input_ids.shape:
        raise ValueError(
            f"The prompt is empty (input_ids is {list(input_ids.shape)}): give at least one token, for example bos_token_id."
        )
    if attention_mask is not None:
        attention_mask = torch.as_tensor(attention_mask)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask is {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}: they must be equal."
            )
        check_padding(attention_mask)
    return input_ids, attention_mask


def any_nonzero(values: Any) -> bool:
    """Whether a tokenizer's field, a tensor or lists of any depth, holds anything but zeros."""
    if isinstance(values, (list, tuple)):
        return any(map(any_nonzero, values))
    return bool(torch.as_tensor(values).any())


def pad_prompts(prompts: Sequence[Any], target: PreTrainedModel | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of any lengths, each a list or tensor of ids, padded on the left: ids and mask, both [B, S]."""
    try:
        rows = [torch.as_tensor(prompt, dtype=torch.long).flatten() for prompt in prompts]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The list of prompts holds something else than token ids ({error}): pass lists or tensors of ids."
        ) from error
    empty = [index for index, row in enumerate(rows) if not len(row)]
    if empty:
        raise ValueError(f"Prompt {empty[0]} of the list is empty: give at least one token, for example bos_token_id.")
    config = None if target is None else target.generation_config
    pad = getattr(config, "pad_token_id", None)
    pad = getattr(config, "eos_token_id", None) if pad is None else pad
    pad_token_id = (pad[0] if isinstance(pad, list) else pad) or 0  # masked: it only has to be some token
    width = max(map(len, rows))
    input_ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad_token_id) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    return input_ids, (torch.arange(width) >= width - lengths).long()


def check_settings(
    drafter: PreTrainedModel,
    block_size: Any,
    verification: Any,
    max_draft_tokens: Any,
    adaptive: Any,
    draft_tree: Any,
    compile: Any,
    latency_curve: Any,
) -> None:
    """Raises ValueError, with the value and the remedy, for a setting of the loop that has no meaning."""
    if block_size is not None and not 2 <= block_size <= drafter.config.block_size:
        raise ValueError(
            f"block_size={block_size}: use 2 to {drafter.config.block_size}, the block that the drafter was trained for."
        )
    if verification not in VERIFICATIONS:
        raise ValueError(f"verification={verification!r}: use one of {', '.join(VERIFICATIONS)}.")
    most = max_draft_tokens
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise ValueError(
            f"max_draft_tokens={most!r}: use a number of tokens from 0 (draft nothing) on, or leave it out."
        )
    if not isinstance(draft_tree, int) or draft_tree < 0:
        raise ValueError(f"draft_tree={draft_tree!r}: use a number of nodes, or True for as many as pay.")
    if not isinstance(adaptive, bool):
        raise ValueError(f"adaptive={adaptive!r}: use True or False.")
    if not isinstance(compile, bool) and compile != "auto":
        raise ValueError(f"compile={compile!r}: use True, False or 'auto'.")
    if latency_curve is not None and not hasattr(latency_curve, "verify_ms"):
        raise ValueError(
            f"latency_curve is a {type(latency_curve).__name__}: pass what LatencyCurve.from_json returns."
        )


def check_request(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompt_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: Mapping[str, Any],
) -> None:
    """Raises ValueError, with the value and the remedy, for a request that cannot be run exactly."""
    vocab_size, smallest, largest = (
        target.config.get_text_config(decoder=True).vocab_size,
        int(prompt_ids.min()),
        int(prompt_ids.max()),
    )
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
    temperature, do_sample = kwargs.get("temperature"), kwargs.get("do_sample")
    if temperature is not None and not temperature >= 0:
        raise ValueError(f"temperature={temperature}: use 0 for greedy decoding or a number above 0 to sample.")
    if temperature == 0 and do_sample:
        raise ValueError("temperature=0.0 asks for greedy decoding and do_sample=True for sampling: pass one of them.")
    top_p, top_k = kwargs.get("top_p"), kwargs.get("top_k")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: use a probability above 0 and up to 1 (1 keeps every token).")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k={top_k}: use the number of tokens to keep, or 0 to keep every token.")
    for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size"):
        value = kwargs.get(name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: use at least 1, or leave it out.")
    if kwargs.get("max_matching_ngram_size") is not None and kwargs.get("prompt_lookup_num_tokens") is None:
        raise ValueError(
            "max_matching_ngram_size belongs to a prompt lookup: pass prompt_lookup_num_tokens beside it."
        )
    check_special_tokens(target, prompt_ids, attention_mask, kwargs)
    for name in NO_MEANING_HERE:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} cannot be used inside spec_generate: it decodes by itself. Leave it out.")
    for name in KEYWORD_ONLY:
        if any(
            getattr(c, name, None) is not None for c in (kwargs.get("generation_config"), target.generation_config)
        ):
            raise ValueError(
                f"A generation config holds {name}, which speculation reads as a keyword alone: pass {name}=… to "
                "spec_generate (with tokenizer=… for stop strings), or take it out of the config."
            )


def check_special_tokens(
    target: PreTrainedModel, prompt_ids: torch.Tensor, attention_mask: torch.Tensor | None, kwargs: Mapping[str, Any]
) -> None:
    """Refuses a pad id inside a prompt without a mask, which `generate` would hide; says when a prompt ends in a stop."""
    config = kwargs.get("generation_config") or target.generation_config
    stops = kwargs.get("eos_token_id") if kwargs.get("stop_token_ids") is None else kwargs["stop_token_ids"]
    stops = getattr(config, "eos_token_id", None) if stops is None else stops
    stop_ids = torch.as_tensor([] if stops is None else stops, dtype=torch.long).flatten()
    pad = kwargs.get("pad_token_id")
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    prompt_ids = prompt_ids.cpu()
    if attention_mask is None and pad is not None and pad not in stop_ids:
        check_padding(prompt_ids != pad)
        is_text = (prompt_ids != pad).long().cumsum(dim=1) > 0  # from the first token that is not padding on
        inside = ((prompt_ids == pad) & is_text).nonzero()
        if len(inside):
            row, column = inside[0].tolist()
            raise ValueError(
                f"Row {row} of the prompt holds the pad id {pad} at column {column} and no attention_mask was given, so "
                "generate would hide that token: pass attention_mask (all ones if it is a token like others)."
            )
    ended = torch.isin(prompt_ids[:, -1], stop_ids).nonzero().flatten().tolist()
    if ended:
        logger.warning(
            f"Row {ended[0]} of the prompt already ends in the stop token {int(prompt_ids[ended[0], -1])}: the text goes on "
            "behind it, as in generate. Did the tokenizer append it?"
        )


def check_processors(processors: Iterable[Any]) -> None:
    """Refuses logits processors whose answer depends on more than `(input_ids, scores)`."""
    for processor in processors:
        if type(processor).__name__ in STATEFUL_PROCESSORS:
            raise ValueError(
                f"{type(processor).__name__} keeps a state from call to call, which asking it about drafted tokens would "
                "spoil: leave it out, or use target.generate."
            )


def check_prepared(
    generation_config: Any, attention_mask: torch.Tensor | None, num_rows: int, conversation: Any
) -> None:
    """Refuses what `generate` has prepared and speculation by blocks cannot do exactly or does not return."""
    if conversation is not None and num_rows > 1:
        raise ValueError(f"A conversation holds the caches of one prompt, not of {num_rows}: give each its own.")
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False: speculation verifies behind cached keys and values; leave it out.")
    for name, plain in (
        ("num_beams", 1),
        ("penalty_alpha", None),
        ("dola_layers", None),
        ("force_words_ids", None),
        ("constraints", None),
        ("guidance_scale", 1),
        ("watermarking_config", None),
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
    chunk_size = getattr(generation_config, "prefill_chunk_size", None)
    if chunk_size is not None and (isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"prefill_chunk_size={chunk_size!r}: use a number of tokens from 1 on, or leave it out.")
    check_padding(attention_mask)


def check_padding(attention_mask: torch.Tensor | None) -> None:
    """Raises ValueError if a prompt ends in padding: its last column could not choose a token."""
    if attention_mask is not None and not attention_mask[:, -1].all():
        raise ValueError("The prompt ends in padding: pad on the left (tokenizer.padding_side = 'left').")
