"""Every task: its rows in each form that they are published in, its prompts, its subset, and what it refuses."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from loopback import LoopbackServer, QuietHandler, started

from dflash.evaluation import TASKS, load_questions


STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
LIVECODEBENCH = {
    "question_content": "Add.",
    "starter_code": "",
    "public_test_cases": "[]",
    "private_test_cases": "[]",
    "metadata": "{}",
    "platform": "x",
}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}

# By case: the task, a row of it, the turns, and what the scorer gets.
ROWS: dict[str, tuple[str, dict[str, Any], list[str], Any]] = {
    "gsm8k": ("gsm8k", {"question": "How?", "answer": "1,0 + 5\n#### 1,005"}, ["How?" + STEP_BY_STEP], "1005"),
    "math500": ("math500", {"problem": "$x$?", "answer": "\\pi", "level": 1}, ["$x$?" + STEP_BY_STEP], "\\pi"),
    "aime25": ("aime25", {"problem": "n?", "answer": 70, "problem_idx": 1}, ["n?" + STEP_BY_STEP], "70"),
    "aime25 in a template": (
        "aime25",
        {
            "prompt": "<|im_start|>user\nn?\nDo.<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "reference_solution": "\\boxed{70}\n#### 70",
        },
        ["n?\nDo."],
        "70",
    ),
    "humaneval": (
        "humaneval",
        HUMANEVAL,
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
        {"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"},
    ),
    "mbpp": (
        "mbpp",
        {"task_id": 2, "prompt": "Sum.", "test_imports": ["import math"], "test_list": ["assert f()"]},
        ["Sum."],
        {"setup": "import math", "tests": ["assert f()"]},
    ),
    "mbpp with all splits": (
        "mbpp",
        {"task_id": 11, "text": "Sum.", "test_setup_code": "", "test_list": ["assert f()"]},
        ["Sum."],
        {"setup": "", "tests": ["assert f()"]},
    ),
    "livecodebench": (
        "livecodebench",
        LIVECODEBENCH,
        [
            "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
            "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
            "except for the program\n\n### Question:\nAdd.\n\n### Format: Write your code in the following format:\n"
            "```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)"
        ],
        {"public_test_cases": "[]", "private_test_cases": "[]", "metadata": "{}"},
    ),
    "livecodebench in a template": (
        "livecodebench",
        {"prompt": "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n<think>\n", "tests": {"md5": "0"}},
        ["Add."],
        None,
    ),
    "mt-bench": ("mt-bench", {"prompt": ["Hi.", "And?"], "category": "writing"}, ["Hi.", "And?"], None),
    "mt-bench of FastChat": ("mt-bench", {"turns": ["Hi.", "And?"], "category": "writing"}, ["Hi.", "And?"], None),
    "spec-bench": ("spec-bench", {"turns": ["Hi."], "category": "qa", "reference": ["Ho."]}, ["Hi."], None),
    "spec-bench of GSM8K": (
        "spec-bench",
        {"turns": ["How?"], "category": "math_reasoning", "reference": ["5\n#### 5"]},
        ["How?"],
        "5",
    ),
    "alpaca": ("alpaca", {"instruction": "Sort.", "input": "b a"}, ["Sort.\n\nInput:\nb a"], None),
    "alpaca without input": ("alpaca", {"instruction": "Sort.", "input": ""}, ["Sort."], None),
    "speed-bench": ("speed-bench", {"turns": ["Hi.", "And?"], "category": "roleplay"}, ["Hi.", "And?"], None),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("case", ROWS)
def test_row_becomes_the_question_of_the_paper(case: str, tmp_path: Path) -> None:
    """Promise: in each form that a task is published in, its prompt is the paper's, without any template of others."""
    name, row, turns, reference = ROWS[case]
    write(tmp_path / TASKS[name].local_file, [row])
    (question,) = load_questions(name, data_root=tmp_path)
    assert (question.task, question.index) == (name, 0)
    assert list(question.turns) == turns
    assert question.reference == reference
    assert question.category == row.get("category")


def test_every_task_has_a_case() -> None:
    assert {name for name, *_ in ROWS.values()} == set(TASKS)


def test_a_folders_name_is_no_pattern(tmp_path: Path) -> None:
    """Bug: rows below `da[1]ta` were looked for in `da1ta`."""
    folder = tmp_path / "da[1]t*a"
    write(folder / "gsm8k.jsonl", [{"question": "How?", "answer": "#### 5"}])
    assert len(load_questions("gsm8k", data_root=folder)) == 1


def test_starter_code_stands_in_the_prompt(tmp_path: Path) -> None:
    write(tmp_path / "livecodebench.jsonl", [{**LIVECODEBENCH, "starter_code": "class Solution: pass"}])
    (question,) = load_questions("livecodebench", data_root=tmp_path)
    assert "Use the following code structure:\n```python\nclass Solution: pass\n```" in question.turns[0]


def test_subset_is_the_same_for_the_same_seed_and_grows(tmp_path: Path) -> None:
    """Promise: a seed names the rows; more prompts of it hold the fewer; rows stay in the data set's order."""
    write(tmp_path / "gsm8k.jsonl", [{"question": str(n), "answer": f"#### {n}"} for n in range(50)])

    def rows(count: int | None, seed: int) -> list[int]:
        return [question.index for question in load_questions("gsm8k", count, seed, tmp_path)]

    assert rows(5, 0) == rows(5, 0) == sorted(rows(5, 0)) != rows(5, 1)
    assert set(rows(5, 0)) < set(rows(9, 0))
    assert rows(5, 0) == [2, 16, 24, 26, 48]  # on every machine
    assert rows(None, 0) == rows(99, 0) == list(range(50))


def test_rows_of_other_splits_and_masked_rows_are_not_asked(tmp_path: Path) -> None:
    rows = [{"task_id": n, "text": "t", "test_setup_code": "", "test_list": []} for n in (10, 11, 510, 511)]
    write(tmp_path / "mbpp.jsonl", rows)
    write(tmp_path / "speed-bench.jsonl", [{"turns": [text], "category": "qa"} for text in (MASKED, "Hi.", MASKED)])
    assert [question.index for question in load_questions("mbpp", data_root=tmp_path)] == [1, 2]
    assert [question.index for question in load_questions("speed-bench", 1, data_root=tmp_path)] == [1]


def test_task_whose_rows_are_all_masked_says_where_they_are(tmp_path: Path) -> None:
    write(tmp_path / "speed-bench.jsonl", [{"turns": [MASKED], "category": "qa"}])
    with pytest.raises(ValueError, match=r"None of the 1 rows of speed-bench can be asked.*specdec_bench"):
        load_questions("speed-bench", data_root=tmp_path)


def test_unknown_task_lists_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no task 'gsm9k': choose from gsm8k, math500, .*speed-bench"):
        load_questions("gsm9k")


def test_unknown_columns_list_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path / "mbpp.jsonl", [{"task": "x", "solution": "y"}])
    with pytest.raises(
        ValueError, match=r"no columns prompt, test_imports, test_list or text, .*; there are task, sol"
    ):
        load_questions("mbpp", data_root=tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no rows of gsm8k: put them into gsm8k/test.jsonl or gsm8k.jsonl"):
        load_questions("gsm8k", data_root=tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"--data-root .*nowhere is no folder: name the one that holds gsm8k/test"
    ):
        load_questions("gsm8k", data_root=tmp_path / "nowhere")
    (tmp_path / "gsm8k.jsonl").touch()
    with pytest.raises(ValueError, match=r"gsm8k.jsonl is empty: get the data set openai/gsm8k again"):
        load_questions("gsm8k", data_root=tmp_path)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": 1')
    with pytest.raises(ValueError, match=r"gsm8k.jsonl is not JSON, a row a line: get the data set openai/gsm8k"):
        load_questions("gsm8k", data_root=tmp_path)


@pytest.mark.parametrize("name", TASKS)
def test_published_rows_are_asked_for_by_their_address(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: without `data_root` the Hub's data set, configuration and split are read, or the files that stand for it."""
    _, row, turns, _ = ROWS[name]
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*names: Any, **options: Any) -> datasets.Dataset:
        asked.append((*names, options))
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(load_questions(name)[0].turns) == turns
    task = TASKS[name]
    if task.files:
        assert asked == [("json", {"data_files": list(task.files), "split": "train"})]
        assert all(address.startswith(("hf://datasets/", "https://")) for address in task.files)
    else:
        assert asked == [(task.hub_id, task.config, {"split": task.split})]


def test_unreachable_data_set_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*names: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        OSError, match=r"openai/gsm8k of gsm8k cannot be read \(Couldn't reach the Hub\): pass --data-root"
    ):
        load_questions("gsm8k")


def test_without_the_hub_the_cache_alone_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would try again for a minute; an address where nobody listens is asked once."""
    asked: list[tuple[bool, bool]] = []

    def load_dataset(*_: Any, **__: Any) -> Any:
        asked.append((datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE))
        raise ConnectionError("not in the cache\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Before 1.0 a session that was made offline, by another test, stays so.
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # refuses: it does not listen
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(
            OSError, match=r"openai/gsm8k of gsm8k cannot be read \(not in the cache\): pass --data-root"
        ):
            load_questions("gsm8k")
    assert asked == [(True, True)]
    assert not datasets.config.HF_HUB_OFFLINE
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    with started(LoopbackServer(QuietHandler)) as hub:  # it answers, if only that it knows no HEAD
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        with pytest.raises(OSError, match="cannot be read"):
            load_questions("gsm8k")
    assert asked[1] == (False, False)
