"""The benchmark for GPUs, as far as it runs without one: what counts as a step, and that a row that fails loses only itself."""

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
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from dflash.evaluation import (
    HAS_NATIVE,
    Script,
    read_result,
    scripted_continuation,
    scripted_pair,
    scripted_prompt,
    tables_of,
    timed_blocks,
    useless,
)


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name):
    """A module of the benchmarks, which import each other as scripts do."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


# Scripted pairs


class RefusesForeignGenerators(TorchFunctionMode):
    """What `with torch.device("cuda")` does: tensors are made there, and a CPU's generator is refused."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if func in _device_constructors() and kwargs.get("device") is None and generator is not None:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
        return func(*args, **kwargs)


def test_a_pair_is_drawn_where_generators_of_other_devices_are_refused(monkeypatch):
    """The script was drawn by the CPU's generator in the context of the GPU: no row could begin."""
    scripted = sys.modules[Script.__module__]
    new_weights = scripted._new_weights

    @contextmanager
    def on_a_gpu(dtype, device):
        with new_weights(dtype, device), RefusesForeignGenerators():
            yield

    with pytest.raises(RuntimeError, match="but found 'cpu'"), RefusesForeignGenerators():
        torch.rand(3, generator=torch.Generator())
    monkeypatch.setattr(scripted, "_new_weights", on_a_gpu)
    _, drafter = scripted_pair("smoke", 6.5, torch.bfloat16)
    assert torch.equal(drafter.runs, Script(6.5, 16).runs(512))


def test_a_script_drawn_in_bf16_has_the_mean_that_it_states():
    """Drawn in the default dtype, bf16, whose values are too few, the mean was 6.56."""
    exact = Script(6.5, 16).runs(400_000)
    torch.set_default_dtype(torch.bfloat16)
    try:
        runs = Script(6.5, 16).runs(400_000)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(runs, exact)
    assert runs.double().mean() + 1 == pytest.approx(6.5, abs=0.03)


def test_a_useless_drafter_is_never_right_and_shares_the_weights():
    target, drafter = scripted_pair("smoke", 6.5)
    before = drafter.runs.clone()
    twin = useless(drafter)
    ids = scripted_prompt(target, 12)
    run = timed_blocks(twin, target, ids, max_new_tokens=20, temperature=0.0)
    assert set(run.acceptance_lengths) == {1}
    assert run.token_ids == scripted_continuation(target, ids, 20)[0].tolist()
    assert torch.equal(drafter.runs, before)
    own = dict(drafter.named_parameters())
    assert all(parameter is own[name] for name, parameter in twin.named_parameters())
    states = torch.zeros(1, 15, target.config.hidden_size)
    head = target.get_output_embeddings()
    sure = [d.propose(states, torch.tensor([[7]]), head, with_confidences=True).confidences for d in (drafter, twin)]
    assert torch.equal(*sure)


# Steps


@pytest.fixture
def clock(monkeypatch):
    """Marks are made at these times, one after another; at those among `recordings` another graph has been recorded."""
    steps = load("gpu_steps")
    watch = steps.GraphWatch.installed()
    numbers = count()

    def run_at(seconds, recordings=()):
        counted = (steps.Counts(sum(mark >= at for at in recordings)) for mark in numbers)
        monkeypatch.setattr(steps.time, "perf_counter", iter(seconds).__next__)
        monkeypatch.setattr(watch, "counts", lambda: next(counted))
        return steps.StepMarks()

    return run_at


def block(sequence, count):
    return SimpleNamespace(sequence=sequence, token_ids=[0] * count)


def blocks_of(*steps):
    yield from (block(*one) for step in steps for one in step)


def test_steps_that_are_not_like_most_do_not_count(clock):
    """Prefill, the first step, one that records a graph, and two that count; what comes after is not read."""
    steps = load("gpu_steps")
    marks = clock([0, 0.050, 0.150, 0.850, 0.860, 0.872], recordings=[3])
    blocks = blocks_of([(0, 1)], [(0, 4)], [(0, 4)], [(0, 2)], [(0, 3)], [(0, 1)])
    assert steps.read_blocks(blocks, marks, 1, 4) == [[0] * 14]
    assert list(blocks) == []
    figures = steps.step_figures(marks, 1)
    assert (figures["ms_to_first_token"], figures["steps"], figures["steps_counted"]) == (50, 4, 2)
    assert figures["ms_per_step"] == pytest.approx(11)
    assert figures["ms_per_token"] == pytest.approx(4.4)
    assert figures["tokens_per_step"] == 2.5


def test_the_blocks_of_a_batch_are_one_step(clock):
    steps = load("gpu_steps")
    marks = clock([0, 0.009, 0.019, 0.034])
    token_ids = steps.read_blocks(blocks_of([(0, 1), (1, 1)], [(0, 2), (1, 2)], [(0, 4), (1, 2)]), marks, 2, 2)
    assert list(map(len, token_ids)) == [7, 5]
    figures = steps.step_figures(marks, 2)
    assert figures["ms_per_step"] == pytest.approx(15)
    assert figures["tokens_per_step"] == 3


def test_steps_of_several_widths_count_by_their_mean(clock):
    steps = load("gpu_steps")
    marks = clock([0, 1, 2, 2.002, 2.004, 2.015])
    steps.read_blocks(blocks_of(*[[(0, 1)]] * 5), marks, 1, 4)
    assert steps.step_figures(marks, 1)["ms_per_token"] == pytest.approx(2)
    assert steps.step_figures(marks, 1, by_mean=True)["ms_per_token"] == pytest.approx(5)
    with pytest.raises(ValueError, match=r"None of 1 steps counts.*let it write more tokens"):
        steps.step_figures(marks[:3], 1)


def test_recordings_are_counted_before_they_begin():
    watch = load("gpu_steps").GraphWatch.installed()
    before = watch.counts()
    with pytest.raises(AttributeError):
        torch.cuda.CUDAGraph.capture_begin(None)
    assert watch.counts().since(before)["recordings"] == 1


def test_compilations_are_counted_with_their_reasons():
    watch = load("gpu_steps").GraphWatch.installed()

    @torch.compile(backend="eager", dynamic=False)
    def double(values):
        return values * 2

    double(torch.zeros(3))
    before, known = watch.counts(), watch.compiled()
    double(torch.zeros(5))
    assert watch.counts().since(before)["compilations"] == 1
    assert any("recompile of double" in reason and "size mismatch" in reason for reason in watch.reasons(known))
    assert watch.reasons(watch.compiled()) == []


def test_steps_of_generate_are_those_of_its_streamer():
    steps = load("gpu_steps")
    target, _ = scripted_pair("smoke", 4.0)
    marks = steps.StepMarks()
    target.generate(scripted_prompt(target, 12, 2), do_sample=False, max_new_tokens=6, streamer=marks)
    assert [mark.num_tokens for mark in marks] == [24, *[2] * 6]
    figures = steps.step_figures(marks, 2)
    assert (figures["steps"], figures["steps_counted"], figures["tokens_per_step"]) == (5, 4, 1)


def test_every_text_of_a_batch_outlasts_its_steps():
    """Promise: a step is a block of every sequence, also where whole blocks are accepted."""
    bench = load("gpu_measure").GpuBench.__new__(load("gpu_measure").GpuBench)
    bench.num_steps = 4
    target, drafter = scripted_pair("smoke", 16.0)
    ids, marks = scripted_prompt(target, 12, 3), load("gpu_steps").StepMarks()
    assert bench._read(target, drafter, "eager", ids, marks) == scripted_continuation(target, ids, 65).tolist()
    assert [mark.num_tokens for mark in marks] == [0, 3, *[48] * 4]


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
    runner = load("gpu_runner")
    rows = [runner.new_row(f"{place}/{do}", 1.5 if do == "hang" else 30.0, do=do) for place, do in enumerate(what)]
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


def test_the_rows_are_all_there_the_most_useful_ones_first():
    rows = load("gpu_rows")
    names = [row["name"] for row in rows.all_rows()]
    assert len(names) == len(set(names)) == 2 * (1 + 3 * 2 * 9 + 2)
    assert names[:3] == ["qwen3-8b/floor", "qwen3-8b/512x1/generate", "qwen3-8b/512x1/compiled"]
    before = names[: names.index("qwen3-0.6b/floor")]
    assert {"qwen3-8b/32768x1/compiled", "qwen3-8b/512x8/compiled", "qwen3-8b/training/library"} <= set(before)
    assert {f"qwen3-8b/512x1/{way}" for way in rows.WAYS} <= set(before)
    assert names.index("qwen3-0.6b/512x1/compiled") < names.index("qwen3-8b/4096x8/tree")
    assert {row["kind"] for row in rows.all_rows(("smoke",), (16,), (1, 2))} == {"floor", "decode", "training"}


def test_rows_are_chosen_by_name():
    rows = load("gpu_rows")
    names = [row["name"] for row in rows.chosen(rows.all_rows(), ["*/training/*", "qwen3-8b/floor"])]
    assert names[:3] == ["qwen3-8b/floor", "qwen3-8b/training/library", "qwen3-8b/training/sdpa"]
    assert len(names) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--smoke", "--rows", "qwen3-8b/floor"],
            "--rows 'qwen3-8b/floor' matches no row: choose from those that --list",
        ),
        (["--smoke", "--seconds", "0"], "--seconds 0 is too few: give 1 at least"),
        (["--smoke", "--steps", "2"], "--steps 2 is too few: give 3 at least"),
        (["--smoke", "--tau", "17"], "--tau 17 cannot be scripted: a block gives 16 tokens at most"),
        pytest.param(
            [], "There is no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
        ),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, said):
    with pytest.raises(SystemExit):
        load("gpu").arguments(words)
    assert said in capsys.readouterr().err


def test_figures_of_a_smoke_test_are_kept_nowhere_but_where_they_are_wanted(monkeypatch):
    gpu = load("gpu")
    monkeypatch.delenv("OUT", raising=False)
    assert gpu.default_output(is_smoke=True) is None
    assert gpu.default_output(is_smoke=False).parent == BENCHMARKS / "results"
    monkeypatch.setenv("OUT", "/somewhere")
    assert gpu.default_output(is_smoke=True) == Path("/somewhere/gpu.json")


# What follows from the rows


def outcome(name, status="measured", **figures):
    (row,) = [row for row in load("gpu_rows").all_rows() if row["name"] == name]
    return {**row, "status": status, "reason": None, "seconds": 1.0, **figures}


def decoded(name, ms_per_step, tokens_per_step=1.0, reason=None):
    return outcome(
        name,
        ms_per_step=ms_per_step,
        tokens_per_step=tokens_per_step,
        ms_per_token=ms_per_step / tokens_per_step,
        step_bytes=8_000_000_000,
        not_compiled_because=reason,
    )


def test_ratios_are_of_the_tokens_that_a_step_gave():
    report = load("gpu_rows")
    outcomes = [
        outcome("qwen3-8b/floor", copy_gb_per_second=2000.0),
        decoded("qwen3-8b/512x1/generate", 24.0),
        decoded("qwen3-8b/512x1/static", 8.0),
        decoded("qwen3-8b/512x1/compiled", 6.0, 6.0),
        decoded("qwen3-8b/512x8/compiled", 7.5, 6.0),
        decoded("qwen3-8b/512x1/tree", 8.0, 1.1),
        decoded("qwen3-8b/512x1/native", 30.0, 1.1),
    ]
    rows = {row["name"]: row for row in report.derived(outcomes)}
    compiled = rows["qwen3-8b/512x1/compiled"]
    assert (compiled["floor_ms"], compiled["step_over_floor"], compiled["generate_over_this"]) == (4.0, 1.5, 24.0)
    # Of these the script does not decide what is accepted: only a step's time is a figure.
    assert not any("generate_over_this" in rows[f"qwen3-8b/512x1/{way}"] for way in ("tree", "native"))
    assert compiled["static_over_this"] == 8.0
    assert rows["qwen3-8b/512x8/compiled"]["over_batch_of_1"] == 1.25
    assert "over_batch_of_1" not in compiled


def test_nothing_is_called_compiled_that_was_not():
    report = load("gpu_rows")
    outcomes = [decoded("qwen3-8b/512x1/generate", 24.0), decoded("qwen3-8b/512x1/compiled", 30.0, 6.0, "no compiler")]
    row = report.derived(outcomes)[1]
    assert row["label"] == "ours, NOT compiled: no compiler"


def test_rows_that_were_not_measured_are_told_with_their_reason():
    report = load("gpu_rows")
    failed = outcome("qwen3-8b/32768x8/compiled", "failed") | {"reason": "out of memory"}
    assert report.line(failed) == "qwen3-8b/32768x8/compiled: failed, out of memory [1 s]"
    (row,) = report.derived([failed])
    assert (row["status"], row["reason"], row["context"], row["batch"]) == ("failed", "out of memory", 32768, 8)
    assert report.all_rows()[0]["reason"] == "not begun yet"


def test_the_floor_counts_the_head_twice_and_the_keys_and_no_embedding():
    measure = load("gpu_measure")
    target, drafter = scripted_pair("smoke", 4.0)
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    weights = target.num_parameters() - embedding.numel()
    of_target, of_drafter = 2 * 4 * 1 * 32, 2 * 1 * 1 * 32  # keys and values: layers, heads, size of a head
    assert measure.step_bytes(target, None, 100, 3) == 4 * (weights + 300 * of_target)
    both = weights + drafter.num_parameters() + head.numel() + 300 * (of_target + of_drafter)
    assert measure.step_bytes(target, drafter, 100, 3) == 4 * both


# From the shell to a file


def shell(words, python="", **variables):
    """`gpu.sh` with a Python whose program is replaced by these lines of shell; `"$python"` is the real one."""
    script = Path(variables["HOME"]) / "python"
    script.write_text(f'#!/bin/bash\npython={sys.executable}\n{python}\nexec "$python" "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, **variables, "PYTHON": str(script)}
    return subprocess.run(
        [str(BENCHMARKS / "gpu.sh"), *words], env=environment, capture_output=True, text=True, check=False
    )


def run_main(monkeypatch, *words):
    """The exit status of `gpu.py`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke", *words])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            load("gpu").main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not multiprocessing.active_children()
    return ended.value.code


def test_rows_of_every_way_are_measured_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    assert not run_main(monkeypatch, "--rows", "smoke/floor", "smoke/16x1/*", "smoke/16x2/native", "smoke/training/*")
    log = capsys.readouterr().out
    assert f"{12 if HAS_NATIVE else 11} of 13 rows measured" in log
    result = read_result(tmp_path / "gpu.json")
    decoded, training, floor, refused = tables_of(result)
    assert decoded[0][:4] == ["shape", "context", "batch", "label"]
    assert {"x floor", "x generate"} < set(decoded[0])
    assert (len(decoded[1]), len(training[1]), len(floor[1])) == ((9 if HAS_NATIVE else 8), 2, 1)
    assert refused[1][-1][:2] == ["smoke/16x2/native", "refused"]
    assert "training step, SDPA (sdpa)" in log
    assert result["decoding"]["is_simulated"]
    assert "means nothing; simulated acceptance" in result["decoding"]["label"]
    assert result["environment"]["device"] == "cpu"
    by_name = {row["name"].removeprefix("smoke/"): row for row in result["summary"]}
    assert len(by_name) == 13
    refused = [by_name.pop("16x2/native"), *([] if HAS_NATIVE else [by_name.pop("16x1/native")])]
    assert {row["status"] for row in refused} == {"refused"}
    assert ("batch_size = 1" if HAS_NATIVE else "has no native dflash") in refused[0]["reason"]
    assert {row["status"] for row in by_name.values()} == {"measured"}
    texts = [row for row in by_name.values() if row["kind"] == "decode"]
    assert all(row["is_right"] for row in texts)
    assert all({"recordings", "skips", "reasons", "floor_ms", "peak_memory_gb"} <= set(row) for row in texts)
    assert by_name["16x1/compiled"]["tokens_per_step"] > 1
    assert by_name["16x1/useless"]["tokens_per_step"] == 1
    assert "NOT compiled" in by_name["16x1/sampled"]["label"]
    assert by_name["training/sdpa"]["attention"] == "sdpa"
    assert all(by_name[f"training/{way}"]["tokens_per_second"] > 0 for way in ("library", "sdpa"))


def test_a_run_that_is_ended_leaves_a_whole_file(tmp_path, monkeypatch, helper):
    monkeypatch.setattr(load("gpu"), "open_bench", helper.open_bench)
    # When the first row has had its turn.
    monkeypatch.setattr(load("gpu"), "line", lambda row: signal.raise_signal(signal.SIGTERM))
    assert run_main(monkeypatch, "--output", str(tmp_path / "gpu.json")) == 128 + signal.SIGTERM
    rows = read_result(tmp_path / "gpu.json")["summary"]
    assert len(rows) == 39
    assert rows[-1]["reason"] == "not begun yet"


def test_the_shell_script_keeps_what_was_said_and_how_it_ended(tmp_path):
    ran = shell(["--smoke"], 'echo "$@"; exit 7', HOME=str(tmp_path), OUT=str(tmp_path / "out"))
    assert ran.returncode == 7
    assert re.fullmatch(r"benchmarks/gpu\.py --seconds 5[67]\d --smoke\n", ran.stdout)
    assert (tmp_path / "out" / "gpu.log").read_text() == ran.stdout


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (
            ["--smoke"],
            {"PACKAGES": "no/such"},
            "PACKAGES=no/such is no folder: make it with benchmarks/gpu.sh --pack no/such",
        ),
        (["--pack", str(BENCHMARKS)], {}, "cannot be packed into, it holds"),
    ],
)
def test_bad_folders_of_packages_are_one_sentence(words, variables, said):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = [str(BENCHMARKS / "gpu.sh"), *words]
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
    said = 'if [[ $1 == *gpu.py ]]; then exec "$python" -c "import apart, inner, numpy; print(numpy.__file__)"; fi'
    ask = partial(shell, ["--smoke"], said, HOME=str(tmp_path), PACKAGES=str(folder))
    assert "holds no wheels: write them with benchmarks/gpu.sh --pack" in ask().stderr
    wheel(folder, "apart", files=["apart-1.0.data/purelib/inner.py"])
    wheel(folder, "numpy")
    ran = ask()
    assert ran.stdout.strip() == numpy.__file__, ran.stderr
    (folder / "bad-1.0-py3-none-any.whl").write_text("no archive")
    assert ask().stderr.strip() == f"{folder}/bad-1.0-py3-none-any.whl is no wheel: pack again."


def test_the_shell_script_is_well_formed():
    subprocess.run(["bash", "-n", str(BENCHMARKS / "gpu.sh")], check=True)
