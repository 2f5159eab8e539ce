"""`dflash eval` from names of tasks to a result: load, share out, answer, keep, gather, summarise."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash.common.files import check_output, check_writable, only_writer
from dflash.common.processes import Processes
from dflash.common.provenance import public_name, record, write_result

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
    "target_parameters", "drafter_parameters", "block_size",
)  # fmt: skip

# Called with a process's share at its start (questions to answer here, questions done before) and at each answer.
Begun = Callable[[int, int], None]
Done = Callable[[list[TaskAnswer]], None]


def questions_of(plan: EvalPlan) -> list[Question]:
    """All questions of a plan, task by task; raises as [`load_questions`] does, before any model is needed."""
    scorers = {known_task(name).scorer for name in plan.tasks}
    if plan.score:
        check_scorers((scorer for scorer in scorers if scorer is not None), plan.unsafe_code)
    return [
        question if plan.score else replace(question, reference=None)
        for name in plan.tasks
        for question in load_questions(name, plan.num_prompts, plan.seed, plan.data_root)
    ]


def check_eval_output(output: Path, overwrite: bool = False) -> None:
    """Raises ValueError or OSError if [`run_eval`] could not write `output`: asked before models are loaded.

    A result with its journal beside it may be continued. Any other file is replaced only with `overwrite`.
    """
    check_writable(output)
    journal = output.with_suffix(".jsonl")
    if journal == output:
        raise ValueError(f"The output {output} must not end in .jsonl, as its journal does: end it in .json.")
    check_writable(journal)
    check_output(output, overwrite or journal.exists())


def run_eval(
    plan: EvalPlan,
    questions: Sequence[Question],
    backend: Backend,
    tokenizer: Any,
    output: Path | None = None,
    processes: Processes | None = None,
    on_begin: Begun = lambda share, done: None,
    on_question: Done = lambda answers: None,
    overwrite: bool = False,
    is_locked: bool = False,
) -> dict[str, Any]:
    """Answers the questions and returns the result, the same in every process; the first one writes it to `output`.

    A journal (`.jsonl`) beside `output` keeps finished questions and their texts; they are not measured again.
    `questions` are those of [`questions_of`], of [`questions_of_prompts`] or both; `backend` is a [`pair_backend`] or a
    [`server_backend`]. `processes` are by default those of the launcher's variables. `overwrite` begins anew where
    `output` or its journal exists. `is_locked` says that the caller has checked `output` ([`check_eval_output`]) and holds
    its lock (`only_writer`), as who loads a model first should. ValueError if the journal was begun with other settings,
    or another process writes `output`.
    """
    processes = processes or Processes()
    with ExitStack() as lock:
        if output is not None and processes.is_first and not is_locked:
            check_eval_output(output, overwrite)
            lock.enter_context(only_writer(output))
        decoding = {
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
        journal: Journal | None = None
        done: dict[str, list[TaskAnswer]] = {}
        if output is not None:
            template = decoding["chat_template"]
            digest = None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]
            setup = {name: backend.environment.get(name) for name in DEPENDS_ON}
            settings = setup | decoding | {"chat_template": digest}
            journal = Journal(output.with_suffix(".jsonl"), settings, processes.rank)
            journal.path.parent.mkdir(parents=True, exist_ok=True)
            if overwrite:
                for part in journal.parts() if processes.is_first else ():
                    part.unlink()
                processes.gather([None])  # no process reads before the old answers are deleted
            done = dict(processes.gather(list(journal.read().items())))
            journal.mend()
        left = [question for question in questions if key(question) not in done]
        share = processes.share(left)
        on_begin(len(share), len(questions) - len(left))
        encode = chat_encoder(tokenizer, plan.thinking, plan.chat_template)
        limits = backend.memory, plan.repeats, backend.max_prompt_tokens
        answered = answer_questions(share, backend.begin, encode, tokenizer, *limits, unsafe_code=plan.unsafe_code)
        made = []
        for question, answers in zip(share, answered, strict=True):
            if journal is not None:
                journal.add(question, answers)
            made.append((key(question), answers))
            on_question(answers)
        done |= dict(processes.gather(made))
        answers = numbered(answer for question in questions for answer in done[key(question)])
        if not answers:
            room = f"the target's positions leave room for {backend.max_prompt_tokens} tokens"
            raise ValueError(f"No prompt fits: with --max-new-tokens {backend.max_new_tokens} {room}, lower it.")
        result = record(
            "eval",
            {**backend.environment, "processes": processes.count},
            decoding={**decoding, "prompts_per_task": plan.num_prompts, "seed": plan.seed},
            tasks=[_described(name, questions, answers) for name in dict.fromkeys(one.task for one in questions)],
            summary=summarise_answers(answers),
            categories=by_category(answers),
            # All of an answer but its text, which the journal keeps.
            measurements=[{name: said for name, said in asdict(one).items() if name != "text"} for one in answers],
        )
        if output is not None and journal is not None and processes.is_first:
            journal.join_parts()
            write_result(output, result)
        return result


def _described(name: str, questions: Sequence[Question], answers: Sequence[TaskAnswer]) -> dict[str, Any]:
    mine, facts = [question for question in questions if question.task == name], {}
    if (task := TASKS.get(name)) is not None:  # else prompts of one's own
        facts = {"data_set": task.address, "config": task.config, "split": task.split, "source": task.source}
    return {
        "task": name,
        **facts,
        "scorer": task and task.scorer,
        "prompts": len(mine),
        "too_long": len(mine) - len({answer.row for answer in answers if answer.task == name}),
        "with_answers": sum(question.reference is not None for question in mine),
    }
