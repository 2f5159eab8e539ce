"""Encodes rows of text as token ids with a loss mask, and mixes sources by weight. It imports no model.

A row is a chat (`messages`, or ShareGPT's `conversations`), a `prompt` and its `completion`, plain `text`, or an answer
of the target itself: `prompt_ids` and `response_ids`, which are taken token for token.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash.common.plain_text import check_text

from .examples import Example, Examples, joined, lengths_of, selected
from .settings import Facts, TrainingSettings
from .sources import FORMS, Source, read_rows


# What ShareGPT calls the roles.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# At least one of the first `SEARCHED_ROWS` rows must be usable; a stream without one would otherwise be read to its
# end.
SEARCHED_ROWS = 10_000


def encode(row: Mapping[str, Any], tokenizer: Any, **template_kwargs: Any) -> Example:
    """Returns one row of data as an [`Example`], encoded with the tokenizer's chat template.

    Args:
        row: `messages` (or `conversations`), in which every assistant turn is supervised; or `prompt` and `completion`,
            as text or as lists of messages; or `text`, supervised from its second token on; or `prompt_ids` and
            `response_ids`.
        tokenizer: The target's tokenizer. Without a chat template the text of a prompt is encoded as it is.
        template_kwargs: Arguments of the chat template, such as `enable_thinking=False`.

    Raises:
        ValueError: for a row of another form, or a chat template that does not mark what the assistant says. A
            malformed row may raise other errors, which [`named_row`] turns into a ValueError.
    """
    row = {name: value for name, value in row.items() if value is not None}  # tables hold every column in every row
    if "response_ids" in row:
        example = with_response(row["prompt_ids"], row["response_ids"], row.get("response_mask"))
        example.rejected.extend(row.get("rejected", ()))
        return example
    if "completion" in row:
        return _encode_completion(row["prompt"], row["completion"], tokenizer, template_kwargs)
    messages = messages_of(row)
    if messages is not None:
        return _encode_chat(messages, tokenizer, template_kwargs)
    if isinstance(row.get("text"), str):
        input_ids = _token_ids(row["text"], tokenizer)
        input_ids += _end(tokenizer)
        return with_response(input_ids[:1], input_ids[1:])
    raise ValueError(f"A row with the columns {sorted(row)} cannot be trained on: give {FORMS}.")


def messages_of(row: Mapping[str, Any]) -> list[Facts] | None:
    """Returns the messages of a chat, also in ShareGPT's form (`conversations`); `None` if the row is not a chat."""
    if row.get("messages") is not None:
        return chat_messages(row["messages"])
    if row.get("conversations") is None:
        return None
    messages = []
    for turn in chat_messages(row["conversations"]):
        role = turn["from"]
        messages.append({"role": SHAREGPT_ROLES.get(role, role), "content": turn["value"]})
    return messages


def chat_messages(messages: Any) -> list[Facts]:
    """Returns copies of a row's messages; ValueError unless they are a list of objects with well-formed text."""
    is_text_or_object = isinstance(messages, (str, Mapping))
    is_list = isinstance(messages, Iterable) and not is_text_or_object
    messages = list(messages) if is_list else messages
    are_objects = is_list and all(isinstance(message, Mapping) for message in messages)
    if not are_objects:
        raise ValueError(f"its messages are {reprlib.repr(messages)}: give a list of objects with role and content.")
    for message in messages:
        for value in message.values():
            if isinstance(value, str):
                check_text(value, "a message")
    return [dict(message) for message in messages]


def _encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, template_kwargs: Facts) -> Example:
    encoded = _apply_template(messages, tokenizer, return_assistant_tokens_mask=True, **template_kwargs)
    loss_mask = list(map(int, encoded["assistant_masks"]))
    turns = [message for message in messages if message["role"] == "assistant"]
    says_something = any(turn["content"] for turn in turns)
    if says_something and not any(loss_mask):
        raise ValueError(
            "The chat template marks no token as the assistant's: wrap what the assistant says in "
            "{% generation %}…{% endgeneration %} in the template, or give rows of prompt and completion."
        )
    return Example(encoded["input_ids"], loss_mask)


def _encode_completion(prompt: Any, completion: Any, tokenizer: Any, template_kwargs: Facts) -> Example:
    prompt_ids = encode_prompt(prompt, tokenizer, **template_kwargs)
    if isinstance(completion, str):
        response_ids = _token_ids(completion, tokenizer, add_special_tokens=False)
        return with_response(prompt_ids, response_ids + _end(tokenizer))
    messages = chat_messages([*prompt, *completion])
    encoded = _apply_template(messages, tokenizer, **template_kwargs)
    input_ids = list(encoded["input_ids"])
    length = len(prompt_ids)
    if input_ids[:length] != prompt_ids:
        raise ValueError(
            "The chat template writes this prompt differently when an answer follows, so the answer's first token is "
            "not known: give rows of messages, or prompt and completion as text."
        )
    return with_response(prompt_ids, input_ids[length:])


def encode_prompt(prompt: Any, tokenizer: Any, **template_kwargs: Any) -> list[int]:
    """Returns the token ids of a user's text, or of a list of messages, up to where the assistant's answer begins.

    ValueError if there are messages and no chat template, or if the template renders the prompt as an empty text.
    """
    if isinstance(prompt, str):
        if getattr(tokenizer, "chat_template", "") is None:
            return _token_ids(prompt, tokenizer)
        prompt = [{"role": "user", "content": prompt}]
    encoded = _apply_template(chat_messages(prompt), tokenizer, add_generation_prompt=True, **template_kwargs)
    if not encoded["input_ids"]:
        raise ValueError(
            "The chat template renders this prompt as an empty text: correct the template, or use the target's own."
        )
    return list(encoded["input_ids"])


def _token_ids(text: str, tokenizer: Any, **options: Any) -> list[int]:
    check_text(text, "it")
    return list(tokenizer(text, **options)["input_ids"])


def _apply_template(messages: Any, tokenizer: Any, **options: Any) -> Any:
    if getattr(tokenizer, "chat_template", "") is None:
        raise ValueError(
            "The tokenizer has no chat template, so messages cannot be rendered: set tokenizer.chat_template, or give "
            "rows of text, or of prompt and completion as text."
        )
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def with_response(
    prompt_ids: Sequence[int], response_ids: Sequence[int], response_mask: Sequence[int] | None = None
) -> Example:
    """Returns an example of prompt and response, supervised where `response_mask` is 1 (default: everywhere)."""
    if response_mask is None:
        response_mask = [1] * len(response_ids)
    prompt_mask = [0] * len(prompt_ids)
    return Example([*prompt_ids, *response_ids], [*prompt_mask, *response_mask])


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Writes single-turn examples to `path`, as JSON lines of `prompt_ids` and `response_ids`."""
    with path.open("w") as file:
        for example in examples:
            prompt_ids = example.prompt_ids
            response_ids = example.input_ids[len(prompt_ids) :]
            row = {"prompt_ids": prompt_ids, "response_ids": response_ids}
            line = json.dumps(row, separators=(",", ":"))
            file.write(line + "\n")


@dataclass(frozen=True)
class Wanted:
    """How many usable examples to take from the beginning of a source, and how many tokens a usable one may have."""

    samples: int
    shortest: int = 1
    longest: int | None = None

    def is_usable(self, example: Example) -> bool:
        """Whether the example is usable: its length is in the range, and a block may begin in it."""
        length = len(example)
        if self.longest is not None and length > self.longest:
            return False
        return length >= self.shortest and example.has_anchor


def load_examples(
    source: Source | Iterable[Mapping[str, Any]],
    tokenizer: Any = None,
    *,
    split: str = "train",
    max_length: int | None = None,
    streaming: bool = False,
    wanted: Wanted | None = None,
    **template_kwargs: Any,
) -> list[Example]:
    """Reads a source and returns its rows as encoded examples, in the source's order.

    Args:
        source: A file of JSON lines; a parquet, csv, arrow or text file, a folder of `Dataset.save_to_disk` or an id on
            the Hub (`name` or `name:configuration`), which `datasets` reads; or rows, such as a `Dataset`.
        tokenizer: The target's tokenizer. Not needed for rows of token ids.
        split: The split of a data set that has several.
        max_length: Longer sequences are cut to this number of tokens.
        streaming: Read a data set only as far as `wanted` asks, without downloading it whole.
        wanted: Stop after this number of usable examples. Unusable examples among them are returned too.
        template_kwargs: Arguments of the chat template, such as `enable_thinking=False`.

    Raises:
        ValueError: for a source without rows, one without a usable row among the first `SEARCHED_ROWS` if `wanted` is
            given, or a row that `encode` refuses; the message names the row's number.
        FileNotFoundError: for a file or data set that does not exist.
    """
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        source = read_rows(name, split, streaming)
    else:
        name = "the data"
    return list(
        encoded(
            source,
            name,
            tokenizer,
            max_length,
            wanted,
            template_kwargs,
        )
    )


def encoded(
    rows: Iterable[Mapping[str, Any]],
    name: str,
    tokenizer: Any,
    max_length: int | None,
    wanted: Wanted | None,
    template_kwargs: Mapping[str, Any],
) -> Iterator[Example]:
    """Yields each row's example until `wanted` is satisfied; arguments and errors are those of [`load_examples`]."""
    number = num_usable = 0
    for number, row in enumerate(rows, start=1):
        with named_row(number, name):
            example = encode(row, tokenizer, **template_kwargs)
        if max_length is not None:
            example = example.cut(max_length)
        yield example
        if wanted is None:
            continue
        num_usable += wanted.is_usable(example)
        if num_usable == wanted.samples:
            return
        if number == SEARCHED_ROWS and not num_usable:
            lengths = f"at least {wanted.shortest}"
            if wanted.longest is not None:
                lengths = f"{wanted.shortest} to {wanted.longest}"
            raise ValueError(
                f"None of the first {number:,} rows of {name} is usable (usable means: {lengths} tokens, two "
                "supervised ones in a row): give longer answers, a smaller block_size or another min_length."
            )
    if not number:
        raise ValueError(f"{name} holds no row: give {FORMS}.")


def parts_of(data: Source | Sequence[Source]) -> list[tuple[str, float | None]]:
    """Splits texts such as `"a.jsonl:0.7"` into pairs of source and weight. The weight is `None` if the text has none.

    Raises:
        ValueError: for no source, a weight that is not a finite number above 0, or a weight of some sources only.
    """
    sources = [data] if isinstance(data, (str, os.PathLike)) else data
    parts = [_weighted(os.fspath(source)) for source in sources]
    if not parts:
        raise ValueError("data names no source: give a file, a folder or a Hub id.")
    unweighted = [source for source, weight in parts if weight is None]
    if 0 < len(unweighted) < len(parts):
        names = ", ".join(unweighted)
        raise ValueError(f"data without a weight beside others with one ({names}): give every part a weight, or none.")
    return parts


def _weighted(text: str) -> tuple[str, float | None]:
    source, _, last = text.rpartition(":")
    if not source or Path(text).expanduser().exists():
        return text, None
    try:
        weight = float(last)
    except ValueError:  # the configuration of a data set
        return text, None
    if not 0 < weight < math.inf:
        raise ValueError(
            f"data {text}: the weight {last} is not a finite number above 0: give another one, or leave this source "
            "out."
        )
    return source, weight


def mixed(
    parts: Sequence[Examples], weights: Sequence[float | None], settings: TrainingSettings
) -> tuple[Examples, Counter[str]]:
    """Joins the examples that the settings keep, mixed by `weights`; also returns how many are left out, by reason.

    Weights are shares of the number of sequences. The part with the fewest sequences per unit of weight is used whole;
    from the others, sequences are drawn at random in proportion to their weights. Without weights all sequences are
    used.

    Raises:
        ValueError: if the settings keep no example of a part.
    """
    digests: set[bytes] = set()
    left_out: Counter[str] = Counter()
    places = []
    for number, part in enumerate(parts, start=1):
        kept = []
        left_out_of_part: Counter[str] = Counter()
        for place, length in enumerate(lengths_of(part)):
            reason = _reason(part, place, length, settings, digests)
            if reason is None:
                kept.append(place)
            else:
                left_out_of_part[reason] += 1
        if not kept:
            reasons = in_words(left_out_of_part)
            remedy = "give another min_length or max_length, turn deduplicate off, or leave this part out"
            raise ValueError(f"Part {number} of the data has no sequence left ({reasons}): {remedy}.")
        left_out += left_out_of_part
        places.append(kept)
    given_weights = [weight for weight in weights if weight is not None]
    if given_weights:
        total = sum(map(len, places))
        places = _drawn(places, given_weights, settings.seed)
        left_out["for the weights of the mix"] = total - sum(map(len, places))
    kept_parts = list(map(selected, parts, places))
    return joined(kept_parts), +left_out


def in_words(left_out: Counter[str]) -> str:
    """Describes, as text, how many examples were left out and why.

    An example: `3 shorter than 8 tokens, 1 that repeats another one`.
    """
    return ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())


def _drawn(places: list[list[int]], weights: list[float], seed: int) -> list[list[int]]:
    """Draws indices from each part in the ratio of `weights`. One part is drawn whole."""
    unit = min(map(truediv, map(len, places), weights))
    drawn = []
    for index, weight in enumerate(weights):
        generator = random.Random(f"mix-{seed}-{index}")
        count = max(1, round(unit * weight))
        drawn.append(sorted(generator.sample(places[index], count)))
    return drawn


def _reason(part: Examples, place: int, length: int, settings: TrainingSettings, digests: set[bytes]) -> str | None:
    """Returns why the example at `place` is left out, or `None`. The hash of a kept example is added to `digests`."""
    if length < (settings.min_length or 0):
        return f"shorter than {settings.min_length} tokens"
    if settings.drop_above is not None and length > settings.drop_above:
        return f"longer than {settings.drop_above} tokens"
    if not settings.deduplicate:
        return None
    tokens = part[place].token_array.tobytes()
    digest = hashlib.blake2b(tokens, digest_size=16).digest()
    if digest in digests:
        return "that repeats another one"
    digests.add(digest)
    return None


@contextmanager
def named_row(number: int, name: str) -> Iterator[None]:
    """Inside the `with`, turns an error about a bad row into a ValueError with the row's number and source."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Row {number} of {name}: {error}") from error
    except TemplateError as error:
        raise ValueError(f"Row {number} of {name}: the chat template cannot render it ({error}).") from error
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"Row {number} of {name}: it is malformed ({fault}).") from error


def stop_ids(generation_config: Any) -> set[int]:
    """Returns the set of token ids that end a text; empty if the config has no `eos_token_id`."""
    stops = getattr(generation_config, "eos_token_id", None)
    if stops is None:
        return set()
    return {stops} if isinstance(stops, int) else set(stops)
