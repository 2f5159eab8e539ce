"""Writing a checkpoint: only an older one of the same kind is ever replaced, and an interrupt loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_drafter, make_target

from dflash.checkpoints import replace_folder, save_checkpoint


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, by its path inside."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    for make in (make_drafter, make_target):
        folder = save_checkpoint(make(), tmp_path / make.__name__, files={"README.md": "old", "training.json": "{}"})
        save_checkpoint(make(), folder, files={"README.md": "new"})
        assert (folder / "README.md").read_text() == "new"
        assert not (folder / "training.json").exists()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [("notes.txt", "holds notes.txt"), (".git/HEAD", "holds .git"), ("adapter.safetensors", "holds adapter.safe")],
)
def test_what_we_do_not_write_is_kept(name: str, said: str, tmp_path: Path) -> None:
    """Promise: a file of the user's in the folder is named, and everything stays."""
    folder = save_checkpoint(make_drafter(), tmp_path / "drafter")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    before = contents(folder)
    with pytest.raises(ValueError, match=said):
        save_checkpoint(make_drafter(), folder)
    assert contents(folder) == before


def test_a_model_of_another_kind_is_kept(tmp_path: Path) -> None:
    """Promise: a drafter never replaces a target, nor a target a drafter, nor either a config that says nothing."""
    drafter, target = make_drafter(), make_target()
    for name, there, new in (("a", target, drafter), ("b", drafter, target)):
        folder = save_checkpoint(there, tmp_path / name)
        before = contents(folder)
        with pytest.raises(ValueError, match="holds another model than"):
            save_checkpoint(new, folder)
        assert contents(folder) == before
    for text in ("{", "[]", "{}", json.dumps({"architectures": None, "auto_map": "x"})):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "config.json").write_text(text)
        with pytest.raises(ValueError, match="holds another model than"):
            save_checkpoint(drafter, tmp_path / "mine")


def test_an_interrupt_between_the_renames_restores_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "folder", tmp_path / "new"
    for path in (old, new):
        path.mkdir()
        (path / "README.md").write_text(path.name)
    rename = Path.rename

    def interrupted(self: Path, to: Any) -> Path:
        if self == new:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(new, old)
    assert (old / "README.md").read_text() == "folder"


def test_what_a_killed_process_moved_aside_is_cleared_or_restored(tmp_path: Path) -> None:
    """Bug: a folder left by a process of the same number made every later save fail, and a kill between the renames hid the old one."""
    folder = save_checkpoint(make_drafter(), tmp_path / "drafter", files={"README.md": "old"})
    left = tmp_path / f".drafter.replaced-{os.getpid()}"
    left.mkdir()
    (left / "README.md").touch()
    save_checkpoint(make_drafter(), folder, files={"README.md": "old"})
    assert list(tmp_path.iterdir()) == [folder]
    folder.rename(left)

    def refuse(_: Path) -> None:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        save_checkpoint(make_drafter(), folder, inspect=refuse)
    assert (folder / "README.md").read_text() == "old"


def test_weights_are_as_readable_as_the_config(tmp_path: Path) -> None:
    """Known trap: safetensors files come out readable by their owner alone, and a server of another user fails."""
    before = os.umask(0o022)
    try:
        folder = save_checkpoint(make_drafter(), tmp_path / "drafter")
    finally:
        os.umask(before)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
