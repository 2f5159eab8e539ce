"""Rows of text as token ids with a loss mask. It knows no model.

A row is a chat (`messages`, or ShareGPT's `conversations`), a `prompt` and its `completion`, plain `text`, or an answer of
the target itself: `prompt_ids` and `response_ids`, which are taken token for token.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import reprlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash.common.plain_text import check_text

from .lazy_sequences import chosen, joined, lengths_of
from .settings import TrainingSettings
from .sources import FORMS, Source, read_rows


# What ShareGPT calls the roles.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Rows among which at least one has to be usable: a stream without any would be read to its end.
SEARCHED_ROWS = 10_000


@dataclass(slots=True, init=False)
class Example:
    """One sequence as arrays, which take 5 bytes a token; in `mask_array` the tokens that the drafter learns to propose are 1.

    `rejected` are the anchors of drafts that verification rejected, where a [`Trace`] recorded them.
    """

    token_array: array[int]
    mask_array: array[int]
    rejected: array[int]

    def __init__(self, input_ids: Sequence[int], loss_mask: Sequence[int], rejected: Sequence[int] = ()) -> None:
        self.token_array = array("i", input_ids)
        self.mask_array = array("b", loss_mask)
        self.rejected = array("i", rejected)

    @property
    def input_ids(self) -> list[int]:
        """The token ids, in a new list."""
        return self.token_array.tolist()

    @property
    def loss_mask(self) -> list[int]:
        """1 for a supervised token, else 0, in a new list."""
        return self.mask_array.tolist()

    @property
    def prompt_ids(self) -> list[int]:
        """The token ids before the first supervised one."""
        return self.token_array[: self.mask_array.index(1)].tolist()

    @property
    def has_anchor(self) -> bool:
        """Whether two supervised tokens follow each other, so that a block may begin here."""
        return b"\1\1" in self.mask_array.tobytes()

    def __len__(self) -> int:
        return len(self.token_array)

    def __hash__(self) -> int:
        return hash((self.token_array.tobytes(), self.mask_array.tobytes()))

    def __repr__(self) -> str:
        return f"Example({self.input_ids}, {self.loss_mask})"

    def cut(self, length: int) -> Example:
        """The first `length` tokens."""
        left = [anchor for anchor in self.rejected if anchor < length]
        return self if len(self) <= length else Example(self.token_array[:length], self.mask_array[:length], left)


def encode(row: Mapping[str, Any], tokenizer: Any, **template_kwargs: Any) -> Example:
    """The token ids of one row of data, written with the tokenizer's chat template.

    Args:
        row: `messages` (or `conversations`), all of whose assistant turns are supervised; or `prompt` and `completion`, as text
            or as lists of messages; or `text`, supervised from its second token on; or `prompt_ids` and `response_ids`.
        tokenizer: The target's tokenizer. Without a chat template a prompt is written as it is.
        template_kwargs: For the chat template, such as `enable_thinking=False`.

    Raises:
        ValueError: for a row of another form, or a chat template that does not mark what the assistant says.
    """
    row = {name: value for name, value in row.items() if value is not None}  # tables hold every column in every row
    if "response_ids" in row:
        example = with_response(row["prompt_ids"], row["response_ids"], row.get("response_mask"))
        example.rejected.extend(row.get("rejected", ()))
        return example
    if "completion" in row:
        return _encode_completion(row["prompt"], row["completion"], tokenizer, template_kwargs)
    if "messages" in row:
        return _encode_chat(chat_messages(row["messages"]), tokenizer, template_kwargs)
    if "conversations" in row:
        return _encode_chat(sharegpt_messages(row["conversations"]), tokenizer, template_kwargs)
    if isinstance(row.get("text"), str):
        input_ids = [*_token_ids(row["text"], tokenizer), *_end(tokenizer)]
        return Example(input_ids, [0, *[1] * (len(input_ids) - 1)][: len(input_ids)])
    raise ValueError(f"A row with the columns {sorted(row)} cannot be trained on: give {FORMS}.")


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a row in new dictionaries; ValueError unless they are a list of objects."""
    is_list = isinstance(messages, Iterable) and not isinstance(messages, (str, Mapping))
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"its messages are {reprlib.repr(messages)}: give a list of objects with role and content.")
    for message in messages:
        for value in message.values():
            if isinstance(value, str):
                check_text(value, "a message")
    return [dict(message) for message in messages]


def sharegpt_messages(turns: Any) -> list[dict[str, Any]]:
    """ShareGPT's turns as chat messages."""
    return [
        {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        for turn in chat_messages(turns)
    ]


def _encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, template_kwargs: dict[str, Any]) -> Example:
    encoded = _apply_template(messages, tokenizer, return_assistant_tokens_mask=True, **template_kwargs)
    loss_mask = list(map(int, encoded["assistant_masks"]))
    if not any(loss_mask) and any(message["role"] == "assistant" and message["content"] for message in messages):
        raise ValueError(
            "The chat template marks no token as the assistant's: wrap what the assistant says in "
            "{% generation %}…{% endgeneration %} in the template, or give rows of prompt and completion."
        )
    return Example(encoded["input_ids"], loss_mask)


def _encode_completion(prompt: Any, completion: Any, tokenizer: Any, template_kwargs: dict[str, Any]) -> Example:
    prompt_ids = encode_prompt(prompt, tokenizer, **template_kwargs)
    if isinstance(completion, str):
        response_ids = _token_ids(completion, tokenizer, add_special_tokens=False)
        return with_response(prompt_ids, [*response_ids, *_end(tokenizer)])
    input_ids = list(_apply_template(chat_messages([*prompt, *completion]), tokenizer, **template_kwargs)["input_ids"])
    if input_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError(
            "The chat template writes this prompt differently when an answer follows, so the answer's first token is not "
            "known: give rows of messages, or prompt and completion as text."
        )
    return with_response(prompt_ids, input_ids[len(prompt_ids) :])


def encode_prompt(prompt: Any, tokenizer: Any, **template_kwargs: Any) -> list[int]:
    """Token ids of one user message, or of a list of messages, up to where the assistant begins."""
    if isinstance(prompt, str):
        if getattr(tokenizer, "chat_template", "") is None:
            return _token_ids(prompt, tokenizer)
        prompt = [{"role": "user", "content": prompt}]
    encoded = _apply_template(chat_messages(prompt), tokenizer, add_generation_prompt=True, **template_kwargs)
    if not encoded["input_ids"]:
        raise ValueError("The chat template writes nothing of this prompt: correct it, or use the target's own.")
    return list(encoded["input_ids"])


def _token_ids(text: str, tokenizer: Any, **options: Any) -> list[int]:
    check_text(text, "it")
    return list(tokenizer(text, **options)["input_ids"])


def _apply_template(messages: Any, tokenizer: Any, **options: Any) -> Any:
    if getattr(tokenizer, "chat_template", "") is None:
        raise ValueError(
            "The tokenizer has no chat template, so messages cannot be written: set tokenizer.chat_template, or give rows "
            "of text, or of prompt and completion as text."
        )
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def with_response(
    prompt_ids: Sequence[int], response_ids: Sequence[int], response_mask: Sequence[int] | None = None
) -> Example:
    """A prompt and its response, supervised where `response_mask` is 1; without a mask all of the response is."""
    loss_mask = [1] * len(response_ids) if response_mask is None else response_mask
    return Example([*prompt_ids, *response_ids], [*[0] * len(prompt_ids), *loss_mask])


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Writes single-turn examples as JSON lines of `prompt_ids` and `response_ids`."""
    with path.open("w") as file:
        for example in examples:
            prompt_ids = example.prompt_ids
            row = {"prompt_ids": prompt_ids, "response_ids": example.input_ids[len(prompt_ids) :]}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


@dataclass(frozen=True)
class Wanted:
    """How many usable examples to take from the beginning of a source, and how long those are, in tokens."""

    samples: int
    shortest: int = 1
    longest: int | None = None

    def takes(self, example: Example) -> bool:
        """Whether the example is usable: as long as it has to be, with a place where a block may begin."""
        return self.shortest <= len(example) <= (self.longest or len(example)) and example.has_anchor


def load_examples(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    tokenizer: Any = None,
    *,
    split: str = "train",
    max_length: int | None = None,
    streaming: bool = False,
    wanted: Wanted | None = None,
    **template_kwargs: Any,
) -> list[Example]:
    """The examples of any source, in its order.

    Args:
        source: A file of JSON lines; a parquet, csv, arrow or text file, a folder of `Dataset.save_to_disk` or an id on the
            Hub (`name` or `name:configuration`), which `datasets` reads; or rows, such as a `Dataset`.
        tokenizer: The target's; rows of ids need none.
        split: Of a data set that has several.
        max_length: Longer sequences are cut to this number of tokens.
        streaming: Read a data set only as far as is `wanted`, without downloading it whole.
        wanted: Read to this number of usable examples; those before them that are not usable are returned too.
        template_kwargs: For the chat template, such as `enable_thinking=False`.

    Raises:
        ValueError: for a source without rows or without a usable one among many, or a row that `encode` refuses, by its number.
        FileNotFoundError: for a file or data set that does not exist.
    """
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the data"
    rows = read_rows(name, split, streaming) if isinstance(source, (str, os.PathLike)) else source
    return list(encoded(rows, name, tokenizer, max_length, wanted, template_kwargs))


def encoded(
    rows: Iterable[Mapping[str, Any]],
    name: str,
    tokenizer: Any,
    max_length: int | None,
    wanted: Wanted | None,
    template_kwargs: Mapping[str, Any],
) -> Iterator[Example]:
    """The examples of rows, one by one; arguments and errors as of [`load_examples`]."""
    number = found = 0
    for number, row in enumerate(rows, start=1):
        with named_row(number, name):
            example = encode(row, tokenizer, **template_kwargs)
        example = example if max_length is None else example.cut(max_length)
        yield example
        if wanted is None:
            continue
        found += wanted.takes(example)
        if found == wanted.samples:
            return
        if number == SEARCHED_ROWS and not found:
            least = f"at least {wanted.shortest}"
            if wanted.longest is not None:
                least = f"{wanted.shortest} to {wanted.longest}"
            raise ValueError(
                f"None of the first {number:,} rows of {name} is usable ({least} tokens, two supervised ones in "
                "a row): give longer answers, a smaller block_size or another min_length."
            )
    if not number:
        raise ValueError(f"{name} holds no row: give {FORMS}.")


def parts_of(data: Source | Sequence[Source]) -> list[tuple[str, float | None]]:
    """The sources of a mix with their weights, `None` where none is given: `["a.jsonl:0.7", "org/name:0.3"]`.

    Raises:
        ValueError: for no source, a weight that is not above 0, or a weight of some sources only.
    """
    parts: list[tuple[str, float | None]] = []
    for one in [data] if isinstance(data, (str, os.PathLike)) else data:
        source, _, last = os.fspath(one).rpartition(":")
        weight = None
        if source and not Path(os.fspath(one)).expanduser().exists():
            with suppress(ValueError):  # else the configuration of a data set
                weight = float(last)
        if weight is not None and not (weight > 0 and math.isfinite(weight)):
            raise ValueError(
                f"data {os.fspath(one)}: its weight is {last}; give a number above 0, or leave the part out."
            )
        parts.append((os.fspath(one) if weight is None else source, weight))
    if not parts or len({weight is None for _, weight in parts}) > 1:
        said = ", ".join(source for source, weight in parts if weight is None)
        raise ValueError(f"data without a weight beside others with one ({said}): give every part a weight, or none.")
    return parts


def mixed(
    parts: Sequence[Sequence[Example]], weights: Sequence[float | None], settings: TrainingSettings
) -> tuple[Sequence[Example], dict[str, int]]:
    """The examples of all parts that the settings keep, by their weights, and how many are left out for which reason.

    Weights are shares of the sequences. The part that is smallest for its weight is taken whole; of the others as many are
    drawn by the seed as the weights say. Without weights all are taken. ValueError for a part of which nothing is left.
    """
    seen: set[bytes] = set()
    left_out: Counter[str] = Counter()
    kept: list[list[int]] = [[] for _ in parts]
    for place, part in enumerate(parts):
        for number, length in enumerate(lengths_of(part)):
            if settings.min_length is not None and length < settings.min_length:
                left_out[f"shorter than {settings.min_length} tokens"] += 1
            elif settings.drop_long and settings.max_length is not None and length > settings.max_length:
                left_out[f"longer than {settings.max_length} tokens"] += 1
            elif settings.deduplicate and _is_repeated(part[number], seen):
                left_out["repeats of another one"] += 1
            else:
                kept[place].append(number)
    for place, numbers in enumerate(kept, start=1):
        if not numbers:
            said = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
            remedy = "give another min_length or max_length, or leave it out"
            raise ValueError(f"Part {place} of the data has no sequence left ({said}): {remedy}.")
    if all(weights):
        unit = min(len(numbers) / (weight or 1) for numbers, weight in zip(kept, weights, strict=True))
        for place, (numbers, weight) in enumerate(zip(kept, weights, strict=True)):
            count = max(1, round(unit * (weight or 1)))
            drawn = random.Random(f"mix-{settings.seed}-{place}").sample(range(len(numbers)), count)
            left_out["beyond their weight in the mix"] += len(numbers) - count
            kept[place] = [numbers[index] for index in sorted(drawn)]
    both = zip(parts, kept, strict=True)
    return joined([chosen(*one) for one in both]), {why: count for why, count in left_out.items() if count}


def _is_repeated(example: Example, seen: set[bytes]) -> bool:
    """Whether `seen` holds the example's tokens, as a digest; if not, it is added."""
    key = hashlib.blake2b(example.token_array.tobytes(), digest_size=16).digest()
    if key in seen:
        return True
    seen.add(key)
    return False


@contextmanager
def named_row(number: int, name: str) -> Iterator[None]:
    """Names the row in what the body finds wrong with it, as a ValueError of one sentence."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, TemplateError) as error:
        reason = f"it is malformed ({type(error).__name__}: {error})."
        if isinstance(error, ValueError):
            reason = str(error)
        elif isinstance(error, TemplateError):
            reason = f"the chat template does not take it ({error})."
        raise ValueError(f"Row {number} of {name}: {reason}") from error


def described(examples: Sequence[Example]) -> dict[str, Any]:
    """How much the examples are, and a short hash of them to tell one version of the data from another; each is read once."""
    tokens = supervised = 0
    digest = hashlib.sha256()
    for example in examples:
        tokens += len(example)
        supervised += sum(example.mask_array)
        rejected = [example.rejected.tolist()] if example.rejected else []
        digest.update(repr((example.input_ids, example.loss_mask, *rejected)).encode())
    return {
        "examples": len(examples),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "fingerprint": digest.hexdigest()[:16],
    }


def stop_ids(generation_config: Any) -> set[int]:
    """The ids that end a text."""
    stops = getattr(generation_config, "eos_token_id", None)
    return set() if stops is None else {stops} if isinstance(stops, int) else set(stops)
