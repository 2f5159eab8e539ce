"""Processes of a user: each runs a script where the package is hidden or on its path, with a home of its own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hub_server import Hub, User

import dflash


PACKAGE_ROOT = Path(dflash.__file__).parent.parent
MESSAGES = [{"role": "user", "content": "HOW MANY APPLES"}]
NUM_NEW = 24

# Runs with the package hidden, so it stands for any user's process. Prints one line of JSON.
PRELUDE = """
import contextlib, json, sys
sys.modules["dflash"] = None  # an installed package is hidden too
with contextlib.suppress(ImportError):
    import dflash
    raise SystemExit("dflash is importable: this process proves nothing")
import torch
torch.set_num_threads(1)
"""

USERS = {"loopback-me": User("me", ("me",)), "loopback-you": User("you", ("you",))}
WITH_PACKAGE = (PACKAGE_ROOT, Path(__file__).parent)

# A process that has imported others' packages alone, and runs each script that it is sent in a copy of itself.
BARE = """
import json, os, sys, traceback
{imports}
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.chdir(asked["cwd"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            sys.path[:0] = asked["path"]
            if "transformers" in sys.modules:
                from transformers import dynamic_module_utils
                dynamic_module_utils.HF_MODULES_CACHE = os.path.join(os.environ["HF_HOME"], "modules")
            exec(compile(asked["script"], "<script>", "exec"), {{"__name__": "__main__"}})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# The client of the Hub reads its variables when it is imported. Most of what transformers imports is torch's.
PARTS_OF_TORCH = "import torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor"
IMPORTS = {True: PARTS_OF_TORCH, False: "from transformers import AutoModel, AutoTokenizer, Qwen3ForCausalLM"}


@cache
def bare_process(python: str, reads_variables: bool) -> subprocess.Popen[str]:
    """The one of that interpreter, isolated from this one's paths and variables; it ends with this process."""
    started = subprocess.Popen(
        [python, "-I", "-c", BARE.format(imports=IMPORTS[reads_variables])],
        env=other_variables(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.communicate)
    return started


def other_variables() -> dict[str, str]:
    """Those of this process that are neither Python's nor the Hub's."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    return {**known, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}


def printed_by(
    script: str,
    cwd: Path,
    python: str = sys.executable,
    path: tuple[Path, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> str:
    """What `script` prints, run by `python` in `cwd`, offline, with a home of its own.

    `variables` are set in its environment; only modules below `path` are importable beside those of the interpreter.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    out, err = cwd / "printed.txt", cwd / "errors.txt"
    process = bare_process(python, bool(variables))
    asked = {"script": script, "cwd": str(cwd), "path": list(map(str, path)), "out": str(out), "err": str(err)}
    environment = {**other_variables(), "HF_HOME": str(cwd / "hf_home"), **(variables or {})}
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({**asked, "environment": environment}) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0\n", err.read_text()[-4000:]
    return out.read_text()


def run_script(script: str, cwd: Path, *process: Any, **names: Any) -> dict[str, Any]:
    """What `script` prints as JSON in the last line, with `names` defined; `process` and the rest are `printed_by`'s."""
    of_process = {name: names.pop(name) for name in ("python", "path", "variables") if name in names}
    values = {"messages": MESSAGES, "NUM_NEW": NUM_NEW, "RESAVED": None, **names}
    values = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return json.loads(printed_by(header + script, cwd, *process, **of_process).strip().splitlines()[-1])


def environment(hub: Hub, home: Path, token: str | None = None, **more: str) -> dict[str, str]:
    """A client of `hub` with its cache at `home`; large files by LFS, since the server does not speak Xet."""
    known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    given = {} if token is None else {"HF_TOKEN": token}
    return {**known, "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", **given, **more}
