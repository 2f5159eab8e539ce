"""Each method's answers to each question: asked in turns, under the clock, and scored."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from dflash.common.messages import first_line
from dflash.common.plain_text import check_text

from .backends import Begin
from .measurements import Measurement, measured, summarise, take_turns
from .memory import PeakMemory
from .methods import Method
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

    It raises ValueError for a prompt that is no text, a template that does not take it, and one that leaves it out.
    """

    def encode(messages: list[dict[str, str]]) -> torch.Tensor:
        for message in messages:
            check_text(message["content"])
        if not chat_template or tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            return tokenizer(text, return_tensors="pt")["input_ids"]
        text = in_template(messages)
        last = messages[-1]
        if text == in_template([*messages[:-1], {**last, "content": f"{last['content']} again"}]):
            raise ValueError(f"The target's chat template writes nothing of the prompt: {TEMPLATE_REMEDY}.")
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    def in_template(messages: list[dict[str, str]]) -> str:
        how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
        try:
            return str(tokenizer.apply_chat_template(messages, **how))
        except Exception as error:  # a template is a program: it can raise anything
            said = f"The target's chat template does not take the prompt ({first_line(error)})"
            raise ValueError(f"{said}: {TEMPLATE_REMEDY}.") from error

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
    is_warm = False
    for number, question in enumerate(questions):
        messages = [dict(message) for message in question.before]
        answers: list[TaskAnswer] = []
        sessions: list[dict[str, Method]] = []
        for turn, said in enumerate(question.turns):
            messages.append({"role": "user", "content": said})
            input_ids = encode(messages)
            if max_prompt_tokens is not None and input_ids.shape[1] > max_prompt_tokens:
                break
            if not is_warm:
                take_turns(begin(), input_ids, 0)
                is_warm = True
            sessions = sessions or [begin() for _ in range(repeats)]
            peaks: dict[str, int] = {}
            rounds = []
            for repeat, methods in enumerate(sessions):
                if memory is not None:
                    methods = {name: partial(_watched, memory, peaks, name, run) for name, run in methods.items()}
                rounds.append(take_turns(methods, input_ids, number + repeat))
            texts = {
                name: tokenizer.decode(run.token_ids, skip_special_tokens=True) for name, run in rounds[0].items()
            }
            scores: dict[str, bool] = {}
            if turn == len(question.turns) - 1:
                scores = _scores(question, texts, Limits(unsafe_code=unsafe_code))
            for one in measured(question.task, turn, rounds):
                score, peak, text = scores.get(one.method), peaks.get(one.method), texts[one.method]
                known: dict[str, Any] = {"row": question.index, "turn": turn, "category": question.category}
                answers.append(TaskAnswer(**vars(one), **known, score=score, peak_memory_bytes=peak, text=text))
            messages.append({"role": "assistant", "content": next(iter(texts.values()))})
        yield answers


def _watched(
    memory: PeakMemory, peaks: dict[str, int], name: str, method: Method, input_ids: torch.Tensor
) -> TimedRun:
    """The method's run; `peaks` takes its peak memory."""
    memory.reset()
    run = method(input_ids)
    peaks[name] = max(peaks.get(name, 0), memory.read())
    return run


def _scores(question: Question, texts: dict[str, str], limits: Limits) -> dict[str, bool]:
    """Whether each method's text is right, equal texts scored once; empty without a reference."""
    scorer = TASKS[question.task].scorer if question.task in TASKS else None
    if scorer is None or question.reference is None:
        return {}
    right = {text: is_right(scorer, text, question.reference, limits) for text in set(texts.values())}
    return {name: right[text] for name, text in texts.items()}


def summarise_answers(answers: Sequence[TaskAnswer]) -> list[dict[str, Any]]:
    """The rows of [`summarise`] with the share of right answers (`score`) among `scored`, and the peak memory."""
    rows = summarise(answers)
    for row in rows:
        chosen = [a for a in answers if a.task == row["task"] and a.method == row["method"]]
        scores = [answer.score for answer in chosen if answer.score is not None]
        peaks = [answer.peak_memory_bytes for answer in chosen if answer.peak_memory_bytes is not None]
        row["score"] = round(sum(scores) / len(scores), 4) if scores else None
        row["scored"] = len(scores)
        row["peak_memory_bytes"] = max(peaks, default=None)
    return rows


def numbered(answers: Iterable[TaskAnswer]) -> list[TaskAnswer]:
    """Answers in the order of tasks, rows and turns; each turn of each question has its own `prompt_index`."""
    order = {name: place for place, name in enumerate(TASKS)}
    ordered = sorted(answers, key=lambda a: (order.get(a.task, len(order)), a.task, a.row, a.turn))
    turns = groupby(ordered, key=lambda a: (a.task, a.row, a.turn))
    return [replace(answer, prompt_index=index) for index, (_, group) in enumerate(turns) for answer in group]


def by_category(answers: Sequence[TaskAnswer]) -> list[dict[str, Any]]:
    """[`summarise_answers`] for each category of the tasks that have them."""
    kinds = [replace(a, task=f"{a.task}/{a.category}") for a in answers if a.category is not None]
    rows = summarise_answers(kinds)
    for row in rows:
        row["task"], row["category"] = row["task"].split("/", 1)
    return rows
