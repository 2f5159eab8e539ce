"""The API: what `spec_generate` and `generate_blocks` take, refuse and return.

The target's own `generate` prepares the generation config, logits processors and stopping criteria, and runs the loop as its
`custom_generate`. A request that cannot be run exactly is refused before any forward, with the value and the remedy.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import ModelOutput, logging

from .attention_dflash import attention_of
from .cache_dflash import CACHE_NAMES, LINEAR_TYPES
from .decoding_dflash import LARGEST_TREE, Block, Conversation, Decoder, decode_blocks
from .proposals_dflash import LatencyCurve, make_cutter
from .step_dflash import WIDTH_CLASSES, InexactError, Pair, check_pair, compiled_pair
from .verification_dflash import VERIFICATIONS, Verifier


logger = logging.get_logger(__name__)

# Token ids [B, S], a tokenizer's output, or a list: the ids of one prompt, or of several.
Prompts = torch.Tensor | Mapping[str, Any] | list[Any]
# Multimodal targets whose text after an image is known to be exact, by model_type.
IMAGE_FAMILIES = {"gemma3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}
# Inputs that `generate` prepares for the forward of any model.
PREPARED = {"attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache", *CACHE_NAMES}
# Logits processors of transformers that keep a state.
STATEFUL_PROCESSORS = {
    *("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    *("WhisperTimeStampLogitsProcessor", "DiaClassifierFreeGuidanceLogitsProcessor"),
}
# Packages whose processors make their state in the first call, so that a shallow copy is a new processor. They hold compiled
# grammars, which cannot be copied and can be shared.
STATE_OF_FIRST_CALL = ("outlines", "xgrammar")
# Arguments of `generate` that belong to other ways of decoding, or to the target's forward.
NO_MEANING_HERE = (
    *("assistant_early_exit", "assistant_model", "assistant_tokenizer", "cache_implementation", "cache_position"),
    *("custom_generate", "inputs_embeds", "logits_to_keep", "negative_prompt_attention_mask", "negative_prompt_ids"),
    *("position_ids", "speculation_type", "synced_gpus", "use_mtp", *CACHE_NAMES),
)
# Fields of a generation config that select another way of decoding or another output, and their neutral values.
OTHER_DECODING = (
    *(("num_beams", 1), ("penalty_alpha", None), ("dola_layers", None), ("force_words_ids", None)),
    *(("constraints", None), ("guidance_scale", 1), ("watermarking_config", None), ("output_attentions", False)),
    *(("output_hidden_states", False), ("cache_implementation", None)),
)
MOST_LOOKED_UP = WIDTH_CLASSES[-1] - 1  # tokens: compiled steps have no wider class
MOST_NODES = 1024  # of a draft tree: its mask grows with their square
COLDEST, HOTTEST = 1e-30, 1e30  # logits divided by another temperature may be infinite, or all equal, in float32


MOST_TOKENS = 2**31  # of a window; any number that is larger than a text means the whole text


def _whole(least: int, most: float = float("inf")) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def _is_probability(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= 1


def _is_temperature(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and (value == 0 or COLDEST <= value <= HOTTEST)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _are_generators(value: Any) -> bool:
    generators = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(generator, torch.Generator) for generator in generators)


def _are_stop_ids(value: Any) -> bool:
    ids = value if isinstance(value, list | tuple | torch.Tensor) else [value]
    return all(
        _whole(-1)(int(i) if isinstance(i, torch.Tensor) else i) for i in ids
    )  # -1 stands for none in some configs


def _are_callables(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(callable, value))


def _are_strings(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    return isinstance(strings, list | tuple) and all(isinstance(string, str) for string in strings)


# For each setting: whether a value is valid, and the remedy.
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (_whole(1), "ask for at least one new token, as a whole number"),
    "max_length": (_whole(1), "ask for at least one new token, as a whole number"),
    "temperature": (
        _is_temperature,
        f"use 0 for greedy decoding, or a finite number from {COLDEST} to {HOTTEST} to sample",
    ),
    "top_p": (
        lambda value: _is_probability(value) and value > 0,
        "use a probability above 0 and up to 1 (1 keeps every token)",
    ),
    "min_p": (_is_probability, "use a probability from 0 to 1 (0 keeps every token)"),
    "top_k": (_whole(0), "use the number of tokens to keep, or 0 to keep every token"),
    "prefill_chunk_size": (_whole(1), "use a number of tokens from 1 on, or leave it out"),
    "prompt_lookup_num_tokens": (_whole(0, MOST_LOOKED_UP), f"use 1 to {MOST_LOOKED_UP}, or 0 to look nothing up"),
    "max_matching_ngram_size": (_whole(1), "use at least 1, or leave it out"),
    "max_draft_tokens": (_whole(0), "use a number of tokens, or 0 to draft nothing"),
    "draft_tree": (
        lambda value: isinstance(value, bool) or _whole(0, MOST_NODES)(value),
        f"use a number of nodes up to {MOST_NODES}, or True for as many as pay",
    ),
    "draft_window": (
        lambda value: (
            isinstance(value, tuple | list) and [*map(_whole(0, MOST_TOKENS), value)] == [True] * 2 and value[1] > 0
        ),
        "use two numbers of tokens, (sink, window): the first and the newest that the drafter reads",
    ),
    "token_streamer": (lambda value: hasattr(value, "put"), "pass a streamer of transformers"),
    "verification": (VERIFICATIONS.__contains__, f"use one of {', '.join(VERIFICATIONS)}"),
    "adaptive": (lambda value: isinstance(value, bool), "use True or False"),
    "compile": (lambda value: isinstance(value, bool) or value == "auto", "use True, False or 'auto'"),
    "stop_token_ids": (_are_stop_ids, "pass a token id, or a list of them"),
    "eos_token_id": (_are_stop_ids, "pass a token id, or a list of them"),
    "logits_processor": (_are_callables, "pass a list of processors of transformers"),
    "stopping_criteria": (_are_callables, "pass a list of criteria of transformers"),
    "max_time": (_is_positive, "use a number of seconds above 0"),
    "generator": (_are_generators, "pass a torch.Generator, or a list of one for each prompt"),
    "conversation": (lambda value: hasattr(value, "draft_window"), "pass a dflash.Conversation"),
    "stop_strings": (_are_strings, "pass a string, or a list of strings"),
    "generation_config": (
        lambda value: isinstance(value, GenerationConfig),
        "pass a GenerationConfig of transformers",
    ),
    "latency_curve": (lambda value: hasattr(value, "verify_ms"), "pass what LatencyCurve.from_json returns"),
}


def _check_settings(given: Mapping[str, Any]) -> None:
    for name, (is_meant, remedy) in SETTINGS.items():
        value = given.get(name)
        if value is not None and not is_meant(value):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
            raise ValueError(f"{name}={shown}: {remedy}.")


def _check_masks(request: Request) -> None:
    """Refuses models that do not accept the masks of several sequences or of a draft tree."""
    target, num_sequences = request.target, len(request.input_ids)
    why = f"{num_sequences} sequences of different lengths" if num_sequences > 1 else "a draft tree"
    for name, model in (("target", target), ("drafter", request.drafter))[: 2 if num_sequences > 1 else 1]:
        if attention_of(model) not in ("sdpa", "eager"):
            remedy = "load it with attn_implementation='sdpa', or pass one prompt at a time and no draft_tree"
            given = f"The {name}'s attn_implementation={attention_of(model)!r}"
            raise InexactError(f"{given} takes no 4-D mask, which {why} need: {remedy}.")
    types = set(getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ())
    if others := types - {"full_attention", "sliding_attention", *LINEAR_TYPES}:
        given = f"{type(target).__name__} has layers of type {', '.join(sorted(others))}"
        raise InexactError(f"{given}, which take no masks for {why}: pass one prompt at a time, and no draft_tree.")


def _check_tree(request: Request) -> None:
    """Refuses a draft tree that cannot be verified exactly."""
    rule, num_sequences = request.verification, len(request.input_ids)
    if num_sequences > 1:
        raise InexactError(f"draft_tree takes one prompt at a time, not {num_sequences}: pass them one by one.")
    if rule not in ("auto", "match"):
        raise ValueError(f"verification={rule!r}: a draft_tree is verified by the target's own choices, use 'match'.")
    if named := ", ".join(sorted(request.prompt_inputs)):
        raise InexactError(f"draft_tree came with {named}, but it supports only token ids: leave it out.")


def _may_keep_state(processor: Any) -> bool:
    """Whether a logits processor may count the tokens of a text, as a grammar does: every one that is not of transformers."""
    return not type(processor).__module__.startswith("transformers.")


def _check_processors(request: Request, processors: Sequence[Any]) -> None:
    """Refuses processors whose state drafts would change, and has each other one called once for each token of the text."""
    for name in STATEFUL_PROCESSORS & {type(processor).__name__ for processor in processors}:
        raise InexactError(f"{name} keeps a state, which drafts would change: leave it out, or use target.generate.")
    for processor in filter(_may_keep_state, processors):
        rule, name = request.verification, type(processor).__name__
        if request.config.do_sample and rule not in ("auto", "match"):
            given = f"verification={rule!r} also processes tokens that are then rejected, and {name} may keep a state"
            raise ValueError(f"{given}: leave verification out.")
        request.verification = "match"  # processes the tokens of the text alone


def _processors_of(index: int, num_sequences: int, processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors of one sequence of the batch. It has copies of those that may keep a state, which it alone calls."""
    if num_sequences == 1:
        return processors
    own = LogitsProcessorList(processors)
    for place, processor in enumerate(processors):
        if _may_keep_state(processor):
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


def _read_prompt_inputs(request: Request, model_inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Further inputs of the prompt's forward, such as images. Refuses those that are not known to be exact."""
    inputs, num_sequences, mask, target = {}, len(request.input_ids), request.attention_mask, request.target
    for name, value in model_inputs.items():
        # All-zero types mean text. transformers 5 passes an empty dict where no image is encoded.
        is_text = name.endswith("token_type_ids") and value is not None and not bool(value.any())
        if name not in PREPARED and value is not None and not is_text and not (isinstance(value, dict) and not value):
            inputs[name] = value
    if not inputs:
        return {}
    named = ", ".join(sorted(inputs))
    if target.config.model_type not in IMAGE_FAMILIES:
        given = f"{type(target).__name__} was given more than token ids ({named})"
        raise InexactError(f"{given}, and its text after that is not known to be exact: use target.generate.")
    if num_sequences > 1 or (mask is not None and not bool(mask.all())):
        raise InexactError(f"{named} came with {num_sequences} prompts or with padding: pass one prompt, unpadded.")
    if request.chunk_size is not None:
        raise InexactError(f"{named} came with prefill_chunk_size: an image cannot be cut, leave the size out.")
    if request.conversation is not None:
        raise ValueError(f"{named} came with a conversation, which supports only token ids: leave one of them out.")
    if model_inputs.get("position_ids") is not None:  # with three axes for images
        inputs["position_ids"] = model_inputs["position_ids"]
    return inputs


def max_positions(target: PreTrainedModel) -> int | None:
    """The target's number of positions, including rope scaling; `None` if its config does not say."""
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
    """Ids [B, S] and their mask, from any form of `Prompts`. Raises ValueError for others, empty ones, and wrong masks."""
    mask = None
    if isinstance(input_ids, Mapping):
        fields = dict(input_ids)
        if "input_ids" not in fields:
            raise ValueError(f"The prompt holds {sorted(fields)} and no input_ids: pass what the tokenizer returns.")
        input_ids, mask = fields.pop("input_ids"), fields.pop("attention_mask", None)
        for name, values in fields.items():
            if name != "token_type_ids" or any(bool(torch.as_tensor(leaf).any()) for leaf in tree_leaves(values)):
                raise InexactError(f"The prompt holds {name}, which this loop cannot feed the target: leave it out.")
        # Lists are padded here, where their lengths are known.
        if attention_mask is None and isinstance(input_ids, torch.Tensor):
            attention_mask = mask
    if isinstance(input_ids, (list, tuple)) and len(input_ids) and not isinstance(input_ids[0], str):
        if attention_mask is not None:
            raise ValueError("A list of prompts needs no attention_mask: leave it out, or pass a padded tensor.")
        if all(isinstance(i, Integral) or getattr(i, "ndim", 1) == 0 for i in input_ids):  # the ids of one prompt
            input_ids, mask = [input_ids], [mask]
        input_ids, attention_mask = _pad_prompts(input_ids, mask, target)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not _are_ids(input_ids):
        is_tensor = isinstance(input_ids, torch.Tensor)
        shown = type(input_ids).__name__
        if is_tensor:
            shown = f"{tuple(input_ids.shape)} of {input_ids.dtype}"
            if input_ids.layout != torch.strided or input_ids.is_meta:
                shown += f", {input_ids.layout} on {input_ids.device}"
        raise ValueError(
            f"input_ids is {shown}: pass a tensor of token ids [B, S] (int64), or a list of prompts' token ids."
        )
    shape = tuple(input_ids.shape)
    if 0 in shape:
        raise ValueError(f"The prompt is empty (input_ids is {list(shape)}): give a token, such as bos_token_id.")
    if attention_mask is not None:
        attention_mask = torch.as_tensor(attention_mask)
        if attention_mask.shape != shape:
            mask_shape = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask is {mask_shape} and input_ids {shape}: they must be equal.")
        check_padding(attention_mask)
    return input_ids, attention_mask


def _pad_prompts(
    prompts: Sequence[Any], masks: Any, target: PreTrainedModel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of any lengths, without the padding that `masks` show, padded on the left: ids and mask, both [B, S]."""
    try:
        sequences = [torch.as_tensor(prompt).flatten() for prompt in prompts]
        if masks is not None and masks[0] is not None:
            kept = [torch.as_tensor(mask).flatten().bool() for mask in masks]
            sequences = [sequence[where] for sequence, where in zip(sequences, kept, strict=True)]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"The list of prompts holds something else than token ids ({error}).") from error
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise ValueError(f"Prompt {index} of the list is empty: give at least one token, such as bos_token_id.")
        if not _are_ids(sequence):
            raise ValueError(f"Prompt {index} of the list holds {sequence.dtype}: pass token ids.")
    sequences = [sequence.long() for sequence in sequences]
    config = getattr(target, "generation_config", None)
    pad = _first_given(getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None), 0)
    pad = pad[0] if isinstance(pad, list) else pad  # masked, so any token will do
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=pad, padding_side="left")
    ones = [torch.ones_like(sequence) for sequence in sequences]
    return input_ids, pad_sequence(ones, batch_first=True, padding_side="left")


def _are_ids(tensor: torch.Tensor) -> bool:
    """Whether a target can embed them: other integers are too small for a vocabulary, and a meta tensor has no values."""
    return tensor.dtype in (torch.int32, torch.int64) and tensor.layout == torch.strided and not tensor.is_meta


def _first_given(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _check_request(target: PreTrainedModel, prompt_ids: torch.Tensor, mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses prompts and keywords that cannot be run exactly."""
    vocab_size, limit = target.config.get_text_config(decoder=True).vocab_size, max_positions(target)
    smallest, largest, length = int(prompt_ids.min()), int(prompt_ids.max()), prompt_ids.shape[1]
    if largest >= vocab_size or smallest < 0:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"Token id {wrong} is outside the target's vocabulary of {vocab_size}: use its tokenizer.")
    if limit is not None and length >= limit:
        raise InexactError(f"The prompt has {length} tokens, and the target {limit} positions: shorten the prompt.")
    _check_settings(kwargs)
    if kwargs.get("temperature") == 0 and kwargs.get("do_sample"):
        raise ValueError("temperature=0.0 asks for greedy decoding and do_sample=True for sampling: pass one of them.")
    if kwargs.get("max_matching_ngram_size") is not None and kwargs.get("prompt_lookup_num_tokens") == 0:
        raise ValueError("max_matching_ngram_size belongs to a prompt lookup, and prompt_lookup_num_tokens is 0.")
    _check_specials(target, prompt_ids, mask, kwargs)
    for name in NO_MEANING_HERE:
        if kwargs.get(name) is not None:
            raise InexactError(f"{name} cannot be used inside spec_generate: it decodes by itself. Leave it out.")
    for name in ("prompt_lookup_num_tokens", "stop_strings"):  # `generate` would act on them itself
        configs = kwargs.get("generation_config"), target.generation_config
        if any(getattr(config, name, None) is not None for config in configs):
            raise InexactError(f"A generation config holds {name}: pass it to spec_generate (strings: tokenizer=…).")


def _check_specials(target: PreTrainedModel, prompt_ids: torch.Tensor, mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses a pad id inside a prompt without a mask, which `generate` would mask. Warns if a prompt ends in a stop token."""
    config, prompt_ids = kwargs.get("generation_config") or target.generation_config, prompt_ids.cpu()
    stops = kwargs.get("stop_token_ids"), kwargs.get("eos_token_id"), getattr(config, "eos_token_id", None)
    stop_ids = torch.as_tensor(_first_given(*stops, []), dtype=torch.long).flatten()
    pad = _first_given(kwargs.get("pad_token_id"), getattr(config, "pad_token_id", None))
    if mask is None and pad is not None and pad not in stop_ids:
        check_padding(prompt_ids != pad)
        is_text = (prompt_ids != pad).long().cumsum(dim=1) > 0  # from the first token that is not padding
        inside = ((prompt_ids == pad) & is_text).nonzero()
        if len(inside):
            index, column = inside[0].tolist()
            given = f"Prompt {index} holds the pad id {pad} at column {column} and no attention_mask was given"
            remedy = "pass attention_mask (all ones if it is a token like others)"
            raise InexactError(f"{given}, so generate would mask that token: {remedy}.")
    if ended := torch.isin(prompt_ids[:, -1], stop_ids).nonzero().flatten().tolist():
        given = f"Prompt {ended[0]} already ends in the stop token {int(prompt_ids[ended[0], -1])}"
        logger.warning(f"{given}: the text continues after it, as in generate. Did the tokenizer append it?")


def _check_prepared(config: Any, request: Request) -> None:
    """Refuses settings of the prepared generation config that block speculation does not support."""
    num_sequences, block_size, largest = len(request.input_ids), request.block_size, request.drafter.config.block_size
    if request.conversation is not None and num_sequences > 1:
        raise ValueError(f"A conversation holds the caches of one prompt, not of {num_sequences}: give each its own.")
    if config.use_cache is False:
        raise InexactError("use_cache=False: speculation needs cached keys and values; leave it out.")
    for name, plain in OTHER_DECODING:
        value = getattr(config, name, None)
        if value is not None and value != plain:
            raise InexactError(f"{name}={value!r} is not supported: leave it at {plain}, or use target.generate.")
    if block_size is not None and not (_whole(2)(block_size) and block_size <= largest):
        raise ValueError(f"block_size={block_size}: use 2 to {largest}, the block that the drafter was trained for.")
    if request.token_streamer is not None and num_sequences > 1:
        raise InexactError(f"A streamer takes one prompt at a time, not {num_sequences}: read generate_blocks.")
    check_padding(request.attention_mask)


def check_padding(attention_mask: torch.Tensor | None) -> None:
    """Raises ValueError if a mask holds anything but 0 and 1, or a prompt ends in padding."""
    if attention_mask is None:
        return
    is_other = (attention_mask != 0) & (attention_mask != 1)
    has_other, ends_in_padding = torch.stack([is_other.any(), (attention_mask[:, -1] == 0).any()]).tolist()
    if has_other:
        raise InexactError(f"attention_mask holds {attention_mask[is_other][0]}: use 1 for tokens and 0 for padding.")
    if ends_in_padding:
        raise InexactError("The prompt ends in padding: pad on the left (tokenizer.padding_side = 'left').")


@dataclass
class DFlashOutput(ModelOutput):
    """The output of `spec_generate(return_dict_in_generate=True)`.

    Attributes:
        sequences (`torch.Tensor` of shape `(B, S + new)`): Prompts and new tokens, padded on the right after early stops.
        acceptance_lengths (`list[list[int]]`): Accepted proposals + 1, before cuts, for each sequence and verify step.
        tau (`float`): Mean acceptance length of the steps whose proposals are all the drafter's, as the DFlash paper and the
            engines count it; NaN without such a step.
        tau_with_lookup (`float`): Mean of all `acceptance_lengths`: those of steps with looked-up tokens
            (`prompt_lookup_num_tokens`) count, too.
        tokens_per_step (`float`): Kept tokens, without the prompt's first one, per sequence and verify step.
        scores (`tuple[torch.Tensor]`, *optional*): With `output_scores=True`, processed scores of each new position, of shape
            `(B, V)` each; 0 after a sequence's end.
        logits (`tuple[torch.Tensor]`, *optional*): With `output_logits=True`, the target's logits, in the same form.

    Example:
        >>> output = drafter.spec_generate(input_ids, target=target, return_dict_in_generate=True)
        >>> text_ids, tau = output.sequences, output.tau
    """

    sequences: torch.Tensor | None = None
    acceptance_lengths: list[list[int]] | None = None
    tau: float | None = None
    tau_with_lookup: float | None = None
    tokens_per_step: float | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None


def spec_generate(
    drafter: PreTrainedModel, target: PreTrainedModel, input_ids: Prompts, *, streamer: Any = None, **kwargs: Any
) -> torch.Tensor | DFlashOutput:
    """Generates the target's own continuation of a prompt, in fewer forwards of the target.

    Greedy text equals that of `target.generate(do_sample=False)` token for token, if a forward over a block and a forward for
    each token have the same argmax. In float32 they always had in our tests. In bfloat16 a near-tie may be decided differently;
    each token is still the argmax of the forward that committed it. Sampled text has the distribution of
    `target.generate(do_sample=True)`.

    Args:
        drafter (`DFlashDraftModel`): A drafter trained for `target`.
        target (`PreTrainedModel`): A decoder-only model, loaded by `AutoModelForCausalLM`.
        input_ids (`torch.Tensor` of shape `(B, S)`, a tokenizer's output, or a list): The prompt or prompts. A list holds the
            ids of one prompt, or one list or tensor of ids for each prompt, of any lengths.
        streamer (`BaseStreamer`, *optional*): Gets the prompt, then the tokens as blocks are committed. One prompt only.
        kwargs: The keywords of [`generate_blocks`], and with them those of `target.generate`.

    Returns:
        `torch.Tensor` of shape `(B, S + new)`: Prompts and new tokens. With `return_dict_in_generate=True`, a [`DFlashOutput`].

    Raises:
        ValueError: for anything that cannot be run exactly, before any forward, and for logits that are NaN or infinite.

    Example:
        >>> inputs = tokenizer("The capital of France is", return_tensors="pt")
        >>> text_ids = drafter.spec_generate(**inputs, target=target, max_new_tokens=64, temperature=0.0)
    """
    return _through_generate(drafter, target, input_ids, {"token_streamer": streamer, **kwargs})


def generate_blocks(
    drafter: PreTrainedModel, target: PreTrainedModel, input_ids: Prompts, **kwargs: Any
) -> Iterator[Block]:
    """Yields the target's continuation as [`Block`] objects, one for each sequence and step, as soon as it is committed.

    Nothing is computed before the first `next`. The generator can be closed early; the target is not changed.

    Args:
        drafter (`DFlashDraftModel`): A drafter trained for `target`.
        target (`PreTrainedModel`): A decoder-only model, loaded by `AutoModelForCausalLM`.
        input_ids (`torch.Tensor` of shape `(B, S)`, a tokenizer's output, or a list): As for [`spec_generate`].
        kwargs: Any keyword of `target.generate`, such as `max_new_tokens`, `top_p`, `repetition_penalty`, `generation_config`,
            or `stop_strings` with `tokenizer`. Keywords that cannot be exact are refused by name. Additional keywords:

            - **attention_mask** (`torch.Tensor` of shape `(B, S)`): 1 for tokens, 0 for padding, which is on the left.
            - **temperature** (`float`): 0 decodes greedily, above 0 samples. Default: the target's generation config.
            - **do_sample** (`bool`): As in `generate`. Default: `temperature > 0` if given, else the target's config.
            - **stop_token_ids** (`list[int]`): Ids that end the text, `[]` for none. Default: the config's `eos_token_id`.
            - **generator** (`torch.Generator` or a list of one for each prompt): Source of the uniforms for sampling. With
              "match" the text depends only on its seed, not on the block size.
            - **block_size** (`int`): Tokens in a block, anchor included; at most, and by default, that of the training.
            - **verification** (`str`, defaults to `"auto"`): "match", "rejection" or "block" (see `verification_dflash`).
              "auto" is "block" for drafters that draw their proposals and "match" for others.
            - **conversation** ([`Conversation`]): Its caches are reused and kept. One prompt only.
            - **max_draft_tokens** (`int`): Most proposals to verify in a step; 0 drafts nothing.
            - **adaptive** (`bool`, defaults to `False`): Verifies as many proposals as pay, by the drafter's confidence and
              by the durations of the forwards, which are measured for each pair.
            - **latency_curve** ([`LatencyCurve`]): Durations measured earlier, for `adaptive`.
            - **draft_tree** (`int` or `bool`, defaults to `False`): Verifies a tree of the drafter's most probable paths: its
              number of nodes, or `True` for as many as pay. One prompt only.
            - **draft_window** (`(int, int)`): How many of the first and of the newest tokens (up to an eighth more) a drafter
              with full attention reads, and keeps keys of. Default: that in the drafter's config, or all tokens.
            - **compile** (`bool` or `"auto"`, defaults to `"auto"`): `True` compiles in the first call, which takes seconds
              to minutes; `False` never does. "auto" compiles a kind of step, such as one of two prompts, once eager ones have
              lost as much time as that takes (on a GPU later kinds at once). What does not compile runs eagerly, with a warning.
            - **prompt_lookup_num_tokens** (`int`, defaults to 31): Proposals of a step, at most 63, where the text repeats
              itself. After the last tokens, or those and the first that the drafter proposes, what followed them earlier is
              proposed. **max_matching_ngram_size** (`int`, defaults to 10) of them have to match. 0 looks nothing up.

    Each sequence's first block holds one token, which the prompt's forward gives. Raises ValueError as [`spec_generate`].

    Example:
        >>> blocks = generate_blocks(drafter, target, input_ids, max_new_tokens=64)
        >>> text = "".join(tokenizer.decode(block.token_ids) for block in blocks)
    """
    for name in ("streamer", "return_dict_in_generate"):
        if kwargs.get(name):
            raise ValueError(f"generate_blocks yields the blocks themselves: pass {name} to spec_generate.")
    return _through_generate(drafter, target, input_ids, {"as_blocks": True, **kwargs})


# Keywords that `generate` keeps for itself, and their names in a [`Request`].
GENERATES_OWN = {
    "generator": "uniforms_generator",
    "prompt_lookup_num_tokens": "num_looked_up",
    "max_matching_ngram_size": "ngram_size",
}


def _check_drafter(drafter: Any) -> None:
    """Raises ValueError for anything that is not a drafter, and for one without weights."""
    if not hasattr(drafter, "spec_generate"):
        shown = repr(drafter) if isinstance(drafter, str | None) else type(drafter).__name__
        raise ValueError(f"drafter={shown} cannot draft: pass what DFlashDraftModel.from_pretrained returns.")
    is_offloaded = any(hasattr(module, "_hf_hook") for module in drafter.modules())  # weights come for each forward
    if not is_offloaded and any(parameter.is_meta for parameter in drafter.parameters()):
        raise ValueError("The drafter's weights are on the meta device, without values: load it by from_pretrained.")


def _through_generate(drafter: PreTrainedModel, target: PreTrainedModel, input_ids: Any, asked: dict[str, Any]) -> Any:
    """Checks a request, translates its keywords to those of `generate`, and lets `generate` call [`custom_generate`]."""
    _check_drafter(drafter)
    check_pair(target, drafter)
    prompt_ids, attention_mask = read_prompt(input_ids, asked.pop("attention_mask", None), target)
    _check_request(target, prompt_ids, attention_mask, asked)
    temperature, do_sample = asked.pop("temperature", None), asked.pop("do_sample", None)
    if temperature is not None:
        do_sample = temperature > 0 if do_sample is None else do_sample
        # Greedy decoding ignores these, and `generate` would warn about the target's defaults.
        asked.update({"temperature": temperature} if temperature else dict.fromkeys(("temperature", "top_p", "top_k")))
    if do_sample is not None:
        asked["do_sample"] = do_sample
    if (stop_token_ids := asked.pop("stop_token_ids", None)) is not None:
        asked["eos_token_id"] = None if stop_token_ids == [] else stop_token_ids  # no token stops the text
    criteria = StoppingCriteriaList(asked.pop("stopping_criteria", None) or ())
    # Made here, because `generate` does not pass the tokenizer to a custom loop. One criterion for each string, because one
    # that can never match would disable the others.
    stop_strings, tokenizer = asked.pop("stop_strings", None), asked.pop("tokenizer", None)
    for stop_string in [stop_strings] if isinstance(stop_strings, str) else stop_strings or ():
        if tokenizer is None or not stop_string:
            remedy = "give a string that is not empty" if tokenizer else "pass the target's tokenizer=… beside it"
            raise ValueError(f"stop_strings={stop_strings!r} cannot stop a text: {remedy}.")
        criteria.append(StopStringCriteria(tokenizer, stop_string))
    asked = {GENERATES_OWN.get(name, name): value for name, value in asked.items()}
    # Ids are not moved for a target whose embedding is offloaded ("meta" between calls).
    device = prompt_ids.device if target.device.type == "meta" else target.device
    attention_mask = None if attention_mask is None else attention_mask.to(device)
    asked |= {"attention_mask": attention_mask, "stopping_criteria": criteria, "drafter": drafter}
    generate: Any = target.generate  # not in the type of PreTrainedModel
    return generate(prompt_ids.to(device), custom_generate=custom_generate, **asked)


@dataclass
class Request:
    """A checked request. The arguments are the keywords of [`custom_generate`]."""

    drafter: PreTrainedModel
    block_size: Any = None  # tokens in a block, anchor included; by default as many as the drafter was trained for
    max_draft_tokens: int | None = None
    verification: str = "auto"
    conversation: Conversation | None = None
    adaptive: bool = False
    latency_curve: LatencyCurve | None = None
    draft_tree: int | bool = False  # nodes; 0: none
    draft_window: Any = None  # positions that the drafter reads: the first and the newest; by default its config's
    compile: bool | str = "auto"
    num_looked_up: int = 31  # `prompt_lookup_num_tokens` of `generate_blocks`
    ngram_size: int = 10  # its `max_matching_ngram_size`
    uniforms_generator: torch.Generator | list[torch.Generator] | None = None  # its `generator`
    token_streamer: Any = None  # gets the prompt, and the tokens as blocks commit
    as_blocks: bool = False  # whether to return the iterator of `generate_blocks`
    target: Any = field(init=False)
    input_ids: torch.Tensor = field(init=False)  # [B, S]
    attention_mask: torch.Tensor | None = field(init=False)
    config: Any = field(init=False)  # the generation config
    max_new_tokens: int = field(init=False)
    max_length: float = field(init=False)  # positions of the target
    temperature: float = field(init=False)  # 1 for greedy decoding
    chunk_size: int | None = field(init=False)  # columns of a prompt that run at a time; `None`: all
    keeping: set[str] = field(init=False)  # further outputs: "scores", "logits"
    prompt_inputs: Mapping[str, Any] = field(init=False)  # further inputs of the prompt's forward, such as images

    @classmethod
    def of(cls, target: PreTrainedModel, input_ids: torch.Tensor, config: Any, asked: dict[str, Any]) -> Request:
        """The request that `generate` has prepared. Raises ValueError if it cannot be run exactly."""
        own: dict[str, Any] = {name: value for name in KEYWORDS if (value := asked.pop(name, None)) is not None}
        _check_drafter(own.get("drafter"))
        check_pair(target, own["drafter"])
        request = cls(**own)
        request.target, request.input_ids, request.config = target, input_ids, config
        request.attention_mask = asked.get("attention_mask")
        request.max_length = max_positions(target) or float("inf")
        request.temperature = float(config.temperature or 1.0) if config.do_sample else 1.0
        request.chunk_size = getattr(config, "prefill_chunk_size", None)
        request.keeping = {name for name in ("scores", "logits") if getattr(config, f"output_{name}", False)}
        temperature = config.temperature if config.do_sample else None
        its_window = getattr(request.drafter.config, "draft_window", None)
        request.draft_window = _first_given(request.draft_window, its_window)
        own |= {"prefill_chunk_size": request.chunk_size, "temperature": temperature}
        own["generator"] = request.uniforms_generator
        _check_settings({**own, "draft_window": request.draft_window})
        _check_prepared(config, request)
        request.prompt_inputs = _read_prompt_inputs(request, asked)
        drafter, draft_tree = request.drafter, request.draft_tree
        if draft_tree:
            _check_tree(request)
        if draft_tree or len(input_ids) > 1:
            _check_masks(request)
        if request.latency_curve is not None:
            request.latency_curve.check(target, drafter, bool(draft_tree))
        if request.conversation is not None:
            request.conversation.check(target, drafter)
        if request.draft_window and any(map(drafter.config.layer_window, range(drafter.config.num_hidden_layers))):
            raise ValueError(f"draft_window={request.draft_window}: this drafter has sliding layers, leave it out.")
        request.block_size = request.block_size or drafter.config.block_size
        request.adaptive = request.adaptive or request.latency_curve is not None or draft_tree is True
        request.draft_tree = LARGEST_TREE if draft_tree is True else int(draft_tree)
        depth = "%s: block_size=%s, max_draft_tokens=%s, draft_tree=%s", drafter.name_or_path or "The drafter"
        logger.info_once(*depth, request.block_size, request.max_draft_tokens, draft_tree)
        return request


KEYWORDS = inspect.signature(Request).parameters


def custom_generate(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **asked: Any,
) -> torch.Tensor | DFlashOutput | Iterator[Block]:
    """The decoding loop for the target's own `generate`. Output and errors are those of [`spec_generate`].

    `generate` does not pass on `generator`, `tokenizer` and `stop_strings`: use `uniforms_generator`, and [`spec_generate`] for
    stop strings. A `streamer` is found, and gets the tokens as blocks are committed. `generate` passes the target and what it has prepared: prompts [B, S],
    processors, criteria and generation config. `asked` holds the keywords of a [`Request`], of which `drafter` is required, and
    the prepared inputs of the target's forward.

    Example:
        >>> target.generate(**inputs, custom_generate=custom_generate, drafter=drafter, max_new_tokens=64)
    """
    streamer = _streamer_of_generate()
    if streamer is not None:
        if asked.get("token_streamer") is not None or asked.get("as_blocks"):
            raise ValueError("streamer came with token_streamer or as_blocks: pass one of them.")
        asked["token_streamer"] = streamer
    request = Request.of(target, input_ids, generation_config, asked)
    _check_processors(request, logits_processor)
    processors = [_processors_of(index, len(input_ids), logits_processor) for index in range(len(input_ids))]
    longest = min(c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria))
    request.max_new_tokens = longest - input_ids.shape[1]
    verifier = Verifier(request, processors)
    verifier.ends = lambda text_ids: bool(stopping_criteria(text_ids, None).all())
    compiled = None if request.prompt_inputs else compiled_pair(target, request.drafter, request.compile)
    pair = Pair(target, request.drafter, request.prompt_inputs, compiled)
    conversation = request.conversation or Conversation()
    conversation.draft_window = request.draft_window
    decoder = Decoder(request, pair, verifier, make_cutter(stopping_criteria, request.max_new_tokens), conversation)
    blocks = _guarded(decode_blocks(decoder), request, conversation)
    return blocks if request.as_blocks else _collect(blocks, request, has_put_prompt=streamer is not None)


def _streamer_of_generate() -> Any:
    """The `streamer` of the `generate` that calls this loop; `None` if it has none.

    `generate` gives it the prompt and hands it to no custom loop. It is read from the frame of `generate`: without it, whoever
    reads the stream would wait forever.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


# `generate` passes a custom loop the keywords in its signature.
*_given, _asked = inspect.signature(custom_generate).parameters.values()
_keywords = [keyword.replace(kind=keyword.KEYWORD_ONLY) for keyword in KEYWORDS.values()]
custom_generate.__signature__ = inspect.Signature([*_given, *_keywords, _asked])  # type: ignore[attr-defined]


def _guarded(blocks: Iterator[Block], request: Request, conversation: Conversation) -> Iterator[Block]:
    """The blocks. An error empties the caches, and running out of memory is reported with remedies."""
    has_failed = False
    try:
        yield from blocks
    except GeneratorExit:  # closed early, between two steps
        raise
    except BaseException as error:
        has_failed = True
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        remedy = "lower prefill_chunk_size for a long prompt, the number of prompts, max_new_tokens, or draft_tree"
        raise torch.OutOfMemoryError(f"Out of memory ({str(error).splitlines()[0]}): {remedy}.") from error
    finally:
        if has_failed or request.conversation is None:
            conversation.close(has_failed)


def _collect(blocks: Iterator[Block], request: Request, has_put_prompt: bool) -> torch.Tensor | DFlashOutput:
    """Collects the blocks into the output of `generate`, and streams them."""
    input_ids, streamer = request.input_ids, request.token_streamer
    if streamer is not None and not has_put_prompt:
        streamer.put(input_ids.cpu())
    of_sequences: list[list[Block]] = [[] for _ in input_ids]
    for block in blocks:
        of_sequences[block.sequence].append(block)
        if streamer is not None:
            for token_id in block.token_ids:
                streamer.put(torch.tensor([token_id]))
    if streamer is not None:
        streamer.end()
    new_ids = [torch.tensor([token_id for block in one for token_id in block.token_ids]) for one in of_sequences]
    pad_token = getattr(request.config, "_pad_token_tensor", None)
    pad_token_id = 0 if pad_token is None else int(pad_token)  # without one all sequences stop together
    padded = pad_sequence(new_ids, batch_first=True, padding_value=pad_token_id)
    sequences = torch.cat([input_ids, padded.to(input_ids)], dim=1)
    if not request.config.return_dict_in_generate:
        return sequences
    lengths = [[block.acceptance_length for block in sequence if not block.is_prefill] for sequence in of_sequences]
    by_position: dict[str, Any] = {}
    for name in request.keeping:
        scores = [torch.cat([getattr(block, name) for block in one]) for one in of_sequences]  # [new, V] each
        by_position[name] = pad_sequence(scores).unbind(dim=0)
    steps = [block for sequence in of_sequences for block in sequence if not block.is_prefill]
    num_new = sum(map(len, new_ids))
    return DFlashOutput(
        sequences=sequences,
        acceptance_lengths=lengths,
        tau=_mean_length([block for block in steps if not block.is_lookup]),
        tau_with_lookup=_mean_length(steps),
        tokens_per_step=(num_new - len(new_ids)) / len(steps) if steps else float("nan"),
        **by_position,
    )


def _mean_length(blocks: list[Block]) -> float:
    """The mean acceptance length of verify steps; NaN of none."""
    return sum(block.acceptance_length for block in blocks) / len(blocks) if blocks else float("nan")


def generate(inputs: Any = None, *, model: Any, drafter: Any = None, **kwargs: Any) -> Any:
    """Runs the loop of the DFlash checkpoint that contains this file in a target's own `generate`.

        drafter = AutoModel.from_pretrained("org/drafter", trust_remote_code=True)
        target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True, drafter=drafter)

    `drafter` is the model of that checkpoint; all other arguments are those of `generate`. Raises ValueError if the drafter is
    missing or the request cannot be exact.
    """
    if kwargs.get("custom_generate") is not None:  # the loop, where a target's folder holds this file
        return type(model).generate(model, inputs, drafter=drafter, **kwargs)
    if not hasattr(drafter, "spec_generate"):
        raise ValueError(f"drafter={drafter!r} cannot draft: pass AutoModel.from_pretrained(<this checkpoint>).")
    ids = kwargs.pop("input_ids", None)
    return drafter.spec_generate(inputs if ids is None else ids, target=model, **kwargs)


def custom_generate_source() -> str:
    """The text of a checkpoint's `custom_generate/generate.py`."""
    return f"from typing import Any\n\n\n{inspect.getsource(generate)}"


def write_custom_generate(folder: str | Path) -> None:
    """Puts `custom_generate/generate.py` into `folder`, where `target.generate(custom_generate=…)` looks for it."""
    path = Path(folder, "custom_generate", "generate.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # transformers uploads only files that are new
    path.write_text(custom_generate_source(), encoding="utf-8")
