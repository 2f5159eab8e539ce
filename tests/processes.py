"""Processes of their own that need not import torch and transformers again, which takes seconds in each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO


# Starts processes that may train: copies of one that has imported and done nothing else. Autograd does not survive the copying
# of a process that used a GPU.
FRESH = multiprocessing.get_context("forkserver")
# `dflash.training` alone would import nothing: its names are imported on first use.
FRESH.set_forkserver_preload(["pytest", "torch.distributed.tensor", "dflash.training.run"])


class Forked:
    """A copy of this process that runs `work` and ends, as a script of it would: no backward pass in it, and no GPU.

    Args:
        work: What it runs; it is given nothing, and returns nothing.
        text: Its standard input.
        folder: Its working directory.
        variables: Of its environment, beside those of this process.
    """

    def __init__(self, work: Callable[[], Any], text: str = "", folder: Path | None = None, **variables: str) -> None:
        self._streams = [TemporaryFile("w+", encoding="utf-8") for _ in range(3)]  # noqa: SIM115, closed by `finish`
        self._streams[0].write(text)
        self._streams[0].seek(0)
        self.pid = os.fork()
        if self.pid == 0:
            _run(work, self._streams, folder, variables)

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Waits for its end: exit status, standard output and standard error."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = []
        for stream in self._streams:
            stream.seek(0)
            said.append(stream.read())
            stream.close()
        return subprocess.CompletedProcess((), status, *said[1:])


def forked(work: Callable[[], Any], *args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """What a `Forked` process printed, and how it ended."""
    return Forked(work, *args, **kwargs).finish()


def dflash_process(*words: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """`dflash words …` in a process of its own."""

    def work() -> None:
        from dflash.cli import main

        sys.argv = ["dflash", *map(str, words)]
        main()

    return forked(work, **kwargs)


def _run(work: Callable[[], Any], streams: list[TextIO], folder: Path | None, variables: dict[str, str]) -> None:
    """Ends the copy when `work` has ended: nothing of pytest's may run twice."""
    status = 1
    signal.alarm(300)  # ends it, whatever it waits for
    warnings.resetwarnings()  # pytest makes errors of some
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
        os.environ.update(variables)
        os.chdir(folder or os.getcwd())
        work()
        status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
