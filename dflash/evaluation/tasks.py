"""The tasks of the DFlash paper, and NVIDIA's SPEED-Bench: where their rows are, and how a row becomes a question.

Prompts are those of the paper's published benchmark.
"""

import glob
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from dflash.common.messages import first_line

from .results import task_key


Row = Mapping[str, Any]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """One question of a task, or of a file of prompts."""

    task: str
    index: int  # its row in the data set
    turns: tuple[str, ...]  # the user's messages; each follows the answers to those before it
    reference: Any = None  # what the scorer compares the last answer with; `None` if the row has no answer
    category: str | None = None  # in tasks that have several
    before: tuple[Message, ...] = ()  # messages of role and content that stand before the turns


@dataclass(frozen=True)
class Form:
    """A form in which a task's rows are published."""

    columns: tuple[str, ...]  # those that a row must have
    turns: Callable[[Row], Sequence[str]]  # the user's messages; a row without any is not asked
    reference: Callable[[Row], Any] = lambda row: None  # what the scorer needs; a row with `None` is not scored


@dataclass(frozen=True)
class Task:
    """Where a task's rows are published, the forms that turn a row into a question, and who scores the answers."""

    name: str
    local_file: str  # where its rows are below a `--data-root`; `NAME.jsonl` is tried too
    forms: Sequence[Form]  # the published ones first
    source: str  # whom to cite
    hub_id: str | None = None
    config: str | None = None  # on the Hub, if it has several
    split: str = "test"
    files: Sequence[str] = ()  # JSONL files to read instead, if the Hub has no rows or only a loading script
    scorer: str | None = None  # a name of `scoring.SCORERS`; `None` for open questions

    @property
    def address(self) -> str:
        """Where its rows are published."""
        return self.hub_id or self.files[0]


def known_task(name: str) -> Task:
    """The task of that name; ValueError with those that exist."""
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}: choose from {', '.join(TASKS)}.")
    return TASKS[name]


def load_questions(
    name: str, num_prompts: int | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Question]:
    """A task's questions in the data set's order: all, or `num_prompts` of them chosen by `seed`.

    Fewer prompts of the same seed are a subset of more. A task that has fewer rows gives all. The rows come from files
    in the folder `data_root`, or from the Hub.

    Raises:
        ValueError: for an unknown task, with those that exist; for rows without the task's columns.
        OSError: for rows that cannot be read.
    """
    task = known_task(name)
    rows = _published_rows(task) if data_root is None else _local_rows(task, Path(data_root).expanduser())
    form = _form(task, rows.column_names)
    needed = {*form.columns, "category"}
    columns = [column for column in rows.column_names if column in needed]
    rows = rows.select_columns(columns)
    order = list(range(len(rows)))
    if num_prompts is not None:
        order = random.Random(seed).sample(order, len(order))
    questions: list[Question] = []
    for index in order:
        if len(questions) == num_prompts:
            break
        row = rows[index]
        turns = tuple(form.turns(row))
        if turns:
            reference = form.reference(row)
            question = Question(name, index, turns, reference, row.get("category"))
            questions.append(question)
    if not questions:
        raise ValueError(f"None of the {len(rows)} rows of {name} can be asked: see {task.source}.")
    return sorted(questions, key=lambda question: question.index)


def questions_of_prompts(
    name: str, dialogues: Sequence[Sequence[Message]], num_prompts: int | None = None, seed: int = 0
) -> list[Question]:
    """Questions without an answer to score: all of `dialogues`, or `num_prompts` of them, chosen as in [`load_questions`].

    Each dialogue is a list of messages of role and content. Its last one is asked, after those before it as they are.

    Raises:
        ValueError: for a `name` that a task has, because results are kept under it, or a dialogue whose last message is not
            the user's.
    """
    for task in TASKS:
        if task_key(task) == task_key(name):
            raise ValueError(
                f"The prompts {name} have the name of the task {task}, under which results are kept: rename their file, or "
                f"read it with --tasks {task} --data-root FOLDER."
            )
    order = random.Random(seed).sample(range(len(dialogues)), len(dialogues))
    questions = []
    for index in sorted(order[:num_prompts]):
        *before, last = dialogues[index]
        if last["role"] != "user":
            raise ValueError(
                f"Prompt {index + 1} of {name} ends with a message of the role {last['role']}: end it with one of the user's."
            )
        questions.append(Question(name, index, (last["content"],), before=tuple(before)))
    return questions


def _published_rows(task: Task) -> Any:
    """The rows as they are published, or in the cache of this machine."""
    import datasets

    try:
        with _cache_alone_without_hub():
            if task.files:
                return datasets.load_dataset("json", data_files=list(task.files), split="train")
            return datasets.load_dataset(task.hub_id, task.config, split=task.split)
    except (OSError, ValueError) as error:
        raise OSError(
            f"The data set {task.address} of {task.name} cannot be read ({first_line(error)}): pass --data-root with a folder "
            f"that holds {task.local_file}."
        ) from error


@contextmanager
def _cache_alone_without_hub() -> Iterator[None]:
    """Makes `datasets` read its cache alone if the Hub does not answer; otherwise it would retry for a minute."""
    import datasets
    from huggingface_hub import constants

    from dflash.common.hub import hub_answers

    with ExitStack() as patches:
        if not hub_answers():
            for module in (datasets.config, constants):
                patches.enter_context(mock.patch.object(module, "HF_HUB_OFFLINE", True))
        yield


def _local_rows(task: Task, root: Path) -> Any:
    """The rows of a file below `root`."""
    import datasets

    names = [task.local_file, f"{task.name}.jsonl"]
    files = " or ".join(names)
    paths = [root / name for name in names]
    paths = [path for path in paths if path.is_file()]
    if not root.is_dir():
        raise FileNotFoundError(f"--data-root {root} is no folder: name the one that holds {files}.")
    if not paths:
        raise FileNotFoundError(f"{root} holds no rows of {task.name}: put them into {files} there.")
    remedy = f"get the data set {task.address} again"
    try:
        return datasets.load_dataset("json", data_files=glob.escape(str(paths[0])), split="train")
    except StopIteration as error:  # what the library makes of no bytes
        raise ValueError(f"{paths[0]} is empty: {remedy}.") from error
    except (ValueError, RecursionError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{paths[0]} is not JSON, a row a line: {remedy}.") from error


def _form(task: Task, columns: Sequence[str]) -> Form:
    """The task's form with these columns."""
    for form in task.forms:
        if set(form.columns) <= set(columns):
            return form
    wanted = " or ".join(", ".join(form.columns) for form in task.forms)
    raise ValueError(
        f"The rows of {task.name} have no columns {wanted}; there are {', '.join(columns)}: get {task.address} again."
    )


def _mathematics(column: str, answer: Callable[[Any], str | None] = str) -> Form:
    """Rows with a problem in `column`; `answer` reads the result from the column of that name."""
    task = "Please reason step by step, and put your final answer within \\boxed{}."
    return Form((column, "answer"), lambda row: [f"{row[column]}\n{task}"], lambda row: answer(row["answer"]))


def _after_hashes(solution: str) -> str | None:
    """The number after `####`, with which GSM8K ends a solution."""
    _, hashes, number = solution.rpartition("####")
    return number.strip().replace(",", "") if hashes else None


def _prompt_alone(row: Row) -> list[str]:
    """The user's message in a prompt that is already in the ChatML template."""
    messages = re.findall(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|\Z)", row["prompt"], re.DOTALL)
    return [messages[-1].strip() if messages else row["prompt"]]


def _aime_reference(row: Row) -> str | None:
    return _after_hashes(row["reference_solution"])


def _alpaca(row: Row) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _humaneval(row: Row) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    code = row["starter_code"] or "# YOUR CODE HERE"
    task = "Use the following code structure:" if row["starter_code"] else "Write your code in the following format:"
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{row['question_content']}\n\n### Format: {task}\n"
        f"```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    ]


def _mbpp_test_split(row: Row) -> list[str]:
    """The file with all 974 rows holds every split; 11 to 510 are the test's."""
    return [row["text"]] if 11 <= row["task_id"] <= 510 else []


def _mbpp_tests(row: Row) -> dict[str, Any]:
    setup = row["test_setup_code"] if "test_setup_code" in row else "\n".join(row["test_imports"])
    return {"setup": setup, "tests": row["test_list"]}


def _turns(row: Row) -> Sequence[str]:
    return row["turns"]


def _spec_bench_reference(row: Row) -> str | None:
    """Its `math_reasoning` rows are GSM8K's."""
    is_scored = row["category"] == "math_reasoning" and row["reference"]
    return _after_hashes(row["reference"][0]) if is_scored else None


def _speed_bench(row: Row) -> Sequence[str]:
    # Replaces text in the public rows that its licence does not allow there; NVIDIA's specdec_bench fetches it.
    mask = "FULL BENCHMARK DATA SHOULD BE FETCHED"
    is_masked = any(mask in turn for turn in row["turns"])
    return [] if is_masked else row["turns"]


def _only(*columns: str) -> Callable[[Row], dict[str, Any]]:
    return lambda row: {column: row[column] for column in columns}


HUMANEVAL = ("prompt", "test", "entry_point")
LIVECODEBENCH = ("public_test_cases", "private_test_cases", "metadata")
LIVECODEBENCH_FILES = ("test", "test2", "test3", "test4", "test5", "test6")
TASKS = {
    task.name: task
    for task in (
        Task(
            "gsm8k",
            "gsm8k/test.jsonl",
            [_mathematics("question", _after_hashes)],
            "Cobbe et al. 2021, arXiv 2110.14168",
            hub_id="openai/gsm8k",
            config="main",
            scorer="math",
        ),
        Task(
            "math500",
            "math500/math500.jsonl",
            [_mathematics("problem")],
            "Hendrycks et al. 2021, arXiv 2103.03874; the 500 of Lightman et al. 2023, arXiv 2305.20050",
            hub_id="HuggingFaceH4/MATH-500",
            scorer="math",
        ),
        Task(
            "aime25",
            "aime25/aime25_promptcot.jsonl",
            [
                _mathematics("problem"),
                Form(("prompt", "reference_solution"), _prompt_alone, _aime_reference),
            ],
            "AIME 2025, Mathematical Association of America; MathArena, arXiv 2505.23281",
            hub_id="MathArena/aime_2025",
            split="train",
            scorer="math",
        ),
        Task(
            "humaneval",
            "humaneval/HumanEval.jsonl.gz",
            [Form(HUMANEVAL, _humaneval, _only(*HUMANEVAL))],
            "Chen et al. 2021, arXiv 2107.03374",
            hub_id="openai/openai_humaneval",
            scorer="humaneval",
        ),
        Task(
            "mbpp",
            "mbpp/mbpp.jsonl",
            # The paper's prompt does not say the name that the tests call: scores compare decoders, not models.
            [
                Form(("prompt", "test_imports", "test_list"), lambda row: [row["prompt"]], _mbpp_tests),
                Form(("text", "task_id", "test_setup_code", "test_list"), _mbpp_test_split, _mbpp_tests),
            ],
            "Austin et al. 2021, arXiv 2108.07732",
            hub_id="google-research-datasets/mbpp",
            config="sanitized",
            scorer="mbpp",
        ),
        Task(
            "livecodebench",
            "livecodebench/lcb_v6_prompts.jsonl",
            [
                Form(("question_content", "starter_code", *LIVECODEBENCH), _livecodebench, _only(*LIVECODEBENCH)),
                Form(("prompt",), _prompt_alone),
            ],
            "Jain et al. 2024, arXiv 2403.07974",
            files=[f"hf://datasets/livecodebench/code_generation_lite/{name}.jsonl" for name in LIVECODEBENCH_FILES],
            scorer="livecodebench",
        ),
        Task(
            "mt-bench",
            "mt_bench/question.jsonl",
            [
                Form(("prompt", "category"), lambda row: row["prompt"]),
                Form(("turns", "category"), _turns),
            ],
            "Zheng et al. 2023, arXiv 2306.05685",
            hub_id="HuggingFaceH4/mt_bench_prompts",
            split="train",
        ),
        Task(
            "spec-bench",
            "spec_bench/question.jsonl",
            [Form(("turns", "category", "reference"), _turns, _spec_bench_reference)],
            "Xia et al. 2024, arXiv 2401.07851",
            files=["https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"],
            scorer="math",
        ),
        Task(
            "alpaca",
            "alpaca/alpaca.jsonl",
            [Form(("instruction", "input"), _alpaca)],
            "Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca",
            hub_id="tatsu-lab/alpaca",
            split="train",
        ),
        Task(
            "speed-bench",
            "speed_bench/qualitative.jsonl",
            [Form(("turns", "category"), _speed_bench)],
            "NVIDIA 2026, arXiv 2604.09557; its public rows mask what specdec_bench fetches",
            hub_id="nvidia/SPEED-Bench",
            config="qualitative",
        ),
    )
}
