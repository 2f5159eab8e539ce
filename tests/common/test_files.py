"""Files that are whole or not there, and one process at a time that writes them."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.checkpoints import written_aside
from dflash.common.files import check_output, check_writable, leftovers, only_writer, write_text
from dflash.common.json_lines import JsonLines


HOLD = """
import sys
from pathlib import Path
from dflash.common.files import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(path: Path) -> subprocess.Popen:
    """Another process that holds `path` until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path):
    output = tmp_path / "run"
    process = holding(output)
    with (
        pytest.raises(ValueError, match=rf"run is being written by process {process.pid} on .+: wait"),
        only_writer(output),
    ):
        pass
    process.communicate("")
    with only_writer(output):
        pass
    assert list(tmp_path.iterdir()) == []  # nothing is left beside it


def test_a_killed_writer_holds_nothing(tmp_path):
    process = holding(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with only_writer(tmp_path / "run"):
        pass


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "new" / "out.json"
    write_text(path, "first")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_is_said_before(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "made" / "on" / "the" / "way.json")
    with pytest.raises(ValueError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        check_writable(tmp_path / "file" / "out.json")


def test_a_full_disk_is_named_with_the_file_and_what_was_there_stays(tmp_path):
    output = tmp_path / "r.json"
    output.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"r\.json") as caught:
            write_text(output, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(output)
    assert os.listdir(tmp_path) == ["r.json"]
    assert output.read_text() == "before"


def test_an_output_that_exists_or_is_being_written_is_refused(tmp_path):
    output = tmp_path / "r.json"
    check_output(output, overwrite=False)
    process = holding(output)
    with pytest.raises(ValueError, match=r"r\.json is being written by process"):
        check_output(output)
    process.communicate("")
    output.write_text("before")
    with pytest.raises(ValueError, match=r"r\.json exists: pass overwrite"):
        check_output(output, overwrite=False)
    check_output(output)
    assert output.read_text() == "before"


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    """Promise: an output that is a link to another disk is written there. The link itself was once replaced."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "real.json").write_text("old")
    link, dangling = tmp_path / "link.json", tmp_path / "new.json"
    link.symlink_to(disk / "real.json")
    dangling.symlink_to(disk / "made.json")
    for path, real in ((link, disk / "real.json"), (dangling, disk / "made.json")):
        check_writable(path)
        write_text(path, "new")
        assert path.is_symlink()
        assert real.read_text() == "new"
    with only_writer(link), pytest.raises(ValueError, match="is being written"), only_writer(disk / "real.json"):
        pass
    assert sorted(os.listdir(disk)) == ["made.json", "real.json"]


def test_a_link_into_a_folder_that_is_not_there_is_refused(tmp_path):
    """Promise: a disk that is not mounted is named, before any work."""
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "unmounted" / "real.json")
    for write in (check_writable, check_output, lambda path: write_text(path, "x")):
        with pytest.raises(ValueError, match=r"is a link to .*unmounted/real\.json, whose folder does not exist"):
            write(link)
    assert not (tmp_path / "unmounted").exists()


def test_a_folder_that_is_a_link_is_replaced_where_it_leads(tmp_path):
    """Promise: as above for a checkpoint, whose older one there is replaced in one rename."""
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.mkdir(parents=True)
    (real / "old").touch()
    link.symlink_to(real)
    with written_aside(link) as aside:
        assert aside.parent == real.parent  # on the same disk, or it could not be renamed
        aside.mkdir()
        (aside / "new").touch()
    assert link.is_symlink()
    assert os.listdir(real) == ["new"]
    assert os.listdir(real.parent) == ["real"]


def test_files_of_a_like_name_are_no_parts_and_stay(tmp_path):
    """Bug: a user's `answers.partial.jsonl` was taken for a part of `answers.jsonl`, and deleted when the parts were joined."""
    own = [tmp_path / name for name in ("answers.jsonl", "answers.part1.jsonl", "answers.part12.jsonl")]
    others = [tmp_path / name for name in ("answers.partial.jsonl", "answers.part2b.jsonl", "my-answers.part1.jsonl")]
    for path in (*own, *others):
        path.write_text("{}\n")
    lines = JsonLines(own[0])
    assert lines.parts() == own
    lines.join([b"{}\n"])
    assert sorted(tmp_path.iterdir()) == sorted([own[0], *others])


def test_leftovers_are_those_of_the_name_and_not_of_a_pattern(tmp_path):
    """Bug: the name `run[1]` was read as a pattern, so that what a killed run had left of `run1` was taken for its own."""
    own = tmp_path / ".run[1].replaced-7"
    for folder in (own, tmp_path / ".run1.replaced-7", tmp_path / ".run[1].replaced"):
        folder.mkdir()
    assert leftovers(tmp_path / "run[1]", "replaced-*") == [own]


def test_a_licence_text_stays_when_a_folder_is_replaced(tmp_path):
    """Promise: what somebody has put beside a checkpoint as its licence is in the next one, unless that has its own."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "LICENSE").write_text("mine")
    (folder / "weights").write_text("old")
    for own in (None, "its own"):
        with written_aside(folder) as aside:
            aside.mkdir()
            if own:
                (aside / "LICENSE").write_text(own)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"LICENSE": own or "mine"}
