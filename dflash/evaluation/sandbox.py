"""Runs code that a model wrote, in a process of its own that cannot hang, fill, read or end the caller.

`sandbox_child.py` confines the process. This file starts it in an empty folder, hands it its tests, and ends it in time.
"""

import contextlib
import ctypes
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """Limits of a program: time until it is killed, processor time, address space, and size of its output.

    SECURITY.md states them. `unsafe_code` is no limit: it lets a program run where nothing confines it.
    """

    wall_seconds: float = 20.0
    cpu_seconds: int = 10
    memory_bytes: int = 2**30
    file_bytes: int = 16 * 2**20
    unsafe_code: bool = False  # whether programs run even where this system cannot confine them


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int | None  # negative for the signal that killed it, `None` if its time was over
    output: str  # at most `file_bytes`
    errors: str  # the last of standard error
    passed: bool  # whether the program and its tests ran to their ends


CHILD = Path(__file__).with_name("sandbox_child.py")

# Libraries that start a thread per core would exceed the limits before the program does anything.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4


def run_program(source: str, stdin: str = "", limits: Limits = Limits(), tests: str = "") -> Outcome:
    """Runs `source` as a Python program in an empty folder, with `stdin` as its whole input. Only on POSIX systems.

    `tests` run after it, with its names. The program cannot read them before.

    Raises:
        ValueError: where this system cannot confine a program, unless the limits say `unsafe_code`.
    """
    problem = None if limits.unsafe_code else why_unconfined()
    if problem is not None:
        raise ValueError(
            f"A program cannot be confined here: {problem}; Limits(unsafe_code=True) runs it all the same."
        )
    return _run(source, stdin, limits, tests)


@functools.cache
def why_unconfined() -> str | None:
    """Why a program cannot be confined on this system; `None` if it can."""
    outcome = _run("import random, threading\nthreading.Thread(target=random.random).start()", "", Limits(), "")
    if outcome.passed:
        return None
    last_lines = outcome.errors.strip().splitlines()[-1:]
    return last_lines[0] if last_lines else f"a harmless one ends with status {outcome.status}"


def _run(source: str, stdin: str, limits: Limits, tests: str) -> Outcome:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-"))
        place = Path(folder)
        if os.geteuid() == 0:
            place.chmod(0o755)  # the program runs as another user
        program = place / "program.py"
        work = place / "work"
        work.mkdir()
        program.write_text(source, encoding="utf-8", errors="replace")
        (place / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        given_input = stack.enter_context((place / "stdin").open("rb"))
        output = stack.enter_context((place / "stdout").open("wb"))
        errors = stack.enter_context((place / "stderr").open("wb"))
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        ours.settimeout(limits.wall_seconds)
        examiner = stack.enter_context(ThreadPoolExecutor(1))
        stack.enter_context(_closed_to_others())
        arguments = [json.dumps(asdict(limits)), str(theirs.fileno()), str(program)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), *arguments],
            stdin=given_input,
            stdout=output,
            stderr=errors,
            pass_fds=[theirs.fileno()],
            cwd=work,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        theirs.close()
        passed = examiner.submit(_examine, ours, tests.encode(errors="replace"))
        try:
            status: int | None = process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # all processes of the session
            process.wait()
        written = (place / "stdout").read_bytes()[: limits.file_bytes]
        problems = (place / "stderr").read_bytes()[-2000:]
        return Outcome(
            status,
            written.decode(errors="replace"),
            problems.decode(errors="replace"),
            passed.result(),
        )


def _examine(channel: socket.socket, tests: bytes) -> bool:
    """Gives a program its tests once it has run; returns whether it reached their end, where it sends a secret word back.

    The program could not know the word before, wherever it looks in its process.
    """
    word = secrets.token_bytes(16)
    with contextlib.suppress(OSError):  # the program has ended
        if channel.recv(1):
            channel.sendall(len(tests).to_bytes(8, "big") + tests + word)
            return channel.recv(len(word), socket.MSG_WAITALL) == word
    return False


_count_lock = threading.Lock()
_count = 0  # of programs that run
_was_dumpable = 0


@contextlib.contextmanager
def _closed_to_others() -> Iterator[None]:
    """While a program runs, /proc shows this process's memory, environment and files to root alone.

    The program has the same user where this is not root's process, and a kernel without Landlock would let it read them.
    """
    global _count, _was_dumpable
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    with _count_lock:
        if _count == 0:
            _was_dumpable = prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
            prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        _count += 1
    try:
        yield
    finally:
        with _count_lock:
            _count -= 1
            if _count == 0 and _was_dumpable == 1:  # 2 cannot be set
                prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
