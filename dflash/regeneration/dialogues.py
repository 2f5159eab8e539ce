"""Rows of data as dialogues: prompts turn by turn, and the answers as rows to train on. It knows no model."""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dflash.common.plain_text import check_text
from dflash.training import FORMS, chat_messages, encode_prompt, sharegpt_messages


Message = dict[str, Any]


class Unanswerable(ValueError):
    """A row without a question that can be answered; the message is a phrase."""


class Dialogue:
    """One row in progress: the assistant's turns are written anew in order, each after the new ones before it.

    `encode` gives the ids of messages. A row of messages has `questions`: those before each answer. Another has
    `prompt_ids`, and its prompt's text in `columns`.
    """

    def __init__(
        self,
        number: int,
        tokenizer: Any,
        encode: Callable[[list[Message]], list[int]],
        questions: Sequence[list[Message]] = (),
        prompt_ids: list[int] | None = None,
        columns: dict[str, str] | None = None,
    ) -> None:
        self.number = number  # of the row, from 1
        self._prompt: array[int] | None = None
        self._ask(encode(questions[0]) if questions else prompt_ids or ())
        self.num_turns = max(len(questions), 1)
        self.num_answers = 0
        self.is_cut = False
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._encode, self._questions = encode, questions
        self._messages = list(questions[0]) if questions else []
        self._columns = columns or {}
        self._sequences: list[tuple[list[int], list[int], list[int], int]] = []  # prompt, response, mask, messages

    @property
    def prompt_ids(self) -> list[int] | None:
        """The next prompt, in a new list; `None` when nothing is left to answer."""
        return None if self._prompt is None else self._prompt.tolist()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to answer."""
        return self._prompt is None

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the next prompt."""
        return len(self._prompt or ())

    def digest(self) -> bytes:
        """A digest of what is asked: the first prompt as it is sent, and the questions after it."""
        first = b"" if self._prompt is None else self._prompt.tobytes()
        later = json.dumps(self._questions[1:], sort_keys=True, default=str).encode()
        return hashlib.blake2b(first + later, digest_size=16).digest()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were written."""
        return sum(sum(mask) for _, _, mask, _ in self._sequences)

    def room(self, max_new_tokens: int, positions: int | None) -> int:
        """The longest next answer; 0 if its prompt fills the positions."""
        return max_new_tokens if positions is None else max(0, min(max_new_tokens, positions - self.num_prompt_tokens))

    def write(self, token_ids: Sequence[int], ended: bool) -> None:
        """Takes the answer to `prompt_ids` and sets the next prompt; an answer that was cut ends the dialogue."""
        prompt_ids = self.prompt_ids
        assert prompt_ids is not None
        self.num_answers += 1
        spoken = token_ids[:-1] if ended else token_ids
        if self._questions:
            self._messages.append({"role": "assistant", "content": self._decode(spoken)})
        else:
            # Decoded together with its prompt: alone, some tokenizers would drop its first space.
            text = self._decode([*prompt_ids, *spoken])
            is_completion = "prompt" in self._columns
            answered = {"completion": text[len(self._decode(prompt_ids)) :]} if is_completion else {"text": text}
            self._columns = self._columns | answered
        self._append(prompt_ids, token_ids)
        if not ended:
            self.end()
        elif self.num_answers == self.num_turns:
            self._prompt = None
        else:
            self._messages += self._questions[self.num_answers]
            self._ask(self._encode(self._messages))

    def end(self) -> None:
        """Ends the dialogue: the length is used up."""
        self._prompt, self.is_cut = None, True

    def rows(self) -> list[dict[str, Any]]:
        """The rows to train on: ids as the target read and wrote them, the finish, and a text for people.

        A chat is one row with a `response_mask` as long as the template repeats earlier turns token for token. If the
        template rewrites them, as those that drop earlier thinking do, another row begins.
        """
        found = []
        for prompt_ids, response_ids, mask, num_messages in self._sequences:
            row: dict[str, Any] = {"row": self.number, "parts": len(self._sequences)}
            row["finish"] = "length" if self.is_cut else "stop"
            row |= {"messages": self._messages[:num_messages]} if self._questions else self._columns
            row |= {"prompt_ids": prompt_ids, "response_ids": response_ids}
            found.append(row if all(mask) else row | {"response_mask": mask})
        return found

    def _ask(self, prompt_ids: Sequence[int]) -> None:
        self._prompt = array("i", prompt_ids)  # 4 bytes a token, where a list takes 36: many rows wait

    def _append(self, prompt_ids: list[int], token_ids: Sequence[int]) -> None:
        if self._sequences:
            first_prompt, response_ids, mask, _ = self._sequences[-1]
            held = [*first_prompt, *response_ids]
            if prompt_ids[: len(held)] == held:
                between = prompt_ids[len(held) :]
                response_ids += [*between, *token_ids]
                mask += [0] * len(between) + [1] * len(token_ids)
                self._sequences[-1] = (first_prompt, response_ids, mask, len(self._messages))
                return
        self._sequences.append((list(prompt_ids), list(token_ids), [1] * len(token_ids), len(self._messages)))


def as_dialogue(
    number: int, row: Mapping[str, Any], tokenizer: Any, num_prompt_tokens: int, **template_kwargs: Any
) -> Dialogue:
    """The dialogue of row `number` (from 1), whatever its form.

    It has `messages` (or `conversations`), `prompt` with or without `completion`, `text`, whose first
    `num_prompt_tokens` tokens are the prompt, or `prompt_ids`.

    Raises:
        Unanswerable: for a row without a question.
        ValueError: for a row of another form; what a malformed one raises is for [`named_row`] to say.
    """

    def encode(messages: list[Message]) -> list[int]:
        return encode_prompt(messages, tokenizer, **template_kwargs)

    def plain(prompt_ids: list[int], **columns: str) -> Dialogue:
        if not prompt_ids:
            raise Unanswerable("an empty prompt")
        return Dialogue(number, tokenizer, encode, prompt_ids=prompt_ids, columns=columns)

    prompt = row.get("prompt")
    if row.get("prompt_ids") is not None:
        return plain(list(row["prompt_ids"]))
    if row.get("messages") is not None:
        messages = chat_messages(row["messages"])
    elif row.get("conversations") is not None:
        messages = sharegpt_messages(row["conversations"])
    elif isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, str):
        return plain(encode_prompt(prompt, tokenizer), prompt=prompt)
    elif prompt is not None:
        messages = chat_messages(prompt)
    elif isinstance(row.get("text"), str):
        check_text(row["text"], "it")
        return plain(list(tokenizer(row["text"])["input_ids"])[:num_prompt_tokens])
    else:
        named = sorted(key for key, value in row.items() if value is not None)
        raise ValueError(f"its columns {named} ask nothing: give {FORMS}.")
    questions = _questions(messages)
    if len(questions) > 1:  # a template that does not take later turns is refused now and not after the first answer
        encode(messages)
    return Dialogue(number, tokenizer, encode, questions)


def _questions(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages before each of the assistant's turns, and before the answer to a last question.

    The assistant's messages before the first question stay as they are.
    """
    if any(message["role"] in ("tool", "function") or message.get("tool_calls") for message in messages):
        raise Unanswerable("calls of tools, which the target's own turns may not make")
    questions: list[list[Message]] = [[]]
    is_asked = False
    for message in messages:
        if message["role"] == "assistant" and is_asked:
            if questions[-1]:  # two answers in a row are one
                questions.append([])
            continue
        questions[-1].append(message)
        is_asked |= message["role"] == "user"
    if not is_asked:
        raise Unanswerable("no user turn")
    return questions if questions[-1] else questions[:-1]
