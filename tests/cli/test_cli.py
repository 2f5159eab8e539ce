"""The command line and what it shows, on a random pair in place of the embedded one."""

from __future__ import annotations

import inspect
import json
import logging
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import typer
from processes import forked
from rich.console import Console
from safetensors import SafetensorError
from tiny_models import ScriptedDrafter, greedy, make_drafter, make_prompt, make_target, make_tokenizer, save_target
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM
from typer.testing import CliRunner

import dflash
from dflash import Block
from dflash.checkpoints import embedded
from dflash.cli import app as cli
from dflash.cli import loading
from dflash.cli.terminal import BlockPrinter, Comparison, TextStream, comparison_table, counting_bar, show_table
from dflash.common import hub
from dflash.evaluation import (
    HAS_NATIVE,
    METHODS,
    NATIVE,
    TASKS,
    Difference,
    TimedRun,
    first_difference,
    timed_blocks,
    timed_generate,
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like `dflash/assets`."""
    folder = tmp_path_factory.mktemp("assets")
    save_target(folder / embedded.TARGET_NAME)
    for name, head in ((embedded.DRAFTER_NAME, {}), (embedded.DOMINO_NAME, {"gru_hidden_dim": 6, "emb_dim": 4})):
        make_drafter(**head).save_pretrained(folder / name)
        for code in (folder / name).glob("*.py"):
            code.unlink()  # as in the package: never kept twice
        (folder / name / "README.md").write_text(f"the card of {name}")
    rows = [{"question": f"{number} and 1?", "answer": f"#### {number + 1}"} for number in range(4)]
    (folder / "heldout.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(assets: Path, monkeypatch: pytest.MonkeyPatch, dflash_command: Callable[..., Any]) -> Any:
    """`run("demo", …)`: exit status, standard output, standard error."""
    monkeypatch.setattr(embedded, "embedded_path", lambda name: assets / name)
    monkeypatch.setenv("COLUMNS", "200")
    return dflash_command


@pytest.fixture
def pair(assets: Path) -> list[str]:
    """The options that name the pair."""
    return ["--target", str(assets / embedded.TARGET_NAME), "--drafter", str(assets / embedded.DRAFTER_NAME)]


def test_what_every_command_line_answers(run: Any) -> None:
    """Promise: the version, help by either name, and how much is logged; `python -m dflash` is the same program."""
    assert run("--version") == (0, f"dflash {dflash.__version__}\n", "")
    assert run("-h")[:2] == run("--help")[:2]
    status, _, error = run("--quiet", "--verbose", "demo")
    assert status == 2
    assert "give one of them" in error
    done = subprocess.run([sys.executable, "-m", "dflash", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dflash {dflash.__version__}\n"


@pytest.mark.parametrize(("flag", "level"), [("-q", "ERROR"), ("-v", "INFO")])
def test_how_much_is_logged(flag: str, level: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr("transformers.utils.logging.set_verbosity", levels.append)
    run(flag, "demo", "--prompts", "0")  # refused, after this was set
    assert levels == [getattr(logging, level)]


def test_demo_answers_and_ends_with_a_table(run: Any, assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = files_read(monkeypatch, assets)
    status, out, _ = run("demo", "--prompts", "2", "--max-new-tokens", "6")
    assert status == 0
    assert "0 and 1?" in out
    assert "1 and 1?" in out
    assert "2 and 1?" not in out
    assert out.count("identical") == 3
    assert "float32, 1 thread, block size 6, greedy, batch 1, at most 6 tokens" in out
    assert read == {"heldout.jsonl", embedded.TARGET_NAME, embedded.DRAFTER_NAME}


def test_demo_answers_the_text_and_drafts_with_the_head_it_is_given(
    run: Any, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = files_read(monkeypatch, assets)
    status, out, _ = run("demo", "--domino", "--prompt", "how many", "--max-new-tokens", "6")
    assert status == 0
    assert "how many" in out
    assert out.count("identical") == 1
    assert read == {"heldout.jsonl", embedded.TARGET_NAME, embedded.DOMINO_NAME}


def files_read(monkeypatch: pytest.MonkeyPatch, assets: Path) -> set[str]:
    """Takes the names of the embedded files that are read from here on."""
    names: set[str] = set()

    def path_of(name: str) -> Path:
        names.add(name)
        return assets / name

    monkeypatch.setattr(embedded, "embedded_path", path_of)
    return names


def test_generate_writes_json_that_equals_plain_greedy(run: Any, pair: list[str], assets: Path) -> None:
    status, out, _ = run("generate", *pair, "abc", "--json", "--no-chat-template", "--max-new-tokens", "9")
    assert status == 0
    report = json.loads(out)
    prompt_ids = make_tokenizer()("abc", return_tensors="pt")["input_ids"]
    assert (
        report["token_ids"] == greedy(make_target(), prompt_ids, max_new_tokens=9)[0, prompt_ids.shape[1] :].tolist()
    )
    assert report["text"] == make_tokenizer().decode(report["token_ids"], skip_special_tokens=True)
    assert len(report["acceptance_lengths"]) >= 1
    assert report["tau"] >= 1
    assert set(report["versions"]) == {"python", "torch", "transformers", "dflash-transformers"}


def test_generate_streams_plain_text_into_a_pipe(run: Any, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("abc"))
    status, out, err = run("generate", *pair, "-", "--max-new-tokens", "9")
    report = json.loads(run("generate", *pair, "abc", "--max-new-tokens", "9", "--json")[1])
    assert status == 0
    assert out == report["text"] + "\n"
    assert "tau" in err


def test_generate_samples_the_same_text_for_the_same_seed(run: Any, pair: list[str]) -> None:
    texts = [
        run("generate", *pair, "abc", "--temperature", "2", "--seed", str(seed), "--max-new-tokens", "8")[1]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_top_k_of_zero_is_no_default(run: Any, pair: list[str]) -> None:
    """Promise: `--top-k 0` reads the whole vocabulary, whatever the default is."""
    words = ["abc", "--json", "--temperature", "2", "--max-new-tokens", "8"]
    status, out, err = run("generate", *pair, *words, "--top-k", "0")
    assert status == 0, err
    assert json.loads(out)["top_k"] == 0


def test_thinking_flag_reaches_the_template(run: Any, pair: list[str]) -> None:
    on, off = (
        run("generate", *pair, "abc", "--json", "--max-new-tokens", "8", flag)[1]
        for flag in ("--thinking", "--no-thinking")
    )
    assert json.loads(on)["token_ids"] != json.loads(off)["token_ids"]


def test_compare_shows_both_and_explains_texts_that_differ_by_rounding(
    run: Any, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: as `dflash eval` does, and only where rounding can be the cause. "margin 0" once stood there alone."""
    sentence = "--dtype float32 shows that they are equal"

    def compared(dtype: str, difference: Difference | None) -> str:
        monkeypatch.setattr("dflash.evaluation.first_difference", lambda *_: difference)
        status, out, err = run("generate", *pair, "abc", "--compare", "--max-new-tokens", "6", "--dtype", dtype)
        assert status == 0, err
        return " ".join(out.split())

    same = compared("bfloat16", None)
    assert "target.generate" in same
    assert "identical" in same
    assert sentence not in same
    for dtype in ("bfloat16", "float32"):
        other = compared(dtype, Difference(4, 0.0))
        assert "differs from token 4, margin 0" in other
        assert (sentence in other) == (dtype == "bfloat16")


@pytest.mark.parametrize("command", ["generate", "convert", "train"])
def test_a_drafter_whose_tensors_do_not_fit_is_one_sentence(
    command: str, run: Any, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: no table of transformers stands above it."""
    drafter = tmp_path / "drafter"
    make_drafter().save_pretrained(drafter)
    config = json.loads((drafter / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (drafter / "config.json").write_text(json.dumps(config))
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}')
    words = {
        "generate": ["generate", *pair[:2], "--drafter", drafter, "abc"],
        "convert": ["convert", drafter, tmp_path / "new"],
        "train": [
            "train",
            *pair[:2],
            "--data",
            tmp_path / "data.jsonl",
            "--output",
            tmp_path / "new",
            "--init",
            drafter,
        ],
    }
    logged: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    status, _, error = run(*words[command])
    assert (status, logged) == (1, [])
    assert "does not fill a DFlash drafter exactly" in error.splitlines()[-1]


def test_export_writes_the_code_beside_the_drafter(run: Any, tmp_path: Path) -> None:
    status, out, _ = run("export-demo", str(tmp_path / "new"))
    assert status == 0
    target, *drafters = map(Path, out.split())
    assert [drafter.name for drafter in drafters] == [embedded.DRAFTER_NAME, embedded.DOMINO_NAME]
    for drafter in drafters:
        assert (drafter / "modeling_dflash.py").is_file()
        assert (drafter / "README.md").read_text() == f"the card of {drafter.name}"
        assert "AutoModel" in json.loads((drafter / "config.json").read_text())["auto_map"]
    assert [json.loads((one / "config.json").read_text()).get("gru_hidden_dim") for one in drafters] == [None, 6]
    assert (target / "tokenizer.json").is_file()
    assert run("export-demo", str(tmp_path / "new"))[0] == 0  # again: replaces its own


@pytest.mark.parametrize("name", [embedded.DRAFTER_NAME, embedded.DOMINO_NAME])
def test_export_leaves_what_is_not_a_checkpoint(run: Any, tmp_path: Path, name: str) -> None:
    kept = tmp_path / name / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("x")
    status, _, err = run("export-demo", str(tmp_path))
    assert status == 1
    assert "not a checkpoint" in err
    assert kept.read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "{pair}", ""], "prompt is empty"),
        (["generate", "{pair}", "a", "--compare", "--json"], "--compare"),
        (["generate", "{pair}", "a", "--compare", "--top-p", "0.5"], "--compare"),
        (["generate", "{pair}", "a", "--compare", "--top-k", "0"], "--compare"),
        (["generate", "{pair}", "a", "--compare", "--seed", "1"], "--compare"),
        (["generate", "--target", "/no/such/folder", "--drafter", "x", "a"], "--target /no/such/folder"),
        (["generate", "--target", "{empty}", "--drafter", "x", "a"], "config.json"),
        (["generate", "--target", "{truncated}", "--drafter", "{drafter}", "a"], "cannot be read"),
        (["generate", "--target", "{target}", "--drafter", "{target}", "a"], "config holds no"),
    ],
)
def test_bad_input_gets_one_sentence(
    run: Any, pair: list[str], assets: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    for path in (assets / embedded.TARGET_NAME).iterdir():
        (truncated / path.name).write_bytes(
            path.read_bytes()[:1000] if "safetensors" in path.name else path.read_bytes()
        )
    names = {"empty": str(tmp_path), "truncated": str(truncated), "target": pair[1], "drafter": pair[3]}
    filled = [part for a in arguments for part in (pair if a == "{pair}" else [a.format(**names)])]
    status, out, err = run(*filled)
    assert status == 1
    assert out == ""
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("dflash: ")]) == 1
    assert "Traceback" not in err


def test_lines_end_at_line_feeds_alone(
    run: Any, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: they ended at form feeds and at separators of Unicode too, which JSON takes as they are."""
    texts = ["a\u2028b", "a\x85b", "a\x0cb"]
    (tmp_path / "p.txt").write_text("".join(f"{text}\r\n" for text in texts), encoding="utf-8", newline="")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": texts[0]}, ensure_ascii=False), encoding="utf-8")
    assert loading.read_prompts(tmp_path / "p.txt") == [loading.question(text) for text in texts]
    assert loading.read_prompts(tmp_path / "p.jsonl") == [loading.question(texts[0])]
    row = {"question": texts[0], "answer": texts[1]}
    (tmp_path / "heldout.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    monkeypatch.setattr(embedded, "embedded_path", lambda name: tmp_path / name)
    assert [problem.question for problem in embedded.heldout_problems()] == [texts[0]]


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_a_measurement_is_written_before_it_is_printed(
    command: str, run: Any, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a pipe that was closed, or a terminal without its letters, lost it."""

    def closed(*_: Any) -> None:
        raise OSError("standard output is closed")

    monkeypatch.setattr(f"dflash.cli.{command}.print_result", closed)
    monkeypatch.setattr(f"dflash.evaluation.run_{command}", lambda *_: {"figures": 1}, raising=False)
    models = pair if command == "bench" else pair[1::2]
    status, _, err = run(command, *models, "--output", tmp_path / "out.json")
    assert (status, "standard output is closed" in err) == (1, True)
    assert json.loads((tmp_path / "out.json").read_text()) == {"figures": 1}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-new-tokens", "0"),
        ("--temperature", "-1.0"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "3.0"),
        ("--top-p", "nan"),
        ("--top-k", "-1"),
        ("--device", "nonsense"),
        ("--device", "meta"),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_anything_is_loaded(option: str, value: str, run: Any) -> None:
    """The pair does not exist: a value that is looked at after loading would not be named."""
    names = ["--target", "no/such-target", "--drafter", "no/such-drafter"]
    status, out, err = run("generate", *names, "a", option, value)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"dflash: {option} {value} cannot be used")


def test_usage_error_exits_with_2(run: Any) -> None:
    assert run("generate", "a")[0] == 2
    assert run("demo", "--prompts", "0")[0] == 2


def test_other_distribution_of_the_same_name_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash.common import name_clash as distributions

    monkeypatch.setattr(distributions.metadata, "version", lambda name: {"dflash": "0.1.0"}[name])
    status, _, err = run("demo")
    assert status == 1
    assert "pip uninstall -y dflash dflash-transformers" in err


# --- what is shown


def printed(blocks: list[Block], **console: Any) -> str:
    out = StringIO()
    printer = BlockPrinter(Console(file=out, width=80, **console), make_tokenizer())
    for block in blocks:
        printer.block(block)
    printer.end()
    return out.getvalue()


def blocks_of(*parts: tuple[str, int]) -> list[Block]:
    """Blocks from texts and numbers of accepted characters."""
    encode = make_tokenizer().encode
    return [Block(encode(text), 5, accepted, is_prefill=i == 0) for i, (text, accepted) in enumerate(parts)]


BLOCKS = blocks_of(("a", 0), ("bcd", 2), ("e", 0), ("fg", 2))


def test_accepted_runs_are_bracketed_without_colour() -> None:
    assert printed(BLOCKS) == "a[bc]de[fg]\n"


def test_accepted_runs_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = printed(BLOCKS, force_terminal=True, color_system="standard")
    assert "\x1b[4;32mbc\x1b[0m" in out
    assert "\x1b[1;35md\x1b[0m" in out
    assert "[bc]" not in out


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[bc]" in printed(BLOCKS, force_terminal=True, color_system="standard")


def test_half_a_character_waits_for_its_other_bytes() -> None:
    class Bytes:
        def decode(self, token_ids: list[int], **kwargs: Any) -> str:
            return bytes(token_ids).decode("utf-8", errors="replace")

    stream = TextStream(Bytes())
    assert [stream.push([byte]) for byte in "aé".encode()] == ["a", "", "é"]
    assert stream.push([0xC3]) == ""
    assert stream.push([], is_last=True) == "\ufffd"


def test_table_counts_over_all_prompts(tiny_target: Any) -> None:
    def row(tokens: int, seconds: float, lengths: list[int]) -> Comparison:
        plain = TimedRun(list(range(tokens)), seconds, 0.1, tokens, [])
        fast = TimedRun(list(range(tokens)), seconds / 2, 0.1, len(lengths) + 1, lengths)
        return Comparison(plain, fast, None)

    out = StringIO()
    Console(file=out, width=120).print(comparison_table([row(9, 1.0, [4, 4]), row(5, 1.0, [1, 1, 1, 2])]))
    last = out.getvalue().splitlines()[-2]
    assert [cell.strip() for cell in last.strip("│").split("│")] == [
        "all", "14", "7", "14", "2.00x", "2.17", "2.00", "identical"
    ]  # fmt: skip


# --- what is measured


def test_timed_runs_count_tokens_forwards_and_steps(tiny_target: Any) -> None:
    prompt_ids = make_prompt()
    truth = greedy(tiny_target, prompt_ids, max_new_tokens=20)
    plain = timed_generate(tiny_target, prompt_ids, max_new_tokens=20, do_sample=False)
    fast = timed_blocks(
        ScriptedDrafter(tiny_target, truth, [3, 0, 5]), tiny_target, prompt_ids, max_new_tokens=20, temperature=0.0
    )
    assert plain.token_ids == fast.token_ids == truth[0, prompt_ids.shape[1] :].tolist()
    assert plain.num_forwards == 20
    assert plain.tokens_per_step == 1
    assert fast.num_forwards == len(fast.acceptance_lengths) + 1
    assert fast.acceptance_lengths[:3] == [4, 1, 6]
    assert fast.tau == sum(fast.acceptance_lengths) / len(fast.acceptance_lengths)
    assert fast.tokens_per_step == 19 / len(fast.acceptance_lengths)
    assert 0 < fast.seconds_to_first_token < fast.seconds
    assert 0 < plain.seconds_to_first_token < plain.seconds
    assert not tiny_target._forward_hooks


def test_listeners_are_outside_the_clock(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the listener moves: every second it takes is left out, every token is handed on."""
    now = [0.0]
    monkeypatch.setattr("dflash.evaluation.timing.time.perf_counter", lambda: now[0])
    heard: list[int] = []

    def slow(token_ids: list[int]) -> None:
        now[0] += 10
        heard.extend(token_ids)

    plain = timed_generate(tiny_target, make_prompt(), slow, max_new_tokens=5, do_sample=False)
    assert heard == plain.token_ids
    assert plain.seconds == 0
    heard.clear()
    fast = timed_blocks(
        make_drafter(), tiny_target, make_prompt(), lambda block: slow(block.token_ids), max_new_tokens=5
    )
    assert heard == fast.token_ids
    assert fast.seconds == 0


def test_first_difference_names_place_and_margin(tiny_target: Any) -> None:
    prompt_ids = make_prompt()
    ids = greedy(tiny_target, prompt_ids, max_new_tokens=6)[0, prompt_ids.shape[1] :].tolist()
    assert first_difference(tiny_target, prompt_ids, ids, list(ids)) is None
    other = [*ids[:3], (ids[3] + 1) % 96, *ids[4:]]
    logits = tiny_target(greedy(tiny_target, prompt_ids, max_new_tokens=3)).logits[0, -1]
    found = first_difference(tiny_target, prompt_ids, ids, other)
    assert found is not None
    assert found.index == 3
    assert found.margin == pytest.approx((logits[ids[3]] - logits[other[3]]).item(), rel=1e-4)
    assert first_difference(tiny_target, prompt_ids, ids, ids[:4]).index == 4


COMMANDS_THAT_LOAD = {
    "generate": ("generate", "--target", "org/target", "--drafter", "org/drafter", "abc"),
    "regenerate": ("regenerate", "--target", "org/target", "--data", "data.jsonl", "--output", "new.jsonl"),
    "train": ("train", "--target", "org/target", "--data", "data.jsonl", "--output", "new"),
    "check": ("check", "org/drafter"),
}


@pytest.mark.parametrize("command", COMMANDS_THAT_LOAD)
def test_without_the_hub_a_name_fails_at_once(
    command: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: an address where nobody listens is asked once, and nothing waits. It took 32 seconds."""
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Before 1.0 a session that was made offline, by another test, stays so.
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()
    huggingface_hub.utils.get_session()
    loading.say_once.cache_clear()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} seconds"))
    asked: list[str] = []
    monkeypatch.setattr("dflash.common.hub.get_session", lambda: SimpleNamespace(head=refuse(asked)))
    status, _, error = run(*COMMANDS_THAT_LOAD[command])
    assert (status, len(asked)) == (1, 1)
    assert "huggingface.co does not answer: what it holds is read from the cache alone.\n" in error
    name = COMMANDS_THAT_LOAD[command][2] if command != "check" else "org/drafter"
    assert name in error.splitlines()[-1]
    hub.ask_hub_again()
    assert huggingface_hub.constants.HF_HUB_OFFLINE == hub.IS_OFFLINE


def refuse(asked: list[str]) -> Callable[..., Any]:
    """A `head` of a session that notes the address and finds nobody there."""

    def head(url: str, **_: Any) -> Any:
        asked.append(url)
        raise ConnectionError(url)

    return head


def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: where standard error is no terminal a long command is not silent, and a short one says nothing."""
    now = [0.0]

    def stopwatch() -> Callable[[], float]:
        began = now[0]
        return lambda: now[0] - began

    monkeypatch.setattr("dflash.cli.terminal.stopwatch", stopwatch)
    for is_first in (True, False):
        with counting_bar(is_first) as bar:
            task = bar.add_task("Answering", total=2000, rate="9 tokens/s")
            for _ in range(1500):
                now[0] += 0.125
                bar.advance(task)
            bar.update(task, advance=1, description="gsm8k 2.00x")
            now[0] += 60
            bar.update(task, advance=1, description="gsm8k 2.00x")
        lines = [
            f"{done} of 2,000: {what}, 9 tokens/s"
            for done, what in (
                ("480", "Answering"),
                ("960", "Answering"),
                ("1,440", "Answering"),
                ("1,502", "gsm8k 2.00x"),
            )
        ]
        assert capsys.readouterr().err.splitlines() == (lines if is_first else [])


def test_a_bar_is_silent_in_all_processes_but_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    for is_first, said in ((True, "5 rows\n"), (False, "")):
        with counting_bar(is_first) as bar:
            bar.console.print("5 rows")
        assert capsys.readouterr().err == said


TABLE = (
    ["method", "identical texts", "tokens/s", "10-90 %", "compilations"],
    [
        ["dflash with lookup", "16 of 16", "642", "3.0-7.0", "2"],
        ["target.generate", "16 of 16", "135", "1.0-1.0", "0"],
    ],
)


@pytest.mark.parametrize("width", [None, 200, 80, 40, 5])
def test_no_figure_of_a_table_is_cut(
    width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: every cell is whole at any width, its method beside it. Figures once ended in an ellipsis ("1.…")."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    show_table(TABLE, "mine, 16 prompts")
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "…" not in out
    if width is None or width >= 80:
        assert [line.split()[-6:] for line in lines[-2:]] == [
            ["16", "of", "16", "642", "3.0-7.0", "2"],
            ["16", "of", "16", "135", "1.0-1.0", "0"],
        ]
        return
    longest = max(map(len, TABLE[1][0][:2])) + 1
    assert max(len(line.rstrip()) for line in lines) <= max(width, longest + len("compilations"))
    for place in range(1, 5):
        for name, *cells in TABLE[1]:
            assert any(line.startswith(name) and cells[place - 1] in line for line in lines)


def test_a_table_into_a_file_is_as_wide_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: a pipe has no width, so that no line is broken for one."""
    monkeypatch.delenv("COLUMNS", raising=False)
    headings = [f"figure {number}" for number in range(40)]
    show_table((["method", *headings], [["dflash", *(["123.45"] * 40)]]))
    assert capsys.readouterr().out.splitlines()[-1].split() == ["dflash", *(["123.45"] * 40)]


def test_a_path_that_cannot_be_used_is_named_in_a_sentence(run: Any, tmp_path: Path) -> None:
    """Promise: what the system refuses reads like what the library does."""
    taken = tmp_path / "taken"
    taken.touch()
    status, _, err = run("export-demo", taken)
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"dflash: {taken}")
    assert "Errno" not in err


def test_more_problems_than_there_are_is_refused(run: Any) -> None:
    status, out, err = run("demo", "--prompts", "5")
    assert (status, out) == (1, "")
    assert err == "dflash: --prompts 5: there are 4 problems; ask for at most 4.\n"


def without(folder: Path, tmp_path: Path, *names: str) -> str:
    """A copy of a checkpoint that lacks these files."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in names:
        (copy / name).unlink(missing_ok=True)
    return str(copy)


def test_a_target_without_a_tokenizer_is_named(run: Any, pair: list[str], tmp_path: Path) -> None:
    """Bug: it was taken for an empty prompt."""
    target = without(Path(pair[1]), tmp_path, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    status, out, err = run("generate", "--target", target, *pair[2:], "abc")
    assert (status, out) == (1, "")
    assert f"dflash: --target {target}: there is no tokenizer: put its files (tokenizer.json" in err


def test_a_target_without_a_chat_template_is_prompted_as_it_is_and_said_so(
    run: Any, pair: list[str], tmp_path: Path
) -> None:
    """Promise: one line on standard error, however many prompts; none where the template is switched off."""
    target = without(Path(pair[1]), tmp_path, "chat_template.jinja")
    config = json.loads((Path(target) / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (Path(target) / "tokenizer_config.json").write_text(json.dumps(config))
    words = ["generate", "--target", target, *pair[2:], "abc", "--max-new-tokens", "4"]
    loading.say_once.cache_clear()
    assert run(*words)[2].count("has no chat template") == 1
    assert "chat template" not in run(*words)[2]
    loading.say_once.cache_clear()
    assert "chat template" not in run(*words, "--no-chat-template")[2]


def test_a_dtype_that_the_cpu_emulates_is_warned_of(
    run: Any, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: one line if the stored dtype is slow here; none with --dtype, nor on a CPU that multiplies it."""
    target = without(Path(pair[1]), tmp_path)
    AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(target)
    words = ["generate", "--target", target, *pair[2:], "abc", "--no-chat-template", "--max-new-tokens", "2"]
    hint = "This CPU emulates bfloat16, in which the target is stored: --dtype float32 is faster here."
    cpus: dict[str, Any] = {"avx2": {"architecture": "x86_64"}, "arm": {"architecture": "aarch64"}}
    cpus["avx512_bf16"] = {"architecture": "x86_64", "avx512_bf16": True}
    for cpu, options, count in (
        ("avx2", [], 1),
        ("avx2", ["--dtype", "bfloat16"], 0),
        ("avx512_bf16", [], 0),
        ("arm", [], 0),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda cpu=cpu: cpus[cpu])
        loading.say_once.cache_clear()
        status, _, error = run(*words, *options)
        assert (status, error.count(hint)) == (0, count), (cpu, options, error)


def test_a_target_that_sees_the_tokens_after_is_refused(run: Any, pair: list[str], tmp_path: Path) -> None:
    """Bug: BERT was told that its hidden_size differs."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path / "bert")
    make_tokenizer().save_pretrained(tmp_path / "bert")
    status, out, err = run("generate", "--target", tmp_path / "bert", *pair[2:], "abc")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].endswith("bert model is not a causal language model: give one that writes text.")


def test_a_request_beyond_the_targets_positions_is_warned_of(run: Any, pair: list[str], tmp_path: Path) -> None:
    """Promise: one line with the numbers and what fits; the text is written all the same."""
    copy = without(Path(pair[1]), tmp_path)
    config = json.loads((Path(copy) / "config.json").read_text()) | {"max_position_embeddings": 12}
    (Path(copy) / "config.json").write_text(json.dumps(config))
    words = ["generate", "--target", copy, *pair[2:], "abc", "--no-chat-template", "--max-new-tokens"]
    loading.say_once.cache_clear()
    status, out, err = run(*words, "10")
    assert (status, len(out) > 1) == (0, True)
    assert "The prompt's 3 tokens and --max-new-tokens 10 reach beyond the target's 12 positions" in err
    assert "ask for at most 9." in err
    assert "reach beyond" not in run(*words, "9")[2]


def test_a_full_disk_is_one_sentence(pair: list[str], tmp_path: Path) -> None:
    """Promise: the cause and the remedy, and nothing half written stays. Files of the process stop at 8 kB."""
    new = str(tmp_path / "new-DFlash")
    commands = [["export-demo", new], ["convert", pair[3], new], ["export", pair[3], new, "--target", pair[1]]]

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        for words in commands:
            sys.argv = ["dflash", *words]
            try:
                cli.main()
            except SystemExit as stopped:
                sys.stdout.write(f"{stopped.code}\n")

    done = forked(work)
    assert done.stdout.split() == ["1"] * 3
    said = "dflash: Nothing more can be written (File too large): free some space, or name a path on another disk."
    assert done.stderr.count(said) == 3
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(28, "No space left on device", "x/config.json"),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_every_way_of_saying_that_the_disk_is_full_reads_alike(
    error: Exception, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Any) -> None:
        raise error

    monkeypatch.setattr("dflash.checkpoints.embedded.export_embedded_pair", fail)
    assert run("export-demo", "x")[2] == (
        "dflash: Nothing more can be written (No space left on device): free some space, or name a path on another disk.\n"
    )


def test_help_needs_no_model() -> None:
    done = subprocess.run([sys.executable, "-m", "dflash", "--help"], capture_output=True, text=True, check=True)
    for name in ("demo", "generate", "export-demo"):
        assert name in done.stdout


def help_of(*command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    return CliRunner().invoke(cli.app, [*command, "--help"]).output


def test_the_help_of_eval_names_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports no task, because help has to be quick."""
    words = help_of("eval", width=100, monkeypatch=monkeypatch).replace(",", " ").replace(".", " ").split()
    assert [name for name in TASKS if name not in words] == []


@pytest.mark.parametrize("width", [80, 100])
def test_every_command_stands_in_its_panel(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: what somebody wants to do leads to the commands for it; no name is cut."""
    shown = help_of(width=width, monkeypatch=monkeypatch)
    panels = {
        title: [line.split()[1] for line in body.splitlines() if re.match(r"│ \S", line)]
        for title, body in re.findall(r"╭─ ([\w ]+) ─+╮\n(.*?)╰", shown, re.DOTALL)
    }
    assert panels.pop("Options")
    assert panels == {
        "Try it": ["demo", "export-demo"],
        "Decode": ["generate"],
        "Measure": ["bench", "doctor", "eval", "report"],
        "Train": ["adapt", "regenerate", "train"],
        "Checkpoints": ["check", "convert", "export", "pair", "publish"],
        "Servers": ["serve", "canary"],
    }


@pytest.mark.parametrize(
    "command", ["demo", "generate", "export-demo", "check", "convert", "export", "publish", "serve"]
)
@pytest.mark.parametrize("width", [80, 100])
def test_help_shows_whole_names_and_required_ones_first(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = next(commands[command] for commands in cli.PANELS.values() if command in commands)
    shown = help_of(command, width=width, monkeypatch=monkeypatch)
    names = [f"--{name.replace('_', '-')}" for name in inspect.signature(cli.with_flags(function)).parameters]
    renamed = {"--as-json": "--json", "--only-print": "--print", "--checked": "--check"}
    named = {"--prompt", "--source", "--folder", "--repo-id", "--engine-args", "--drafter"}  # some are arguments
    assert all(renamed.get(name, name) in shown or name in named for name in names)
    assert not re.search(r"--[\w-]*…", shown)
    marks = ["*" in line.split("--")[0] for line in shown.splitlines() if re.match(r"│[ *]+--", line)]
    assert marks == sorted(marks, reverse=True)


@pytest.mark.parametrize("command", sorted(name for commands in cli.PANELS.values() for name in commands))
def test_help_cuts_no_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on 80 columns `--pure-draft-prefix-len`, `--no-chat-template` and others ended in an ellipsis."""
    shown = help_of(command, width=80, monkeypatch=monkeypatch)
    assert re.findall(r"--[\w-]*…", shown) == []
    for parameter in typer.main.get_command(cli.app).commands[command].params:
        assert getattr(parameter, "hidden", False) or all(name in shown for name in parameter.opts if name[0] == "-")


def test_the_opposite_of_a_long_flag_is_taken_though_the_help_has_no_room_for_it() -> None:
    with (
        typer.main.get_command(cli.app)
        .commands["train"]
        .make_context("train", ["--no-gradient-checkpointing"]) as asked
    ):
        assert asked.params["gradient_checkpointing"] is False


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_help_names_every_task_and_method_on_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the names in the help are those that are accepted, none cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    lines = CliRunner().invoke(cli.app, [command, "--help"]).output.split("╭")[0].splitlines()
    paragraphs = " ".join(line.strip() or "\n" for line in lines).splitlines()

    def listed(what: str) -> list[str]:
        (found,) = (text.strip() for text in paragraphs if text.strip().startswith(f"{what}: "))
        return [name.split(" (")[0] for name in found.removeprefix(f"{what}: ").rstrip(".").split(", ")]

    known = [name for name in listed("Methods") if name != NATIVE or HAS_NATIVE]
    assert known == list(METHODS)
    if command == "eval":
        assert listed("Tasks") == list(TASKS)


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    """Promise: whether the texts are identical is readable, also where every figure is as wide as it gets."""
    plain = TimedRun(list(range(120)), 1.0, 0.1, 11, [])
    fast = TimedRun(list(range(120)), 0.08, 0.01, 11, [12] * 10 + [13])
    console = Console(width=80, record=True, file=StringIO())
    console.print(comparison_table([Comparison(plain, fast, None)] * 2))
    lines = console.export_text().splitlines()
    assert sum("identical │" in line for line in lines) == 3
    assert all("12.50x" in line for line in lines if "identical" in line)
