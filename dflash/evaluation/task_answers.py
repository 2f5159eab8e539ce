"""Asks each method each question, in turns and under the clock, and scores the answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dflash.common.messages import first_line
from dflash.common.plain_text import check_text

from .backends import Begin
from .measurements import Measurement, measured, ratio, summarise, take_turns
from .memory import PeakMemory
from .methods import Method
from .results import Row, grouped
from .sandbox import Limits
from .scoring import is_right
from .tasks import TASKS, Question
from .timing import TimedRun


TEMPLATE_REMEDY = "correct it, or do without (--no-chat-template of the commands, chat_template=False in Python)"
# A dialogue of `{"role", "content"}` to ids [1, S].
Encode = Callable[[list[dict[str, str]]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TaskAnswer(Measurement):
    """One method's answer to one turn of a question."""

    row: int  # the question's in its data set
    turn: int  # counted from 0
    category: str | None
    score: bool | None  # whether it is right; `None` without a reference, and for all turns but the last
    peak_memory_bytes: int | None  # while the method ran
    text: str


def chat_encoder(tokenizer: Any, thinking: bool = False, chat_template: bool = True) -> Encode:
    """A function that encodes dialogues in the tokenizer's chat template; without a template, turns are paragraphs.

    It raises ValueError for a prompt that is no text, for a template that fails, and for a template that leaves the prompt out.
    """

    def encode(messages: list[dict[str, str]]) -> torch.Tensor:
        for message in messages:
            check_text(message["content"])
        if not chat_template or tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            return tokenizer(text, return_tensors="pt")["input_ids"]
        text = in_template(messages)
        *earlier, last = messages
        longer = {**last, "content": f"{last['content']} again"}
        if text == in_template([*earlier, longer]):
            raise ValueError(f"The target's chat template writes nothing of the prompt: {TEMPLATE_REMEDY}.")
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    def in_template(messages: list[dict[str, str]]) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise ValueError(
                f"The target's chat template does not take the prompt ({first_line(error)}): {TEMPLATE_REMEDY}."
            ) from error

    return encode


def answer_questions(
    questions: Iterable[Question],
    begin: Begin,
    encode: Encode,
    tokenizer: Any,
    memory: PeakMemory | None = None,
    repeats: int = 1,
    max_prompt_tokens: int | None = None,
    unsafe_code: bool = False,
) -> Iterator[list[TaskAnswer]]:
    """The answers to each question, of all turns and methods, as soon as the question is done.

    The first question is answered once before, unmeasured. The order of the methods rotates from question to question.
    Every method gets the same prompt: later turns contain the first method's answers. Each method answers `repeats`
    times; texts and scores are those of the first time. A dialogue ends before a turn whose prompt is longer than
    `max_prompt_tokens`; if that is the first, it has no answers. Answers that are programs run confined, or raise where
    this system cannot confine them, unless `unsafe_code` runs them all the same.
    """
    limits = Limits(unsafe_code=unsafe_code)
    is_warm = False
    for number, question in enumerate(questions):
        messages = [dict(message) for message in question.before]
        answers: list[TaskAnswer] = []
        dialogues: list[dict[str, Method]] = []  # the methods of each repeat
        for turn, content in enumerate(question.turns):
            messages.append({"role": "user", "content": content})
            input_ids = encode(messages)
            if max_prompt_tokens is not None and input_ids.shape[1] > max_prompt_tokens:
                break
            if not is_warm:
                take_turns(begin(), input_ids, 0)
                is_warm = True
            if not dialogues:
                dialogues = [begin() for _ in range(repeats)]
            peaks: dict[str, int] = {}
            rounds = []
            for repeat, methods in enumerate(dialogues):
                watched = methods if memory is None else _watched(methods, memory, peaks)
                rounds.append(take_turns(watched, input_ids, number + repeat))
            texts = {
                name: tokenizer.decode(run.token_ids, skip_special_tokens=True) for name, run in rounds[0].items()
            }
            is_last = turn == len(question.turns) - 1
            opening = _open_thought(tokenizer, input_ids)
            said = {name: opening + text for name, text in texts.items()}
            scores = _scores(question, said, limits) if is_last else {}
            for measurement in measured(question.task, turn, rounds):
                answers.append(
                    TaskAnswer(
                        **vars(measurement),
                        row=question.index,
                        turn=turn,
                        category=question.category,
                        score=scores.get(measurement.method),
                        peak_memory_bytes=peaks.get(measurement.method),
                        text=texts[measurement.method],
                    )
                )
            messages.append({"role": "assistant", "content": next(iter(texts.values()))})
        yield answers


def _watched(methods: dict[str, Method], memory: PeakMemory, peaks: dict[str, int]) -> dict[str, Method]:
    """The methods; `peaks` takes the peak memory of each one's runs."""

    def run(name: str, input_ids: torch.Tensor) -> TimedRun:
        memory.reset()
        timed = methods[name](input_ids)
        peak = memory.read()
        if peak is not None:
            peaks[name] = max(peaks.get(name, 0), peak)
        return timed

    return {name: partial(run, name) for name in methods}


def _open_thought(tokenizer: Any, input_ids: torch.Tensor) -> str:
    """The `<think>` with which some chat templates end a prompt, where an answer would not repeat it; else nothing."""
    prompt = tokenizer.decode(input_ids[0].tolist(), skip_special_tokens=True)
    return "<think>" if prompt.rstrip().endswith("<think>") else ""


def _scores(question: Question, texts: dict[str, str], limits: Limits) -> dict[str, bool]:
    """Whether each method's text is right, equal texts scored once; empty without a reference."""
    task = TASKS.get(question.task)
    if task is None or task.scorer is None or question.reference is None:
        return {}
    right: dict[str, bool] = {}
    scores = {}
    for name, text in texts.items():
        if text not in right:
            right[text] = is_right(task.scorer, text, question.reference, limits)
        scores[name] = right[text]
    return scores


def summarise_answers(answers: Sequence[TaskAnswer]) -> list[Row]:
    """The rows of [`summarise`] with the share of right answers (`score`) among `scored`, and the peak memory."""
    rows = summarise(answers)
    groups = grouped(answers, lambda answer: (answer.task, answer.method))
    for row in rows:
        chosen = groups[row["task"], row["method"]]
        scores = _known(answer.score for answer in chosen)
        peaks = _known(answer.peak_memory_bytes for answer in chosen)
        row["score"] = ratio(sum(scores), len(scores))
        row["scored"] = len(scores)
        row["peak_memory_bytes"] = max(peaks, default=None)
    return rows


def _known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def numbered(answers: Iterable[TaskAnswer]) -> list[TaskAnswer]:
    """Answers in the order of tasks, rows and turns; each turn of each question has its own `prompt_index`."""
    order = {task: number for number, task in enumerate(TASKS)}

    def place(answer: TaskAnswer) -> tuple[Any, ...]:
        number = order.get(answer.task, len(order))
        return number, answer.task, answer.row, answer.turn

    indices: dict[Any, int] = {}
    ordered = []
    for answer in sorted(answers, key=place):
        index = indices.setdefault(place(answer), len(indices))
        ordered.append(replace(answer, prompt_index=index))
    return ordered


def by_category(answers: Sequence[TaskAnswer]) -> list[Row]:
    """[`summarise_answers`] for each category of the tasks that have them."""
    with_category = [answer for answer in answers if answer.category is not None]
    rows = []
    for (_, category), chosen in grouped(with_category, lambda answer: (answer.task, answer.category)).items():
        for row in summarise_answers(chosen):
            rows.append({**row, "category": category})
    return rows
