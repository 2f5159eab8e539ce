"""What may be asked for: the form of a prompt, the values of settings, and what is refused before any forward.

A request that cannot be run exactly is refused with the value and the remedy. What is left is a `Request`, which the loop reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from .configuration_dflash import ABOVE_ZERO, Checks, check_values, is_a, is_number, is_whole_number
from .decoding_dflash import Conversation
from .targets_dflash import (
    IMAGE_FAMILIES,
    LINEAR_TYPES,
    MASKED_TYPES,
    InexactError,
    check_pair,
    counts_hidden_tokens,
    layer_types,
    text_config,
)


logger = logging.get_logger(__name__)

# Token ids [B, S], a tokenizer's output, or a list: the ids of one prompt, or of several.
Prompts = torch.Tensor | Mapping[str, Any] | list[Any]
# One for all prompts, or one for each.
Generators = torch.Generator | Sequence[torch.Generator] | None
# Inputs of the forward of any model.
COMMON_INPUTS = {
    "attention_mask",
    "cache_position",
    "input_ids",
    "logits_to_keep",
    "position_ids",
    "use_cache",
    *CACHE_NAMES,
}
# Logits processors of transformers that keep a state.
STATEFUL_PROCESSORS = {
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}
# Packages whose processors make their state in the first call, so that copies can share all parts. They hold compiled grammars,
# which cannot be copied.
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
    "use_cache": True,
}
# Keywords of the package's engine. They change how soon a token comes, never the token.
ENGINE_KEYWORDS = (
    "adaptive",
    "compile",
    "cuda_graph",
    "draft_tree",
    "draft_window",
    "history",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)
# Keywords that `generate` keeps for itself, and their names in `custom_generate`.
OTHER_NAMES = {
    "generator": "uniforms_generator",
    "prompt_lookup_num_tokens": "num_looked_up",
    "max_matching_ngram_size": "ngram_size",
}
COLDEST, HOTTEST = 1e-30, 1e30  # logits divided by another temperature may be infinite, or all equal, in float32
PASS_IDS = "pass a tensor of token ids [B, S] (int64), or a list of prompts' token ids"


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
    prefill_chunk_size: int | None  # columns of a prompt that run at a time; None: all
    block_size: int  # tokens in a block, anchor included
    max_draft_tokens: int | None  # most proposals of a step; None: those of a block
    verification: str  # "auto", "match", "rejection" or "block"
    temperature: float  # 1 for greedy decoding
    keeping: frozenset[str]  # further outputs: "scores", "logits"
    conversation: Conversation | None
    uniforms_generator: Generators
    token_streamer: Any  # gets the prompt, and the tokens as blocks are committed
    engine_keywords: Mapping[str, Any]  # `ENGINE_KEYWORDS`; all None in a shipped copy


# -- values of settings


def _is_temperature(value: Any) -> bool:
    return is_number(value, 0, HOTTEST) and (value == 0 or value >= COLDEST)


def _are_callables(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(callable, value))


def _each(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The check of a value, or of a list of values."""

    def check(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        values = value if isinstance(value, list | tuple) else [value]
        return all(map(is_valid, values))

    return check


IS_COUNT = partial(is_whole_number, least=1)
IS_COUNT_OR_ZERO = partial(is_whole_number, least=0)
ONE_TOKEN = (IS_COUNT, "ask for at least one new token, as a whole number")
# -1 stands for none in some configs.
STOP_IDS = (_each(partial(is_whole_number, least=-1)), "pass a token id, or a list of them")
GENERATORS = (_each(is_a(torch.Generator)), "pass a torch.Generator, or a list of one for each prompt")
SETTINGS: Checks = {
    "max_new_tokens": ONE_TOKEN,
    "max_length": ONE_TOKEN,
    "temperature": (
        _is_temperature,
        f"use 0 for greedy decoding, or a finite number from {COLDEST} to {HOTTEST} to sample",
    ),
    "top_p": (
        partial(is_number, least=ABOVE_ZERO, most=1),
        "use a probability above 0 and up to 1 (1 keeps every token)",
    ),
    "min_p": (partial(is_number, least=0, most=1), "use a probability from 0 to 1 (0 keeps every token)"),
    "top_k": (IS_COUNT_OR_ZERO, "use the number of tokens to keep, or 0 to keep every token"),
    "prefill_chunk_size": (IS_COUNT, "use a number of tokens from 1 on, or leave it out"),
    "max_draft_tokens": (IS_COUNT_OR_ZERO, "use a number of tokens, or 0 to draft nothing"),
    "token_streamer": (lambda value: hasattr(value, "put"), "pass a streamer of transformers"),
    "verification": (VERIFICATIONS.__contains__, f"use one of {', '.join(VERIFICATIONS)}"),
    "stop_token_ids": STOP_IDS,
    "eos_token_id": STOP_IDS,
    "logits_processor": (_are_callables, "pass a list of processors of transformers"),
    "stopping_criteria": (_are_callables, "pass a list of criteria of transformers"),
    "max_time": (partial(is_number, least=ABOVE_ZERO), "use a number of seconds above 0"),
    "generator": GENERATORS,
    "uniforms_generator": GENERATORS,
    # Of this class or of remote code.
    "conversation": (lambda value: hasattr(value, "reuse"), "pass a dflash.Conversation"),
    "stop_strings": (_each(is_a(str)), "pass a string, or a list of strings"),
    "generation_config": (is_a(GenerationConfig), "pass a GenerationConfig of transformers"),
}


# In a checkpoint's own code, which these values ask for nothing.
NO_ENGINE: Checks = dict.fromkeys(
    ENGINE_KEYWORDS,
    (
        (False, 0, "auto").__contains__,
        "a checkpoint's own code does not have it, "
        "install dflash-transformers and load the drafter by dflash.DFlashDraftModel, or leave it out",
    ),
)


# -- prompts


def read_prompt(
    input_ids: Any, attention_mask: torch.Tensor | None = None, target: PreTrainedModel | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids [B, S] and their mask, from any form of `Prompts`. Raises ValueError for others, and for empty ones."""
    mask = None
    if isinstance(input_ids, Mapping):
        names = ", ".join(sorted(further_inputs(input_ids, known={"input_ids", "attention_mask"})))
        if names:
            raise InexactError(f"The prompt holds {names}, which this loop cannot feed the target: leave it out.")
        mask = input_ids.get("attention_mask")
        input_ids = input_ids.get("input_ids")
    if isinstance(input_ids, list | tuple):
        if attention_mask is not None:
            raise ValueError("A list of prompts needs no attention_mask: leave it out, or pass a padded tensor.")
        return _pad_prompts(input_ids, mask, target)
    _check_ids("input_ids", input_ids)
    mask = first_of(attention_mask, mask)
    if mask is not None:
        mask = torch.as_tensor(mask)
        if mask.shape != input_ids.shape:
            shapes = f"attention_mask is {tuple(mask.shape)} and input_ids {tuple(input_ids.shape)}"
            raise ValueError(f"{shapes}: they must be equal.")
    return input_ids, mask


def further_inputs(inputs: Mapping[str, Any], known: Collection[str] = COMMON_INPUTS) -> dict[str, Any]:
    """The inputs that say something beyond the `known` ones, such as images."""
    further = {}
    for name, value in inputs.items():
        # transformers 5 passes an empty dict where no image is encoded.
        parts = [leaf for leaf in tree_leaves(value) if leaf is not None]
        if name.endswith("token_type_ids"):  # zeros mean text
            parts = [part for part in parts if torch.as_tensor(part).any()]
        if parts and name not in known:
            further[name] = value
    return further


def _can_be_embedded(ids: torch.Tensor) -> bool:
    """Other integers are too small for a vocabulary, and a meta tensor has no values."""
    is_matrix = ids.dim() == 2 and ids.layout == torch.strided
    is_integer = ids.dtype in (torch.int32, torch.int64)
    return is_matrix and is_integer and not ids.is_meta


def _check_ids(name: str, ids: Any) -> None:
    """Refuses what no target can embed."""
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"{name} is {type(ids).__name__}: {PASS_IDS}.")
    shape = list(ids.shape)
    if 0 in shape:
        remedy = "give at least one token, such as bos_token_id"
        raise ValueError(f"{name} is empty, {shape}: {remedy}.")
    if not _can_be_embedded(ids):
        place = f"{ids.layout} on {ids.device}"
        raise ValueError(f"{name} is {shape} of {ids.dtype}, {place}: {PASS_IDS}.")


def _pad_prompts(
    prompts: Sequence[Any], mask: Any, target: PreTrainedModel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of any lengths, without the padding that `mask` shows, padded on the left: ids and mask, both [B, S]."""
    try:
        sequences = _as_sequences(prompts)
        if mask is not None:
            is_real = _as_sequences(mask)
            pairs = zip(sequences, is_real, strict=True)
            sequences = [ids[where.bool()] for ids, where in pairs]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        fault = f"The list of prompts holds something else than token ids ({error})"
        raise ValueError(f"{fault}: {PASS_IDS}.") from error
    for index, ids in enumerate(sequences):
        _check_ids(f"Prompt {index} of the list", ids[None])
    config = getattr(target, "generation_config", None)
    pad = first_of(getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None), 0)
    pads = torch.as_tensor(pad).flatten()  # masked, so any of them will do
    pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
    input_ids = pad_left(sequences, padding_value=int(pads[0]))
    ones = [torch.ones_like(ids) for ids in sequences]
    return input_ids.long(), pad_left(ones)


def _as_sequences(entries: Sequence[Any]) -> list[torch.Tensor]:
    """Each entry as a tensor [S]. Entries that are numbers are one sequence."""
    if torch.as_tensor(entries[0]).dim() == 0:
        entries = [entries]
    return [torch.as_tensor(entry).flatten() for entry in entries]


def first_of(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


# -- what cannot be run exactly


def check_drafter(drafter: Any, target: Any) -> None:
    """Raises ValueError for anything that is not a drafter of `target`, and for one without weights."""
    if not hasattr(drafter, "spec_generate"):
        shown = repr(drafter).partition("(")[0]
        raise ValueError(f"drafter={shown} cannot draft: pass what DFlashDraftModel.from_pretrained returns.")
    # Offloaded weights come for each forward.
    if drafter.device.type == "meta" and not hasattr(drafter, "_hf_hook"):
        raise ValueError("The drafter's weights are on the meta device, without values: load it by from_pretrained.")
    check_pair(target, drafter)


def check_keywords(
    target: PreTrainedModel, prompt_ids: torch.Tensor, mask: torch.Tensor | None, keywords: Mapping[str, Any]
) -> None:
    """Refuses what `generate` would act on itself. Warns if a prompt ends in a stop token."""
    check_values(keywords, SETTINGS)
    if keywords.get("temperature") == 0 and keywords.get("do_sample"):
        raise ValueError("temperature=0.0 asks for greedy decoding and do_sample=True for sampling: pass one of them.")
    for name in NO_MEANING_HERE:
        value = keywords.get(name)
        if value is not None and value is not False:
            raise InexactError(f"{name} cannot be used inside spec_generate: it decodes by itself. Leave it out.")
    config = keywords.get("generation_config") or target.generation_config
    looked_up = first_of(config.prompt_lookup_num_tokens, target.generation_config.prompt_lookup_num_tokens)
    if looked_up is not None:
        raise InexactError("A generation config holds prompt_lookup_num_tokens: pass it to spec_generate.")
    if first_of(keywords.get("token_healing"), config.token_healing):
        raise InexactError("token_healing=True rewrites the prompt: leave it out, or use target.generate.")
    own = target.generation_config  # generate fills a config up from it
    stops = first_of(
        keywords.get("stop_token_ids"), keywords.get("eos_token_id"), config.eos_token_id, own.eos_token_id, []
    )
    stop_ids = torch.as_tensor(stops, dtype=torch.long, device="cpu").flatten()
    last_ids = prompt_ids[:, -1].cpu()
    has_ended = torch.isin(last_ids, stop_ids)
    if has_ended.any():
        fault = f"A prompt already ends in the stop token {last_ids[has_ended][0]}"
        logger.warning(f"{fault}: the text continues after it, as in generate. Did the tokenizer append it?")
    pad = first_of(keywords.get("pad_token_id"), config.pad_token_id, own.pad_token_id)
    if mask is None and pad is not None and pad not in stop_ids:
        _check_pad_inside(prompt_ids, pad)


def _check_pad_inside(prompt_ids: torch.Tensor, pad: int) -> None:
    """Refuses a pad id after a token that is none."""
    is_pad = prompt_ids == pad
    follows_token = ~is_pad[:, :-1]
    inside = is_pad[:, 1:] & follows_token
    if inside.any():
        index, column = inside.nonzero()[0].tolist()
        fault = f"Prompt {index} holds the pad id {pad} at column {column + 1}"
        reason = "no attention_mask was given, so generate would mask that token"
        remedy = "pad on the left, or pass attention_mask (all ones if it is a token like others)"
        raise InexactError(f"{fault} and {reason}: {remedy}.")


def check_config(config: Any) -> None:
    """Refuses settings of the prepared generation config that the loop does not support."""
    for name, neutral in OTHER_DECODING.items():
        value = getattr(config, name, None)
        if value not in (None, neutral):
            raise InexactError(f"{name}={value!r} is not supported: leave it at {neutral}, or use target.generate.")


def check_request(request: Request) -> None:
    """Refuses prompts and settings that the loop cannot run exactly."""
    check_values(vars(request), SETTINGS)
    largest = request.drafter.config.block_size
    if not is_whole_number(request.block_size, 2, largest):
        remedy = f"use 2 to {largest}, the block that the drafter was trained for"
        raise ValueError(f"block_size={request.block_size}: {remedy}.")
    _check_prompts(request)
    if request.prompt_inputs:
        _check_prompt_inputs(request)
    num_sequences = len(request.input_ids)
    if num_sequences > 1:
        for name in ("conversation", "token_streamer"):
            if getattr(request, name) is not None:
                fault = f"{name} takes one prompt at a time, not {num_sequences}"
                raise InexactError(f"{fault}: pass them one by one.")
        models = {"target": request.target, "drafter": request.drafter}
        check_masks(models, "pass one prompt at a time")


def _check_prompts(request: Request) -> None:
    """Refuses ids outside the vocabulary, prompts without room for an answer, and masks that `generate` cannot mean."""
    ids = request.input_ids
    vocab_size = text_config(request.target).vocab_size
    for token_id in torch.stack(ids.aminmax()).tolist():
        if not 0 <= token_id < vocab_size:
            fault = f"Token id {token_id} is outside the target's vocabulary of {vocab_size}"
            raise ValueError(f"{fault}: use its tokenizer.")
    limit = request.max_length
    length = ids.shape[1]
    if limit is not None and length >= limit:
        raise InexactError(f"The prompt has {length} tokens, and the target {limit} positions: shorten the prompt.")
    mask = request.attention_mask
    if mask is None:
        return
    is_other = (mask != 0) & (mask != 1)
    ends_in_padding = mask[:, -1] == 0
    begins_hole = mask[:, 1:] < mask[:, :-1]
    faults = torch.stack([is_other.any(), ends_in_padding.any(), begins_hole.any()])
    holds_other, ends_so, has_hole = faults.tolist()  # the host waits once
    if holds_other:
        value = mask[is_other][0]
        raise InexactError(f"attention_mask holds {value}: use 1 for tokens and 0 for padding.")
    if ends_so:
        raise InexactError("The prompt ends in padding: pad on the left (tokenizer.padding_side = 'left').")
    if has_hole and counts_hidden_tokens(request.target):
        fault = f"attention_mask hides tokens inside a prompt, and {type(request.target).__name__} counts them"
        reason = "in its windows or states"
        raise InexactError(f"{fault} {reason}: take these tokens out of the prompt, or use target.generate.")


def check_prepared(input_ids: torch.Tensor, model_inputs: Mapping[str, Any]) -> None:
    """Refuses what the caller of `generate` passed for the target's forward and the loop does not read."""
    caches = [model_inputs[name] for name in CACHE_NAMES if model_inputs.get(name) is not None]
    fault = None
    if not input_ids.shape[1]:
        fault = "inputs_embeds came without input_ids"
    elif any(cache.get_seq_length() for cache in caches):
        fault = "The cache holds keys already"
    elif _skips_positions(input_ids, model_inputs):
        fault = "position_ids do not count the prompt's tokens"
    if fault is not None:
        raise InexactError(f"{fault}: leave it out of generate(custom_generate=…), or use target.generate.")


def _skips_positions(input_ids: torch.Tensor, model_inputs: Mapping[str, Any]) -> bool:
    """Whether there are positions [B, S] that differ from those which `generate` makes; images have three axes of them."""
    positions = model_inputs.get("position_ids")
    if positions is None or positions.dim() != 2:
        return False
    mask = first_of(model_inputs.get("attention_mask"), torch.ones_like(input_ids))
    expected = mask.long().cumsum(-1) - 1
    return positions.shape != expected.shape or bool(((positions != expected) & (mask == 1)).any())


def _check_prompt_inputs(request: Request) -> None:
    """Refuses inputs that are not known to be exact."""
    names = ", ".join(sorted(request.prompt_inputs))
    target = request.target
    if target.config.model_type not in IMAGE_FAMILIES:
        fault = f"{type(target).__name__} was given more than token ids ({names})"
        remedy = "its text after that is not known to be exact: use target.generate"
        raise InexactError(f"{fault}, and {remedy}.")
    num_sequences = len(request.input_ids)
    mask = request.attention_mask
    is_padded = mask is not None and not mask.all()
    if num_sequences > 1 or is_padded:
        raise InexactError(f"{names} came with {num_sequences} prompts or with padding: pass one prompt, unpadded.")
    for name in ("conversation", "prefill_chunk_size"):
        if getattr(request, name) is not None:
            raise InexactError(f"{names} came with {name}, which takes token ids alone: leave one of them out.")


def check_masks(models: Mapping[str, PreTrainedModel], remedy: str) -> None:
    """Refuses models that take no masks for a batch or a tree. `models`: the target, and the drafter if it needs one."""
    for name, model in models.items():
        implementation = attention_of(model)
        if implementation not in ("sdpa", "eager"):
            fault = f"The {name}'s attn_implementation={implementation!r} takes no 4-D mask"
            raise InexactError(f"{fault}: load it with attn_implementation='sdpa', or {remedy}.")
    target = models["target"]
    types = set(layer_types(target))
    unmasked = types - MASKED_TYPES - set(LINEAR_TYPES)
    if unmasked:
        shown = ", ".join(sorted(unmasked))
        raise InexactError(f"{type(target).__name__} has layers of type {shown}, which take no masks: {remedy}.")


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


def own_processors(processors: LogitsProcessorList, num_sequences: int) -> list[LogitsProcessorList]:
    """The processors of each sequence. Those that may keep a state are copied, so that each one is called by one sequence."""
    if num_sequences == 1:
        return [processors]
    own = []
    for index in range(num_sequences):
        copies = [_copied(processor, index, num_sequences) for processor in processors]
        own.append(LogitsProcessorList(copies))
    return own


def _copied(processor: Any, index: int, num_sequences: int) -> Any:
    """A processor with a state of its own, for one sequence. InexactError if it cannot be copied."""
    if not may_keep_state(processor):
        return processor
    package = type(processor).__module__.partition(".")[0]
    kept = object if package in STATE_OF_FIRST_CALL else torch.nn.Module | PreTrainedTokenizerBase
    parts = getattr(processor, "__dict__", {}).values()
    shared = {id(part): part for part in parts if isinstance(part, kept)}
    try:
        own = copy.deepcopy(processor, shared)
    except Exception as error:  # of any type: what the processor holds raises it
        fault = f"{type(processor).__name__} cannot be copied for each of {num_sequences} sequences ({error})"
        raise InexactError(f"{fault}: pass the prompts one by one, or give it __deepcopy__.") from error
    grammars = getattr(own, "compiled_grammars", ())  # xgrammar takes one for all sequences, or one for each
    if len(grammars) == num_sequences:
        own.compiled_grammars = [grammars[index]] * num_sequences
    return own
