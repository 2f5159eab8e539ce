"""How a request is put: what `spec_generate` and `generate_blocks` take, refuse and return.

Everything around the loop (the generation config, logits processors, stopping criteria, expansion, special tokens) is
prepared by the target's own `generate`, which runs the loop as its `custom_generate`. What cannot be run exactly is refused
before any compute, in one sentence with the value and the remedy.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput, logging

from .attention_dflash import attention_of
from .cache_dflash import LINEAR_TYPES
from .decoding_dflash import LARGEST_TREE, Block, Conversation, Decoder, decode_ahead, decode_blocks
from .proposals_dflash import LatencyCurve, PromptLookup, make_cutter, token_limit
from .step_dflash import Pair, check_pair, compiled_pair
from .verification_dflash import VERIFICATIONS, PositionNoise, Verifier


logger = logging.get_logger(__name__)


# Multimodal targets whose text behind an image is known to be exact, by the model_type of their config.
IMAGE_FAMILIES = {"gemma3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}

# What `generate` prepares for the forward of any model.
PREPARED_INPUTS = {
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}

# Logits processors of transformers that remember what they were shown.
STATEFUL_PROCESSORS = {
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
}

# Arguments of `generate` that belong to other ways of decoding, or to a forward that is not ours to shape.
NO_MEANING_HERE = (
    *("assistant_early_exit", "assistant_model", "assistant_tokenizer", "cache_implementation", "cache_position"),
    *("custom_generate", "inputs_embeds", "logits_to_keep", "negative_prompt_attention_mask", "negative_prompt_ids"),
    *("past_key_values", "position_ids", "speculation_type", "synced_gpus", "use_mtp"),
)

# Fields of a generation config that ask for another way of decoding or another output, and the values that do not.
OTHER_DECODING = (
    *(("num_beams", 1), ("penalty_alpha", None), ("dola_layers", None), ("force_words_ids", None)),
    *(("constraints", None), ("guidance_scale", 1), ("watermarking_config", None), ("output_attentions", False)),
    *(("output_hidden_states", False), ("cache_implementation", None)),
)

# Settings that `generate` would act upon itself if it found them in a config.
KEYWORD_ONLY = ("prompt_lookup_num_tokens", "stop_strings")

# What a tokenizer may return beside the ids and their mask, if it says nothing (all zero).
IGNORABLE_INPUTS = {"token_type_ids"}


def _is_count(smallest: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= smallest


# What a setting has to be if it is given, and what to give otherwise.
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: value > 0, "ask for at least one new token"),
    "max_length": (lambda value: value > 0, "ask for at least one new token"),
    "temperature": (lambda value: value >= 0, "use 0 for greedy decoding or a number above 0 to sample"),
    "top_p": (lambda value: 0 < value <= 1, "use a probability above 0 and up to 1 (1 keeps every token)"),
    "top_k": (lambda value: value >= 0, "use the number of tokens to keep, or 0 to keep every token"),
    "prefill_chunk_size": (_is_count(1), "use a number of tokens from 1 on, or leave it out"),
    "prompt_lookup_num_tokens": (_is_count(1), "use at least 1, or leave it out"),
    "max_matching_ngram_size": (_is_count(1), "use at least 1, or leave it out"),
    "max_draft_tokens": (_is_count(0), "use a number of tokens from 0 (draft nothing) on, or leave it out"),
    "draft_tree": (
        lambda value: isinstance(value, int) and value >= 0,
        "use a number of nodes, or True for as many as pay",
    ),
    "verification": (VERIFICATIONS.__contains__, f"use one of {', '.join(VERIFICATIONS)}"),
    "adaptive": (lambda value: isinstance(value, bool), "use True or False"),
    "compile": (lambda value: isinstance(value, bool) or value == "auto", "use True, False or 'auto'"),
    "latency_curve": (lambda value: hasattr(value, "verify_ms"), "pass what LatencyCurve.from_json returns"),
}


def check_settings(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that has no meaning."""
    for name, (is_meant, remedy) in SETTINGS.items():
        value = given.get(name)
        if value is not None and not is_meant(value):
            raise ValueError(f"{name}={value!r}: {remedy}.")


def check_masks(target: PreTrainedModel, drafter: PreTrainedModel, num_rows: int, draft_tree: Any) -> None:
    """Raises ValueError unless the models take the masks that rows of different lengths, or a draft tree, need."""
    why = f"{num_rows} rows of different lengths" if num_rows > 1 else "a draft tree"
    for name, model in (("target", target), ("drafter", drafter)) if num_rows > 1 else (("target", target),):
        if attention_of(model) not in ("sdpa", "eager"):
            raise ValueError(
                f"The {name}'s attn_implementation={attention_of(model)!r} takes no 4-D mask, which {why} need: load the {name} "
                "with attn_implementation='sdpa', or pass one prompt at a time and no draft_tree."
            )
    types = set(getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ())
    others = types - {"full_attention", "sliding_attention", *(() if draft_tree else LINEAR_TYPES)}
    if others:
        raise ValueError(
            f"{type(target).__name__} has layers of type {', '.join(sorted(others))}, which take no masks for {why}: "
            "pass one prompt at a time, and no draft_tree."
        )


def check_tree(drafter: PreTrainedModel, num_rows: int, verification: str, prompt_inputs: Mapping[str, Any]) -> None:
    """Raises ValueError unless a draft tree can be verified choice by choice."""
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
    if prompt_inputs:
        raise ValueError(
            f"draft_tree came with {', '.join(sorted(prompt_inputs))}: it knows token ids alone, leave it out."
        )


def read_prompt_inputs(request: Request, model_inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the prompt's forward gets beside ids and mask: images, and nothing for a text.

    Raises:
        ValueError: if there is something, and the target is not known to be exact behind it, or the prompt is not a
            single one without padding, without a conversation and in one piece.
    """
    inputs = {
        name: value
        for name, value in model_inputs.items()
        if name not in PREPARED_INPUTS and not _says_nothing(name, value)
    }
    if not inputs:
        return {}
    target, named, mask = request.target, ", ".join(sorted(inputs)), request.attention_mask
    if target.config.model_type not in IMAGE_FAMILIES:
        raise ValueError(
            f"{type(target).__name__} was given more than token ids ({named}), and its text behind that is not known to be "
            "exact here: leave it out, or use target.generate."
        )
    if len(request.input_ids) > 1 or (mask is not None and not bool(mask.all())):
        raise ValueError(
            f"{named} came with {len(request.input_ids)} rows or with padding: pass one prompt at a time, unpadded."
        )
    if request.chunk_size is not None:
        raise ValueError(
            f"{named} came with prefill_chunk_size={request.chunk_size}: an image cannot be cut, leave it out."
        )
    if request.conversation is not None:
        raise ValueError(f"{named} came with a conversation, which knows token ids alone: leave the conversation out.")
    if model_inputs.get("position_ids") is not None:  # of three axes, where an image has them
        inputs["position_ids"] = model_inputs["position_ids"]
    return inputs


def _says_nothing(name: str, value: Any) -> bool:
    # Types that are all zero mean text; where there is no image, transformers 5 passes an empty dict of encoded ones.
    is_text = name.endswith("token_type_ids") and not bool(value.any())
    return value is None or is_text or (isinstance(value, dict) and not value)


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


def check_request(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: Mapping[str, Any],
) -> None:
    """Raises ValueError, with the value and the remedy, for a request that cannot be run exactly."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    smallest, largest = int(prompt_ids.min()), int(prompt_ids.max())
    if largest >= vocab_size or smallest < 0:
        raise ValueError(
            f"Token id {smallest if smallest < 0 else largest} is outside the target's vocabulary of {vocab_size}: use the "
            "target's tokenizer."
        )
    limit = max_positions(target)
    if limit is not None and prompt_ids.shape[1] >= limit:
        raise ValueError(
            f"The prompt has {prompt_ids.shape[1]} tokens and the target can tell {limit} positions apart: shorten the prompt."
        )
    check_settings(kwargs)
    if kwargs.get("temperature") == 0 and kwargs.get("do_sample"):
        raise ValueError("temperature=0.0 asks for greedy decoding and do_sample=True for sampling: pass one of them.")
    if kwargs.get("max_matching_ngram_size") is not None and kwargs.get("prompt_lookup_num_tokens") is None:
        raise ValueError(
            "max_matching_ngram_size belongs to a prompt lookup: pass prompt_lookup_num_tokens beside it."
        )
    check_special_tokens(target, prompt_ids, attention_mask, kwargs)
    for name in NO_MEANING_HERE:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} cannot be used inside spec_generate: it decodes by itself. Leave it out.")
    for name in KEYWORD_ONLY:
        configs = kwargs.get("generation_config"), target.generation_config
        if any(getattr(config, name, None) is not None for config in configs):
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


def check_prepared(config: Any, request: Request) -> None:
    """Refuses what `generate` has prepared and speculation by blocks cannot do exactly or does not return."""
    num_rows = len(request.input_ids)
    if request.conversation is not None and num_rows > 1:
        raise ValueError(f"A conversation holds the caches of one prompt, not of {num_rows}: give each its own.")
    if config.use_cache is False:
        raise ValueError("use_cache=False: speculation verifies behind cached keys and values; leave it out.")
    for name, plain in OTHER_DECODING:
        value = getattr(config, name, None)
        if value is not None and value != plain:
            raise ValueError(
                f"{name}={value!r} is not supported by spec_generate: leave it out (or set {name}={plain} if the target's "
                "generation config holds it), or use target.generate."
            )
    largest = request.drafter.config.block_size
    if request.block_size is not None and not 2 <= request.block_size <= largest:
        raise ValueError(
            f"block_size={request.block_size}: use 2 to {largest}, the block that the drafter was trained for."
        )
    if request.token_streamer is not None and num_rows > 1:
        raise ValueError(f"A streamer takes one prompt at a time, not {num_rows}: read generate_blocks instead.")
    check_padding(request.attention_mask)


def check_padding(attention_mask: torch.Tensor | None) -> None:
    """Raises ValueError if a prompt ends in padding: its last column could not choose a token."""
    if attention_mask is not None and not attention_mask[:, -1].all():
        raise ValueError("The prompt ends in padding: pad on the left (tokenizer.padding_side = 'left').")


@dataclass
class DFlashOutput(ModelOutput):
    """What `spec_generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: Prompts and new tokens, [B, S + new], padded on the right behind the rows that stopped first.
        acceptance_lengths: For each row, per verify step: accepted proposals + 1, before stop and length cuts.
        tau: Their mean over all rows and steps, as the DFlash paper and the engines count it; NaN without a step.
        tokens_per_step: Tokens kept, without the prefill's, per row and verify step: what a speed-up rests on.
        scores: With `output_scores=True`, the processed scores of each new position, [B, V] each; 0 behind a row's end.
        logits: With `output_logits=True`, the target's logits of each new position, in the same form.
    """

    sequences: torch.Tensor | None = None
    acceptance_lengths: list[list[int]] | None = None
    tau: float | None = None
    tokens_per_step: float | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None


def spec_generate(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor] | list[Any],
    *,
    streamer: Any = None,
    **kwargs: Any,
) -> torch.Tensor | DFlashOutput:
    """The target's own continuation of a prompt, in fewer forwards of the target.

    Greedy text equals that of `target.generate(do_sample=False)` token for token wherever one forward over a block and
    one forward per token agree on the argmax: always in fp32 as far as we have tested; in bf16 a near-tie can flip,
    and every token is still the argmax of the forward that committed it. Sampled text has the law of
    `target.generate(do_sample=True)`.

    Args:
        drafter: A `DFlashDraftModel` trained for `target`.
        target: Any decoder-only `AutoModelForCausalLM`.
        input_ids: Token ids [B, S], what a tokenizer returns (its attention mask is then used), or a list of prompts of
            any lengths.
        streamer: A `transformers` streamer; it gets the prompt, then the tokens as blocks commit. One prompt only.
        kwargs: Those of [`generate_blocks`], and through it those of `target.generate`. With
            `return_dict_in_generate=True` a [`DFlashOutput`] comes back.

    Returns:
        Prompts and new tokens [B, S + new], or a [`DFlashOutput`] that holds them.

    Raises:
        ValueError: for anything that cannot be run exactly, before any compute.
    """
    return _through_generate(custom_generate, drafter, target, input_ids, {"token_streamer": streamer, **kwargs})


def generate_blocks(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor] | list[Any],
    **kwargs: Any,
) -> Iterator[Block]:
    """Yields the target's continuation block by block, each as soon as it is committed, one per row and step.

    Nothing is computed before the first `next`. Closing the generator early leaves the target as it was.

    Args:
        drafter: A `DFlashDraftModel` trained for `target`.
        target: Any decoder-only `AutoModelForCausalLM`.
        input_ids: Token ids [B, S], padded on the left, what a tokenizer returns, or a list of prompts of any lengths.
        kwargs: Any keyword of `target.generate` (`max_new_tokens`, `top_p`, `repetition_penalty`, `stop_strings` with
            `tokenizer`, `generation_config`, …); what cannot be exact is refused by name. And these:

            - `attention_mask`: 1 for real tokens, 0 for padding, [B, S].
            - `temperature`: 0 decodes greedily; above 0 samples. Default: the target's generation config decides.
            - `do_sample`: as in `generate`. Default: whether `temperature` is above 0, else the target's config.
            - `stop_token_ids`: ids that end the text, [] for none. Default: `eos_token_id` of the target's generation config.
            - `generator`: source of the sampling noise, or one for each prompt. With "match" the text depends on its seed
              alone, not on the block size.
            - `block_size`: tokens in a block, anchor included, if fewer than the drafter was trained for.
            - `verification`: "match", "rejection" or "block" (see `verification_dflash`), or "auto": "match" for
              drafters that propose one token per row, "block" for those that draw.
            - `conversation`: a [`Conversation`] whose caches are used and kept; one prompt only.
            - `max_draft_tokens`: proposals verified per step at most; 0 drafts nothing.
            - `adaptive`: verify as many proposals as pay, chosen step by step from the drafter's confidence and from how
              long the forwards take here, which is measured once per pair. A useless drafter then costs next to nothing.
            - `latency_curve`: a [`LatencyCurve`] measured before, for `adaptive`.
            - `draft_tree`: verifies a tree of the drafter's likeliest paths instead of one: its number of nodes, or True
              for as many as pay. One prompt at a time.
            - `compile`: True compiles both forwards once per pair; "auto" does so once the pair's eager steps have lost as much
              time as compiling takes; False never. What cannot be compiled runs eagerly, and one warning says why. On CUDA a
              compiled step is launched before the last one is read, where it needs nothing of the text.
            - `prompt_lookup_num_tokens`: lets proposals of that length, found earlier in the text, compete with the
              drafter's; `max_matching_ngram_size` (3) is how many tokens must have occurred.

    Raises:
        ValueError: for anything that cannot be run exactly, before any compute.
    """
    for name in ("streamer", "return_dict_in_generate"):
        if kwargs.get(name):
            raise ValueError(f"generate_blocks yields the blocks themselves: pass {name} to spec_generate.")
    return _through_generate(custom_generate, drafter, target, input_ids, {"as_blocks": True, **kwargs})


def _through_generate(
    decode: Callable[..., Any],
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: Any,
    asked: dict[str, Any],
) -> Any:
    """Checks what was asked, says it in `generate`'s words, and lets `generate` prepare it for `decode`."""
    check_pair(target, drafter)
    prompt_ids, attention_mask = read_prompt(input_ids, asked.pop("attention_mask", None), target)
    check_request(target, prompt_ids, attention_mask, asked)

    temperature, do_sample = asked.pop("temperature", None), asked.pop("do_sample", None)
    if temperature is not None:
        do_sample = temperature > 0 if do_sample is None else do_sample
        # Greedy choices do not depend on these, and a target's sampling defaults would only be warned about.
        asked.update({"temperature": temperature} if temperature else dict.fromkeys(("temperature", "top_p", "top_k")))
    if do_sample is not None:
        asked["do_sample"] = do_sample
    stop_token_ids = asked.pop("stop_token_ids", None)
    if stop_token_ids is not None:
        asked["eos_token_id"] = None if stop_token_ids == [] else stop_token_ids  # nothing stops it
    criteria = StoppingCriteriaList(asked.pop("stopping_criteria", None) or ())
    # Made here, because `generate` hands no tokenizer on where a callable decodes; one for each string, because one
    # that can never match would hide the others.
    stop_strings, tokenizer = asked.pop("stop_strings", None), asked.pop("tokenizer", None)
    for stop_string in [stop_strings] if isinstance(stop_strings, str) else stop_strings or ():
        if tokenizer is None or not stop_string:
            remedy = "give a string that is not empty" if tokenizer else "pass the target's tokenizer=… beside it"
            raise ValueError(f"stop_strings={stop_strings!r} cannot stop a text: {remedy}.")
        criteria.append(StopStringCriteria(tokenizer, stop_string))
    # `generate` would take these for its own.
    for name, ours in GENERATES_OWN.items():
        value = asked.pop(name, None)
        if value is not None:
            asked[ours] = value
    # Ids of a target whose embedding is offloaded ("meta" between calls) stay where they are.
    device = prompt_ids.device if target.device.type == "meta" else target.device
    generate: Any = target.generate  # mixed into every causal model; the type of PreTrainedModel does not show it
    return generate(
        prompt_ids.to(device),
        attention_mask=None if attention_mask is None else attention_mask.to(device),
        stopping_criteria=criteria,
        custom_generate=decode,
        drafter=drafter,
        **asked,
    )


# Keywords that `generate` keeps for itself, and their names in a [`Request`].
GENERATES_OWN = {
    "generator": "noise_generator",
    "prompt_lookup_num_tokens": "num_looked_up",
    "max_matching_ngram_size": "ngram_size",
}


@dataclass
class Request:
    """What was asked for, checked once. The first fields are the keywords of [`custom_generate`]."""

    drafter: PreTrainedModel
    block_size: Any = None  # tokens in a block, anchor included; by default as many as the drafter was trained for
    max_draft_tokens: int | None = None
    verification: str = "auto"
    conversation: Conversation | None = None
    adaptive: bool = False
    latency_curve: LatencyCurve | None = None
    draft_tree: int | bool = False  # nodes; 0: none
    compile: bool | str = "auto"
    num_looked_up: int | None = None  # `prompt_lookup_num_tokens` of `generate_blocks`
    ngram_size: int = 3  # its `max_matching_ngram_size`
    noise_generator: torch.Generator | list[torch.Generator] | None = None  # its `generator`
    token_streamer: Any = None  # gets the prompt, and the tokens as blocks commit
    as_blocks: bool = False  # return what `generate_blocks` returns
    target: Any = None
    input_ids: Any = None  # [B, S]
    attention_mask: torch.Tensor | None = None
    config: Any = None  # the generation config
    max_new_tokens: int = 0
    max_length: float = float("inf")  # positions that the target can tell apart
    prompt_inputs: Mapping[str, Any] = field(
        default_factory=dict
    )  # what the prompt's forward gets beside its ids: images

    @classmethod
    def of(cls, target: PreTrainedModel, input_ids: torch.Tensor, config: Any, asked: dict[str, Any]) -> Request:
        """What `generate` has prepared.

        Raises:
            ValueError: for anything that cannot be run exactly, with the value and the remedy.
        """
        names = {of_class.name for of_class in fields(cls)}
        own = {
            name: value for name, value in asked.items() if name in names - {"attention_mask"} and value is not None
        }
        model_inputs = {name: value for name, value in asked.items() if name not in names or name == "attention_mask"}
        request = cls(target=target, input_ids=input_ids, config=config, **own)
        request.attention_mask = model_inputs.get("attention_mask")
        drafter, num_rows = request.drafter, len(input_ids)
        check_settings({**own, "prefill_chunk_size": request.chunk_size})
        check_prepared(config, request)
        request.prompt_inputs = read_prompt_inputs(request, model_inputs)
        if request.draft_tree:
            check_tree(drafter, num_rows, request.verification, request.prompt_inputs)
        if request.draft_tree or num_rows > 1:
            check_masks(target, drafter, num_rows, request.draft_tree)
        if request.latency_curve is not None:
            request.latency_curve.check(target, drafter, bool(request.draft_tree))
        if request.conversation is not None:
            request.conversation.check(target, drafter)
        request.block_size = request.block_size or drafter.config.block_size
        request.adaptive = request.adaptive or request.latency_curve is not None or request.draft_tree is True
        request.draft_tree = LARGEST_TREE if request.draft_tree is True else int(request.draft_tree)
        request.max_length = max_positions(target) or float("inf")
        return request

    @property
    def lookup(self) -> PromptLookup | None:
        """A search of the text's own past, begun anew."""
        return None if self.num_looked_up is None else PromptLookup(self.num_looked_up, self.ngram_size)

    @property
    def chunk_size(self) -> int | None:
        """Columns of a prompt that run at a time; `None`: all."""
        size: int | None = getattr(self.config, "prefill_chunk_size", None)
        return size

    @property
    def temperature(self) -> float:
        """Of the draws; 1 where nothing is drawn."""
        return float(self.config.temperature or 1.0) if self.config.do_sample else 1.0

    @property
    def keeping(self) -> frozenset[str]:
        """What comes back beside the tokens, of "scores" and "logits"."""
        return frozenset(name for name in ("scores", "logits") if getattr(self.config, f"output_{name}", False))


def custom_generate(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **asked: Any,
) -> torch.Tensor | DFlashOutput | Iterator[Block]:
    """The loop as the target's own `generate` runs it: `target.generate(ids, custom_generate=custom_generate, drafter=drafter)`.

    `generate` prepares everything and calls this. It keeps `streamer`, `tokenizer` and with them `stop_strings` for
    itself: pass a streamer as `token_streamer` (which gets the new tokens), and use [`spec_generate`] for stop strings.

    `asked` holds the keywords of a [`Request`], and what `generate` has prepared for the target's forward.
    """
    request = Request.of(target, input_ids, generation_config, asked)
    check_processors(logits_processor)
    request.max_new_tokens = token_limit(stopping_criteria, input_ids.shape[1])
    noise = PositionNoise(len(input_ids), request.noise_generator) if generation_config.do_sample else None
    verifier = Verifier(logits_processor, len(input_ids), noise, request.verification, "scores" in request.keeping)
    compiled = None if request.prompt_inputs else compiled_pair(target, request.drafter, request.compile)
    pair = Pair(target, request.drafter, request.prompt_inputs, compiled)
    memory = request.conversation or Conversation()
    cut = make_cutter(stopping_criteria, request.max_new_tokens)
    decoder = Decoder(request, pair, verifier, cut, memory)
    blocks = _guarded(decode_blocks(decoder) if compiled is None else decode_ahead(decoder), request, memory)
    return blocks if request.as_blocks else _collect(blocks, request)


# `generate` hands a callable the keywords that its signature names.
_own = inspect.signature(custom_generate)
_keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in list(inspect.signature(Request).parameters.values())[:14]]
custom_generate.__signature__ = _own.replace(  # type: ignore[attr-defined]
    parameters=[*list(_own.parameters.values())[:-1], *_keywords, list(_own.parameters.values())[-1]]
)


def _guarded(blocks: Iterator[Block], request: Request, memory: Conversation) -> Iterator[Block]:
    """The blocks; after an error the caches hold nothing. Running out of memory is said with what would have needed less."""
    has_failed = True
    try:
        yield from blocks
        has_failed = False
    except GeneratorExit:  # closed early, between two steps
        has_failed = False
        raise
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(
            f"Out of memory ({str(error).splitlines()[0]}): lower prefill_chunk_size for a long prompt, the number of prompts, "
            "max_new_tokens, or draft_tree."
        ) from error
    finally:
        if has_failed or request.conversation is None:
            memory.close(has_failed)


def _collect(blocks: Iterator[Block], request: Request) -> torch.Tensor | DFlashOutput:
    """The blocks as what `generate` returns, streamed on the way."""
    input_ids, generation_config, streamer = request.input_ids, request.config, request.token_streamer
    if streamer is not None:
        streamer.put(input_ids.cpu())
    of_rows: list[list[Block]] = [[] for _ in input_ids]
    for block in blocks:
        of_rows[block.row].append(block)
        if streamer is not None:
            for token_id in block.token_ids:
                streamer.put(torch.tensor([token_id]))
    if streamer is not None:
        streamer.end()

    new_ids = [[token_id for block in row for token_id in block.token_ids] for row in of_rows]
    longest, pad_token = max(map(len, new_ids)), getattr(generation_config, "_pad_token_tensor", None)
    pad_token_id = 0 if pad_token is None else int(pad_token)  # without one no row stops before another
    padded = [ids + [pad_token_id] * (longest - len(ids)) for ids in new_ids]
    sequences = torch.cat([input_ids, input_ids.new_tensor(padded)], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    lengths = [[block.acceptance_length for block in row if not block.is_prefill] for row in of_rows]
    num_steps = sum(map(len, lengths))
    return DFlashOutput(
        sequences=sequences,
        acceptance_lengths=lengths,
        tau=sum(map(sum, lengths)) / num_steps if num_steps else float("nan"),
        tokens_per_step=(sum(map(len, new_ids)) - len(new_ids)) / num_steps if num_steps else float("nan"),
        scores=_by_position(of_rows, "scores", longest),
        logits=_by_position(of_rows, "logits", longest),
    )


def _by_position(of_rows: list[list[Block]], name: str, longest: int) -> tuple[torch.Tensor, ...] | None:
    """A field of all rows' blocks as `generate` gives it: for each new position [B, V]."""
    if getattr(of_rows[0][0], name) is None:
        return None
    rows = [torch.cat([getattr(block, name) for block in row]) for row in of_rows]  # [new, V] each
    return torch.nn.utils.rnn.pad_sequence(rows).unbind(dim=0)


def generate(model: Any, inputs: Any = None, drafter: Any = None, **kwargs: Any) -> Any:
    """Lets a target's own `generate` run the loop of the DFlash checkpoint that this file lies in.

        drafter = AutoModel.from_pretrained("org/drafter", trust_remote_code=True)
        target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True, drafter=drafter)

    Args:
        model: The target, whose `generate` was called.
        inputs: The prompt's ids, under `generate`'s first name for them.
        drafter: The DFlash model, loaded from the checkpoint.
        kwargs: All other arguments of `generate`; what cannot be exact is refused by name.

    Raises:
        ValueError: without a drafter.
    """
    if not hasattr(drafter, "spec_generate"):
        raise ValueError(
            f"drafter={drafter!r} cannot draft: pass drafter=AutoModel.from_pretrained(<this checkpoint>, "
            "trust_remote_code=True) to generate."
        )
    given = {name: value for name, value in kwargs.items() if value is not None}
    input_ids = given.pop("input_ids", inputs)
    return drafter.spec_generate(input_ids=input_ids, target=model, **given)


def door_source() -> str:
    """The text of a checkpoint's `custom_generate/generate.py`."""
    return f"from typing import Any\n\n\n{inspect.getsource(generate)}"


def write_door(folder: str | os.PathLike[str]) -> None:
    """Puts `custom_generate/generate.py` into `folder`, where `target.generate(custom_generate=…)` looks for it."""
    path = os.path.join(folder, "custom_generate", "generate.py")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path):
        os.remove(path)  # transformers uploads a folder only if it is newer than it was
    with open(path, "w", encoding="utf-8") as file:
        file.write(door_source())


# The title of the card that transformers writes where a repository has none.
BLANK = "# Model Card for Model ID"

CARD = """---
library_name: transformers
{base}pipeline_tag: text-generation
tags: [dflash, speculative-decoding]
---
# {title}

A DFlash drafter{whose}: {config.num_hidden_layers} layers, blocks of {config.block_size} tokens, target layers \
{config.target_layer_ids}, mask token {config.mask_token_id}.

```python
from transformers import AutoModel

drafter = AutoModel.from_pretrained("{name}", trust_remote_code=True, dtype="auto")
text = drafter.spec_generate(input_ids, target=target, max_new_tokens=256)
```
"""


def write_card(config: Any, name: str, target: str | None = None) -> str:
    """The README.md of a drafter, loaded by `name`: what it is and how it is loaded, and no number that was not measured.

    `target` is its target's id on the Hub, or a folder, of which the card keeps the name alone.
    """
    is_id = target is not None and not os.path.isdir(target)
    of_target = "" if target is None else f" for `{target if is_id else os.path.basename(os.path.normpath(target))}`"
    base = f"base_model: {target}\n" if is_id else ""
    return CARD.format(base=base, title=name.split("/")[-1], whose=of_target, config=config, name=name)


def complete_upload(folder: str | os.PathLike[str], config: Any, name: str) -> None:
    """Adds to a folder that is about to be uploaded what transformers leaves out or blank: the door and the card."""
    write_door(folder)
    path = os.path.join(folder, "README.md")
    with open(path, encoding="utf-8") as card:
        is_blank = BLANK in card.read()
    if is_blank:
        with open(path, "w", encoding="utf-8") as card:
            card.write(write_card(config, name))
