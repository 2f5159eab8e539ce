"""Completions of a text, for servers that take no token ids. `transformers serve` is one, and encodes the text itself."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


REMEDY = "serve the target with vLLM or SGLang, which take ids, or generate in this process, without --url"

# Settings of sampling that such a server would take from the target's own generation config; here they do nothing.
NEUTRAL = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
# What vLLM and SGLang are asked to send; this server sends texts without special tokens and no ids.
UNKNOWN = ("return_token_ids", "skip_special_tokens")


class TextOnlyError(ValueError):
    """A server refused a request of token ids, and would take one of text."""


def text_request(request: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A `request` whose prompt is ids, as one of text; ValueError if no text is encoded to these ids.

    The settings of sampling go into `generation_config`, where they win over the target's own.
    """
    text = {name: value for name, value in request.items() if name not in UNKNOWN}
    text["prompt"] = exact_text(request["prompt"], tokenizer)
    sampling = {
        "temperature": text.pop("temperature"),
        "top_p": text.pop("top_p", 1.0),
        "min_p": text.pop("min_p", 0.0),
        **NEUTRAL,
        "top_k": max(text.pop("top_k", -1), 0),  # 0 keeps every token there, and -1 in vLLM and SGLang
    }
    is_sampled = bool(sampling["temperature"])
    settings = {"do_sample": is_sampled, **sampling} if is_sampled else {"do_sample": False}
    text["generation_config"] = json.dumps(settings)
    return text


def exact_text(prompt_ids: Sequence[int], tokenizer: Any) -> str:
    """The text that `tokenizer(text)` encodes to exactly `prompt_ids`; ValueError if decoding them gives another."""
    prompt_ids = list(prompt_ids)
    added = tokenizer("")["input_ids"]  # such as a first token that the tokenizer adds to every text
    begin = len(added) if prompt_ids[: len(added)] == added else 0
    text = tokenizer.decode(
        prompt_ids[begin:],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    if tokenizer(text)["input_ids"] != prompt_ids:
        shown = text if len(text) <= 80 else f"{text[:80]} …"
        ids = f"the {len(prompt_ids)} ids of the prompt {shown!r}"
        raise ValueError(f"The server takes text alone, and {ids} are not those of its text: {REMEDY}.")
    return text


def check_prompt_tokens(counted: Any, prompt_ids: Sequence[int], where: str) -> None:
    """ValueError if a server encoded the text of a prompt to another number of tokens."""
    if counted != len(prompt_ids):
        fault = f"{where} counted {counted} tokens in a prompt of {len(prompt_ids)}"
        raise ValueError(f"{fault}: it must serve the target with its own tokenizer; else {REMEDY}.")
