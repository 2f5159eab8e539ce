"""What may be asked for: the form of a prompt, the values of settings, and what is refused before any forward.

A request that cannot be run exactly is refused with the value and the remedy. What is left is a `Request`, which the loop reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from transformers.generation import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from .acceptance_dflash import VERIFICATIONS
from .attention_dflash import attention_of
from .cache_dflash import CACHE_NAMES
from .decoding_dflash import Conversation
from .targets_dflash import (
    IMAGE_FAMILIES,
    LINEAR_TYPES,
    MASKED_TYPES,
    InexactError,
    layer_types,
    max_positions,
    text_config,
)


logger = logging.get_logger(__name__)

# Token ids [B, S], a tokenizer's output, or a list: the ids of one prompt, or of several.
Prompts = torch.Tensor | Mapping[str, Any] | list[Any]
# Inputs that `generate` prepares for the forward of any model.
PREPARED = {"attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache", *CACHE_NAMES}
# Logits processors of transformers that keep a state.
STATEFUL_PROCESSORS = {
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}
# Packages whose processors make their state in the first call, so that a shallow copy is a new processor. They hold compiled
# grammars, which cannot be copied and can be shared.
STATE_OF_FIRST_CALL = ("outlines", "xgrammar")
# Arguments of `generate` that belong to other ways of decoding, or to the target's forward.
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
    "position_ids",
    "speculation_type",
    "synced_gpus",
    "use_mtp",
    *CACHE_NAMES,
)
# Fields of a generation config that select another way of decoding or another output, and their neutral values.
OTHER_DECODING = {
    "num_beams": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "output_attentions": False,
    "output_hidden_states": False,
    "cache_implementation": None,
}
# Keywords of the package's engine, and what each means to it. They change how soon a token comes, never the token.
ENGINE_KEYWORDS = {
    "adaptive": "widths that pay",
    "compile": "a compiled step",
    "cuda_graph": "a recorded step",
    "draft_tree": "draft trees",
    "draft_window": "a window of the drafter",
    "prompt_lookup_num_tokens": "prompt lookup",
    "max_matching_ngram_size": "prompt lookup",
}
# Keywords that `generate` keeps for itself, and their names in `custom_generate`.
OTHER_NAMES = {
    "generator": "uniforms_generator",
    "prompt_lookup_num_tokens": "num_looked_up",
    "max_matching_ngram_size": "ngram_size",
}
COLDEST, HOTTEST = 1e-30, 1e30  # logits divided by another temperature may be infinite, or all equal, in float32


@dataclass(frozen=True)
class Request:
    """A checked request: models, prompts, and how they are continued."""

    target: PreTrainedModel
    drafter: Any  # of this class or of remote code
    input_ids: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor | None
    prompt_inputs: Mapping[str, Any]  # further inputs of the prompt's forward, such as images
    config: Any  # the generation config
    max_new_tokens: int
    max_length: int | None  # positions of the target; None: its config does not say
    chunk_size: int | None  # columns of a prompt that run at a time; None: all
    block_size: int  # tokens in a block, anchor included
    max_draft_tokens: int | None  # most proposals of a step; None: those of a block
    verification: str  # "auto", "match", "rejection" or "block"
    temperature: float  # 1 for greedy decoding
    keeping: frozenset[str]  # further outputs: "scores", "logits"
    conversation: Conversation | None
    uniforms_generator: torch.Generator | Sequence[torch.Generator] | None
    token_streamer: Any  # gets the prompt, and the tokens as blocks are committed
    engine_keywords: Mapping[str, Any]  # `ENGINE_KEYWORDS`; all None in a shipped copy


# -- values of settings


def is_whole(value: Any, least: int, most: float = float("inf")) -> bool:
    """Whether `value` is a whole number from `least` to `most`, and no boolean."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and least <= int(value) <= most


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, and no boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_whole(value, 1)


def _is_count_or_zero(value: Any) -> bool:
    return is_whole(value, 0)


def _is_probability(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _is_positive_probability(value: Any) -> bool:
    return _is_probability(value) and value > 0


def _is_temperature(value: Any) -> bool:
    return is_number(value) and (value == 0 or COLDEST <= value <= HOTTEST)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _are_generators(value: Any) -> bool:
    generators = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(generator, torch.Generator) for generator in generators)


def _are_stop_ids(value: Any) -> bool:
    ids = value if isinstance(value, list | tuple | torch.Tensor) else [value]
    numbers = [int(i) if isinstance(i, torch.Tensor) else i for i in ids]
    return all(is_whole(number, -1) for number in numbers)  # -1 stands for none in some configs


def _are_callables(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(callable, value))


def _are_strings(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    return isinstance(strings, list | tuple) and all(isinstance(string, str) for string in strings)


def _is_config(value: Any) -> bool:
    return isinstance(value, GenerationConfig)


def _is_conversation(value: Any) -> bool:
    return hasattr(value, "reuse")  # of this class or of remote code


def _is_streamer(value: Any) -> bool:
    return hasattr(value, "put")


ONE_TOKEN = "ask for at least one new token, as a whole number"
STOP_IDS = "pass a token id, or a list of them"
# For each setting: whether a value is valid, and the remedy.
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (_is_count, ONE_TOKEN),
    "max_length": (_is_count, ONE_TOKEN),
    "temperature": (
        _is_temperature,
        f"use 0 for greedy decoding, or a finite number from {COLDEST} to {HOTTEST} to sample",
    ),
    "top_p": (_is_positive_probability, "use a probability above 0 and up to 1 (1 keeps every token)"),
    "min_p": (_is_probability, "use a probability from 0 to 1 (0 keeps every token)"),
    "top_k": (_is_count_or_zero, "use the number of tokens to keep, or 0 to keep every token"),
    "prefill_chunk_size": (_is_count, "use a number of tokens from 1 on, or leave it out"),
    "max_draft_tokens": (_is_count_or_zero, "use a number of tokens, or 0 to draft nothing"),
    "token_streamer": (_is_streamer, "pass a streamer of transformers"),
    "verification": (VERIFICATIONS.__contains__, f"use one of {', '.join(VERIFICATIONS)}"),
    "stop_token_ids": (_are_stop_ids, STOP_IDS),
    "eos_token_id": (_are_stop_ids, STOP_IDS),
    "logits_processor": (_are_callables, "pass a list of processors of transformers"),
    "stopping_criteria": (_are_callables, "pass a list of criteria of transformers"),
    "max_time": (_is_positive, "use a number of seconds above 0"),
    "generator": (_are_generators, "pass a torch.Generator, or a list of one for each prompt"),
    "conversation": (_is_conversation, "pass a dflash.Conversation"),
    "stop_strings": (_are_strings, "pass a string, or a list of strings"),
    "generation_config": (_is_config, "pass a GenerationConfig of transformers"),
}


def check_settings(
    settings: Mapping[str, Any], table: Mapping[str, tuple[Callable[[Any], bool], str]] = SETTINGS
) -> None:
    """Raises ValueError for a value that its setting cannot have, by the `table` of settings."""
    for name, (is_valid, remedy) in table.items():
        value = settings.get(name)
        if value is not None and not is_valid(value):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
            raise ValueError(f"{name}={shown}: {remedy}.")


def check_engine_keywords(keywords: Mapping[str, Any]) -> None:
    """Raises ValueError for a keyword of the package's engine, by name; values that ask for nothing pass."""
    for name, what in ENGINE_KEYWORDS.items():
        value = keywords.get(name, keywords.get(OTHER_NAMES.get(name, name)))
        asks_for_nothing = value in (None, False, 0, "auto")
        if not asks_for_nothing:
            given = f"{name}={value!r} asks for {what}, which a checkpoint's own code does not have"
            remedy = "install dflash-transformers and load the drafter by dflash.DFlashDraftModel, or leave it out"
            raise ValueError(f"{given}: {remedy}.")


# -- prompts


def read_prompt(
    input_ids: Any, attention_mask: torch.Tensor | None = None, target: PreTrainedModel | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids [B, S] and their mask, from any form of `Prompts`. Raises ValueError for others, empty ones, and wrong masks."""
    mask = None
    if isinstance(input_ids, Mapping):
        input_ids, mask = _read_encoding(input_ids)
        # Lists are padded here, where their lengths are known.
        if attention_mask is None and isinstance(input_ids, torch.Tensor):
            attention_mask = mask
    if isinstance(input_ids, (list, tuple)) and len(input_ids) and not isinstance(input_ids[0], str):
        if attention_mask is not None:
            raise ValueError("A list of prompts needs no attention_mask: leave it out, or pass a padded tensor.")
        if all(_is_id(entry) for entry in input_ids):  # the ids of one prompt
            input_ids = [input_ids]
            mask = [mask]
        input_ids, attention_mask = _pad_prompts(input_ids, mask, target)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not _are_ids(input_ids):
        shown = _shown(input_ids)
        remedy = "pass a tensor of token ids [B, S] (int64), or a list of prompts' token ids"
        raise ValueError(f"input_ids is {shown}: {remedy}.")
    shape = tuple(input_ids.shape)
    if 0 in shape:
        raise ValueError(f"The prompt is empty (input_ids is {list(shape)}): give a token, such as bos_token_id.")
    if attention_mask is not None:
        attention_mask = torch.as_tensor(attention_mask)
        mask_shape = tuple(attention_mask.shape)
        if mask_shape != shape:
            raise ValueError(f"attention_mask is {mask_shape} and input_ids {shape}: they must be equal.")
        check_padding(attention_mask)
    return input_ids, attention_mask


def _read_encoding(encoding: Mapping[str, Any]) -> tuple[Any, Any]:
    """Ids and mask of a tokenizer's output."""
    fields = dict(encoding)
    if "input_ids" not in fields:
        raise ValueError(f"The prompt holds {sorted(fields)} and no input_ids: pass what the tokenizer returns.")
    input_ids = fields.pop("input_ids")
    mask = fields.pop("attention_mask", None)
    for name, values in fields.items():
        is_text = name == "token_type_ids" and not any(
            bool(torch.as_tensor(leaf).any()) for leaf in tree_leaves(values)
        )
        if not is_text:
            raise InexactError(f"The prompt holds {name}, which this loop cannot feed the target: leave it out.")
    return input_ids, mask


def _is_id(entry: Any) -> bool:
    return isinstance(entry, Integral) or getattr(entry, "ndim", 1) == 0


def _are_ids(tensor: torch.Tensor) -> bool:
    """Whether a target can embed them: other integers are too small for a vocabulary, and a meta tensor has no values."""
    is_integer = tensor.dtype in (torch.int32, torch.int64)
    return is_integer and tensor.layout == torch.strided and not tensor.is_meta


def _shown(value: Any) -> str:
    """What a prompt of a wrong form is, for the error."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shown = f"{tuple(value.shape)} of {value.dtype}"
    if value.layout != torch.strided or value.is_meta:
        shown += f", {value.layout} on {value.device}"
    return shown


def _pad_prompts(
    prompts: Sequence[Any], masks: Any, target: PreTrainedModel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of any lengths, without the padding that `masks` show, padded on the left: ids and mask, both [B, S]."""
    try:
        sequences = [torch.as_tensor(prompt).flatten() for prompt in prompts]
        if masks is not None and masks[0] is not None:
            is_real = [torch.as_tensor(mask).flatten().bool() for mask in masks]
            sequences = [sequence[where] for sequence, where in zip(sequences, is_real, strict=True)]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"The list of prompts holds something else than token ids ({error}).") from error
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise ValueError(f"Prompt {index} of the list is empty: give at least one token, such as bos_token_id.")
        if not _are_ids(sequence):
            raise ValueError(f"Prompt {index} of the list holds {sequence.dtype}: pass token ids.")
    config = getattr(target, "generation_config", None)
    pad = first_of(getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None), 0)
    pad = pad[0] if isinstance(pad, list) else pad  # masked, so any token will do
    sequences = [sequence.long() for sequence in sequences]
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=pad, padding_side="left")
    ones = [torch.ones_like(sequence) for sequence in sequences]
    return input_ids, pad_sequence(ones, batch_first=True, padding_side="left")


def first_of(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def check_padding(attention_mask: torch.Tensor | None) -> None:
    """Raises ValueError if a mask holds anything but 0 and 1, or a prompt ends in padding."""
    if attention_mask is None:
        return
    is_other = (attention_mask != 0) & (attention_mask != 1)
    ends_in_padding = (attention_mask[:, -1] == 0).any()
    has_fault = torch.stack([is_other.any(), ends_in_padding]).tolist()
    if has_fault[0]:
        value = attention_mask[is_other][0]
        raise InexactError(f"attention_mask holds {value}: use 1 for tokens and 0 for padding.")
    if has_fault[1]:
        raise InexactError("The prompt ends in padding: pad on the left (tokenizer.padding_side = 'left').")


# -- what cannot be run exactly


def check_request(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    mask: torch.Tensor | None,
    keywords: Mapping[str, Any],
) -> None:
    """Refuses prompts and keywords of `generate` that cannot be run exactly."""
    vocab_size = text_config(target).vocab_size
    smallest = int(prompt_ids.min())
    largest = int(prompt_ids.max())
    if largest >= vocab_size or smallest < 0:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"Token id {wrong} is outside the target's vocabulary of {vocab_size}: use its tokenizer.")
    limit = max_positions(target)
    length = prompt_ids.shape[1]
    if limit is not None and length >= limit:
        raise InexactError(f"The prompt has {length} tokens, and the target {limit} positions: shorten the prompt.")
    check_settings(keywords)
    if keywords.get("temperature") == 0 and keywords.get("do_sample"):
        raise ValueError("temperature=0.0 asks for greedy decoding and do_sample=True for sampling: pass one of them.")
    _check_special_tokens(target, prompt_ids, mask, keywords)
    for name in NO_MEANING_HERE:
        if keywords.get(name) is not None:
            raise InexactError(f"{name} cannot be used inside spec_generate: it decodes by itself. Leave it out.")
    configs = (keywords.get("generation_config"), target.generation_config)
    for name in ("prompt_lookup_num_tokens", "stop_strings"):  # `generate` would act on them itself
        if any(getattr(config, name, None) is not None for config in configs):
            raise InexactError(f"A generation config holds {name}: pass it to spec_generate (strings: tokenizer=…).")


def _check_special_tokens(
    target: PreTrainedModel, prompt_ids: torch.Tensor, mask: torch.Tensor | None, keywords: Mapping[str, Any]
) -> None:
    """Refuses a pad id inside a prompt without a mask, which `generate` would mask. Warns if a prompt ends in a stop token."""
    config = keywords.get("generation_config") or target.generation_config
    prompt_ids = prompt_ids.cpu()
    eos = getattr(config, "eos_token_id", None)
    stops = first_of(keywords.get("stop_token_ids"), keywords.get("eos_token_id"), eos, [])
    stop_ids = torch.as_tensor(stops, dtype=torch.long).flatten()
    pad = first_of(keywords.get("pad_token_id"), getattr(config, "pad_token_id", None))
    if mask is None and pad is not None and pad not in stop_ids:
        _check_pad_inside(prompt_ids, pad)
    _warn_of_ended_prompts(prompt_ids[:, -1], stop_ids)


def _warn_of_ended_prompts(last_ids: torch.Tensor, stop_ids: torch.Tensor) -> None:
    """Warns if a prompt, whose last token is in last_ids [B], ends in a stop token."""
    has_ended = torch.isin(last_ids, stop_ids).tolist()
    if any(has_ended):
        index = has_ended.index(True)
        given = f"Prompt {index} already ends in the stop token {int(last_ids[index])}"
        logger.warning(f"{given}: the text continues after it, as in generate. Did the tokenizer append it?")


def _check_pad_inside(prompt_ids: torch.Tensor, pad: int) -> None:
    """Refuses a pad id after the first token that is none."""
    is_token = prompt_ids != pad
    check_padding(is_token)
    has_begun = is_token.long().cumsum(dim=1) > 0
    inside = (~is_token & has_begun).nonzero()
    if len(inside):
        index, column = inside[0].tolist()
        given = f"Prompt {index} holds the pad id {pad} at column {column} and no attention_mask was given"
        remedy = "pass attention_mask (all ones if it is a token like others)"
        raise InexactError(f"{given}, so generate would mask that token: {remedy}.")


def check_drafter(drafter: Any) -> None:
    """Raises ValueError for anything that is not a drafter, and for one without weights."""
    if not hasattr(drafter, "spec_generate"):
        shown = repr(drafter) if isinstance(drafter, str | None) else type(drafter).__name__
        raise ValueError(f"drafter={shown} cannot draft: pass what DFlashDraftModel.from_pretrained returns.")
    is_offloaded = any(hasattr(module, "_hf_hook") for module in drafter.modules())  # weights come for each forward
    if not is_offloaded and any(parameter.is_meta for parameter in drafter.parameters()):
        raise ValueError("The drafter's weights are on the meta device, without values: load it by from_pretrained.")


def check_config(config: Any) -> None:
    """Refuses settings of the prepared generation config that the loop does not support."""
    if config.use_cache is False:
        raise InexactError("use_cache=False: speculation needs cached keys and values; leave it out.")
    for name, neutral in OTHER_DECODING.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise InexactError(f"{name}={value!r} is not supported: leave it at {neutral}, or use target.generate.")


def check_prepared(request: Request) -> None:
    """Refuses combinations of prompts and settings that the loop does not support."""
    num_sequences = len(request.input_ids)
    if request.conversation is not None and num_sequences > 1:
        raise ValueError(f"A conversation holds the caches of one prompt, not of {num_sequences}: give each its own.")
    largest = request.drafter.config.block_size
    if not is_whole(request.block_size, 2, largest):
        given = f"block_size={request.block_size}"
        raise ValueError(f"{given}: use 2 to {largest}, the block that the drafter was trained for.")
    if request.token_streamer is not None and num_sequences > 1:
        raise InexactError(f"A streamer takes one prompt at a time, not {num_sequences}: read generate_blocks.")
    check_padding(request.attention_mask)
    if num_sequences > 1:
        models = {"target": request.target, "drafter": request.drafter}
        check_masks(models, f"{num_sequences} sequences of different lengths", "pass one prompt at a time")


def check_masks(models: Mapping[str, PreTrainedModel], purpose: str, remedy: str) -> None:
    """Refuses models that do not accept the masks that `purpose` needs. `models`: the target, and the drafter if it does."""
    for name, model in models.items():
        implementation = attention_of(model)
        if implementation not in ("sdpa", "eager"):
            given = f"The {name}'s attn_implementation={implementation!r} takes no 4-D mask, which {purpose} need"
            raise InexactError(f"{given}: load it with attn_implementation='sdpa', or {remedy}.")
    target = models["target"]
    unmasked = set(layer_types(target)) - MASKED_TYPES - set(LINEAR_TYPES)
    if unmasked:
        given = f"{type(target).__name__} has layers of type {', '.join(sorted(unmasked))}"
        raise InexactError(f"{given}, which take no masks for {purpose}: {remedy}.")


def read_prompt_inputs(
    target: PreTrainedModel,
    model_inputs: Mapping[str, Any],
    num_sequences: int,
    chunk_size: int | None,
    conversation: Conversation | None,
) -> dict[str, Any]:
    """Further inputs of the prompt's forward, such as images. Refuses those that are not known to be exact."""
    inputs = {}
    for name, value in model_inputs.items():
        if name not in PREPARED and not _is_empty_input(name, value):
            inputs[name] = value
    if not inputs:
        return {}
    names = ", ".join(sorted(inputs))
    if target.config.model_type not in IMAGE_FAMILIES:
        given = f"{type(target).__name__} was given more than token ids ({names})"
        raise InexactError(f"{given}, and its text after that is not known to be exact: use target.generate.")
    mask = model_inputs.get("attention_mask")
    if num_sequences > 1 or (mask is not None and not bool(mask.all())):
        raise InexactError(f"{names} came with {num_sequences} prompts or with padding: pass one prompt, unpadded.")
    if chunk_size is not None:
        raise InexactError(f"{names} came with prefill_chunk_size: an image cannot be cut, leave the size out.")
    if conversation is not None:
        raise ValueError(f"{names} came with a conversation, which supports only token ids: leave one of them out.")
    if model_inputs.get("position_ids") is not None:  # with three axes for images
        inputs["position_ids"] = model_inputs["position_ids"]
    return inputs


def _is_empty_input(name: str, value: Any) -> bool:
    """Whether an input says nothing beyond the token ids."""
    if value is None:
        return True
    if isinstance(value, dict):
        return not value  # transformers 5 passes one where no image is encoded
    return name.endswith("token_type_ids") and not bool(value.any())  # all-zero types mean text


# -- logits processors


def may_keep_state(processor: Any) -> bool:
    """Whether a logits processor may count the tokens of a text, as a grammar does: every one that is not of transformers."""
    return not type(processor).__module__.startswith("transformers.")


def checked_verification(verification: str, is_sampled: bool, processors: Sequence[Any]) -> str:
    """The rule under which each processor is called once for each token of the text.

    Refuses processors of transformers whose state drafts would change.
    """
    for processor in processors:
        name = type(processor).__name__
        if name in STATEFUL_PROCESSORS:
            raise InexactError(
                f"{name} keeps a state, which drafts would change: leave it out, or use target.generate."
            )
        if may_keep_state(processor):
            if is_sampled and verification not in ("auto", "match"):
                given = f"verification={verification!r} also processes tokens that are then rejected"
                raise ValueError(f"{given}, and {name} may keep a state: leave verification out.")
            verification = "match"  # processes the tokens of the text alone
    return verification


def processors_of(index: int, num_sequences: int, processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors of one sequence of the batch. It has copies of those that may keep a state, which it alone calls."""
    if num_sequences == 1:
        return processors
    own = LogitsProcessorList(processors)
    for place, processor in enumerate(processors):
        if may_keep_state(processor):
            own[place] = _copied(processor, index, num_sequences)
    return own


def _copied(processor: Any, index: int, num_sequences: int) -> Any:
    """A copy of a processor with a state of its own, for one sequence. InexactError if it cannot be copied."""
    if type(processor).__module__.partition(".")[0] in STATE_OF_FIRST_CALL:
        own = copy.copy(processor)
        grammars = getattr(own, "compiled_grammars", ())  # xgrammar takes one for all sequences, or one for each
        if len(grammars) == num_sequences:
            own.compiled_grammars = [grammars[index]] * num_sequences
        return own
    parts = getattr(processor, "__dict__", {}).values()
    shared = {id(part): part for part in parts if isinstance(part, torch.nn.Module | PreTrainedTokenizerBase)}
    try:
        return copy.deepcopy(processor, shared)
    except Exception as error:  # of any type: what the processor holds raises it
        given = f"{type(processor).__name__} cannot be copied for each of {num_sequences} sequences ({error})"
        raise InexactError(f"{given}: pass the prompts one by one, or give it __deepcopy__.") from error
