"""The benchmark for GPUs, as far as it runs without one: wrong text is seen, and a row that fails loses only itself."""

import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from processes import FRESH
from reporting import tables_of

from dflash.evaluation import HAS_NATIVE, read_result


BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "gpu"


def load(name):
    """A module of the benchmark; they import each other as scripts do."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


# Steps


@pytest.fixture(scope="module")
def bench():
    with mock.patch.object(torch._dynamo.config, "disable", False):
        return load("measure").GpuBench({"is_smoke": True, "shape": "smoke"})


def test_no_prompts_length_comes_twice(bench):
    """Known bug: each text was read twice, so that no kernel planned for a new length in the one that counted."""
    target, drafter = bench.pair
    first, second = (bench._decoding(target, drafter, "eager", 16, 1) for _ in range(2))
    assert second["prompt_tokens"] == first["prompt_tokens"] + 2
    assert first["is_right"]
    assert first["ms_per_step_of_first_text"] > 0


@pytest.mark.parametrize(("way", "num_sequences"), [("generate", 1), ("generate", 3), ("eager", 3)])
def test_a_step_is_one_of_all_sequences(bench, monkeypatch, way, num_sequences):
    target, drafter = bench.pair
    numbers = iter(range(10_000))
    monkeypatch.setattr(load("measure").time, "perf_counter", lambda: next(numbers) / 1e3)
    figures = bench._text(target, drafter, way, 16, num_sequences)
    assert figures["steps"] >= 2
    if way == "generate":
        assert (figures["steps"], figures["tokens_per_step"]) == (3, 1)  # of 5 tokens, without the first two
    assert figures["ms_per_token"] == pytest.approx(figures["ms_per_step"] / figures["tokens_per_step"])


# One row after another

HELPER = """
import os, signal, time

class OutOfMemoryError(RuntimeError):
    pass

class Bench:
    facts = {"device": "none"}

    def __init__(self):
        self.is_broken = False

    def measure(self, setting):
        what = setting["do"]
        if what == "raise":
            raise KeyError("in the middle")
        if what == "refuse":
            raise ValueError("a tree takes one prompt at a time")
        if what == "memory":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\\nmore")
        if what == "assert":
            self.is_broken = True
            raise RuntimeError("device-side assert triggered")
        if what == "hang":
            time.sleep(600)
        if what == "exit":
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"process": os.getpid()}

    def recover(self):
        if self.is_broken:
            raise RuntimeError("device-side assert triggered, still")

def open_bench(options):
    if options.get("fails"):
        raise ImportError("no such package")
    if options.get("dies"):
        os._exit(5)
    return Bench()
"""


@pytest.fixture
def helper(tmp_path, monkeypatch):
    (tmp_path / "gpu_bench_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("gpu_bench_helper")
    del sys.modules["gpu_bench_helper"]


def run(helper, *what, seconds=60.0, **options):
    runner = load("runner")
    rows = [
        runner.new_row(f"{place}/{do}", "all", 1.5 if do == "hang" else 30.0, do=do) for place, do in enumerate(what)
    ]
    seen, facts = [], {}

    def on_change(rows, said):
        seen.append([row["status"] for row in rows])
        facts.update(said)
        json.dumps(rows, allow_nan=False)

    runner.run_rows(rows, helper.open_bench, options, time.monotonic() + seconds, on_change)
    return rows, facts, seen


def test_a_row_that_fails_hangs_or_dies_loses_only_itself(helper):
    bad = ["raise", "memory", "refuse", "assert", "hang", "exit", "kill"]
    what = [do for each in bad for do in (each, "fine")]
    outcomes, facts, seen = run(helper, *what)
    assert [outcome["status"] for outcome in outcomes[1::2]] == ["measured"] * len(bad)
    reasons = {outcome["do"]: (outcome["status"], outcome["reason"]) for outcome in outcomes[::2]}
    assert reasons["raise"] == ("failed", "KeyError: 'in the middle'")
    assert reasons["memory"] == ("failed", "out of memory: CUDA out of memory. Tried to allocate 1 GiB.")
    assert reasons["refuse"] == ("refused", "ValueError: a tree takes one prompt at a time")
    assert reasons["assert"][1].endswith("after it: RuntimeError: device-side assert triggered, still")
    assert reasons["hang"] == ("failed", "it took longer than the 2 s that it had")
    assert reasons["exit"] == ("failed", "its process ended with status 3")
    assert "ended by signal 9" in reasons["kill"][1]
    assert facts == {"device": "none"}
    # What a process survives it goes on after; else another one does.
    processes = [outcome["process"] for outcome in outcomes[1::2]]
    assert processes[0] == processes[1] == processes[2]
    assert len(set(processes[2:])) == 5
    # Each row is there for who writes files as soon as it is done, and all are there from the beginning.
    assert seen[0] == ["skipped"] * len(what)
    assert [sum(status != "skipped" for status in statuses) for statuses in seen] == [*range(len(what) + 1), len(what)]


def test_rows_of_another_group_have_a_process_of_their_own(helper):
    rows = [load("runner").new_row(str(place), group, 30.0, do="fine") for place, group in enumerate("aabb")]
    load("runner").run_rows(rows, helper.open_bench, {}, time.monotonic() + 60, lambda rows, facts: None)
    processes = [row["process"] for row in rows]
    assert processes[0] == processes[1] != processes[2] == processes[3]


def test_what_the_time_does_not_suffice_for_is_skipped(helper):
    outcomes, *_ = run(helper, "fine", "hang", "fine", "fine", seconds=4.0)
    statuses = [(outcome["status"], outcome["reason"]) for outcome in outcomes]
    assert statuses[0] == ("measured", None)
    assert statuses[1][0] == "failed"
    outcomes, *_ = run(helper, "fine", "fine", seconds=0.0)
    assert {(outcome["status"], outcome["reason"]) for outcome in outcomes} == {
        ("skipped", "the time for all rows was over before this one began")
    }


@pytest.mark.parametrize(
    ("option", "said"), [("fails", "ImportError: no such package"), ("dies", "its process ended with status 5")]
)
def test_a_bench_that_does_not_open_is_tried_twice(helper, option, said):
    outcomes, facts, _ = run(helper, "fine", "fine", "fine", **{option: True})
    assert [outcome["status"] for outcome in outcomes] == ["failed", "failed", "skipped"]
    assert outcomes[0]["reason"] == f"no process to measure in: {said}"
    assert outcomes[2]["reason"] == f"2 processes in a row did not start: {said}"
    assert facts == {}


# Which rows


def test_rows_come_in_order_of_worth():
    names = [row["name"] for row in load("rows").all_rows()]
    assert len(names) == len(set(names))
    wanted = [
        "correctness/eager/chain",
        "correctness/recorded/chain",
        "qwen3-8b/512x1/generate",
        "qwen3-8b/512x1/native",
        "qwen3-8b/512x1/eager",
        "qwen3-8b/512x1/useless",
        "qwen3-8b/512x8/eager",
        "qwen3-8b/4096x1/eager",
        "qwen3-8b/32768x1/eager",
        "qwen3-8b/512x1/recorded",
        "qwen3-8b/32768x1/recorded",
        "qwen3-8b/training/library",
        "qwen3-8b/512x1/static",
        "qwen3-8b/512x1/compiled",
        "qwen3-8b/32768x1/compiled",
        "correctness/compiled/chain",
    ]
    assert [name for name in names if name in wanted] == wanted
    assert {way for way in load("rows").WAYS if f"qwen3-8b/512x1/{way}" not in names} == set()


def test_compiled_steps_have_a_process_of_their_own():
    """Rows of a group follow one another: a kill while compiling loses nothing else."""
    rows = load("rows").all_rows()
    groups = list(dict.fromkeys(row["group"] for row in rows))
    assert groups == ["correctness", "steps", "training", "compiled", "compiled correctness"]
    assert [row["group"] for row in rows] == sorted((row["group"] for row in rows), key=groups.index)
    assert {row["group"] for row in rows if row.get("way") == "compiled"} == {"compiled"}


def test_rows_are_chosen_by_name():
    rows = load("rows")
    names = [row["name"] for row in rows.chosen(rows.all_rows(), ["*/training/*", "*/512x1/eager"])]
    assert names == ["qwen3-8b/512x1/eager", "qwen3-8b/training/library", "qwen3-8b/training/sdpa"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--smoke", "--rows", "qwen3-8b/*"], "--rows 'qwen3-8b/*' matches no row: choose from those that --list"),
        (["--smoke", "--seconds", "0"], "--seconds 0 is too few: give 1 at least"),
        pytest.param(
            [], "There is no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
        ),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, message):
    with pytest.raises(SystemExit):
        load("bench").arguments(words)
    assert message in capsys.readouterr().err


def test_smoke_figures_are_kept_only_where_asked(monkeypatch):
    bench = load("bench")
    monkeypatch.delenv("OUT", raising=False)
    assert bench.default_output(is_smoke=True) is None
    assert bench.default_output(is_smoke=False).parent == BENCHMARKS.parent / "results"
    monkeypatch.setenv("OUT", "/somewhere")
    assert bench.default_output(is_smoke=True) == Path("/somewhere/gpu.json")


# What follows from the rows


def decoded(name, ms_per_step, tokens_per_step=1.0, reason=None):
    (row,) = [row for row in load("rows").all_rows() if row["name"] == name]
    times = {"ms_per_step": ms_per_step, "ms_per_token": ms_per_step / tokens_per_step}
    outcome = {"status": "measured", "reason": None, "seconds": 1.0, "fallback": reason}
    return {**row, **outcome, **times, "tokens_per_step": tokens_per_step}


def test_ratios_are_of_the_tokens_that_a_step_gave():
    outcomes = [
        decoded("qwen3-8b/512x1/generate", 24.0),
        decoded("qwen3-8b/512x1/static", 8.0),
        decoded("qwen3-8b/512x1/recorded", 6.0, 6.0),
        decoded("qwen3-8b/512x8/recorded", 7.5, 6.0),
        decoded("qwen3-8b/512x1/tree", 8.0, 1.1),
    ]
    rows = {row["name"].partition("/")[2]: row for row in load("rows").derived(outcomes)}
    assert rows["512x1/recorded"]["generate_over_this"] == 24.0
    assert rows["512x1/recorded"]["static_over_this"] == 8.0
    # The script does not decide what a tree accepts: only its step's time is a figure.
    assert "generate_over_this" not in rows["512x1/tree"]
    assert "generate_over_this" not in rows["512x8/recorded"]


def test_nothing_is_called_recorded_that_was_not():
    (row,) = load("rows").derived([decoded("qwen3-8b/512x1/recorded", 30.0, 6.0, "out of memory")])
    assert row["label"] == "ours, recorded, but EAGER: out of memory"


def test_rows_that_were_not_measured_tell_their_reason():
    rows = load("rows")
    failed = decoded("qwen3-8b/32768x1/compiled", 1.0) | {"status": "failed", "reason": "out of memory"}
    assert rows.line(failed) == "qwen3-8b/32768x1/compiled: failed, out of memory [1 s]"
    assert "WRONG TEXT" in rows.line(decoded("qwen3-8b/512x1/eager", 1.0) | {"is_right": False})
    assert rows.all_rows()[0]["reason"] == "not begun yet"


# From the shell to a file


def shell(words, python="", **variables):
    """`run.sh` with a Python whose program is replaced by these lines of shell; `"$python"` is the real one."""
    script = Path(variables["HOME"]) / "python"
    script.write_text(f'#!/bin/bash\npython={sys.executable}\n{python}\nexec "$python" "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, **variables, "PYTHON": str(script)}
    return subprocess.run(
        [str(BENCHMARKS / "run.sh"), *words], env=environment, capture_output=True, text=True, check=False
    )


def run_main(monkeypatch, *words):
    """The exit status of `bench.py`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["bench.py", "--smoke", *words])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            load("bench").main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not multiprocessing.active_children()
    return ended.value.code


def test_rows_of_every_kind_are_measured_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    # Processes that need not import torch anew, three times.
    monkeypatch.setattr(load("runner").multiprocessing, "get_context", lambda kind: FRESH)
    names = ["correctness/eager/batch", "smoke/16x1/*", "smoke/training/library"]
    assert not run_main(monkeypatch, "--rows", *names)
    log = capsys.readouterr().out
    assert f"{13 if HAS_NATIVE else 12} of 13 rows measured" in log
    result = read_result(tmp_path / "gpu.json")
    decoded, training, *_ = tables_of(result)
    assert {"x generate", "x static", "first text's, ms"} & set(decoded[0])
    assert (len(decoded[1]), len(training[1])) == ((11 if HAS_NATIVE else 10), 1)
    assert "means nothing; simulated acceptance" in result["decoding"]["label"]
    assert {"device", "torch", "TORCH_CUDNN_SDPA_DEPRIORITIZED"} <= set(result["environment"])
    by_way = {row.get("way", row["kind"]): row for row in result["summary"]}
    assert by_way.pop("native")["status"] == ("measured" if HAS_NATIVE else "refused")
    assert {row["status"] for row in by_way.values()} == {"measured"}
    assert all(row["is_right"] for row in by_way.values() if row["kind"] == "decode")
    assert by_way["eager"]["tokens_per_step"] > 1
    assert by_way["useless"]["tokens_per_step"] == 1
    assert "CUDA device" in by_way["recorded"]["label"]
    assert "EAGER" in by_way["compiled"]["label"]


def test_a_run_that_is_ended_leaves_a_whole_file(tmp_path, monkeypatch, helper):
    monkeypatch.setattr(load("bench"), "GpuBench", helper.open_bench)
    # When the first row has had its turn.
    monkeypatch.setattr(load("bench"), "line", lambda row: signal.raise_signal(signal.SIGTERM))
    assert run_main(monkeypatch, "--output", str(tmp_path / "gpu.json")) == 128 + signal.SIGTERM
    rows = read_result(tmp_path / "gpu.json")["summary"]
    assert len(rows) == 50
    assert rows[-1]["reason"] == "not begun yet"


def test_a_wrong_text_fails_the_run(tmp_path, monkeypatch, helper):
    monkeypatch.setattr(load("bench"), "GpuBench", helper.open_bench)
    output = str(tmp_path / "gpu.json")
    assert run_main(monkeypatch, "--rows", "correctness/eager/chain", "--output", output) == 1


def test_the_shell_script_keeps_what_was_said_and_how_it_ended(tmp_path):
    ran = shell(["--smoke"], 'echo "$@"; exit 7', HOME=str(tmp_path), OUT=str(tmp_path / "out"))
    assert ran.returncode == 7
    assert re.fullmatch(r"benchmarks/gpu/bench\.py --seconds 5[67]\d --smoke\n", ran.stdout)
    assert (tmp_path / "out" / "gpu.log").read_text() == ran.stdout


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (
            ["--smoke"],
            {"PACKAGES": "no/such"},
            "PACKAGES=no/such is no folder: make it with benchmarks/gpu/run.sh --pack no/such",
        ),
        (["--pack", str(BENCHMARKS)], {}, "cannot be packed into, it holds"),
    ],
)
def test_bad_folders_of_packages_are_one_sentence(words, variables, said):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = [str(BENCHMARKS / "run.sh"), *words]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode
    assert said in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


# Packages that travel


def wheel(folder, name, files=()):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in (f"{name}/__init__.py", *files):
            archive.writestr(file, "x = 1\n")
    return path


def test_all_is_packed_but_torch(tmp_path):
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "old-1.0-py3-none-any.whl").touch()
    asked = tmp_path / "asked"
    ran = shell(["--pack", str(folder)], f'echo "$@" >>{asked}; exit', HOME=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    with_needs, alone = asked.read_text().splitlines()
    assert all("-m pip download" in line and f"--dest {folder}" in line for line in (with_needs, alone))
    assert with_needs.endswith(f"--dest {folder} transformers filelock jinja2 rich typer")
    assert alone.endswith("--no-deps accelerate psutil")
    assert (folder / ".gitignore").read_text() == "*\n"
    assert not list(folder.glob("*.whl"))


def test_wheels_are_unpacked_but_for_what_others_were_built_against(tmp_path):
    folder = tmp_path / "packages"
    folder.mkdir()
    said = 'if [[ $1 == *bench.py ]]; then exec "$python" -c "import apart, inner, numpy; print(numpy.__file__)"; fi'
    ask = partial(shell, ["--smoke"], said, HOME=str(tmp_path), PACKAGES=str(folder))
    assert "holds no wheels: write them with benchmarks/gpu/run.sh --pack" in ask().stderr
    wheel(folder, "apart", files=["apart-1.0.data/purelib/inner.py"])
    wheel(folder, "numpy")
    ran = ask()
    assert ran.stdout.strip() == numpy.__file__, ran.stderr
    (folder / "bad-1.0-py3-none-any.whl").write_text("no archive")
    assert ask().stderr.strip() == f"{folder}/bad-1.0-py3-none-any.whl is no wheel: pack again."
