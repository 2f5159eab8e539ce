"""Old paths still import for one release, and say that they moved."""

from __future__ import annotations

import sys
import warnings

import pytest


OLD = {
    "from dflash.embedded import load_embedded_pair as old": "load_embedded_pair",
    "from dflash.hub import save_checkpoint as old": "save_checkpoint",
    "from dflash.checking import check as old": "check",
    "from dflash.serving import launch as old": "server_command",
    "import dflash.publishing; old = dflash.publishing.plan": "plan_publication",
}


def test_old_paths_give_the_same_and_warn_where_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import dflash.checkpoints as checkpoints"]
    for line, new in OLD.items():
        monkeypatch.delitem(sys.modules, line.split()[1].rstrip(";"), raising=False)  # imported once, it warns no more
        lines += [line, f"assert old is checkpoints.{new}"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        exec(compile("\n".join(lines), "<string>", "exec"), {})
    warned = [one for one in seen if issubclass(one.category, DeprecationWarning) and "dflash." in str(one.message)]
    assert [(one.filename, one.lineno) for one in warned] == [("<string>", 2 * i + 2) for i in range(len(OLD))]
    assert all(
        " has moved: import from dflash.checkpoints, or dflash.checkpoints." in str(one.message) for one in warned
    )


def test_a_path_that_never_was_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"dflash\.nothing"):
        __import__("dflash.nothing")
