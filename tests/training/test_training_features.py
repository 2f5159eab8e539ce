"""Features written once: the loss is the one that the target in the process gives, and a mismatch is named."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training_resume import SETTINGS, examples, run
from tiny_models import make_drafter, make_target

from dflash.common.files import only_writer
from dflash.training import BatchPlan, FrozenTarget, epoch_batches
from dflash.training.features import CachedFeatures, documents_of, facts_of, feature_bytes, write_features


@pytest.fixture
def frozen() -> FrozenTarget:
    return FrozenTarget(make_target(), make_drafter())


@pytest.mark.parametrize("pack_length", [None, 96])
def test_features_from_disk_are_those_of_the_target(
    frozen: FrozenTarget, tmp_path: Path, pack_length: int | None
) -> None:
    """In any batch, beside any neighbour, out of any shard."""
    data = examples()
    said: list[str] = []
    facts = facts_of(frozen, data, True)
    write_features(tmp_path / "f", frozen, data, facts, batch_tokens=64, announce=said.append, shard_bytes=4000)
    assert len(list((tmp_path / "f").glob("*.safetensors"))) > 3
    cached = CachedFeatures(tmp_path / "f", facts)
    shape = {"num_anchors": 2, "batch_tokens": 192, "pad_token_id": 0, "seed": 0, "pack_length": pack_length}
    for batch in epoch_batches(data, 0, BatchPlan(**shape)):
        read, online = cached(batch, wants_states=True), frozen(batch, wants_states=True)
        for row, columns in documents_of(batch):
            torch.testing.assert_close(read.features[row, columns], online.features[row, columns])
            torch.testing.assert_close(read.last_hidden_state[row, columns], online.last_hidden_state[row, columns])
        assert cached(batch).last_hidden_state is None
    size = feature_bytes(frozen, data, True)
    assert said == [f"Writing {size / 2**20:,.1f} MiB of features of 12 sequences to {tmp_path / 'f'}."]
    on_disk = sum(path.stat().st_size for path in (tmp_path / "f").glob("*.safetensors"))
    assert size <= on_disk < 1.1 * size + 4000


@pytest.mark.parametrize("loss", ["ce", "forward_kl"])
def test_training_from_written_features_is_training_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    settings = replace(SETTINGS, steps=4, eval_every=2, loss=loss)
    online = run(tmp_path / "online", settings)
    folder = tmp_path / "features"
    first = run(tmp_path / "first", replace(settings, features=str(folder)))
    monkeypatch.setattr(
        FrozenTarget, "__call__", lambda *_: pytest.fail("the target ran although its features are there")
    )
    second = run(tmp_path / "second", replace(settings, features=str(folder)))
    for record in (first, second):
        for point, wanted in zip(record.curve, online.curve, strict=True):
            assert point["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert point["tau"] == wanted["tau"]
    facts = json.loads((tmp_path / "second" / "training.json").read_text())
    assert facts["settings"]["features"] == "features"  # and no path of this machine


def test_features_of_something_else_are_refused_by_name(frozen: FrozenTarget, tmp_path: Path) -> None:
    data = examples()
    write_features(tmp_path, frozen, data, facts_of(frozen, data, False), batch_tokens=256)

    def refused(
        said: str, target: FrozenTarget = frozen, rows: Any = data, wants_states: bool = False, precision: str = "no"
    ) -> None:
        with pytest.raises(ValueError, match=said):
            CachedFeatures(tmp_path, facts_of(target, rows, wants_states, precision))

    refused(r"target: \"[0-9a-f]{16}\", now \"[0-9a-f]{16}\"", FrozenTarget(make_target(seed=9), make_drafter()))
    refused(r"data: \"[0-9a-f]{16}\", now", rows=data[1:])
    refused("has_last_states: false, now true", wants_states=True)
    other = make_drafter(target_layer_ids=[0, 1])
    refused(r"target_layer_ids: \[.*\], now \[0, 1\]", FrozenTarget(make_target(), other))
    refused('mixed_precision: "no", now "bf16"', precision="bf16")
    refused('dtype: "float32", now "bfloat16"', FrozenTarget(make_target().bfloat16(), make_drafter()))
    CachedFeatures(tmp_path, facts_of(frozen, data, False))


def test_features_that_another_run_is_writing_are_not_written_too(tmp_path: Path) -> None:
    with (
        only_writer(tmp_path / "features"),
        pytest.raises(ValueError, match=r"features is being written by process"),
    ):
        run(tmp_path / "drafter", replace(SETTINGS, steps=1, features=str(tmp_path / "features")))
    assert not (tmp_path / "features").exists()


def test_a_folder_left_unfinished_is_written_again_and_a_strange_one_is_not(
    frozen: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = examples(3)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "features-00007.safetensors").write_bytes(b"half")
    (tmp_path / "half" / ".manifest.json.partial").write_text("half")
    write_features(tmp_path / "half", frozen, data, facts_of(frozen, data, False), batch_tokens=256)
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == [
        "features-00000.safetensors",
        "manifest.json",
    ]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"holds letter\.txt"):
        write_features(tmp_path / "mine", frozen, data, facts_of(frozen, data, False), batch_tokens=256)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 0, 10))
    with pytest.raises(ValueError, match=r"take 0\.0 MiB and .* has 0\.0 MiB left: leave features out"):
        write_features(tmp_path / "new", frozen, data, facts_of(frozen, data, False), batch_tokens=256)


def test_an_error_of_the_target_is_not_called_one_of_the_disk(
    frozen: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a target without memory for its forward was said to have a disk without room."""

    def out_of_memory(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    data = examples()
    facts = facts_of(frozen, data, False)
    monkeypatch.setattr(FrozenTarget, "__call__", out_of_memory)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        write_features(tmp_path / "f", frozen, data, facts, batch_tokens=256)


def test_someone_elses_weights_are_no_unfinished_features(frozen: FrozenTarget, tmp_path: Path) -> None:
    """Bug: every .safetensors of the folder was deleted."""
    data, theirs = examples(), tmp_path / "model.safetensors"
    theirs.write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"holds model\.safetensors, which is not a file of features"):
        write_features(tmp_path, frozen, data, facts_of(frozen, data, False), batch_tokens=256)
    assert theirs.read_bytes() == b"weights"
