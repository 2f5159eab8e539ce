"""The benchmark for GPUs, as far as it runs without one: what counts as a step, and that a row that fails loses only itself."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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
CPU = torch.device("cpu")


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


class FakeClock:
    """Mark n is at `times[n]`; what is in `recording` was recorded before that mark."""

    def __init__(self, times, recording=()):
        self.times, self.recording, self.num_marks = times, recording, 0

    def mark(self):
        self.num_marks += 1
        return self.num_marks - 1

    def milliseconds(self, begin, end):
        return self.times[end] - self.times[begin]

    def is_settled(self, begin, end):
        return not any(begin < mark <= end for mark in self.recording)


def block(sequence, count):
    return SimpleNamespace(sequence=sequence, token_ids=[0] * count)


def read(blocks, clock, num_sequences, max_new_tokens, block_size=4):
    steps = load("gpu_steps")
    return steps.time_blocks(blocks, clock, num_sequences, max_new_tokens, block_size)


def test_steps_that_are_not_like_most_do_not_count():
    """Prefill, the first step, one that records a graph, two that count, and one for which less than a block was wanted."""
    blocks = [block(0, 1), block(0, 4), block(0, 4), block(0, 2), block(0, 3), block(0, 2)]
    text = read(blocks, FakeClock([0, 50, 150, 850, 860, 872, 880], recording=[3]), 1, 16)
    assert text.ms_to_first_token == 50
    assert [(step.milliseconds, step.num_tokens) for step in text.steps] == [
        (100, 4),
        (700, 4),
        (10, 2),
        (12, 3),
        (8, 2),
    ]
    assert [step.counts for step in text.steps] == [False, False, True, True, False]
    figures = load("gpu_steps").step_figures(text, 1)
    assert (figures["ms_per_step"], figures["tokens_per_step"], figures["ms_per_token"]) == (11, 2.5, 4.4)
    assert (figures["steps"], figures["steps_counted"]) == (5, 2)


def test_the_blocks_of_a_batch_are_one_step_and_steps_of_fewer_sequences_do_not_count():
    blocks = [block(0, 1), block(1, 1), block(0, 2), block(1, 2), block(0, 4), block(1, 2), block(1, 1), block(1, 1)]
    text = read(blocks, FakeClock([0, 9, 10, 19, 20, 29, 35, 40, 45]), 2, 100)
    assert [step.milliseconds for step in text.steps] == [10, 15, 5, 5]
    assert [step.counts for step in text.steps] == [False, True, False, False]
    assert list(map(len, text.token_ids)) == [7, 7]
    assert load("gpu_steps").step_figures(text, 2)["tokens_per_step"] == 3


def test_steps_of_several_widths_count_by_their_mean():
    steps = load("gpu_steps")
    text = steps.TimedText([steps.Step(ms, 1, True) for ms in (2.0, 2.0, 11.0)], 1.0, [[]])
    assert steps.step_figures(text, 1)["ms_per_token"] == 2
    assert steps.step_figures(text, 1, by_mean=True)["ms_per_token"] == 5
    with pytest.raises(ValueError, match=r"None of 1 steps counts.*let it write more tokens"):
        steps.step_figures(steps.TimedText([steps.Step(1.0, 1, False)], 1.0, [[]]), 1)


def test_a_gpus_clock_reads_its_events_and_sees_recordings(monkeypatch):
    steps = load("gpu_steps")
    now = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.is_over = False

        def record(self):
            self.at = now[0]

        def synchronize(self):
            self.is_over = True

        def elapsed_time(self, end):
            assert end.is_over, "read before the device got there"
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, watch = steps.StepClock(torch.device("cuda")), steps.GraphWatch.installed()
    before = watch.counts()
    clock.mark()
    now[0] = 7.0
    clock.mark()
    with pytest.raises(AttributeError):
        torch.cuda.CUDAGraph.capture_begin(None)  # counted before it begins
    clock.mark()
    assert clock.milliseconds(0, 1) == 7
    assert watch.counts().since(before)["recordings"] == 1
    assert clock.is_settled(0, 1)
    assert not clock.is_settled(1, 2)


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
    ids = scripted_prompt(target, 12, 2)

    def generate(prompt_ids, streamer):
        return target.generate(prompt_ids, do_sample=False, max_new_tokens=6, streamer=streamer)

    text = steps.time_generate(generate, ids, steps.StepClock(CPU))
    assert [(step.num_tokens, step.counts) for step in text.steps] == [(2, False), *[(2, True)] * 4]
    assert text.token_ids == scripted_continuation(target, ids, 6).tolist()


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
    rows = [runner.Row(f"{place}/{do}", 1.5 if do == "hang" else 30.0, {"do": do}) for place, do in enumerate(what)]
    seen = []

    facts = {}

    def on_change(rows, said):
        seen.append([row.status for row in rows])
        facts.update(said)
        json.dumps([row.to_dict() for row in rows], allow_nan=False)

    runner.run_rows(rows, helper.open_bench, options, time.monotonic() + seconds, on_change)
    return rows, facts, seen


def test_a_row_that_fails_hangs_or_dies_loses_only_itself(helper):
    bad = ["raise", "memory", "refuse", "assert", "hang", "exit", "kill"]
    what = [do for each in bad for do in (each, "fine")]
    outcomes, facts, seen = run(helper, *what)
    assert [outcome.status for outcome in outcomes[1::2]] == ["measured"] * len(bad)
    reasons = {outcome.setting["do"]: (outcome.status, outcome.reason) for outcome in outcomes[::2]}
    assert reasons["raise"] == ("failed", "KeyError: 'in the middle'")
    assert reasons["memory"] == ("failed", "out of memory: CUDA out of memory. Tried to allocate 1 GiB.")
    assert reasons["refuse"] == ("refused", "ValueError: a tree takes one prompt at a time")
    assert reasons["assert"][1].endswith("after it: RuntimeError: device-side assert triggered, still")
    assert reasons["hang"] == ("failed", "it took longer than the 2 s that it had")
    assert reasons["exit"] == ("failed", "its process ended with status 3")
    assert "ended by signal 9" in reasons["kill"][1]
    assert facts == {"device": "none"}
    # What a process survives it goes on after; else another one does.
    processes = [outcome.figures["process"] for outcome in outcomes[1::2]]
    assert processes[0] == processes[1] == processes[2]
    assert len(set(processes[2:])) == 5
    # Each row is there for who writes files as soon as it is done, and all are there from the beginning.
    assert seen[0] == ["skipped"] * len(what)
    assert [sum(status != "skipped" for status in statuses) for statuses in seen] == [*range(len(what) + 1), len(what)]


def test_what_the_time_does_not_suffice_for_is_skipped(helper):
    outcomes, *_ = run(helper, "fine", "hang", "fine", "fine", seconds=4.0)
    statuses = [(outcome.status, outcome.reason) for outcome in outcomes]
    assert statuses[0] == ("measured", None)
    assert statuses[1][0] == "failed"
    outcomes, *_ = run(helper, "fine", "fine", seconds=0.0)
    assert {(outcome.status, outcome.reason) for outcome in outcomes} == {
        ("skipped", "the time for all rows was over before this one began")
    }


@pytest.mark.parametrize(
    ("option", "said"), [("fails", "ImportError: no such package"), ("dies", "its process ended with status 5")]
)
def test_a_bench_that_does_not_open_is_tried_twice(helper, option, said):
    outcomes, facts, _ = run(helper, "fine", "fine", "fine", **{option: True})
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "skipped"]
    assert outcomes[0].reason == f"no process to measure in: {said}"
    assert outcomes[2].reason == f"2 processes in a row did not start: {said}"
    assert facts == {}


# Which rows


def test_the_rows_are_all_there_the_most_useful_ones_first():
    rows = load("gpu_rows")
    names = [row.name for row in rows.all_rows()]
    assert len(names) == len(set(names)) == 2 * (1 + 3 * 2 * 9 + 2)
    assert names[:3] == ["qwen3-8b/floor", "qwen3-8b/512x1/generate", "qwen3-8b/512x1/compiled"]
    before = names[: names.index("qwen3-0.6b/floor")]
    assert {"qwen3-8b/32768x1/compiled", "qwen3-8b/512x8/compiled", "qwen3-8b/training/library"} <= set(before)
    assert {f"qwen3-8b/512x1/{way}" for way in rows.WAYS} <= set(before)
    assert names.index("qwen3-0.6b/512x1/compiled") < names.index("qwen3-8b/4096x8/tree")
    assert {row.setting["kind"] for row in rows.all_rows(("smoke",), (16,), (1, 2))} == {"floor", "decode", "training"}


def test_rows_are_chosen_by_name():
    rows = load("gpu_rows")
    names = [row.name for row in rows.chosen(rows.all_rows(), ["*/training/*", "qwen3-8b/floor"])]
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
    (row,) = [row for row in load("gpu_rows").all_rows() if row.name == name]
    row.status, row.reason, row.seconds, row.figures = status, None, 1.0, figures
    return row


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
    assert {goal["ratio"]: goal["value"] for goal in report.goals(list(rows.values()))} == {
        "step_over_floor": 1.5,
        "generate_over_ours": 24.0,
        "static_generate_over_ours": 8.0,
        "large_batch_over_small": 1.25,
    }


def test_nothing_is_called_compiled_that_was_not():
    report = load("gpu_rows")
    outcomes = [decoded("qwen3-8b/512x1/generate", 24.0), decoded("qwen3-8b/512x1/compiled", 30.0, 6.0, "no compiler")]
    row = report.derived(outcomes)[1]
    assert row["label"] == "ours, NOT compiled: no compiler"
    assert report.goals(report.derived(outcomes)) == []


def test_rows_that_were_not_measured_are_told_with_their_reason():
    report = load("gpu_rows")
    failed = outcome("qwen3-8b/32768x8/compiled", "failed")
    failed.reason = "out of memory"
    assert report.line(failed) == "qwen3-8b/32768x8/compiled: failed, out of memory [1 s]"
    (row,) = report.derived([failed])
    assert (row["status"], row["reason"], row["context"], row["batch"]) == ("failed", "out of memory", 32768, 8)
    assert report.all_rows()[0].to_dict()["reason"] == "not begun yet"


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


def test_the_shell_script_writes_results_to_out(tmp_path):
    rows = ["smoke/floor", "smoke/16x1/*", "smoke/16x2/native", "smoke/training/*"]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    command = [str(BENCHMARKS / "gpu.sh"), "--smoke", "--rows", *rows]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    log = (tmp_path / "gpu.log").read_text()
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


def test_a_run_that_is_ended_leaves_a_whole_file(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert "smoke/floor" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    rows = read_result(output)["summary"]
    assert len(rows) == 39
    assert rows[-1]["reason"] == "not begun yet"


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


def test_what_packages_need_is_followed_but_for_torch(tmp_path, monkeypatch):
    pack = load("gpu_pack")
    needs = {
        "top": ["Middle_One>=2", "torch>=2.6", "extra-thing; extra == 'dev'", "old; python_version < '3.12'"],
        "middle-one": ["leaf; sys_platform == 'linux'", "windows-thing; sys_platform == 'win32'"],
        "leaf": ["top"],
    }
    asked = []

    def download(folder, names):
        asked.append(names)
        for name in names:
            wheel(folder, name.replace("-", "_"))

    monkeypatch.setattr(pack, "WANTED", ("top",))
    monkeypatch.setattr(pack.metadata, "requires", needs.get)
    monkeypatch.setattr(pack, "download", download)
    folder = tmp_path / "packages"
    num_bytes = pack.pack(folder)
    assert asked == [["leaf", "middle-one", "top"]]
    assert num_bytes == sum(path.stat().st_size for path in folder.glob("*.whl"))
    assert (folder / ".gitignore").read_text() == "*\n"
    monkeypatch.setattr(pack, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"more than the 0.0 MiB that travel: remove packages.*largest are .*\.whl"):
        pack.pack(folder)


def test_wheels_are_unpacked_but_for_what_others_were_built_against(tmp_path):
    pack = load("gpu_pack")
    folder, site = tmp_path / "packages", tmp_path / "site"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"holds no wheels: write them with benchmarks/gpu\.sh --pack"):
        pack.unpack(folder, site)
    wheel(folder, "apart", files=["apart-1.0.data/purelib/inner.py"])
    wheel(folder, "numpy")
    assert pack.unpack(folder, site) == ["numpy"]
    assert (site / "apart" / "__init__.py").is_file()
    assert (site / "inner.py").is_file()
    assert not (site / "numpy").exists()
    (folder / "bad-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(ValueError, match="is no wheel"):
        pack.unpack(folder, site)


def test_the_shell_script_is_well_formed():
    subprocess.run(["bash", "-n", str(BENCHMARKS / "gpu.sh")], check=True)
