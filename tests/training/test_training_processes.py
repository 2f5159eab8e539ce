"""What decides what is learned is the batch: not the number of processes, nor of parts, nor who holds which weights."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from processes import FRESH
from safetensors.torch import load_file
from test_training_resume import SETTINGS, examples, run, written
from tiny_models import MASK_TOKEN_ID, make_drafter, make_target
from torch import distributed, multiprocessing

from dflash.training import (
    BatchPlan,
    Trainer,
    TrainingRecord,
    TrainingSettings,
    epoch_batches,
    new_drafter,
    state_folder,
    trainer,
)
from dflash.training.distributed import asked_sharding


# An epoch of batches of three sequences, and a last one of which the second process has none.
# By AdamW: Muon computes in bf16, where what sums round to in two processes becomes a difference of a hundredth.
ADAMW: dict[str, Any] = {"recipe": "paper", "muon_learning_rate": 0, "position_weights": "decay"}
SHORT = replace(SETTINGS, steps=5, batch_tokens=96, eval_every=3, save_every=2, **ADAMW)
MUON = {"muon_learning_rate": 1e-2}


def short(output: Path, settings: TrainingSettings = SHORT, **arguments: Any) -> TrainingRecord:
    return run(output, settings, data=examples(13), **arguments)


def test_the_data_leaves_a_process_without_a_row() -> None:
    batches = epoch_batches(examples(13), 0, BatchPlan(num_anchors=4, batch_tokens=96))
    assert sorted(len(batch.input_ids) for batch in batches) == [1, 3, 3, 3, 3]


def in_two_processes(work: Callable[[int, Path], None], folder: Path) -> None:
    multiprocessing.start_processes(_join, args=(work, folder), nprocs=2, start_method=FRESH.get_start_method())


def _join(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    # What `torchrun` would set; accelerate reads it.
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"OMP_NUM_THREADS": "1"}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    torch.set_num_threads(1)
    limit = timedelta(seconds=90)  # processes that no longer agree wait for each other
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, timeout=limit, rank=rank, world_size=2)
    work(rank, folder)
    distributed.destroy_process_group()


def sharded_and_stopped(rank: int, folder: Path) -> None:
    """Runs with both models in pieces and with whole ones; each also stopped by a signal to the second process, and resumed."""
    sharded = replace(SHORT, shard=True, shard_target=True, gradient_accumulation_steps=2)
    short(folder / "sharded", sharded)
    short(folder / "pieces by Muon", replace(sharded, **MUON))
    stop_and_go_on(rank, folder / "pieces by Muon, stopped", replace(sharded, **MUON))
    stop_and_go_on(rank, folder / "stopped", SHORT)
    short(folder / "unstopped", SHORT)
    try:
        short(folder / "unstopped", SHORT)
    except ValueError as error:  # found by the first process, and told to all
        (folder / f"refused by {rank}").write_text(str(error))
    norms = {name: gradient_norms(shard=name == "sharded") for name in ("sharded", "unstopped")}
    norms["muon"] = gradient_norms(shard=True, **MUON)
    trainer.asked_sharding = lambda _: {"reshard_after_forward": True}  # accelerate's default
    norms |= {name: gradient_norms(head) for name, head in HEADS.items()}
    if rank == 0:
        (folder / "norms.json").write_text(json.dumps(norms))


def stop_and_go_on(rank: int, output: Path, settings: TrainingSettings) -> None:
    if rank == 1:  # `on_point` is the first process's, so the signal comes with a measurement of its own
        measure = trainer.measure_acceptance

        def signalling(*arguments: Any) -> Any:
            trainer.measure_acceptance = measure
            os.kill(os.getpid(), signal.SIGTERM)
            return measure(*arguments)

        trainer.measure_acceptance = signalling
    record = short(output, settings)
    assert record.stopped_at == 4
    short(output, settings, resume=True)


HEADS = {
    "selector": {"selector_rank": 3, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8},
    "Domino": {"gru_hidden_dim": 5, "emb_dim": 4},
}


def gradient_norms(shape: dict[str, Any] | None = None, **changes: Any) -> list[float]:
    """Those of the first steps: AdamW and clipping would hide a wrong factor from the curve."""
    torch.manual_seed(3)
    target = make_target()
    drafter = new_drafter(target, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=1, block_size=4, **shape or {})
    trainer = Trainer(drafter, target, examples(13), replace(SHORT, max_grad_norm=1e9, **changes))
    return [trainer.step().gradient_norm for _ in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes, and what two do."""
    folder = tmp_path_factory.mktemp("processes")
    in_two_processes(sharded_and_stopped, folder)
    short(folder / "alone", SHORT)
    return folder


def curves(folder: Path, *names: str) -> list[list[dict[str, Any]]]:
    return [json.loads((folder / name / "training.json").read_text())["curve"] for name in names]


@pytest.mark.parametrize("name", ["sharded", "unstopped"])
def test_two_processes_learn_what_one_learns(folder: Path, name: str) -> None:
    """FSDP2 over drafter and target, and plain data parallelism: the same curve, the same checkpoint."""
    alone, together = curves(folder, "alone", name)
    for one, other in zip(alone, together, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["accepted_per_block"] == pytest.approx(one["accepted_per_block"])
        assert other["tau"] == one["tau"]
    weights, wanted = (load_file(folder / which / "model.safetensors") for which in (name, "alone"))
    assert weights.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(weights[key].float(), tensor.float(), rtol=1e-2, atol=1e-3, msg=key)  # bf16
    assert (folder / name / "config.json").read_text() == (folder / "alone" / "config.json").read_text()


@pytest.mark.parametrize("name", ["sharded", "unstopped"])
def test_gradients_are_those_of_the_mean_over_all_processes(folder: Path, name: str) -> None:
    norms = json.loads((folder / "norms.json").read_text())[name]
    assert norms == pytest.approx(gradient_norms(), rel=1e-4)
    assert norms == pytest.approx(gradient_norms(gradient_accumulation_steps=2), rel=1e-4)


def test_muon_sees_whole_matrices_of_a_sharded_drafter(folder: Path) -> None:
    """Of its rows alone it would make another update: the norms after it would differ by more than bf16 rounds."""
    sharded = json.loads((folder / "norms.json").read_text())["muon"]
    assert sharded[0] == pytest.approx(gradient_norms(**MUON)[0], rel=1e-4)
    assert sharded == pytest.approx(gradient_norms(**MUON), rel=1e-2)
    assert sharded != pytest.approx(gradient_norms(), rel=2e-2)


@pytest.mark.parametrize("head", HEADS)
def test_a_sharded_drafters_head_learns_too(folder: Path, head: str) -> None:
    """It is called after the forward, when the layers are in pieces again."""
    assert json.loads((folder / "norms.json").read_text())[head] == pytest.approx(
        gradient_norms(HEADS[head]), rel=1e-4
    )


def test_two_processes_stopped_by_a_signal_to_one_go_on_bit_for_bit(folder: Path) -> None:
    for stopped, unstopped in (("stopped", "unstopped"), ("pieces by Muon, stopped", "pieces by Muon")):
        assert written(folder / stopped) == written(folder / unstopped)
        assert not state_folder(folder / stopped).exists()


def test_all_processes_refuse_what_the_first_one_finds(folder: Path) -> None:
    said = {(folder / f"refused by {rank}").read_text() for rank in range(2)}
    assert len(said) == 1
    assert "unstopped holds another run" in said.pop()


def test_accelerates_own_configuration_says_how_a_drafter_is_spread() -> None:
    """It takes effect on accelerators alone, so here it is asked and not launched."""

    def asked(kind: DistributedType, **fields: Any) -> dict[str, Any] | None:
        plugin = FullyShardedDataParallelPlugin(**fields) if kind == DistributedType.FSDP else None
        accelerator: Any = SimpleNamespace(distributed_type=kind, state=SimpleNamespace(fsdp_plugin=plugin))
        return asked_sharding(accelerator)

    assert asked(DistributedType.MULTI_GPU) is None
    assert asked(DistributedType.FSDP, fsdp_version=2) == {"reshard_after_forward": True}
    assert asked(DistributedType.FSDP, fsdp_version=2, reshard_after_forward=False) == {"reshard_after_forward": False}
    with pytest.raises(ValueError, match=r"asks for FSDP 1: write `fsdp_version: 2`"):
        asked(DistributedType.FSDP, fsdp_version=1, auto_wrap_policy="no_wrap")
    with pytest.raises(ValueError, match="fsdp_offload_params: false"):
        asked(DistributedType.FSDP, fsdp_version=2, cpu_offload=True)
    with pytest.raises(ValueError, match="asks for DEEPSPEED"):
        asked(DistributedType.DEEPSPEED)


@pytest.mark.parametrize(
    ("device", "processes", "is_alone"), [("mps", 2, True), ("mps", 1, False), ("cuda", 2, False)]
)
def test_processes_meet_on_the_cpu_where_the_accelerator_has_no_meeting_place(
    monkeypatch: pytest.MonkeyPatch, device: str, processes: int, is_alone: bool
) -> None:
    """Each of several processes on a Mac would take itself for the first."""
    assert trainer.is_cpu_alone() is not torch.accelerator.is_available()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(device))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert trainer.is_cpu_alone() is is_alone


def test_a_target_is_spread_before_it_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole it may be larger than a device."""
    target, order = make_target(), []
    monkeypatch.setattr(trainer, "shard_layers", lambda *_: order.append("spread"))
    monkeypatch.setattr(target, "to", lambda *_: order.append("moved"))
    drafter = new_drafter(target, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=1, block_size=4)
    Trainer(drafter, target, examples(13), replace(SHORT, shard_target=True))
    assert order == ["spread", "moved"]


@pytest.mark.parametrize("changes", [{"gradient_accumulation_steps": 3}, {"gradient_checkpointing": True}])
def test_less_memory_learns_the_same(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    record = short(tmp_path / "other", replace(SHORT, **changes))
    (alone,) = curves(folder, "alone")
    assert [point["loss"] for point in record.curve] == pytest.approx([point["loss"] for point in alone], rel=1e-5)
    assert [point["tau"] for point in record.curve] == [point["tau"] for point in alone]


def test_gradient_checkpointing_computes_the_layers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash.model import layers_dflash

    calls: list[bool] = []
    forward = layers_dflash.DFlashAttn.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(layers_dflash.DFlashAttn, "forward", counted)
    one_step = replace(SHORT, steps=1, eval_every=5)
    short(tmp_path / "plain", one_step)
    plain = calls.count(True)
    calls.clear()
    short(tmp_path / "again", replace(one_step, gradient_checkpointing=True))
    assert calls.count(True) > plain


def test_a_compiled_forward_trains_and_decoding_stays_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    eager = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or eager(module))
    two_steps = replace(SHORT, steps=2, eval_every=1)  # each batch has another shape, and is traced
    alone = short(tmp_path / "eager", two_steps)
    assert not compiled
    record = short(tmp_path / "compiled", replace(two_steps, compile=True))
    assert len(compiled) == 1
    losses = [point["loss"] for point in record.curve]
    assert losses == pytest.approx([point["loss"] for point in alone.curve], rel=1e-5)
    assert len(losses) == 2


def test_bf16_computes_over_fp32_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    class Watching(trainer.DrafterLoss):
        def __call__(self, *arguments: Any) -> Any:
            loss, counts = super().__call__(*arguments)
            seen.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
            assert {parameter.dtype for parameter in self.drafter.parameters()} == {torch.float32}
            return loss, counts

    monkeypatch.setattr(trainer, "DrafterLoss", Watching)
    record = short(tmp_path / "bf16", replace(SHORT, mixed_precision="bf16"))
    assert set(seen) == {torch.bfloat16}
    (alone,) = curves(folder, "alone")
    assert [point["loss"] for point in record.curve] == pytest.approx([point["loss"] for point in alone], rel=0.05)
    assert record.curve[0]["loss"] != alone[0]["loss"]


def test_a_change_of_low_rank_is_not_sharded_by_accelerates_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `lora_rank` with `shard` was refused, and with FSDP of the configuration it failed at the first measurement."""
    monkeypatch.setattr(trainer, "asked_sharding", lambda accelerator: {})
    settings = replace(SETTINGS, init="begun", lora_rank=2)
    with pytest.raises(ValueError, match=r"lora_rank=2 and accelerate's configuration asks for FSDP.*leave FSDP out"):
        trainer.Trainer(make_drafter(), make_target(), examples(), settings)
