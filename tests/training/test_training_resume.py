"""A run that ends early: killed, asked to stop, out of room, or resumed with something else."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import FRESH
from tiny_models import MASK_TOKEN_ID, PAD_TOKEN_ID, make_target

from dflash import DFlashDraftModel
from dflash.training import (
    AcceptanceCounts,
    Example,
    Trainer,
    TrainingRecord,
    TrainingSettings,
    new_drafter,
    state_folder,
    train,
    with_response,
)
from dflash.training.training_state import clear_leftovers, read_tensors, remove_state


Unbroken = tuple[dict[str, bytes], TrainingRecord]
SETTINGS = TrainingSettings(
    steps=12,
    num_anchors=4,
    batch_tokens=128,
    mixed_precision="no",
    learning_rate=5e-3,
    eval_every=5,
    eval_new_tokens=6,
    save_every=2,
)


# What Python calls a change of a file where it is about to make one (the audit events of its documentation).
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def examples(number: int = 12) -> list[Example]:
    rng = random.Random(0)
    low, high = PAD_TOKEN_ID + 1, MASK_TOKEN_ID
    return [
        with_response(
            [rng.randrange(low, high) for _ in range(4)],
            [rng.randrange(low, high) for _ in range(rng.randrange(8, 28))],
        )
        for _ in range(number)
    ]


def run(output: Path, settings: TrainingSettings = SETTINGS, **arguments: Any) -> TrainingRecord:
    target = make_target(num_hidden_layers=2)
    torch.manual_seed(3)
    block_size = arguments.pop("block_size", 4)
    drafter = new_drafter(target, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=1, block_size=block_size)
    data = arguments.pop("data", examples())
    prompts = [example.prompt_ids for example in data[:2]]  # measuring takes longer than learning
    return train(drafter, target, data, prompts, settings, output, show_progress=False, **arguments)


def written(folder: Path) -> dict[str, bytes]:
    """A checkpoint byte for byte, but for its name in the card and how long it took."""
    return {
        path.name: re.sub(
            rb'"seconds": [\d.]+|[\d.]+ minutes', b"TIME", path.read_bytes().replace(folder.name.encode(), b"NAME")
        )
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix != ".py"
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """What the run writes and returns if nothing happens to it."""
    folder = tmp_path_factory.mktemp("unbroken") / "drafter"
    record = run(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]  # no training state once it is complete
    return written(folder), record


def test_a_run_into_a_link_writes_where_it_leads(unbroken: Unbroken, tmp_path: Path) -> None:
    """Promise: an `--output` that is a link to a folder on another disk is filled there, and stays a link."""
    (tmp_path / "disk" / "drafter").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "drafter")
    run(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert written(tmp_path / "disk" / "drafter") == unbroken[0]
    left = [path.name for folder in (tmp_path, tmp_path / "disk") for path in folder.iterdir()]
    assert sorted(left) == ["disk", "drafter", "link"]


def run_counted(output: Path, on_change: Callable[[int, str], None]) -> None:
    """Runs; `on_change` is given the number and the kind of each change of a file before it is made, from the first state on."""
    state, numbers, has_begun = state_folder(output) / "state.json", count(), False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal has_begun
        if event not in CHANGES or not str(arguments[0]).startswith(str(output.parent)):
            return
        has_begun = has_begun or state.exists()
        if has_begun and (event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            on_change(next(numbers), event)

    sys.addaudithook(hook)
    run(output)


def changes_of(output: Path, there: Connection) -> None:
    """Sends the kinds of all changes that a run makes."""
    kinds: list[str] = []
    run_counted(output, lambda _, kind: kinds.append(kind))
    there.send(kinds)


def run_killed(output: Path, last: int) -> None:
    """A run that a signal which nothing can catch ends before its change `last`."""
    run_counted(output, lambda number, _: os.kill(os.getpid(), signal.SIGKILL) if number == last else None)


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The kind of each change that a run makes, in order. In a process of its own: a hook stays to the end of its process."""
    here, there = FRESH.Pipe()
    process = FRESH.Process(target=changes_of, args=(tmp_path_factory.mktemp("counted") / "drafter", there))
    process.start()
    there.close()  # so that a child that dies is an EOFError here
    kinds = here.recv()
    process.join()
    assert process.exitcode == 0
    return kinds


@pytest.mark.parametrize("place", [*range(6), "while states are exchanged"])
def test_a_run_killed_anywhere_and_resumed_was_never_killed(
    place: int | str, changes: list[str], unbroken: Unbroken, tmp_path: Path
) -> None:
    """A real SIGKILL before a change of a file that Python makes. Weights, curve, choice of the best: bit for bit.

    Weights are written by native code, into a folder aside: a kill in the middle of that is one before the next change.
    """
    last = place * len(changes) // 6 if isinstance(place, int) else changes.index("os.rename") + 1
    output = tmp_path / "drafter"
    process = FRESH.Process(target=run_killed, args=(output, last))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    state = state_folder(output) / "state.json"
    assert isinstance(place, int) or not state.exists()
    clear_leftovers(state_folder(output))
    step = json.loads(state.read_text())["step"]
    assert 0 <= step < SETTINGS.steps
    record = run(output, resume=True)
    assert written(output) == unbroken[0], f"killed before change {last} of {len(changes)}, resumed from step {step}"
    assert record.curve == unbroken[1].curve
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_run_killed_after_its_first_checkpoint_and_before_its_first_state_begins_again(
    unbroken: Unbroken, tmp_path: Path
) -> None:
    """What it left is an unfinished run's, and no finished checkpoint."""
    output = tmp_path / "drafter"

    def die(point: dict[str, Any]) -> None:
        if point["step"] == 10:
            raise MemoryError

    with pytest.raises(MemoryError):
        run(output, replace(SETTINGS, save_every=1000), on_point=die)
    assert json.loads((output / "training.json").read_text())["best_step"] == 5
    run(output, resume=True)
    assert written(output) == unbroken[0]


def test_a_run_that_died_before_its_first_checkpoint_is_in_nobodys_way(
    unbroken: Unbroken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the first step, say: the next try may have other settings and needs no word more."""
    output = tmp_path / "drafter"
    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "step", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            run(output, replace(SETTINGS, batch_tokens=4096))
    assert state_folder(output).exists()
    run(output)
    assert written(output) == unbroken[0]


def test_a_flat_tau_and_the_steps_of_a_run_without_a_bar_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that proposed one token everywhere stayed at tau 1.25 to the end, and nothing said so."""
    taus = iter((10, 12, 12, 12, 12, 12))
    measured = lambda *_: AcceptanceCounts(steps=10, committed=next(taus), kept=10)  # noqa: E731
    monkeypatch.setattr("dflash.training.trainer.measure_acceptance", measured)
    monkeypatch.setattr("dflash.training.run.LINE_SECONDS", 0)
    said: list[str] = []
    settings = replace(SETTINGS, eval_every=2)
    record = run(tmp_path / "drafter", settings, announce=said.append)
    flat = [line for line in said if line.startswith("tau has stayed at 1.20 for 4 measurements")]
    assert len(flat) == 1
    assert "(short with learning_rate=0.005): give other learning rates, or more steps." in flat[0]
    assert len(record.curve) == 6
    lines = [line for line in said if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == [f"step {step} of 12" for step in range(1, 13)]
    assert said.index(flat[0]) == said.index(lines[9]) + 1  # the first point is not flat


@pytest.mark.parametrize(("steps", "interval"), [(3, 1), (240, 24), (100_000, 500)])
def test_a_run_is_measured_and_saved_ten_times_or_every_500_steps(steps: int, interval: int) -> None:
    settings = TrainingSettings(save_every=7)
    assert (settings.interval("eval_every", steps), settings.interval("save_every", steps)) == (interval, 7)


def test_the_checkpoint_that_accepts_most_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, taus, seen = tmp_path / "drafter", iter((2, 5, 5, 4)), []

    def measured(drafter: DFlashDraftModel, *arguments: Any) -> AcceptanceCounts:
        seen.append({name: value.clone() for name, value in drafter.state_dict().items()})
        return AcceptanceCounts(steps=10, committed=10 * next(taus), kept=10)

    monkeypatch.setattr("dflash.training.trainer.measure_acceptance", measured)
    record = run(output, replace(SETTINGS, eval_every=3))
    assert (record.best_step, record.best_tau, [point["tau"] for point in record.curve]) == (6, 5.0, [2, 5, 5, 4])
    saved = DFlashDraftModel.from_pretrained(output, dtype=torch.bfloat16).state_dict()
    assert saved.keys() == seen[1].keys()
    assert all(torch.equal(saved[name], value.bfloat16()) for name, value in seen[1].items())
    assert any(not torch.equal(saved[name], value.bfloat16()) for name, value in seen[2].items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_the_state_saved(
    unbroken: Unbroken, tmp_path: Path, number: int
) -> None:
    output = tmp_path / "drafter"
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    record = run(output, on_point=lambda point: os.kill(os.getpid(), number) if point["step"] == 10 else None)
    assert (record.stopped_at, record.signal) == (11, number)
    assert json.loads((state_folder(output) / "state.json").read_text())["step"] == 11
    assert {one: signal.getsignal(one) for one in handlers} == handlers
    record = run(output, resume=True)
    assert record.stopped_at is None
    assert written(output) == unbroken[0]


def test_a_signal_while_the_last_files_are_written_lets_them_be_written(
    unbroken: Unbroken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half a file nor a state without its run stays beside the checkpoint."""

    def stopped_on_the_way(folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        remove_state(folder)

    monkeypatch.setattr("dflash.training.checkpointing.remove_state", stopped_on_the_way)
    record = run(tmp_path / "drafter")
    assert record.stopped_at is None
    assert written(tmp_path / "drafter") == unbroken[0]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_the_time_of_all_starts_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "drafter"
    monkeypatch.setattr("dflash.training.run.stopwatch", lambda: lambda: 7200.0)
    stopped(output)
    assert json.loads((state_folder(output) / "state.json").read_text())["record"]["seconds"] == 7200
    monkeypatch.setattr("dflash.training.run.stopwatch", lambda: lambda: 90.04)
    record = run(output, resume=True)
    assert record.seconds == 7290
    assert json.loads((output / "training.json").read_text())["seconds"] == 7290
    assert "the run took 121.5 minutes on 1 process" in (output / "README.md").read_text()


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    def interrupt_twice(point: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "drafter", on_point=interrupt_twice)


def stopped(output: Path) -> None:
    """A run that was asked to stop at its first measurement."""
    run(output, on_point=lambda point: os.kill(os.getpid(), signal.SIGTERM) if point["step"] == 5 else None)


def test_an_output_that_holds_a_run_is_not_written_over_unasked(tmp_path: Path) -> None:
    output = tmp_path / "drafter"
    stopped(output)
    before = written(output)
    with pytest.raises(ValueError, match=r"holds another run: pass resume \(--resume\)"):
        run(output)
    assert written(output) == before
    with pytest.raises(ValueError, match="both given"):
        run(output, resume=True, overwrite=True)
    short = replace(SETTINGS, steps=1)
    run(output, short, overwrite=True)
    assert json.loads((output / "training.json").read_text())["settings"]["steps"] == 1
    (output / "training.json").write_text('{"mark": 1}')
    with pytest.raises(
        ValueError, match=r"a checkpoint that no training run wrote, and there is no training state .* to resume"
    ):
        run(output, short, resume=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text.md").write_text("mine")
    with pytest.raises(ValueError, match="not a checkpoint"):
        run(tmp_path / "notes", overwrite=True)
    assert (tmp_path / "notes" / "text.md").read_text() == "mine"


def test_resuming_with_other_settings_or_data_names_what_differs(tmp_path: Path) -> None:
    output = tmp_path / "drafter"
    stopped(output)
    with pytest.raises(ValueError, match=r"learning_rate: 0\.005, now 0\.001; seed: 0, now 4"):
        run(output, replace(SETTINGS, learning_rate=1e-3, seed=4), resume=True)
    with pytest.raises(ValueError, match=r"data: \"[0-9a-f]{16}\", now \"[0-9a-f]{16}\"; held_out"):
        run(output, data=examples(11)[::-1], resume=True)
    with pytest.raises(ValueError, match=r"drafter: \"[0-9a-f]{16}\", now \"[0-9a-f]{16}\"\)"):
        run(output, block_size=5, resume=True)
    state = state_folder(output) / "state.json"
    whole = state.read_text()
    facts = json.loads(whole)
    del facts["settings"]["seed"]  # as an older version writes it, which did not know this setting: it had the default
    state.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="seed: 0, now 4"):
        run(output, replace(SETTINGS, seed=4), resume=True)
    state.write_text(whole.replace('"processes": 1', '"processes": 3'))
    said: list[str] = []
    free = replace(SETTINGS, save_every=50, license="mit")  # these change nothing learned
    record = run(output, free, resume=True, announce=said.append)
    assert "The run began in 3 processes and goes on in 1" in said[0]
    assert record.curve[-1]["step"] == SETTINGS.steps


def test_resuming_a_complete_run_changes_nothing_and_gives_its_record(unbroken: Unbroken, tmp_path: Path) -> None:
    """A queue may start the same command again and again."""
    output = tmp_path / "drafter"
    run(output)
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    record = run(output, resume=True)
    assert record.was_complete
    assert (record.curve, record.best_step, record.best_tau) == (
        unbroken[1].curve,
        unbroken[1].best_step,
        unbroken[1].best_tau,
    )
    assert {path.name: path.stat().st_mtime_ns for path in output.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    with pytest.raises(ValueError, match="to resume differs \\(steps: 12, now 13\\)"):
        run(output, replace(SETTINGS, steps=13), resume=True)


def test_a_second_process_is_refused_the_output_of_a_running_one(unbroken: Unbroken, tmp_path: Path) -> None:
    """Two real processes: the first one trains on, and writes what it would have written alone."""
    output = tmp_path / "drafter"
    here, there = FRESH.Pipe()
    first = FRESH.Process(target=_run_that_waits, args=(output, there))
    first.start()
    there.close()
    assert here.recv() == "measured 5"
    for asked in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(
            ValueError, match=rf"drafter is being written by process {first.pid} on .*: wait for it, stop it"
        ):
            run(output, **asked)
    here.send("go on")
    first.join()
    assert first.exitcode == 0
    assert written(output) == unbroken[0]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_resume_without_a_state_begins(unbroken: Unbroken, tmp_path: Path) -> None:
    """So that one command can be given to a queue that starts it again and again."""
    run(tmp_path / "drafter", resume=True)
    assert written(tmp_path / "drafter") == unbroken[0]


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("what", ["training state", "checkpoint"])
def test_a_full_disk_leaves_the_older_state_and_checkpoint(unbroken: Unbroken, tmp_path: Path, what: str) -> None:
    output = tmp_path / "drafter"
    stopped(output)
    before = written(output), (state_folder(output) / "state.pt").read_bytes()
    settings = replace(SETTINGS, save_every=1000) if what == "checkpoint" else SETTINGS
    if what == "checkpoint":  # any later measurement is a better one
        facts = json.loads((state_folder(output) / "state.json").read_text())
        facts["record"]["best_tau"] = 0.0
        (state_folder(output) / "state.json").write_text(json.dumps(facts))
    with (
        no_file_larger_than(2000),
        pytest.raises(OSError, match=rf"{what} .* cannot be written .*the older one is kept: make room"),
    ):
        run(output, settings, resume=True)
    assert (written(output), (state_folder(output) / "state.pt").read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "drafter.state"]
    run(output, resume=True)
    if what == "training state":
        assert written(output) == unbroken[0]


@pytest.mark.parametrize("moment", ["between the renames", "before them"])
def test_a_kill_while_the_state_is_replaced_loses_none(unbroken: Unbroken, tmp_path: Path, moment: str) -> None:
    output = tmp_path / "drafter"
    stopped(output)
    folder = state_folder(output)
    partial = folder.with_name(f".{folder.name}.partial-77")
    partial.mkdir()
    (partial / "state.pt").write_bytes(b"half")
    if moment == "between the renames":
        folder.rename(folder.with_name(f".{folder.name}.replaced-77"))
    run(output, resume=True)
    assert written(output) == unbroken[0]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("what", ["loss", "norm of the gradient"])
def test_a_loss_or_gradient_that_is_not_finite_leaves_state_and_checkpoint_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    output = tmp_path / "drafter"
    forward: Callable[..., Any] = DFlashDraftModel.forward
    calls: list[int] = []

    def failing(self: DFlashDraftModel, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        if self.training:
            calls.append(1)
            if len(calls) == 8 and what != "loss":
                result.last_hidden_state.register_hook(lambda gradient: gradient * float("inf"))
            elif len(calls) == 8:
                result.last_hidden_state = result.last_hidden_state * float("nan")
        return result

    monkeypatch.setattr(DFlashDraftModel, "forward", failing)
    with pytest.raises(
        FloatingPointError, match=rf"{what} of step 8 is nan, on batch \d of epoch \d.*begins with the ids"
    ) as stopped:
        run(output)
    step = json.loads((output / "training.json").read_text())["best_step"]
    assert str(stopped.value).endswith(f"or look at that batch; the checkpoint of step {step} is kept in {output}.")
    assert json.loads((state_folder(output) / "state.json").read_text())["step"] == 6
    weights = read_tensors(state_folder(output))["drafter"]
    assert all(tensor.isfinite().all() for tensor in weights.values())
    saved = DFlashDraftModel.from_pretrained(output)
    assert all(parameter.isfinite().all() for parameter in saved.parameters())


def _run_that_waits(output: Path, pipe: Any) -> None:
    """Trains; after its first measurement it goes on when it is told to."""

    def wait(point: dict[str, Any]) -> None:
        if point["step"] == SETTINGS.eval_every:
            pipe.send(f"measured {point['step']}")
            pipe.recv()

    run(output, on_point=wait)


def test_patience_counts_from_the_best_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a run goes on while it improves, and ends `patience` points after the best one."""
    monkeypatch.setattr("dflash.training.run.Goal.is_better", lambda self, point, record: point["step"] <= 2)
    record = run(tmp_path / "drafter", replace(SETTINGS, eval_every=1, patience=3))
    assert [point["step"] for point in record.curve] == [1, 2, 3, 4, 5]


def test_a_point_counts_the_blocks_of_all_steps_before(tmp_path: Path) -> None:
    """Promise: points that are further apart count what those between them counted, each block once."""
    short = replace(SETTINGS, steps=4)
    each = [point["blocks"] for point in run(tmp_path / "each", replace(short, eval_every=1)).curve]
    pairs = [point["blocks"] for point in run(tmp_path / "pairs", replace(short, eval_every=2)).curve]
    assert pairs == [each[0] + each[1], each[2] + each[3]]


def test_an_error_of_any_kind_reaches_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a damaged state.json raised KeyError in the first process, and the others waited for hours."""
    told: list[Any] = []
    monkeypatch.setattr("dflash.training.run.broadcast_object_list", told.extend)
    state = state_folder(tmp_path / "drafter")
    state.mkdir()
    (state / "state.json").write_text("{}")
    with pytest.raises(KeyError, match="step"):
        run(tmp_path / "drafter", resume=True)
    assert [type(answer) for answer in told] == [KeyError]


def test_the_display_ends_with_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: trackers were never finished after a loss that was not finite."""
    closed: list[Any] = []

    def diverged(*args: Any, **kwargs: Any) -> None:
        raise FloatingPointError("The loss is nan.")

    monkeypatch.setattr("dflash.training.run._Display.close", lambda display: closed.append(display))
    monkeypatch.setattr(Trainer, "step", diverged)
    with pytest.raises(FloatingPointError, match="The loss is nan"):
        run(tmp_path / "drafter", replace(SETTINGS, eval_every=2))
    assert len(closed) == 1
