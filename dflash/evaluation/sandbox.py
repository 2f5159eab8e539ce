"""Runs code that a model wrote, in a process of its own that cannot hang, fill or end the caller.

`sandbox_child.py` limits the process; here are its wall clock, its empty folder and its end.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Limits:
    """Limits of a program: time until it is killed, processor time, address space, and size of its output."""

    wall_seconds: float = 20.0
    cpu_seconds: int = 10
    memory_bytes: int = 2**30
    file_bytes: int = 16 * 2**20


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int | None  # negative for the signal that killed it, `None` if its time was over
    output: str  # at most `file_bytes`
    errors: str  # the last of standard error


CHILD = Path(__file__).with_name("sandbox_child.py")

# Libraries that start a thread per core would exceed the limits before the program does anything.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run_program(source: str, stdin: str = "", limits: Limits = Limits()) -> Outcome:
    """Runs `source` as a Python program in an empty folder, with `stdin` as its whole input. Only on POSIX systems."""
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder, contextlib.ExitStack() as stack:
        place = Path(folder)
        program, work = place / "program.py", place / "work"
        work.mkdir()
        program.write_text(source, encoding="utf-8", errors="replace")
        (place / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        given = stack.enter_context((place / "stdin").open("rb"))
        output, errors = (stack.enter_context((place / name).open("w+b")) for name in ("stdout", "stderr"))
        words = [sys.executable, "-I", "-B", str(CHILD), json.dumps(asdict(limits)), str(program)]
        files: dict[str, Any] = {"stdin": given, "stdout": output, "stderr": errors}
        process = subprocess.Popen(words, **files, cwd=work, env=ENVIRONMENT, start_new_session=True)
        try:
            status: int | None = process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # all processes of the session
            process.wait()
        return Outcome(status, _text(output, 0, limits.file_bytes), _text(errors, -2000, 2000))


def _text(file: BinaryIO, start: int, length: int) -> str:
    """Up to `length` bytes of a file from `start` on, counted from its end if negative."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size + start, 0) if start < 0 else start)
    return file.read(length).decode("utf-8", errors="replace")
