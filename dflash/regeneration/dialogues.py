"""Turns rows of data into dialogues: prompts turn by turn, and answers as rows to train on. It imports no model."""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.common.plain_text import check_text
from dflash.training import FORMS, chat_messages, encode_prompt, messages_of


Messages = list[dict[str, Any]]
# A function that returns the token ids of messages, up to where the assistant's answer begins.
Encode = Callable[[Messages], list[int]]


class Unanswerable(ValueError):
    """The error for a row without a question that can be answered. Its message is a phrase, such as `no user turn`."""


@dataclass
class _Sequence:
    """One row to train on: a prompt, then answers of the target and the questions between them."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]  # 1 for a token that the target wrote
    num_messages: int  # how many of the chat's messages there are up to the end of this row

    @property
    def token_ids(self) -> list[int]:
        """The token ids of prompt and response together."""
        return self.prompt_ids + self.response_ids


class Dialogue:
    """A row of data that is being answered. The target writes each assistant turn anew, after its own earlier answers.

    `encode` returns the token ids of messages. A chat has `questions`: for each answer, the messages to add before it.
    Any other row has `prompt_ids`. If its prompt was a text, `columns` is `{"prompt": text}`.
    """

    def __init__(
        self,
        number: int,
        tokenizer: Any,
        encode: Encode,
        questions: Sequence[Messages] = (),
        prompt_ids: Sequence[int] = (),
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self.number = number  # the number of the row, counted from 1
        self.num_turns = max(len(questions), 1)
        self.num_answers = 0
        self.is_cut = False
        self._tokenizer = tokenizer
        self._encode = encode
        self._questions = questions
        self._messages: Messages = []
        self._columns = dict(columns or {})
        self._sequences: list[_Sequence] = []
        self._prompt: array[int] | None = None
        self._ask(prompt_ids)

    @property
    def prompt_ids(self) -> list[int]:
        """The token ids of the next prompt, as a new list. It is empty when the dialogue is done."""
        return [] if self._prompt is None else self._prompt.tolist()

    @property
    def is_done(self) -> bool:
        """Whether all turns are answered, or the dialogue was cut."""
        return self._prompt is None

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens in the next prompt; 0 when the dialogue is done."""
        return len(self._prompt or ())

    def digest(self) -> bytes:
        """Returns a 16-byte hash of the first prompt's token ids and of all later questions.

        Valid before the first answer.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self._prompt or b"")
        digest.update(json.dumps(self._questions[1:], sort_keys=True, default=str).encode())
        return digest.digest()

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the target has written."""
        return sum(sum(sequence.response_mask) for sequence in self._sequences)

    def room(self, max_new_tokens: int, positions: int | None) -> int:
        """Returns the largest number of tokens that the next answer may have.

        It is `max_new_tokens`, or the number of `positions` after the prompt if that is smaller.
        """
        if positions is None:
            return max_new_tokens
        return max(0, min(max_new_tokens, positions - self.num_prompt_tokens))

    def write(self, token_ids: Sequence[int], ended: bool) -> None:
        """Records `token_ids` as the answer to the current prompt, and sets the next prompt.

        If the answer was cut off (not `ended`), the dialogue ends.
        """
        prompt_ids = self.prompt_ids
        text_ids = token_ids[:-1] if ended else token_ids  # without the stop token
        if self._questions:
            self._messages.append({"role": "assistant", "content": self._decoded(text_ids)})
        else:
            # The answer is decoded together with its prompt: some tokenizers drop the first space of a text that is
            # decoded alone.
            text = self._decoded([*prompt_ids, *text_ids])
            if "prompt" in self._columns:
                self._columns["completion"] = text[len(self._decoded(prompt_ids)) :]
            else:
                self._columns["text"] = text
        self._append(prompt_ids, list(token_ids))
        self.num_answers += 1
        if not ended:
            self.end()
        elif self.num_answers == self.num_turns:
            self._prompt = None
        else:
            self._ask()

    def end(self) -> None:
        """Ends the dialogue and marks it as cut: an answer was cut off, or the next one would have no room."""
        self._prompt = None
        self.is_cut = True

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows to train on.

        Each row has `row` (the number of this dialogue's row of data), `parts` (how many rows this dialogue became),
        `finish`, the token ids as the target read and wrote them, and the text for people.

        A chat is one row with a `response_mask`, as long as the template repeats earlier turns token for token. Where
        the template rewrites earlier turns, for example to drop their thinking, another row begins.
        """
        rows = []
        for sequence in self._sequences:
            row: dict[str, Any] = {"row": self.number, "parts": len(self._sequences)}
            row["finish"] = "length" if self.is_cut else "stop"
            row |= self._columns
            if self._questions:
                row["messages"] = self._messages[: sequence.num_messages]
            row["prompt_ids"] = sequence.prompt_ids
            row["response_ids"] = sequence.response_ids
            if not all(sequence.response_mask):
                row["response_mask"] = sequence.response_mask
            rows.append(row)
        return rows

    def _ask(self, prompt_ids: Sequence[int] = ()) -> None:
        """Sets the next prompt: the chat up to its next question, or `prompt_ids` if the row is not a chat."""
        if self._questions:
            self._messages = [*self._messages, *self._questions[self.num_answers]]
            prompt_ids = self._encode(self._messages)
        self._prompt = array("i", prompt_ids)  # many rows wait: this takes 4 bytes a token, a list 36

    def _append(self, prompt_ids: list[int], token_ids: list[int]) -> None:
        """Adds an answer to the last sequence if the prompt begins with that sequence. Otherwise begins a new one."""
        mask = [1] * len(token_ids)
        if self._sequences:
            last = self._sequences[-1]
            repeated = last.token_ids
            if prompt_ids[: len(repeated)] == repeated:
                question = prompt_ids[len(repeated) :]
                last.response_ids += question + token_ids
                last.response_mask += [0] * len(question) + mask
                last.num_messages = len(self._messages)
                return
        self._sequences.append(_Sequence(prompt_ids, token_ids, mask, len(self._messages)))

    def _decoded(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def as_dialogue(
    number: int, row: Mapping[str, Any], tokenizer: Any, num_prompt_tokens: int, **template_kwargs: Any
) -> Dialogue:
    """Returns the dialogue of a row in any supported form, with its first prompt set.

    `number` is the number of the row, counted from 1. The row has one of: `prompt_ids`; `messages` or `conversations`;
    `prompt`, with or without `completion`; `text`, whose first `num_prompt_tokens` tokens are the prompt.

    Raises:
        Unanswerable: for an empty prompt, a chat without a user turn, or tool calls.
        ValueError: for a row of another form. A malformed row may raise other errors, which [`named_row`] turns into a
            ValueError.
    """

    def encode(messages: Messages) -> list[int]:
        return encode_prompt(messages, tokenizer, **template_kwargs)

    def plain(prompt_ids: Sequence[int], **columns: str) -> Dialogue:
        if not prompt_ids:
            raise Unanswerable("an empty prompt")
        return Dialogue(number, tokenizer, encode, prompt_ids=prompt_ids, columns=columns)

    prompt = row.get("prompt")
    if row.get("prompt_ids") is not None:
        return plain(row["prompt_ids"])
    messages = messages_of(row)
    if messages is None and isinstance(prompt, str):
        if not getattr(tokenizer, "chat_template", None):
            return plain(encode_prompt(prompt, tokenizer), prompt=prompt)
        messages = [{"role": "user", "content": prompt}]
    elif messages is None and prompt is not None:
        messages = chat_messages(prompt)
    elif messages is None and isinstance(row.get("text"), str):
        check_text(row["text"], "it")
        return plain(tokenizer(row["text"])["input_ids"][:num_prompt_tokens])
    if messages is None:
        columns = sorted(key for key, value in row.items() if value is not None)
        raise ValueError(f"its columns {columns} hold no question: give {FORMS}.")
    questions = _questions(messages)
    if len(questions) > 1:  # an error of the template in a later turn is raised now, not after the first answer
        encode(messages)
    return Dialogue(number, tokenizer, encode, questions)


def _questions(messages: Messages) -> list[Messages]:
    """Returns the messages to add before each assistant turn. A last question without an answer gets a turn too.

    Messages of the assistant before the first question stay as they are. Raises Unanswerable for tool calls, and if
    there is no user turn.
    """
    if any(message["role"] in ("tool", "function") or message.get("tool_calls") for message in messages):
        raise Unanswerable("tool calls, which the target's new turns might not repeat")
    questions: list[Messages] = [[]]
    is_asked = False
    for message in messages:
        if message["role"] != "assistant" or not is_asked:
            questions[-1].append(message)
            is_asked |= message["role"] == "user"
        elif questions[-1]:  # two answers in a row count as a single turn
            questions.append([])
    if not is_asked:
        raise Unanswerable("no user turn")
    return questions if questions[-1] else questions[:-1]
