"""The steps of `dflash eval`: load questions, share them among processes, answer them, keep the answers, and summarise."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash.common.files import check_output, check_writable, only_writer
from dflash.common.fingerprints import fingerprint
from dflash.common.provenance import public_name, record, write_result
from dflash.common.runs import Run
from dflash.common.version import __version__

from .backends import Backend
from .journal import Journal, key
from .scoring import check_scorers
from .task_answers import TaskAnswer, answer_questions, by_category, chat_encoder, numbered, summarise_answers
from .tasks import TASKS, Question, known_task, load_questions


@dataclass(frozen=True)
class EvalPlan:
    """The names of a pair and of tasks, and how they are evaluated."""

    target: str  # a Hub id or a folder
    drafter: str
    tasks: tuple[str, ...]  # names of [`TASKS`]; none, if all questions are of prompts
    num_prompts: int | None = None  # per task, `None` for all
    seed: int = 0  # chooses the questions
    data_root: Path | None = None  # a folder of local rows
    repeats: int = 1  # answers of each method to each question
    thinking: bool = False  # whether the chat template asks for thinking
    chat_template: bool = True
    score: bool = True  # whether answers are scored; code that the target wrote runs then, confined
    unsafe_code: bool = False  # whether it runs even where this system cannot confine it


# Fields of the environment that a kept answer depends on.
DEPENDS_ON = (
    "torch", "transformers", "cpu", "threads", "device", "target_dtype", "drafter_dtype", "attention",
    "target_parameters", "drafter_parameters", "block_size", "target_weights", "target_config", "drafter_weights",
    "drafter_config", "engine",
)  # fmt: skip


def questions_of(plan: EvalPlan) -> list[Question]:
    """All questions of a plan, task by task; raises as [`load_questions`] does, before any model is needed."""
    scorers = [known_task(name).scorer for name in plan.tasks]
    if plan.score:
        check_scorers(filter(None, scorers), plan.unsafe_code)
    questions = []
    for name in plan.tasks:
        questions += load_questions(name, plan.num_prompts, plan.seed, plan.data_root)
    if not plan.score:
        questions = [replace(question, reference=None) for question in questions]
    return questions


def check_eval_output(output: Path, overwrite: bool = False) -> None:
    """Raises ValueError or OSError if [`run_eval`] could not write `output`: asked before models are loaded.

    A result with its journal beside it may be continued. Any other result is replaced only with `overwrite`, and a file that
    has the journal's name and is none stays.
    """
    check_writable(output)
    if output.suffix != ".json":  # its journal would be another's too
        raise ValueError(
            f"The output {output} must end in .json, and its journal beside it ends in .jsonl: rename it."
        )
    journal = output.with_suffix(".jsonl")
    check_writable(journal)
    Journal(journal, {}).parts()
    check_output(output, overwrite or journal.exists())


def run_eval(
    plan: EvalPlan,
    questions: Sequence[Question],
    backend: Backend,
    tokenizer: Any,
    output: Path | None = None,
    overwrite: bool = False,
    run: Run | None = None,
) -> dict[str, Any]:
    """Answers the questions and returns the result, the same in every process; the first one writes it to `output`.

    A journal (`.jsonl`) beside `output` keeps finished questions and their texts; they are not measured again.
    `questions` are those of [`questions_of`], of [`questions_of_prompts`] or both; `backend` is a [`pair_backend`] or a
    [`server_backend`]. `overwrite` begins anew where `output` or its journal exists. `run` is told at its start the number
    of questions to answer here and of those that were answered before, and then each question's answers. ValueError if the
    journal was begun with other settings, or another process writes `output`.
    """
    run = run or Run()
    processes = run.processes
    with ExitStack() as lock:
        if output is not None and processes.is_first and not run.is_locked:
            check_eval_output(output, overwrite)
            lock.enter_context(only_writer(output))
        decoding = _decoding(plan, backend, tokenizer)
        journal = None
        done: dict[str, list[TaskAnswer]] = {}
        if output is not None:
            journal = _journal(output, backend, decoding, processes.rank)
            if overwrite:
                if processes.is_first:
                    journal.delete()
                processes.gather([None])  # no process reads before the old answers are deleted
            done = dict(processes.gather(list(journal.read().items())))
            journal.mend()
        left = [question for question in questions if key(question) not in done]
        share = processes.share(left)
        run.on_begin(len(share), len(questions) - len(left))
        answered = answer_questions(
            share,
            backend.begin,
            chat_encoder(tokenizer, plan.thinking, plan.chat_template),
            tokenizer,
            backend.memory,
            plan.repeats,
            backend.max_prompt_tokens,
            plan.unsafe_code,
        )
        own = []
        for question, answers in zip(share, answered, strict=True):
            if journal is not None:
                journal.add(question, answers)
            own.append((key(question), answers))
            run.on_done(answers)
        done |= dict(processes.gather(own))
        result = _result(plan, questions, backend, decoding, done, processes.count)
        if output is not None and journal is not None and processes.is_first:
            journal.join_parts()
            write_result(output, result)
        return result


def _decoding(plan: EvalPlan, backend: Backend, tokenizer: Any) -> dict[str, Any]:
    """How the questions are answered, for the record."""
    return {
        "target": public_name(plan.target),
        "drafter": public_name(plan.drafter),
        "temperature": 0.0,
        "batch_size": 1,
        "max_new_tokens": backend.max_new_tokens,
        "repeats": plan.repeats,
        "methods": list(backend.begin()),
        "enable_thinking": plan.thinking,
        "chat_template": tokenizer.chat_template if plan.chat_template else None,
        "peak_memory": "not measured" if backend.memory is None else backend.memory.kind,
        **backend.decoding,
    }


def _journal(output: Path, backend: Backend, decoding: dict[str, Any], rank: int) -> Journal:
    """This process's journal beside `output`. The answers in it depend on the machine and on `decoding`."""
    settings = {name: backend.environment.get(name) for name in DEPENDS_ON}
    settings |= {"dflash": __version__, **decoding}
    if settings["chat_template"] is not None:
        settings["chat_template"] = fingerprint(settings["chat_template"])
    path = output.with_suffix(".jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    return Journal(path, settings, rank)


def _result(
    plan: EvalPlan,
    questions: Sequence[Question],
    backend: Backend,
    decoding: dict[str, Any],
    done: dict[str, list[TaskAnswer]],
    num_processes: int,
) -> dict[str, Any]:
    """The result of all answers, by the keys of their questions."""
    answers = numbered(answer for question in questions for answer in done[key(question)])
    if not answers:
        raise ValueError(
            f"No prompt fits: with --max-new-tokens {backend.max_new_tokens} the target's positions leave room for "
            f"{backend.max_prompt_tokens} tokens, lower it."
        )
    measurements = [asdict(answer) for answer in answers]
    for measurement in measurements:
        del measurement["text"]  # which the journal keeps
    return record(
        "eval",
        {**backend.environment, "processes": num_processes},
        decoding={**decoding, "prompts_per_task": plan.num_prompts, "seed": plan.seed},
        tasks=[
            _described(name, questions, answers) for name in dict.fromkeys(question.task for question in questions)
        ],
        summary=summarise_answers(answers),
        categories=by_category(answers),
        measurements=measurements,
    )


def _described(name: str, questions: Sequence[Question], answers: Sequence[TaskAnswer]) -> dict[str, Any]:
    """A task, or a file of prompts, with the numbers of its questions."""
    own = [question for question in questions if question.task == name]
    with_reference = [question for question in own if question.reference is not None]
    answered = {answer.row for answer in answers if answer.task == name}
    facts: dict[str, Any] = {"scorer": None}
    if name in TASKS:
        task = TASKS[name]
        facts = {
            "data_set": task.address,
            "config": task.config,
            "split": task.split,
            "source": task.source,
            "scorer": task.scorer,
        }
    return {
        "task": name,
        **facts,
        "prompts": len(own),
        "too_long": len(own) - len(answered),
        "with_answers": len(with_reference),
    }
