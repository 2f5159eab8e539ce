"""Old paths still import for one release, and say that they moved."""

from __future__ import annotations

import subprocess
import sys

import pytest


OLD = {
    "from dflash.embedded import load_embedded_pair as old": "load_embedded_pair",
    "from dflash.hub import save_checkpoint as old": "save_checkpoint",
    "from dflash.checking import check as old": "check",
    "from dflash.serving import launch as old": "server_command",
    "import dflash.publishing; old = dflash.publishing.plan": "plan_publication",
    "from dflash.dialects import dialect_of as old": "dialects.dialect_of",
}


def test_old_paths_give_the_same_and_warn_where_they_are_imported() -> None:
    """In a process of its own: what was imported once does not warn again."""
    lines = ["import dflash.checkpoints as checkpoints"]
    for line, new in OLD.items():
        lines += [line, f"assert old is checkpoints.{new}"]
    program = [sys.executable, "-W", "default", "-c", "\n".join(lines)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    warned = [line for line in done.stderr.splitlines() if "DeprecationWarning: dflash." in line]
    assert [line.split(" ")[0] for line in warned] == [f"<string>:{2 * i + 2}:" for i in range(len(OLD))]
    assert all(" has moved: import from dflash.checkpoints, or dflash.checkpoints." in line for line in warned)


def test_a_path_that_never_was_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"dflash\.nothing"):
        __import__("dflash.nothing")
