"""What `dflash eval` does, from names of tasks to a result: load, share out, answer (`answers`), keep, gather, summarise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.common.processes import Processes
from dflash.common.provenance import environment, public_name, record, write_result
from dflash.model.generation_dflash import max_positions

from .answers import Answer, as_measurements, by_category, chat_encoder, evaluate, numbered, summarise_answers
from .harness import OURS, check_methods
from .journal import Journal, key, unfinished
from .memory import PeakMemory
from .scoring import check_scorers
from .sessions import Backend, keeping_methods, pair_sessions
from .tasks import TASKS, Question, known_task, load_questions


@dataclass(frozen=True)
class Plan:
    """What is evaluated, and how.

    Attributes:
        target: What the target is called: a Hub id, or its folder.
        drafter: What the drafter is called.
        tasks: Names out of [`TASKS`].
        num_prompts: Rows per task, `None` for all.
        seed: Which rows.
        data_root: A folder of local rows.
        max_new_tokens: The longest answer.
        repeats: How often each method answers each question.
        methods: Besides plain decoding, which always runs.
        thinking: Whether the chat template asks for thinking.
        chat_template: Whether it is used.
        score: Whether answers are scored; code that the target wrote runs then, under limits.

    Raises:
        ValueError: for a method that does not exist.
    """

    target: str
    drafter: str
    tasks: tuple[str, ...]
    num_prompts: int | None = None
    seed: int = 0
    data_root: Path | None = None
    max_new_tokens: int = 2048
    repeats: int = 1
    methods: tuple[str, ...] = (OURS,)
    thinking: bool = False
    chat_template: bool = True
    score: bool = True

    def __post_init__(self) -> None:
        check_methods(self.methods)


# Called with a process's share at its start (how many questions it has, how many are done already) and at each answer.
Begun = Callable[[int, int], None]
Done = Callable[[list[Answer]], None]


def questions_of(plan: Plan) -> list[Question]:
    """All questions of a plan, task by task; raises as [`load_questions`] does, before any model is needed."""
    scorers = {known_task(name).scorer for name in plan.tasks}
    if plan.score:
        check_scorers(scorer for scorer in scorers if scorer is not None)
    return [
        question if plan.score else replace(question, reference=None)
        for name in plan.tasks
        for question in load_questions(name, plan.num_prompts, plan.seed, plan.data_root)
    ]


def pair_backend(plan: Plan, target: PreTrainedModel, drafter: PreTrainedModel) -> Backend:
    """A pair in this process, decoding as the plan says.

    Raises:
        ValueError: if the target's positions leave no room for a prompt.
    """
    begin = pair_sessions(target, drafter, plan.max_new_tokens, plan.methods)
    kept = [name for name in begin() if name in keeping_methods(target)]
    return Backend(
        begin,
        environment(target, drafter),
        {"caches_kept_between_turns": kept},
        PeakMemory(on_cuda=target.device.type == "cuda"),
        _longest_prompt(plan, target),
    )


def run_plan(
    plan: Plan,
    questions: Sequence[Question],
    backend: Backend,
    tokenizer: Any,
    output: Path | None = None,
    processes: Processes | None = None,
    on_begin: Begun = lambda share, done: None,
    on_question: Done = lambda answers: None,
) -> dict[str, Any]:
    """Answers the questions and returns the result, the same in every process; the first one writes it to `output`.

    Beside `output` stands a journal (`.jsonl`) of finished questions and their texts. What it holds is not measured again.

    Args:
        plan: What is evaluated, and how.
        questions: As [`questions_of`] gives them, or a caller's own.
        backend: What answers: [`pair_backend`] or `server_backend`.
        tokenizer: The target's.
        output: The JSON file to write, `None` for none.
        processes: This process and its siblings; `None`: as the launcher's variables say.
        on_begin: Called once.
        on_question: Called at each answer.

    Raises:
        ValueError: if the journal was begun with other settings.
    """
    processes = processes or Processes()
    memory, longest, setup = backend.memory, backend.max_prompt_tokens, backend.environment
    decoding = {
        "target": public_name(plan.target),
        "drafter": public_name(plan.drafter),
        "temperature": 0.0,
        "batch_size": 1,
        "max_new_tokens": plan.max_new_tokens,
        "repeats": plan.repeats,
        "methods": list(backend.begin()),
        "enable_thinking": plan.thinking,
        "chat_template": tokenizer.chat_template if plan.chat_template else None,
        "peak_memory": "not measured" if memory is None else memory.kind,
        **backend.decoding,
    }
    settings = _settings(setup, decoding)
    journal = None if output is None else Journal(output.with_suffix(".jsonl"), settings, processes.rank)
    done: dict[str, list[Answer]] = {}
    if journal is not None:
        journal.path.parent.mkdir(parents=True, exist_ok=True)
        done = dict(processes.gather(list(journal.read().items())))
        journal.mend()
    left = unfinished(questions, done)
    share = processes.share(left)
    on_begin(len(share), len(questions) - len(left))
    encode = chat_encoder(tokenizer, plan.thinking, plan.chat_template)
    answered = evaluate(share, backend.begin, encode, tokenizer, memory, plan.repeats, longest)
    made = []
    for question, answers in zip(share, answered, strict=True):
        if journal is not None:
            journal.append(question, answers)
        made.append((key(question), answers))
        on_question(answers)
    done |= dict(processes.gather(made))
    answers = numbered(answer for question in questions for answer in done[key(question)])
    if not answers:
        raise ValueError(
            f"No prompt fits: with --max-new-tokens {plan.max_new_tokens} the target's positions leave room for {longest} "
            "tokens, lower it."
        )
    result = record(
        "eval",
        {**setup, "processes": processes.count},
        decoding={**decoding, "prompts_per_task": plan.num_prompts, "seed": plan.seed},
        tasks=[_described(name, questions, answers) for name in plan.tasks],
        summary=summarise_answers(answers),
        categories=by_category(answers),
        measurements=as_measurements(answers),
    )
    if output is not None and journal is not None and processes.is_first:
        journal.join()
        write_result(output, result)
    return result


def _longest_prompt(plan: Plan, target: PreTrainedModel) -> int | None:
    """The most tokens of a prompt that leave room for the whole answer; `None` for any."""
    limit = max_positions(target)
    if limit is not None and plan.max_new_tokens >= limit:
        raise ValueError(
            f"--max-new-tokens {plan.max_new_tokens} leaves no room for a prompt: the target can tell {limit} positions apart, "
            "use fewer."
        )
    return None if limit is None else limit - plan.max_new_tokens


def _described(name: str, questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, Any]:
    task = TASKS[name]
    mine = [question for question in questions if question.task == name]
    return {
        "task": name,
        "data_set": task.address,
        "config": task.config,
        "split": task.split,
        "source": task.source,
        "scorer": task.scorer,
        "prompts": len(mine),
        "too_long": len(mine) - len({answer.row for answer in answers if answer.task == name}),
        "with_answers": sum(question.reference is not None for question in mine),
    }


def _settings(setup: dict[str, Any], decoding: dict[str, Any]) -> dict[str, Any]:
    """What a kept answer depends on: a run that goes on must have the same."""
    names = (
        "torch", "transformers", "cpu", "threads", "device", "target_dtype", "drafter_dtype", "attention",
        "target_parameters", "drafter_parameters", "block_size",
    )  # fmt: skip
    template = decoding["chat_template"]
    digest = None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]
    return {**{name: setup.get(name) for name in names}, **decoding, "chat_template": digest}
