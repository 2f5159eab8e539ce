"""The benchmark: what is counted, and that watching changes nothing. No test here asserts a time."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from tiny_models import (
    MASK_TOKEN_ID,
    ScriptedDrafter,
    counted_forwards,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
    num_hooks,
)
from typer.main import get_command
from typer.testing import CliRunner

from dflash import generate_blocks
from dflash.cli import app as cli
from dflash.cli import bench
from dflash.common import provenance
from dflash.common.files import only_writer
from dflash.common.provenance import command
from dflash.evaluation import (
    GREEDY,
    HAS_NATIVE,
    NATIVE,
    OURS,
    PLAIN,
    PROMPT_LOOKUP,
    RANDOM_DRAFTER,
    BenchPlan,
    Measurement,
    Profile,
    Prompt,
    TimedRun,
    allocated_memory,
    compare,
    decoding_methods,
    host_syncs,
    profiling,
    read_result,
    run_bench,
    step_split,
    summarise,
    timed_blocks,
    timed_generate,
    untrained,
)
from dflash.model.drafting_dflash import DraftProposer
from dflash.model.targets_dflash import Target


needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="transformers has native DFlash from 5.15 on")
CPU = torch.device("cpu")
SCRIPT = [3, 0, 5, 1]


@pytest.fixture(scope="module")
def pair():
    """A target, a drafter that is right now and then, and a prompt."""
    target, prompt_ids = make_target(), make_prompt()
    return target, ScriptedDrafter(target, greedy(target, prompt_ids, max_new_tokens=60), SCRIPT), prompt_ids


# The clock


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt_lookup_num_tokens": 3, "eos_token_id": MASK_TOKEN_ID},  # which 4.57 asks for
        pytest.param({"assistant_model": True, "speculation_type": "dflash"}, marks=needs_native),
    ],
    ids=["plain", "prompt lookup", "native"],
)
def test_forwards_are_counted_without_a_hook(pair, options):
    target, drafter, prompt_ids = pair
    options = {**options, "assistant_model": drafter} if "assistant_model" in options else options
    with counted_forwards(target) as forwards:
        run = timed_generate(target, prompt_ids, max_new_tokens=24, **GREEDY, **options)
    assert run.num_forwards == len(forwards) <= len(run.token_ids) == 24


def test_blocks_are_counted_and_nothing_stands_on_the_models_meanwhile(pair):
    target, drafter, prompt_ids = pair
    request = {"max_new_tokens": 24, "temperature": 0.0}
    untimed = [num_hooks(target) for _ in generate_blocks(drafter, target, prompt_ids, **request)]
    timed = []
    timed_blocks(drafter, target, prompt_ids, lambda _: timed.append(num_hooks(target)), **request)
    assert timed == untimed
    with counted_forwards(target) as forwards:
        run = timed_blocks(drafter, target, prompt_ids, **request)
    assert run.num_forwards == len(forwards)
    assert run.token_ids == greedy(target, prompt_ids, max_new_tokens=24)[0, 9:].tolist()


def test_rows_of_a_batch_are_one_step(pair):
    target, *_ = pair
    prompts = torch.cat([make_prompt(seed=seed) for seed in (2, 3)])
    run = timed_blocks(make_drafter(), target, prompts, max_new_tokens=6, temperature=0.0)
    assert run.num_forwards == 6, "a random drafter: the prompts' forward and five steps, each for both rows"
    assert run.token_ids == target.generate(prompts, do_sample=False, max_new_tokens=6)[:, 9:].flatten().tolist()
    assert len(timed_generate(target, prompts, max_new_tokens=6, **GREEDY).token_ids) == 12


def test_what_is_compiled_meanwhile_is_counted(pair):
    import torch._dynamo.utils

    target, drafter, prompt_ids = pair
    stats = torch._dynamo.utils.counters["stats"]

    def compile_something(_):
        stats["unique_graphs"] += 1

    before = dict(stats)
    run = timed_blocks(drafter, target, prompt_ids, compile_something, max_new_tokens=2, temperature=0.0)
    plain = timed_generate(target, prompt_ids, max_new_tokens=2, **GREEDY)
    stats.clear()
    stats.update(before)
    assert run.num_compilations == 2
    assert plain.num_compilations == 0


# Methods, turns, rows


def test_methods_give_the_targets_text(pair):
    target, drafter, prompt_ids = pair
    methods = decoding_methods(target, drafter, 12)
    assert next(iter(methods)) == PLAIN
    assert set(methods) >= {PROMPT_LOOKUP, OURS, "dflash compiled", "dflash tree", RANDOM_DRAFTER}
    assert (NATIVE in methods) == HAS_NATIVE
    del methods["dflash compiled"]  # tests of its own
    texts = {name: run(prompt_ids).token_ids for name, run in methods.items()}
    assert set(map(tuple, texts.values())) == {tuple(texts[PLAIN])}


def test_the_loop_that_drafts_nothing_runs_no_drafter(pair):
    target, drafter, prompt_ids = pair
    methods = decoding_methods(target, drafter, 12, ["dflash drafting nothing"])
    with counted_forwards(drafter) as drafts:
        run = methods["dflash drafting nothing"](prompt_ids)
    assert not drafts
    assert run.num_forwards == len(run.token_ids) == 12


@needs_native
def test_native_decoding_takes_a_drafter_of_another_dtype(pair):
    """Checkpoints are read as they are stored, and a trained drafter is stored in bf16: native decoding raised."""
    target, _, prompt_ids = pair
    drafter = make_drafter().to(torch.bfloat16)
    methods = decoding_methods(target, drafter, 6, [PLAIN, NATIVE])
    assert methods[NATIVE](prompt_ids).token_ids == methods[PLAIN](prompt_ids).token_ids
    assert drafter.dtype == torch.bfloat16


def test_the_random_drafter_has_the_shape_and_not_the_weights():
    drafter = make_drafter()
    before = torch.random.get_rng_state()
    other = untrained(drafter)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's noise is left alone"
    assert other.config.to_dict() == drafter.config.to_dict()
    assert not torch.equal(other.fc.weight, drafter.fc.weight)


def test_unknown_method_is_refused(pair):
    target, drafter, _ = pair
    with pytest.raises(
        ValueError, match=r"no method 'magic': choose from target.generate, .*dflash tree.*random drafter adaptive"
    ):
        decoding_methods(target, drafter, 8, ["magic"])


def test_methods_are_warmed_up_and_take_turns():
    calls = []

    def method(name):
        def run(ids, on_step=None):
            calls.append((name, ids.shape[1]))
            return TimedRun([1], 1.0, 1.0, 1, [])

        return run

    prompts = [Prompt("t", torch.zeros(1, length, dtype=torch.long)) for length in (5, 3, 9)]
    compare({"a": method("a"), "b": method("b")}, prompts, repeats=2)
    assert calls[:6] == [("a", 5), ("a", 3), ("a", 9), ("b", 5), ("b", 3), ("b", 9)], "first, shortest, longest"
    assert calls[6:10] == [("a", 5), ("b", 5), ("b", 5), ("a", 5)]
    assert len(calls) == 6 + 3 * 2 * 2


def test_a_row_says_both_spreads_and_what_was_compiled():
    slow, fast = Measurement("t", 0, PLAIN, 5, 5, [], True, [4.0, 6.0, 4.0], [1.0] * 3), None
    fast = Measurement("t", 0, OURS, 5, 3, [2, 3], True, [2.0, 2.0, 1.0], [1.0] * 3, num_compilations=1)
    plain, ours = summarise([slow, fast])
    assert plain["speedup_by_repeat"] == [1.0, 1.0, 1.0]
    assert ours["speedup"] == 2.0
    assert ours["speedup_by_repeat"] == [2.0, 3.0, 4.0]
    assert ours["compilations"] == 1
    assert (ours["tau_micro"], ours["tokens_per_step"], ours["ms_per_step"]) == (2.5, 2.0, 500.0)
    assert ours["acceptance_histogram"] == [0, 1, 1]
    assert "profiled_ms_draft" not in ours


def test_spread_of_speedups_leaves_out_a_tenth_at_each_end():
    """Promise: of 20 prompts the third slowest and the third fastest are said, as p10 and p90."""
    rows = []
    for prompt in range(20):
        rows.append(Measurement("t", prompt, PLAIN, 5, 5, [], True, [prompt + 1.0], [0.5]))
        rows.append(Measurement("t", prompt, OURS, 5, 3, [2, 3], True, [1.0], [0.5]))
    ours = summarise(rows)[1]
    assert (ours["speedup_p10"], ours["speedup_p90"]) == (3.0, 18.0)


def test_tau_leaves_out_steps_with_looked_up_tokens():
    """Promise: with lookups tau is still the drafter's, and tokens per step count all steps."""
    rows = [
        Measurement("t", 0, PLAIN, 24, 24, [], True, [4.0], [1.0]),
        Measurement("t", 0, OURS, 24, 4, [2, 17, 4], True, [2.0], [1.0], lookup_steps=[1]),
    ]
    ours = summarise(rows)[1]
    assert (ours["tau_micro"], ours["tau_macro"], ours["tokens_per_step"]) == (3.0, 3.0, round(23 / 3, 4))
    assert sum(ours["acceptance_histogram"]) == 3


def test_tokens_per_step_leaves_out_the_first_token_of_every_prompt():
    """Each prompt has a prefill and its token: of 5 + 7 tokens and 3 + 4 forwards, 10 tokens took 5 steps."""
    rows = [Measurement("t", i, PLAIN, *counts, [], True, [2.0], [1.0]) for i, counts in enumerate([(5, 3), (7, 4)])]
    assert summarise(rows)[0]["tokens_per_step"] == 2.0


def test_a_text_that_differs_in_a_later_repeat_is_not_identical():
    texts = iter([[1, 2], [1, 2], [1, 3]])  # warm-up, two repeats

    def wavering(ids):
        return TimedRun(next(texts), 1.0, 0.5, 2, [])

    steady = {"plain": lambda ids: TimedRun([1, 2], 1.0, 0.5, 2, [])}
    rows = compare({**steady, "other": wavering}, [Prompt("t", torch.zeros(1, 3, dtype=torch.long))], repeats=2)
    assert [row.is_identical for row in rows] == [True, False]


def test_a_text_of_one_token_has_no_step():
    (row,) = summarise([Measurement("t", 0, PLAIN, 1, 1, [], True, [2.0], [2.0])])
    assert row["tokens_per_step"] is row["ms_per_step"] is row["ms_per_output_token"] is row["tau_micro"] is None


def test_profiles_count_by_their_steps():
    measured = [Measurement("t", i, OURS, 9, 3, [1], True, [2.0], [1.0]) for i in range(2)]
    profiles = [Profile("t", 0, OURS, 1, 4.0, 2.0, 0.0, 2.0, 10), Profile("t", 1, OURS, 3, 0.0, 2.0, 4.0, 1.0, 30)]
    (row,) = summarise(measured, profiles)
    assert row["profiled_ms_draft"] == 1.0
    assert row["profiled_ms_rest"] == 3.0
    assert row["profiled_host_syncs_per_step"] == 1.25
    assert row["profiled_memory_bytes"] == 30


# Passes beside the clock


@pytest.mark.parametrize(
    ("name", "draft"), [(PLAIN, 0.0), (OURS, 5.0), pytest.param(NATIVE, 5.0, marks=needs_native)], ids=str
)
def test_a_step_is_split_where_the_models_spend_the_time(pair, monkeypatch, name, draft):
    """The drafter's forward takes 5 ms of a fake clock, the target's 3 ms, and all else nothing."""
    target, drafter, prompt_ids = pair
    run = decoding_methods(target, drafter, 24, [name])[name]
    expected = run(prompt_ids)
    now = [0.0]
    monkeypatch.setattr(profiling, "_now", lambda device: now[0])

    def lasting(milliseconds):
        def advance(*_):
            now[0] += milliseconds / 1e3

        return advance

    handles = [target.register_forward_hook(lasting(3)), drafter.register_forward_hook(lasting(5))]
    try:
        num_steps, ms_draft, ms_verify, ms_rest = step_split(run, prompt_ids, target, drafter)
    finally:
        for handle in handles:
            handle.remove()
    assert num_steps == expected.num_forwards - 1
    assert ms_verify == pytest.approx(3)
    # The last token of all may need no draft.
    assert ms_draft == pytest.approx(draft, rel=1.5 / num_steps)
    assert ms_rest == pytest.approx(0, abs=1e-9)


def test_what_was_watched_is_left_as_it_was(pair):
    target, drafter, prompt_ids = pair
    before = DraftProposer.propose, Target.verify, num_hooks(target), num_hooks(drafter)
    run = decoding_methods(target, drafter, 8, [OURS])[OURS]
    step_split(run, prompt_ids, target, drafter)

    def fails(ids, on_step=None):
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        step_split(fails, prompt_ids, target, drafter)
    assert (DraftProposer.propose, Target.verify, num_hooks(target), num_hooks(drafter)) == before


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (lambda x: x.tolist(), 1),
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: int(x[0]), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: [0, 1, 2][x[1]], 1),
        (lambda x: x.argmax(dim=-1) + x.cumsum(0), 0),
        (lambda x: x[:2], 0),
        (lambda x: x.shape[0] + len(x), 0),
    ],
    ids=["tolist", "item", "bool", "int", "cpu", "nonzero", "mask", "equal", "index", "compute", "slice", "shape"],
)
def test_reads_of_values_are_counted_once_each(read, count):
    values = torch.tensor([0, 1, 2])

    def run(ids, on_step):
        values.tolist()  # before the first token: not a step's
        on_step(None)
        for _ in range(4):
            read(values)
            on_step(None)
        return TimedRun([], 1.0, 1.0, 5, [])

    assert host_syncs(run, values[None], CPU) == count


def test_the_clocks_own_reads_are_not_counted(pair):
    target, _, prompt_ids = pair
    totals, tokens = [], []
    for listener in (None, tokens.append):
        with profiling._ReadCounter() as reads:
            timed_generate(target, prompt_ids, listener, max_new_tokens=8, **GREEDY)
        totals.append(reads.total())
    assert len(tokens) == 8
    assert totals[0] == totals[1] >= 16, "at least the token for the streamer, and whether to stop"


def test_peak_memory_is_what_stands_at_once():
    held = torch.zeros(1_000_000)

    def work():
        first = torch.ones(500_000)  # 2 MB
        del first
        second = torch.ones(750_000)  # 3 MB
        third = second * 2  # 3 MB
        return third + held[0]

    assert 6_000_000 <= allocated_memory(work, CPU) <= 9_100_000
    assert allocated_memory(lambda: None, CPU) == 0


# From a pair and prompts to a file


def test_a_command_is_recorded_without_the_machines_paths(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/bin/dflash", "bench", "--target", "/opt/models/t", "--drafter", "org/d"])
    assert command() == "dflash bench --target t --drafter org/d"
    monkeypatch.setattr(sys, "argv", ["/opt/dflash/benchmarks/decode.py", "--methods", "dflash eager"])
    assert command() == "benchmarks/decode.py --methods 'dflash eager'"  # as it can be typed again
    monkeypatch.setattr(sys, "argv", ["/opt/dflash/__main__.py", "eval", "--output=/opt/r.json", "--tasks", "a,b"])
    assert command() == "dflash eval --output=r.json --tasks a,b"
    monkeypatch.setattr(
        sys, "argv", ["dflash", "eval", "--url", "http://me:s@crt@h:80/v1", "--baseline-url=https://u@h"]
    )
    assert command() == "dflash eval --url http://h:80/v1 --baseline-url=https://h"
    monkeypatch.setattr(
        sys, "argv", ["dflash", "train", "--init", "../priv/x", "--data", "a/../../priv/b.jsonl:0.7", "a/b"]
    )
    assert command() == "dflash train --init x --data b.jsonl:0.7 a/b"


def test_the_revision_is_this_codes_and_not_that_of_a_project_around_it(tmp_path, monkeypatch):
    """Bug: in an environment inside a checkout of something else it was that project's."""
    for words in (
        ["init", "-q"],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "--allow-empty", "-m", "m"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    installed = tmp_path / ".venv" / "provenance.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.revision() == ""
    subprocess.run(["git", "-C", str(tmp_path), "add", str(installed)], check=True)
    assert re.fullmatch(r"[0-9a-f]{4,}", provenance.revision())


def test_the_gpu_that_is_named_is_the_targets(monkeypatch):
    """Bug: it was the current one, the first."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"the GPU {device}")
    assert provenance.machine(torch.device("cuda", 3))["device"] == "the GPU cuda:3"


def test_the_embedded_pair_is_measured_on_the_device_that_is_named(monkeypatch):
    """Bug: --device was checked and then ignored."""
    monkeypatch.setattr("dflash.cli.bench.known_device", lambda device: device)
    target, drafter, _ = bench._pair(None, None, bench.BenchModels(device="meta"))
    assert (target.device.type, drafter.device.type) == ("meta", "meta")


def test_bench_writes_what_readers_need_and_says_in_a_log_how_far_it_is(tmp_path, monkeypatch):
    """Promise: each of its parts counts what it has done, the runs before the measurement too, which once took minutes in silence."""
    monkeypatch.setattr("dflash.cli.terminal.LINE_SECONDS", 0)
    monkeypatch.setattr("dflash.evaluation.canvas.DPI", 80)
    prompts, output = tmp_path / "mine.txt", tmp_path / "out.json"
    prompts.write_text('Ann has 3 apples.\n\n{"question": "Tom has 2 pens and a very long desk."}\nOne.\nnever read\n')
    options = ["--limit", "3", "--max-new-tokens", "6", "--repeats", "2", "--profiled", "1", "--methods", "dflash"]
    options += ["--prompts", str(prompts), "--output", str(output)]
    outcome = CliRunner().invoke(cli.app, ["bench", *options])
    assert outcome.exit_code == 0, outcome.output
    assert "3 of 3" in outcome.stdout
    assert "verify" in outcome.stdout
    facts = (
        "float32, 1 thread, block size 16, greedy, batch 1, medians of 2 interleaved repeats, thinking off, at most 6 "
    )
    assert facts in " ".join(outcome.stdout.split())
    result = read_result(output)
    assert result["kind"] == "decode"
    assert "messages" in result["decoding"]["chat_template"]
    assert [(row["task"], row["method"], row["identical"]) for row in result["summary"]] == [
        ("mine", m, 3) for m in (PLAIN, OURS)
    ]
    figures = {"profiled_ms_verify", "profiled_host_syncs_per_step", "profiled_memory_bytes", "compilations"}
    assert all(figures <= set(row) for row in result["summary"])
    assert [row["width"] for row in result["widths"]] == [1, 2, 4, 8, 16]
    assert result["widths"][0]["ms_draft"] is None
    assert len(result["measurements"][0]["seconds"]) == 2
    lines = [line for line in outcome.stderr.splitlines() if " of " in line]
    warmed = [f"{done} of 6: Warming up" for done in range(1, 7)]  # two methods, three prompts
    decoded = [f"{done} of 3: Decoding" for done in range(1, 4)]
    timed = [f"{done} of 10: Timing widths" for done in range(1, 11)]
    assert [line for line in lines if "Loading" not in line] == [*warmed, *decoded, "1 of 1: Profiling", *timed]
    pytest.importorskip("matplotlib")
    plots = {tmp_path / f"out_{name}.png" for name in ("speedup", "acceptance", "lengths", "step_time")}
    assert set(outcome.stdout.splitlines()[-5:]) == set(map(str, {output, *plots}))
    assert all(plot.stat().st_size > 5_000 for plot in plots)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", [], "is empty: write one prompt on each line"),
        ("x", ["--prompts", "none.txt"], "--prompts none.txt cannot be read (No such file or directory): name a file"),
        (b"\xff", [], "is not text in UTF-8: name a file with one prompt on each line"),
        ('{"question"\n', [], "line 1 is not a prompt: write a text in UTF-8, or a JSON object"),
        ('{"answer": "4"}\n', [], "line 1 is not a prompt"),
        ('{"messages": [{"role": "assistant", "content": "4"}]}\n', [], "line 1 is not a prompt"),
        ("x", ["--target", "t"], "--target and --drafter go together"),
        ("x", ["--methods", " ,"], "--methods ' ,' names nothing"),
        (
            "x",
            ["--target", "no/t", "--drafter", "no/d", "--methods", "fast"],
            "There is no method 'fast': choose from",
        ),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, text, options, said):
    prompts = tmp_path / "p.txt"
    prompts.write_bytes(text if isinstance(text, bytes) else text.encode())
    outcome = CliRunner().invoke(cli.app, ["bench", "--prompts", str(prompts), *options])
    assert isinstance(outcome.exception, ValueError)
    assert said in str(outcome.exception)


@pytest.fixture
def loads_nothing(monkeypatch):
    """Fails where a command begins to load models."""
    for name in ("dflash.checkpoints.load_embedded_pair", "dflash.cli.bench.load_pair"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("models were loaded"), raising=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--output", "old.json"], r"old.json exists: pass overwrite \(--overwrite\)"),
        (["--output", "."], "is a folder: name a file in it"),
        (["--output", "old.json/r.json"], "old.json is no folder"),
        (["--device", "nonsense"], "--device nonsense cannot be used"),
        (["--methods", "fast"], "There is no method 'fast'"),
    ],
)
def test_bench_refuses_before_anything_is_loaded(loads_nothing, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    outcome = CliRunner().invoke(cli.app, ["bench", *options])
    assert isinstance(outcome.exception, ValueError)
    assert re.search(said, str(outcome.exception))
    assert (tmp_path / "old.json").read_text() == "{}"


def test_bench_is_refused_a_file_that_another_run_writes(loads_nothing, tmp_path):
    with only_writer(tmp_path / "r.json"):
        outcome = CliRunner().invoke(cli.app, ["bench", "--output", str(tmp_path / "r.json")])
    assert isinstance(outcome.exception, ValueError)
    assert re.search(rf"r.json is being written by process {os.getpid()}", str(outcome.exception))


def test_bench_holds_its_file_while_it_runs(tmp_path, monkeypatch):
    def run_bench(*_: object) -> dict:
        with pytest.raises(ValueError, match="is being written"), only_writer(tmp_path / "r.json"):
            pytest.fail("nobody held it")
        raise ValueError("seen")

    monkeypatch.setattr("dflash.evaluation.run_bench", run_bench, raising=False)
    outcome = CliRunner().invoke(cli.app, ["bench", "--limit", "1", "--output", str(tmp_path / "r.json")])
    assert str(outcome.exception) == "seen"


def test_two_prompt_files_of_one_name_are_refused(loads_nothing, tmp_path):
    """The results of one were once lost: they are kept under the file's name."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.txt").write_text("hello\n")
    given = [word for folder in ("a", "b") for word in ("--prompts", str(tmp_path / folder / "test.txt"))]
    outcome = CliRunner().invoke(cli.app, ["bench", *given])
    assert re.search(r"b/test\.txt is the second file named test\. .*: rename it", str(outcome.exception))


def test_bench_replaces_a_file_when_asked_to(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    options = [
        "--limit",
        "1",
        "--max-new-tokens",
        "2",
        "--repeats",
        "1",
        "--profiled",
        "0",
        "--methods",
        "prompt lookup",
    ]
    outcome = CliRunner().invoke(
        cli.app, ["bench", *options, "--overwrite", "--json", "--output", str(tmp_path / "r.json")]
    )
    assert outcome.exit_code == 0, outcome.output
    written = read_result(tmp_path / "r.json")
    printed = json.loads(outcome.stdout)
    assert written["kind"] == printed["kind"] == "decode"
    assert set(written) - set(printed) == {"measurements", "profiles"}  # an entry for each prompt


def test_bench_names_a_target_whose_logits_are_no_numbers():
    target, drafter, prompt_ids = make_target(), make_drafter(), make_prompt()
    target.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match=r"target's logits are NaN or infinite \(Qwen3ForCausalLM in float32\)"):
        run_bench(target, drafter, [Prompt("t", prompt_ids)], BenchPlan(4, 1, [PROMPT_LOOKUP], 0))


@pytest.mark.parametrize(
    ("command", "required"),
    [
        ("bench", []),
        ("eval", ["--target", "--drafter"]),
        ("canary", ["--url"]),
        ("regenerate", ["--target", "--data", "--output"]),
    ],
)
def test_help_names_every_option_whole_and_the_required_ones_first(command, required):
    text = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}).output
    lines = [line.strip("│ ") for line in text.splitlines() if line.startswith("│")]
    named = [word for line in lines for word in line.split()[:3] if word.startswith("--")]
    options = get_command(cli.app).commands[command].params
    assert {name for option in options for name in (*option.opts, *option.secondary_opts)} - {"-h"} <= set(named) | {
        "--help"
    }
    assert [line.split()[1] for line in lines if line.startswith("* ")] == required
    assert [name for name in named if name != "--help"][: len(required)] == required
    assert text.count("╭─") >= 4
