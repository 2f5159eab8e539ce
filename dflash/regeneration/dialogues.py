"""Rows of data as dialogues: prompts turn by turn, and the answers as rows to train on. It knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from dflash.training import FORMS, encode_prompt, sharegpt_messages


Message = dict[str, Any]


class Unanswerable(ValueError):
    """A row without a question that can be answered; the message is a phrase."""


class Dialogue:
    """One row in progress: the assistant's turns are written anew in order, each after the new ones before it.

    Args:
        number: The row's number, from 1.
        questions: The messages before each answer; empty for a row without messages.
        prompt_ids: The prompt of the first answer.
        columns: The prompt's text as `prompt`, for a row that has one and no messages.
        tokenizer: The target's.
        template_kwargs: For its chat template.
    """

    def __init__(
        self,
        number: int,
        questions: list[list[Message]],
        prompt_ids: list[int],
        columns: dict[str, str],
        tokenizer: Any,
        template_kwargs: dict[str, Any],
    ) -> None:
        self.number = number
        self.prompt_ids: list[int] | None = prompt_ids  # `None` when nothing is left to answer
        self.num_turns = max(len(questions), 1)
        self.num_answers = 0
        self.is_cut = False
        self._questions = questions
        self._messages = list(questions[0]) if questions else []
        self._columns = columns
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs
        self._sequences: list[tuple[list[int], list[int], list[int], int]] = []  # prompt, response, mask, messages

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were written."""
        return sum(sum(mask) for _, _, mask, _ in self._sequences)

    def room(self, max_new_tokens: int, positions: int | None) -> int:
        """The longest next answer; 0 if its prompt fills the positions."""
        used = len(self.prompt_ids or ())
        return max_new_tokens if positions is None else max(0, min(max_new_tokens, positions - used))

    def write(self, token_ids: Sequence[int], ended: bool) -> None:
        """Takes the answer to `prompt_ids` and sets the next prompt; an answer that was cut ends the dialogue."""
        assert self.prompt_ids is not None
        self.num_answers += 1
        spoken = token_ids[:-1] if ended else token_ids
        if self._questions:
            self._messages.append({"role": "assistant", "content": self._decode(spoken)})
        else:
            # Decoded together with its prompt: alone, some tokenizers would drop its first space.
            text = self._decode([*self.prompt_ids, *spoken])
            is_completion = "prompt" in self._columns
            answered = {"completion": text[len(self._decode(self.prompt_ids)) :]} if is_completion else {"text": text}
            self._columns = self._columns | answered
        self._append(self.prompt_ids, token_ids)
        if not ended:
            self.end()
        elif self.num_answers == self.num_turns:
            self.prompt_ids = None
        else:
            self._messages += self._questions[self.num_answers]
            self.prompt_ids = _prompt_ids(self._messages, self._tokenizer, self._template_kwargs)

    def end(self) -> None:
        """Ends the dialogue: the length is used up."""
        self.prompt_ids, self.is_cut = None, True

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

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

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
    """The dialogue of one row of data, whatever its form.

    Args:
        number: The row's number, from 1.
        row: `messages` (or `conversations`), `prompt` with or without `completion`, `text`, or `prompt_ids`.
        tokenizer: The target's.
        num_prompt_tokens: Number of tokens of a `text` that are its prompt.
        template_kwargs: For the chat template.

    Raises:
        Unanswerable: for a row without a question.
        ValueError: for a row that is malformed or of another form, by its number.
    """
    try:
        return _as_dialogue(number, row, tokenizer, num_prompt_tokens, template_kwargs)
    except Unanswerable:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else f"it is malformed ({type(error).__name__}: {error})."
        raise ValueError(f"Row {number}: {reason}") from error
    except TemplateError as error:
        raise ValueError(f"Row {number}: the chat template does not take it ({error}).") from error


def _as_dialogue(
    number: int, row: Mapping[str, Any], tokenizer: Any, num_prompt_tokens: int, template_kwargs: dict[str, Any]
) -> Dialogue:
    def plain(prompt_ids: list[int], columns: dict[str, str]) -> Dialogue:
        if not prompt_ids:
            raise Unanswerable("an empty prompt")
        return Dialogue(number, [], prompt_ids, columns, tokenizer, template_kwargs)

    prompt = row.get("prompt")
    if row.get("prompt_ids") is not None:
        return plain(list(row["prompt_ids"]), {})
    if row.get("messages") is not None:
        messages = [dict(message) for message in row["messages"]]
    elif row.get("conversations") is not None:
        messages = sharegpt_messages(row["conversations"])
    elif isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, str):
        return plain(encode_prompt(prompt, tokenizer), {"prompt": prompt})
    elif prompt is not None:
        messages = [dict(message) for message in prompt]
    elif isinstance(row.get("text"), str):
        return plain(list(tokenizer(row["text"])["input_ids"])[:num_prompt_tokens], {})
    else:
        raise ValueError(
            f"its columns {sorted(key for key, value in row.items() if value is not None)} ask nothing: give {FORMS}."
        )
    questions = _questions(messages)
    prompt_ids = _prompt_ids(questions[0], tokenizer, template_kwargs)
    if len(questions) > 1:  # refused now and not after the first answer
        _prompt_ids(messages, tokenizer, template_kwargs)
    return Dialogue(number, questions, prompt_ids, {}, tokenizer, template_kwargs)


def _prompt_ids(messages: list[Message], tokenizer: Any, template_kwargs: dict[str, Any]) -> list[int]:
    return encode_prompt(messages, tokenizer, **template_kwargs)


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
