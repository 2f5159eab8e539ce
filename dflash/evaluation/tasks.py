"""The tasks of the DFlash paper, and NVIDIA's SPEED-Bench: where their rows are, and how a row becomes a question.

Prompts are those of the paper's published benchmark.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.common.messages import first_line

from .results import task_key


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One question of a task, or of a file of prompts."""

    task: str
    index: int  # its row in the data set
    turns: tuple[str, ...]  # the user's messages; each follows the answers to those before it
    reference: Any = None  # what the scorer compares the last answer with; `None` if the row has no answer
    category: str | None = None  # in tasks that have several
    before: tuple[Mapping[str, str], ...] = ()  # messages of role and content that stand before the turns


@dataclass(frozen=True)
class Form:
    """A form in which a task's rows are published."""

    columns: tuple[str, ...]  # those that a row must have
    turns: Callable[[Row], Sequence[str]]  # the user's messages; a row without any is not asked
    reference: Callable[[Row], Any] = lambda row: None  # what the scorer needs; a row with `None` is not scored


@dataclass(frozen=True)
class Task:
    """A data set and the questions of its rows."""

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
    rows = rows.select_columns([column for column in rows.column_names if column in {*form.columns, "category"}])
    order = random.Random(seed).sample(range(len(rows)), len(rows)) if num_prompts is not None else range(len(rows))
    questions: list[Question] = []
    for index in order:
        if len(questions) == num_prompts:
            break
        row = rows[index]
        if turns := tuple(form.turns(row)):
            questions.append(Question(name, index, turns, form.reference(row), row.get("category")))
    if not questions:
        raise ValueError(f"None of the {len(rows)} rows of {name} can be asked: see {task.source}.")
    return sorted(questions, key=lambda question: question.index)


def questions_of_prompts(
    name: str, dialogues: Sequence[Sequence[Mapping[str, str]]], num_prompts: int | None = None, seed: int = 0
) -> list[Question]:
    """Questions of one's own, without an answer to score: all of `dialogues`, or as many of them as in [`load_questions`].

    Each dialogue is a list of messages of role and content. Its last one is asked, after those before it as they are.

    Raises:
        ValueError: for a `name` that a task has, because results are kept under it, or a dialogue whose last message is not
            the user's.
    """
    if (task := next((task for task in TASKS if task_key(task) == task_key(name)), None)) is not None:
        raise ValueError(
            f"The prompts {name} have the name of the task {task}, under which results are kept: rename their file, or read "
            f"it with --tasks {task} --data-root FOLDER."
        )
    questions = []
    for index in sorted(random.Random(seed).sample(range(len(dialogues)), len(dialogues))[:num_prompts]):
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
        said = f"The data set {task.address} of {task.name} cannot be read ({first_line(error)})"
        raise OSError(f"{said}: pass --data-root with a folder that holds {task.local_file}.") from error


@contextmanager
def _cache_alone_without_hub() -> Iterator[None]:
    """Makes `datasets` read its cache alone if the Hub does not answer; otherwise it would retry for a minute."""
    import datasets
    from huggingface_hub import constants

    from dflash.common.hub import hub_answers

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not hub_answers():
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _local_rows(task: Task, root: Path) -> Any:
    """The rows of a file below `root`."""
    import datasets

    candidates = (task.local_file, f"{task.name}.jsonl")
    path = next((root / name for name in candidates if (root / name).is_file()), None)
    if not root.is_dir():
        raise FileNotFoundError(f"--data-root {root} is no folder: name the one that holds {' or '.join(candidates)}.")
    if path is None:
        raise FileNotFoundError(f"{root} holds no rows of {task.name}: put them into {' or '.join(candidates)} there.")
    try:
        return datasets.load_dataset("json", data_files=str(path), split="train")
    except StopIteration as error:  # what the library makes of no bytes
        raise ValueError(f"{path} is empty: get the data set {task.address} again.") from error
    except (ValueError, RecursionError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{path} is not JSON, a row a line: get the data set {task.address} again.") from error


def _form(task: Task, columns: Sequence[str]) -> Form:
    """The task's form with these columns."""
    for form in task.forms:
        if set(form.columns) <= set(columns):
            return form
    wanted = " or ".join(", ".join(form.columns) for form in task.forms)
    said = f"The rows of {task.name} have no columns {wanted}; there are {', '.join(columns)}"
    raise ValueError(f"{said}: get {task.address} again.")


def _mathematics(column: str, answer: Callable[[Any], str | None] = str) -> Form:
    """Rows with a problem in `column`; `answer` reads the result from the column of that name."""
    asked = "Please reason step by step, and put your final answer within \\boxed{}."
    return Form((column, "answer"), lambda row: [f"{row[column]}\n{asked}"], lambda row: answer(row["answer"]))


def _after_hashes(solution: str) -> str | None:
    """The number after `####`, with which GSM8K ends a solution."""
    return solution.rsplit("####", 1)[1].strip().replace(",", "") if "####" in solution else None


def _prompt_alone(row: Row) -> list[str]:
    """The user's message in a prompt that is already in the ChatML template."""
    spoken = re.findall(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|\Z)", row["prompt"], re.DOTALL)
    return [spoken[-1].strip() if spoken else row["prompt"]]


def _aime_reference(row: Row) -> str | None:
    return _after_hashes(row["reference_solution"])


def _alpaca(row: Row) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _humaneval(row: Row) -> list[str]:
    asked = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{asked}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    wanted, code = "Write your code in the following format:", "# YOUR CODE HERE"
    if row["starter_code"]:
        wanted, code = "Use the following code structure:", row["starter_code"]
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{row['question_content']}\n\n### Format: {wanted}\n"
        f"```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    ]


def _mbpp_test_split(row: Row) -> list[str]:
    """The file with all 974 rows holds every split; 11 to 510 are the test's."""
    return [row["text"]] if 11 <= row["task_id"] <= 510 else []


def _mbpp_tests(row: Row) -> dict[str, Any]:
    setup = row["test_setup_code"] if "test_setup_code" in row else "\n".join(row["test_imports"])
    return {"setup": setup, "tests": row["test_list"]}


def _spec_bench_reference(row: Row) -> str | None:
    """Its `math_reasoning` rows are GSM8K's."""
    return _after_hashes(row["reference"][0]) if row["category"] == "math_reasoning" and row["reference"] else None


def _speed_bench(row: Row) -> Sequence[str]:
    # Replaces text in the public rows that its licence does not allow there; NVIDIA's specdec_bench fetches it.
    mask = "FULL BENCHMARK DATA SHOULD BE FETCHED"
    return [] if any(mask in turn for turn in row["turns"]) else row["turns"]


def _only(*columns: str) -> Callable[[Row], dict[str, Any]]:
    return lambda row: {column: row[column] for column in columns}


LIVECODEBENCH_TESTS = ("public_test_cases", "private_test_cases", "metadata")
# By task; `tasks.json` says where its rows are.
FORMS = {
    "gsm8k": [_mathematics("question", _after_hashes)],
    "math500": [_mathematics("problem")],
    "aime25": [_mathematics("problem"), Form(("prompt", "reference_solution"), _prompt_alone, _aime_reference)],
    "humaneval": [Form(("prompt", "test", "entry_point"), _humaneval, _only("prompt", "test", "entry_point"))],
    # The paper's prompt does not say the name that the tests call: scores compare decoders, not models.
    "mbpp": [
        Form(("prompt", "test_imports", "test_list"), lambda row: [row["prompt"]], _mbpp_tests),
        Form(("text", "task_id", "test_setup_code", "test_list"), _mbpp_test_split, _mbpp_tests),
    ],
    "livecodebench": [
        Form(("question_content", "starter_code", *LIVECODEBENCH_TESTS), _livecodebench, _only(*LIVECODEBENCH_TESTS)),
        Form(("prompt",), _prompt_alone),
    ],
    "mt-bench": [
        Form(("prompt", "category"), lambda row: row["prompt"]),
        Form(("turns", "category"), lambda row: row["turns"]),
    ],
    "spec-bench": [Form(("turns", "category", "reference"), lambda row: row["turns"], _spec_bench_reference)],
    "alpaca": [Form(("instruction", "input"), _alpaca)],
    "speed-bench": [Form(("turns", "category"), _speed_bench)],
}
TASKS = {
    task["name"]: Task(**task, forms=FORMS[task["name"]])
    for task in json.loads(Path(__file__).with_name("tasks.json").read_text(encoding="utf-8"))
}
