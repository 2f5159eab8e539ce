"""Old paths still import for one release, and say where the names went."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("from dflash.embedded import load_embedded_pair as old", "load_embedded_pair"),
        ("from dflash.hub import save_checkpoint as old", "save_checkpoint"),
        ("from dflash.checking import check as old", "check"),
        ("from dflash.serving import launch as old", "server_command"),
        ("import dflash.publishing; old = dflash.publishing.plan", "plan_publication"),
        ("from dflash.dialects import dialect_of as old", "dialects.dialect_of"),
    ],
)
def test_an_old_path_gives_the_same_and_warns_where_it_is_imported(line: str, new: str) -> None:
    """In a process of its own: what was imported once does not warn again."""
    program = f"import dflash.checkpoints as checkpoints\n{line}\nprint(old is checkpoints.{new})"
    done = subprocess.run([sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    warned = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert len(warned) == 1
    assert warned[0].startswith("<string>:2: DeprecationWarning: dflash.")
    assert warned[0].endswith(" has moved: import from dflash.checkpoints.")


def test_a_path_that_never_was_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"dflash\.nothing"):
        __import__("dflash.nothing")
