"""Tasks in, a result out: dialogues, scores, speeds and memory; going on where a run stopped; several processes."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import PartialState
from processes import Forked
from tiny_models import ScriptedDrafter, expected_lengths, greedy, make_drafter, make_target, make_tokenizer
from transformers import DynamicCache

from dflash.cli.loading import listed, read_prompts
from dflash.common import processes
from dflash.common.files import check_output
from dflash.common.processes import Processes
from dflash.common.runs import Run
from dflash.evaluation import (
    EvalPlan,
    Limits,
    PeakMemory,
    Question,
    TaskAnswer,
    TimedRun,
    answer_questions,
    canvas,
    chat_encoder,
    decoding_methods,
    numbered,
    pair_backend,
    questions_of,
    questions_of_prompts,
    run_eval,
    summarise_answers,
)
from dflash.evaluation.backends import Backend, PlainDialogue, keeping_methods, pair_dialogues
from dflash.evaluation.journal import Journal, key


PLAN = EvalPlan("t", "d", ("gsm8k",))
# Rows of GSM8K's and MT-Bench's form that a tokenizer of one token per character can read.
GSM8K = [{"question": f"{n} and 1?", "answer": f"#### {n + 1}"} for n in range(6)]
MT_BENCH = [{"turns": [f"say {n}", "again"], "category": "writing" if n else "maths"} for n in range(2)]


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("gsm8k", GSM8K), ("mt-bench", MT_BENCH)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    return make_target(), make_drafter(), make_tokenizer()


@pytest.fixture(scope="module")
def folders(pair: tuple[Any, Any, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter, tokenizer = pair
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


def run_pair(
    plan: EvalPlan, pair: tuple[Any, Any, Any], max_new_tokens: int | None = 8, **options: Any
) -> dict[str, Any]:
    """The result of all questions of a plan."""
    target, drafter, tokenizer = pair
    backend = pair_backend(target, drafter, max_new_tokens, ["dflash"])
    how = {name: options.pop(name) for name in ("processes", "on_begin", "on_done") if name in options}
    return run_eval(plan, questions_of(plan), backend, tokenizer, **options, run=Run(**how))


class Saying:
    """A tokenizer of numbers for methods that say what the test wants."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return " ".join(map(str, token_ids))


def said(token_ids: list[int], seconds: float = 1.0, lengths: list[int] | None = None) -> TimedRun:
    return TimedRun(token_ids, seconds, 0.25, len(token_ids), lengths or [])


def run_scripted(
    question: Question, methods: dict[str, Callable[[torch.Tensor], TimedRun]], asked: list[Any], **options: Any
) -> list[TaskAnswer]:
    """One question answered by `methods`; every dialogue that is encoded is noted in `asked`."""

    def encode(messages: list[dict[str, str]]) -> torch.Tensor:
        asked.append([message["content"] for message in messages])
        return torch.ones(1, 3 * len(messages), dtype=torch.long)

    (answers,) = answer_questions([question], lambda: methods, encode, Saying(), PeakMemory(on_cuda=False), **options)
    return answers


def test_second_turn_sees_the_first_methods_answer() -> None:
    """Promise: every method is asked the same; what plain decoding answered stands in the next turn's prompt."""
    asked: list[Any] = []
    methods = {"plain": lambda ids: said([1, 2]), "other": lambda ids: said([9])}
    answers = run_scripted(Question("mt-bench", 4, ("a", "b")), methods, asked)
    assert asked == [["a"], ["a", "1 2", "b"]]
    assert [(a.method, a.turn, a.row, a.is_identical) for a in answers] == [
        ("plain", 0, 4, True), ("other", 0, 4, False), ("plain", 1, 4, True), ("other", 1, 4, False)
    ]  # fmt: skip


def test_both_answers_are_scored_at_the_last_turn_alone() -> None:
    methods = {"plain": lambda ids: said([35]), "other": lambda ids: said([36])}
    question = Question("gsm8k", 0, ("a", "b"), "35")
    encoded: list[Any] = []
    tokenizer = Saying()
    tokenizer.decode = lambda ids, **options: f"#### {ids[0]}"  # type: ignore[method-assign]
    (answers,) = answer_questions(
        [question], lambda: methods, lambda m: encoded.append(m) or torch.ones(1, 2), tokenizer, PeakMemory(False)
    )
    assert [answer.score for answer in answers] == [None, None, True, False]
    assert [row["score"] for row in summarise_answers(numbered(answers))] == [1.0, 0.0]
    assert [row["scored"] for row in summarise_answers(numbered(answers))] == [1, 1]


@pytest.mark.parametrize(("prompt", "score"), [("<think>\n", False), ("<think>\n\n</think>\n\n", True)])
def test_an_answer_that_is_cut_in_the_thought_that_its_prompt_opened_is_not_right(prompt: str, score: bool) -> None:
    """Bug: "Maybe 7? No, wait" counted as 7."""
    tokenizer = Saying()
    tokenizer.decode = lambda ids, **options: prompt if len(ids) == 2 else "Maybe \\boxed{7}? No"  # type: ignore[method-assign]
    question = Question("gsm8k", 0, ("a",), "7")
    methods = {"plain": lambda ids: said([1])}
    ((answer,),) = answer_questions([question], lambda: methods, lambda m: torch.ones(1, 2), tokenizer)
    assert answer.score is score


def test_question_without_an_answer_has_no_score() -> None:
    answers = run_scripted(Question("gsm8k", 0, ("a",), None), {"plain": lambda ids: said([1])}, [])
    assert answers[0].score is None
    row = summarise_answers(numbered(answers))[0]
    assert (row["score"], row["scored"]) == (None, 0)


def test_time_per_token_counts_everything_after_the_first() -> None:
    """Promise: (all seconds - seconds to the first token) / (tokens - 1), over all prompts together."""
    answers = run_scripted(Question("mt-bench", 0, ("a", "b")), {"plain": lambda ids: said([1, 2, 3], 2.0)}, [])
    row = summarise_answers(numbered(answers))[0]
    assert row["ms_per_output_token"] == 1000 * 2 * 1.75 / 4
    assert row["ms_to_first_token"] == 250


def test_methods_take_turns_and_keep_their_order_in_the_result() -> None:
    order: list[str] = []

    def method(name: str) -> Callable[[torch.Tensor], TimedRun]:
        return lambda ids: order.append(name) or said([1, 2])  # type: ignore[func-returns-value]

    methods = {name: method(name) for name in "abc"}
    answers = run_scripted(Question("mt-bench", 0, ("x",)), methods, [], repeats=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # once unmeasured
    assert [answer.method for answer in answers] == ["a", "b", "c"]
    assert all(len(answer.seconds) == 3 for answer in answers)


def test_every_repeat_is_a_dialogue_of_its_own() -> None:
    """Promise: no repeat finds in its caches what an earlier one computed."""
    begun: list[list[int]] = []

    def begin() -> dict[str, Callable[[torch.Tensor], TimedRun]]:
        begun.append([])
        mine = begun[-1]
        return {"plain": lambda ids: mine.append(ids.shape[1]) or said([1, 2])}  # type: ignore[func-returns-value]

    question = Question("mt-bench", 0, ("a", "b"))
    list(answer_questions([question], begin, lambda m: torch.ones(1, len(m)), Saying(), PeakMemory(False), repeats=2))
    assert begun == [[1], [1, 3], [1, 3]]


def test_dialogue_ends_before_a_prompt_that_is_too_long() -> None:
    methods = {"plain": lambda ids: said([1, 2])}
    question = Question("mt-bench", 0, ("a", "b"))  # of 3, then 9 tokens
    assert len(run_scripted(question, methods, [], max_prompt_tokens=9)) == 2
    assert len(run_scripted(question, methods, [], max_prompt_tokens=8)) == 1
    assert run_scripted(question, methods, [], max_prompt_tokens=2) == []


def test_thinking_and_template_reach_the_prompt(pair: tuple[Any, Any, Any]) -> None:
    tokenizer, messages = pair[2], [{"role": "user", "content": "abc"}]
    on, off = (tokenizer.decode(chat_encoder(tokenizer, thinking)(messages)[0]) for thinking in (True, False))
    assert on != off
    assert "abc" in on
    assert "abc" in off
    plain = chat_encoder(tokenizer, chat_template=False)([*messages, *messages])
    assert plain.tolist() == tokenizer("abc\n\nabc", return_tensors="pt")["input_ids"].tolist()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_plain_dialogue_writes_what_generate_writes(kind: str) -> None:
    """Promise: the cache kept between turns saves the prompt's forward and changes no token, also where turns differ."""
    target = make_target(kind)
    calls: list[int] = []
    target.register_forward_hook(lambda m, a, k, o: calls.append(k["input_ids"].shape[1]), with_kwargs=True)
    dialogue = PlainDialogue(target, decoding_methods(target, make_drafter(), 6, [])["target.generate"])
    first = torch.arange(5, 14)[None]
    written = dialogue(first).token_ids
    follow_up = torch.cat([first, torch.tensor([[*written[:3], 7, 8, 9, 10]])], dim=1)  # half of the answer, then else
    for ids, most in ((follow_up, 4), (follow_up[:, 4:], 12), (follow_up[:, 4:], 1)):
        expected = greedy(target, ids, max_new_tokens=6)[0, ids.shape[1] :].tolist()
        calls.clear()
        assert dialogue(ids).token_ids == expected
        assert calls[0] == most


def test_targets_whose_cache_cannot_go_back_keep_nothing() -> None:
    """Promise: then ours keeps nothing either, so that later turns compare decoders and not caches."""
    target = make_target("qwen3", layer_types=["sliding_attention"] * 4, sliding_window=4, use_sliding_window=True)
    assert any(layer.is_sliding for layer in DynamicCache(config=target.config).layers)
    assert not keeping_methods(target)
    assert keeping_methods(make_target())
    methods = pair_dialogues(target, make_drafter(), 4, ["dflash"])()
    ids = torch.arange(5, 14)[None]
    assert methods["dflash"](ids).token_ids == methods["target.generate"](ids).token_ids


def test_result_holds_what_its_figures_depend_on(pair: tuple[Any, Any, Any], data_root: Path) -> None:
    plan = replace(PLAN, tasks=("mt-bench", "gsm8k"), num_prompts=2, data_root=data_root, thinking=True)
    result = run_pair(plan, pair)
    assert (result["schema_version"], result["kind"]) == (1, "eval")
    decoding = result["decoding"]
    assert decoding["enable_thinking"] is True
    assert decoding["chat_template"] == pair[2].chat_template
    assert decoding["peak_memory"] == "process resident"
    assert decoding["caches_kept_between_turns"] == ["target.generate", "dflash"]
    assert {"torch", "transformers", "dflash", "processes", "cpu", "device", "target_dtype"} <= set(
        result["environment"]
    )
    rows = {(row["task"], row["method"]): row for row in result["summary"]}
    assert list(rows) == [(t, m) for t in ("gsm8k", "mt-bench") for m in ("target.generate", "dflash")]
    for row in rows.values():
        assert row["identical"] == row["prompts"] == (2 if row["task"] == "gsm8k" else 4)
        assert row["peak_memory_bytes"] > 10**7
        assert row["ms_per_output_token"] > 0
    assert rows["gsm8k", "dflash"]["scored"] == 2
    assert rows["gsm8k", "dflash"]["score"] == rows["gsm8k", "target.generate"]["score"]
    assert rows["mt-bench", "dflash"]["score"] is None
    assert {(row["task"], row["category"]) for row in result["categories"]} == {
        ("mt-bench", "writing"),
        ("mt-bench", "maths"),
    }
    assert [task["prompts"] for task in result["tasks"]] == [2, 2]
    assert len({m["prompt_index"] for m in result["measurements"]}) == 6
    assert json.loads(json.dumps(result)) == result


def test_known_acceptance_gives_known_figures(data_root: Path) -> None:
    """Promise: tau, micro and macro, and the histogram are those of the blocks that were accepted."""
    target, tokenizer = make_target(), make_tokenizer()
    plan = replace(PLAN, data_root=data_root, num_prompts=1, chat_template=False)
    questions = questions_of(plan)
    ids = tokenizer(questions[0].turns[0], return_tensors="pt")["input_ids"]
    drafter = ScriptedDrafter(target, greedy(target, ids, max_new_tokens=40), [3, 0, 1])
    row = run_pair(plan, (target, drafter, tokenizer), 11)["summary"][1]
    lengths = expected_lengths([3, 0, 1], num_new_tokens=11)
    assert row["acceptance_histogram"] == [lengths.count(n) for n in range(1, max(lengths) + 1)]
    assert row["tau_micro"] == row["tau_macro"] == round(sum(lengths) / len(lengths), 4)
    assert row["identical"] == 1


def test_run_goes_on_where_it_stopped(pair: tuple[Any, Any, Any], data_root: Path, tmp_path: Path) -> None:
    """Promise: what is done is not done again, half a line does not count, and more prompts may follow."""
    plan, output = replace(PLAN, data_root=data_root, num_prompts=4), tmp_path / "deep" / "r.json"
    done: list[Any] = []
    shares: list[tuple[int, int]] = []

    def run(plan: EvalPlan) -> dict[str, Any]:
        done.clear()
        return run_pair(plan, pair, output=output, on_done=done.append, on_begin=lambda *n: shares.append(n))

    def fail(answers: list[TaskAnswer]) -> None:
        done.append(answers)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pair(plan, pair, output=output, on_done=fail)
    assert not output.exists()
    journal = output.with_suffix(".jsonl")
    journal.write_bytes(journal.read_bytes() + b'{"key": "gsm8k/3')
    first = run(plan)
    assert len(done) == 2
    assert shares == [(2, 2)]
    assert [m["row"] for m in first["measurements"][::2]] == [q.index for q in questions_of(plan)]
    assert first == {**run(plan), "command": first["command"]}
    assert done == []
    assert json.loads(output.read_text()) == first
    run(replace(plan, num_prompts=6))
    assert len(done) == 2
    assert sorted(path.name for path in output.parent.iterdir()) == ["r.json", "r.jsonl"]


def test_changed_setting_is_refused_by_name(pair: tuple[Any, Any, Any], data_root: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, data_root=data_root, num_prompts=1)
    run_pair(plan, pair, output=tmp_path / "r.json")
    for change, message in (
        ({"thinking": True}, r"enable_thinking: false, now true\)"),
        ({"repeats": 2, "drafter": "e"}, r'drafter: "d", now "e"; repeats: 1, now 2\)'),
        ({"chat_template": False}, r"chat_template: \"\w+\", now null\)"),
    ):
        changed = replace(plan, **change)
        with pytest.raises(ValueError, match=message):
            run_pair(changed, pair, output=tmp_path / "r.json")
    with pytest.raises(ValueError, match=r"max_new_tokens: 8, now 9\).*pass overwrite \(--overwrite\)"):
        run_pair(plan, pair, 9, output=tmp_path / "r.json")
    result = run_pair(plan, pair, 9, output=tmp_path / "r.json", overwrite=True)
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert result["decoding"]["max_new_tokens"] == 9


def test_changed_rows_are_asked_again(tmp_path: Path) -> None:
    """Promise: a question is known by its text, not by its place in a file that may have changed."""
    question = Question("gsm8k", 0, ("a",), "1")
    journal = Journal(tmp_path / "r.jsonl", {"a": 1})
    journal.add(question, [])
    assert set(journal.read()) == {key(question)}
    assert key(question) not in {key(replace(question, turns=("b",))), key(replace(question, reference="2"))}


def test_a_journal_of_half_a_line_holds_nothing(tmp_path: Path) -> None:
    """Promise: a run that was killed at its first line goes on as a new one."""
    (tmp_path / "r.jsonl").write_bytes(b'{"settings": {"a"')
    assert Journal(tmp_path / "r.jsonl", {"a": 1}).read() == {}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["gsm8k.jsonl", "gsm8k.part1.jsonl"])
def test_a_file_that_is_no_journal_stays(
    pair: tuple[Any, Any, Any], tmp_path: Path, name: str, overwrite: bool
) -> None:
    """Bug: a data set beside the output was cut and written over, or deleted with --overwrite."""
    (tmp_path / name).write_text('{"question": "1 and 1?"}\n{"question": "2')
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ValueError, match=rf"{name} is no journal .*: name another --output"):
        run_pair(replace(PLAN, tasks=()), pair, output=tmp_path / "gsm8k.json", overwrite=overwrite)
    assert (tmp_path / name).read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@pytest.mark.parametrize("changed", ["target_weights", "drafter_weights", "drafter_config", "dflash"])
def test_a_pair_that_was_trained_on_is_not_taken_for_the_one_before(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Bug: trained into the same folder, it got the figures of its former weights."""
    target, drafter, tokenizer = make_target(), make_drafter(), make_tokenizer()
    plan, output = replace(PLAN, data_root=data_root, num_prompts=1), tmp_path / "r.json"
    run_pair(plan, (target, drafter, tokenizer), output=output)
    if changed == "dflash":
        monkeypatch.setattr("dflash.evaluation.eval_run.__version__", "0.0")
    elif changed == "drafter_config":
        drafter.config.mask_token_id += 1
    else:
        model = target if changed == "target_weights" else drafter
        next(model.parameters()).data.mul_(2)
    with pytest.raises(ValueError, match=rf'begun with other settings \({changed}: "[^;]+\): give'):
        run_pair(plan, (target, drafter, tokenizer), output=output)


def test_other_engines_answer_anew(tmp_path: Path) -> None:
    """Promise: of a server its engine is known, and not its weights."""
    for number, engine in enumerate(["vllm 1", "vllm 2"]):
        backend = Backend(lambda: {"a": lambda ids: said([1])}, 4, {"engine": engine, "device": None}, {})
        question = Question("mine", 0, ("say 1",))
        with pytest.raises(ValueError, match='engine: "vllm 1", now "vllm 2"') if number else nullcontext():
            run_eval(replace(PLAN, tasks=()), [question], backend, make_tokenizer(), tmp_path / "r.json")


class Sibling(Processes):
    """One of two processes, whose sibling's items are known."""

    def __init__(self, rank: int, of_sibling: list[list[Any]]) -> None:
        self.rank, self.local_rank, self.count = rank, rank, 2
        self._of_sibling = of_sibling

    def gather(self, items: Any) -> list[Any]:
        return [*items, *self._of_sibling.pop(0)]


def test_processes_share_the_questions_and_the_first_writes(
    pair: tuple[Any, Any, Any], data_root: Path, tmp_path: Path
) -> None:
    """Promise: each question is answered by one process; the first one's result holds all, in one file and one journal."""
    plan, output = replace(PLAN, data_root=data_root, num_prompts=5), tmp_path / "r.json"
    questions = questions_of(plan)
    made: list[list[TaskAnswer]] = []
    second = Sibling(1, [[], [(key(q), []) for q in questions[::2]]])
    run_pair(plan, pair, output=output, processes=second, on_done=made.append)
    assert [answers[0].row for answers in made] == [q.index for q in questions[1::2]]
    assert not output.exists()
    assert (tmp_path / "r.part1.jsonl").exists()

    mine: list[list[TaskAnswer]] = []
    of_second = [(key(q), answers) for q, answers in zip(questions[1::2], made, strict=True)]
    first = Sibling(0, [[], of_second])
    (tmp_path / "r.part1.jsonl").rename(tmp_path / "aside")  # the first came before the second wrote
    result = run_pair(
        plan, pair, output=output, processes=first,
        on_begin=lambda *n: (tmp_path / "aside").rename(tmp_path / "r.part1.jsonl"), on_done=mine.append,
    )  # fmt: skip
    assert [answers[0].row for answers in mine] == [q.index for q in questions[::2]]
    assert [m["row"] for m in result["measurements"][::2]] == [q.index for q in questions]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.jsonl"]
    journal = output.with_suffix(".jsonl")
    settings = json.loads(journal.read_text().split("\n")[0])["settings"]
    assert len(Journal(journal, settings).read()) == 5


def test_answer_that_leaves_no_room_for_a_prompt_is_refused(pair: tuple[Any, Any, Any], data_root: Path) -> None:
    with pytest.raises(ValueError, match="1000000 leaves no room for a prompt: the target has"):
        run_pair(replace(PLAN, data_root=data_root), pair, 10**6)


def test_peak_memory_is_that_of_the_run() -> None:
    memory = PeakMemory(on_cuda=False)
    memory.reset()
    small = memory.read()
    held = torch.ones(40_000_000)  # 160 MB
    large = memory.read()
    assert large - small > 100e6
    del held
    if os.path.exists("/proc/self/clear_refs"):
        memory.reset()
        assert memory.read() < large - 100e6


def test_a_system_that_does_not_say_its_peak_memory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an evaluation on Windows, which has neither file nor module, ended in ModuleNotFoundError."""

    def absent(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", absent)
    monkeypatch.setitem(sys.modules, "resource", None)
    answers = run_scripted(Question("mt-bench", 0, ("a",)), {"plain": lambda ids: said([1])}, [])
    assert summarise_answers(numbered(answers))[0]["peak_memory_bytes"] is None


def test_peak_memory_of_a_method_is_that_of_all_repeats() -> None:
    """Promise: a later repeat that takes less does not hide the most."""
    readings = iter([5, 3])
    memory: Any = SimpleNamespace(reset=lambda: None, read=lambda: next(readings))
    methods = {"plain": lambda ids: said([1])}
    questions = [Question("mine", 0, ("say 1",))]
    ((answer,),) = answer_questions(
        questions, lambda: methods, lambda _: torch.ones(1, 3), Saying(), memory, repeats=2
    )
    assert answer.peak_memory_bytes == 5


def test_answers_at_the_end_of_a_chat_are_left_out(tmp_path: Path) -> None:
    """Promise: all of them, because the models write the answer."""
    asked = {"role": "user", "content": "why"}
    answer = {"role": "assistant", "content": "so"}
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": [asked, answer, answer]}))
    assert read_prompts(tmp_path / "mine.jsonl") == [[asked]]


def test_a_task_that_is_named_twice_is_asked_once() -> None:
    """Promise: names are read in order, each once."""
    assert listed("a, b,a", "--tasks") == ("a", "b")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, dflash_command: Callable[..., Any]) -> Any:
    monkeypatch.setenv("COLUMNS", "80")
    return partial(dflash_command, "eval")


def test_command_ends_with_a_table_and_a_file(
    run: Any, folders: tuple[str, str], data_root: Path, tmp_path: Path
) -> None:
    output = tmp_path / "r.json"
    asked = (
        "--target", folders[0], "--drafter", folders[1], "--data-root", data_root, "--limit", 2, "--max-new-tokens", 8,
        "--output", output, "--tasks",
    )  # fmt: skip
    status, out, err = run(*asked, "gsm8k,mt-bench")
    assert status == 0, err
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert [line.split()[:3] for line in out.splitlines() if " of " in line and "x" in line] == [
        [task, method, number] for task, number in (("gsm8k", "2"), ("mt-bench", "4")) for method in ("target.generate", "dflash")
    ]  # fmt: skip
    assert {tuple(line.split()[:2]) for line in out.splitlines() if line.startswith("mean")} == {("mean", "dflash")}
    assert "thinking off, at most 8" in out
    result = json.loads(output.read_text())
    assert result["command"].startswith("dflash eval --target target --drafter drafter --data-root data")
    assert result["decoding"]["target"] == "target"
    assert str(data_root) not in output.read_text()

    status, out, err = run(*asked, "gsm8k", "--json")
    assert json.loads(out)["summary"] == [row for row in result["summary"] if row["task"] == "gsm8k"]
    assert "2 questions answered before." in err
    assert run(*asked, "gsm8k", "--max-new-tokens", 9)[0] == 1


def test_command_says_in_a_log_how_far_it_is(
    run: Any, folders: tuple[str, str], data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.cli.terminal.LINE_SECONDS", 0)
    asked = ("--target", folders[0], "--drafter", folders[1], "--data-root", data_root, "--tasks", "gsm8k")
    _, out, error = run(*asked, "--limit", 2, "--max-new-tokens", 8)
    assert "mean" not in out  # of one task
    assert re.findall(r"^(\d of 2): gsm8k \d", error, re.MULTILINE) == ["1 of 2", "2 of 2"]


def test_the_first_of_two_commands_holds_the_output_while_it_loads(
    run: Any, folders: tuple[str, str], data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a second command fails at once, as with `dflash regenerate`."""
    output = tmp_path / "r.json"

    def load_pair(*_: Any) -> Any:
        with pytest.raises(ValueError, match=r"r\.json is being written by process"):
            check_output(output)
        raise ValueError("It was held.")

    monkeypatch.setattr("dflash.cli.loading.load_pair", load_pair)
    asked = ("--target", folders[0], "--drafter", folders[1], "--data-root", data_root, "--tasks", "gsm8k")
    assert run(*asked, "--output", output) == (1, "", "dflash: It was held.\n")
    check_output(output)  # free again


CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "say 1"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "and 2"},
    {"role": "assistant", "content": "2"},  # what is asked for
]


def test_prompts_of_ones_own_are_compared_and_shown_under_their_files_name(
    run: Any,
    dflash_command: Any,
    folders: tuple[str, str],
    data_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Promise: beside tasks or alone; texts, speed and acceptance, and no score; in the result, the tables and the page."""
    prompts, output = tmp_path / "support desk.jsonl", tmp_path / "r.json"
    prompts.write_text("say 3\n\n" + "\n".join(map(json.dumps, ({"messages": CHAT}, {"question": "say 4"}))))
    (tmp_path / "more.txt").write_text("say 5")
    asked = ("--target", folders[0], "--drafter", folders[1], "--max-new-tokens", 8, "--output", output)
    alone = ("--prompts", prompts, "--prompts", tmp_path / "more.txt")
    status, out, err = run(*asked, *alone)
    assert status == 0, err
    assert [line.split()[:2] for line in out.splitlines() if " of 3 " in line] == 2 * [["support", "desk"]], out
    result = json.loads(output.read_text())
    summary = {(row["task"], row["method"]): row for row in result["summary"]}
    assert list(summary) == [(t, m) for t in ("more", "support desk") for m in ("target.generate", "dflash")]
    ours = summary["support desk", "dflash"]
    assert (ours["prompts"], ours["identical"], ours["score"], ours["scored"]) == (3, 3, None, 0)
    assert ours["speedup"] > 0
    assert ours["tau_micro"] >= 1
    assert result["tasks"][0] == {
        "task": "support desk",
        "scorer": None,
        "prompts": 3,
        "too_long": 0,
        "with_answers": 0,
    }

    monkeypatch.setattr(canvas, "png", lambda figure: b"")
    page = tmp_path / "page.md"
    page.write_text("<!-- r:begin -->\n<!-- r:end -->\n")
    assert dflash_command("report", output, "--pages", page, "--output", tmp_path / "report")[0] == 0
    assert "| support desk | dflash | 3 of 3 |" in page.read_text()
    assert "support desk</h3>" in (tmp_path / "report" / "index.html").read_text()
    assert (tmp_path / "report" / "r_speedup.png").is_file()

    status, out, err = run(*asked, *alone, "--data-root", data_root, "--tasks", "gsm8k", "--limit", 2, "--json")
    assert status == 0, err
    assert "3 questions answered before." in err  # two of the three, and the one of the other file
    found = {(row["task"], row["prompts"], row["scored"]) for row in json.loads(out)["summary"]}
    assert found == {("gsm8k", 2, 2), ("more", 1, 0), ("support desk", 2, 0)}


def test_a_chat_is_asked_as_it_stands_and_known_again_by_all_of_it(tmp_path: Path) -> None:
    """Promise: the user's last message is asked after those before it; another one before it is another question."""
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": CHAT}))
    (question,) = questions_of_prompts("mine", read_prompts(tmp_path / "mine.jsonl"))
    asked: list[Any] = []
    run_scripted(question, {"plain": lambda ids: said([1])}, asked)
    assert asked == [["be short", "say 1", "1", "and 2"]]
    assert key(question) != key(replace(question, before=question.before[1:]))
    dialogues = [[{"role": "user", "content": str(n)}] for n in range(9)]
    some, more = (questions_of_prompts("mine", dialogues, count, seed=3) for count in (3, 5))
    assert [one.index for one in some] == sorted(one.index for one in some) != [0, 1, 2]
    assert {one.turns for one in some} < {one.turns for one in more}
    assert len(questions_of_prompts("mine", dialogues)) == 9


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("GSM-8K.jsonl", "x", "have the name of the task gsm8k, under which results are kept: rename their file"),
        ("mine.jsonl", {"messages": CHAT[:1]}, "Prompt 1 of mine ends with a message of the role system: end it with"),
        ("mine.jsonl", None, "--prompts mine.jsonl cannot be read"),
        ("r.jsonl", "x", "--prompts r.jsonl is a file that --output r.json writes: give --output another name."),
        (
            None,
            None,
            "Nothing is asked: give --tasks with names of tasks, --prompts with a file of your own, or both.",
        ),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused_before_a_model_is_loaded(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, row: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if row is not None:
        (tmp_path / str(name)).write_text(row if isinstance(row, str) else json.dumps(row))
    words = ["--target", "org/t", "--drafter", "org/d", "--output", "r.json", "--overwrite"]
    status, out, err = run(*words, *([] if name is None else ["--prompts", name]))
    assert (status, out) == (1, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == ({name} if row is not None else set())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "gsm9k"), "no task 'gsm9k': choose from gsm8k, "),
        (("--tasks", " ,"), "--tasks ' ,' names nothing"),
        (("--tasks", "humaneval"), "holds no rows of humaneval"),
        (("--tasks", "gsm8k", "--methods", "fast"), "There is no method 'fast': choose from target.generate, "),
    ],
)
def test_command_refuses_in_a_sentence(
    run: Any, folders: tuple[str, str], data_root: Path, options: tuple[str, ...], message: str
) -> None:
    status, out, err = run(
        "--target", folders[0], "--drafter", folders[1], "--data-root", data_root, "--max-new-tokens", 8, *options
    )
    assert (status, out) == (1, "")
    assert message in err
    assert err.startswith("dflash: ")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (),
            "cannot be confined here (no filter): leave the answers unscored with --no-score, or run it all the same",
        ),
        (("--no-score",), "holds no rows of humaneval"),
        (("--unsafe-code",), "holds no rows of humaneval"),
    ],
)
def test_code_that_cannot_be_confined_is_refused_before_anything_is_read(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("dflash.evaluation.scoring.why_unconfined", lambda: "no filter")
    asked = ("--target", "org/t", "--drafter", "org/d", "--data-root", tmp_path, "--tasks", "humaneval")
    status, out, err = run(*asked, *options)
    assert (status, out) == (1, "")
    assert message in err


@pytest.mark.parametrize("options", [(), ("--unsafe-code",)])
def test_unsafe_code_is_allowed_by_its_flag_alone(
    run: Any, folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Promise: the flag reaches the place where programs run, and nothing else allows them there."""
    (tmp_path / "humaneval.jsonl").write_text(json.dumps({"prompt": "def f():", "test": "", "entry_point": "f"}))
    allowed = []

    def scored(scorer: str, answer: str, reference: Any, limits: Limits) -> bool:
        allowed.append(limits.unsafe_code)
        return True

    monkeypatch.setattr("dflash.evaluation.task_answers.is_right", scored)
    monkeypatch.setattr("dflash.evaluation.scoring.why_unconfined", lambda: None)
    asked = ("--target", folders[0], "--drafter", folders[1], "--data-root", tmp_path, "--tasks", "humaneval")
    status, _, err = run(*asked, "--max-new-tokens", 8, *options)
    assert status == 0, err
    assert set(allowed) == {bool(options)}


def test_the_default_length_is_what_the_target_has_room_for(
    run: Any, folders: tuple[str, str], data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2048 tokens leave no room for a prompt in a small target; a length that was asked for is not changed."""
    target = make_target(max_position_embeddings=400)
    assert pair_backend(target, make_drafter()).max_new_tokens == 200
    assert pair_backend(make_target(max_position_embeddings=40960), make_drafter()).max_new_tokens == 2048
    target.save_pretrained(tmp_path / "small")
    make_tokenizer().save_pretrained(tmp_path / "small")
    asked = ("--target", tmp_path / "small", "--drafter", folders[1], "--data-root", data_root, "--tasks", "gsm8k")
    assert "leaves no room" in run(*asked, "--max-new-tokens", 400)[2]
    lengths = []

    def stop(_plan: Any, _questions: Any, backend: Any, *_: Any, **__: Any) -> None:
        lengths.append(backend.max_new_tokens)
        raise ValueError("enough")

    monkeypatch.setattr("dflash.evaluation.run_eval", stop, raising=False)
    status, _, err = run(*asked, "--limit", 1)
    assert (status, lengths) == (1, [200]), err
    assert "Answers are cut at 200 tokens, half of the target's positions (--max-new-tokens)." in err


@pytest.mark.parametrize("methods", [["dflash"], ["prompt lookup"]])
def test_a_target_whose_logits_are_no_numbers_is_refused(methods: list[str]) -> None:
    """All methods would write the same nonsense, which once counted as identical."""
    target = make_target()
    target.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="target's logits are NaN or infinite"):
        pair_backend(target, make_drafter(), 8, methods)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--output", "old.json"), "old.json exists: pass overwrite (--overwrite)"),
        (("--output", "r.jsonl"), "r.jsonl must end in .json"),
        (("--output", "eval.v1"), "eval.v1 must end in .json"),  # with eval.v2 it shared a journal
        (("--output", "."), "is a folder: name a file in it"),
        (("--output", "old.json/r.json"), "old.json is no folder"),
        (("--device", "nonsense"), "--device nonsense cannot be used"),
        (("--methods", "fast"), "There is no method 'fast'"),
    ],
)
def test_command_refuses_before_a_row_or_a_model_is_read(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    monkeypatch.setattr("dflash.evaluation.eval_run.load_questions", lambda *_: pytest.fail("rows were read"))
    status, _, err = run("--target", "org/t", "--drafter", "org/d", "--tasks", "mt-bench", *options)
    assert status == 1
    assert message in err
    assert (tmp_path / "old.json").read_text() == "{}"


def test_two_runs_do_not_write_one_result(pair: tuple[Any, Any, Any], data_root: Path, tmp_path: Path) -> None:
    """Promise: while one run answers, another that would write the same file is refused, and the first ends whole."""
    plan, output = replace(PLAN, data_root=data_root, num_prompts=2), tmp_path / "r.json"
    refused: list[str] = []

    def second(answers: list[TaskAnswer]) -> None:
        with pytest.raises(ValueError, match=r"r\.json is being written by process") as caught:
            run_pair(plan, pair, output=output, overwrite=True)
        refused.append(str(caught.value))

    result = run_pair(plan, pair, output=output, on_done=second)
    assert len(refused) == 2
    assert json.loads(output.read_text()) == result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.jsonl"]


def test_siblings_find_each_other_and_gather_what_each_has() -> None:
    """Promise: with the variables that `accelerate launch` and torchrun set, two processes share and gather."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work() -> None:
        PartialState._reset_state()  # of a test before, which the copy has inherited
        one = processes.Processes()
        share = list(one.share(range(5)))
        said = [one.rank, one.local_rank, one.is_first, share, one.gather([{"of": share}])]
        sys.stdout.write(json.dumps(said))

    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [Forked(work, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    said = [json.loads(process.finish().stdout.splitlines()[-1]) for process in started]
    everything = [{"of": [0, 2, 4]}, {"of": [1, 3]}]
    assert said == [[0, 0, True, [0, 2, 4], everything], [1, 1, False, [1, 3], everything]]
