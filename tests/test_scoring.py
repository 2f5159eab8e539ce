"""Answers scored: mathematics by value, code by its tests; and hostile code, which fails and harms nobody."""

from __future__ import annotations

import base64
import errno
import json
import os
import pickle
import platform
import signal
import struct
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from dflash.evaluation import Limits, check_scorers, extract_code, is_right, run_program, sandbox_child


pytestmark = pytest.mark.skipif(os.name != "posix", reason="code is scored under POSIX limits")

SMALL = Limits(wall_seconds=1.5, cpu_seconds=1, memory_bytes=2**28, file_bytes=2**20)
FILTERED = pytest.mark.skipif(
    not Path("/proc/sys/kernel/seccomp").exists() or platform.machine() not in sandbox_child.REFUSED,
    reason="no system-call filter here",
)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("3 + 4 = 7, so \\boxed{7}.", "7"),
        ("We get 7.\n#### 7", "7"),
        ("#### $1,007.", "1007"),
        ("so \\boxed{0.5}", "\\frac{1}{2}"),
        ("\\boxed{\\left(3, \\frac{\\pi}{2}\\right)}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("The final answer is 7. I hope it helps.", "7"),
        ("<think>\\boxed{3}</think>\\boxed{7}", "7"),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}"),
    ],
)
def test_right_number_counts_however_it_is_written(answer: str, reference: str) -> None:
    assert is_right("math", answer, reference)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "\\boxed{8}",
        "#### 77",
        "7 apples and then 7",
        "<think>\\boxed{7}",
        "\\boxed{7}</think>\\boxed{8}",
        "\\boxed{" * 99,
    ],
)
def test_wrong_cut_or_unsaid_number_does_not_count(answer: str) -> None:
    """Promise: no chance hit: a number counts where it is said to be the answer, and what was only thought does not."""
    assert not is_right("math", answer, "7")


HUMANEVAL = {
    "prompt": "from typing import List\n\n\ndef helper():\n    return 1\n\n\ndef add(xs: List[int]) -> int:\n    '''Sum.'''\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
    "entry_point": "add",
}
BODY = "    return sum(xs) * helper()\n"
MBPP = {"setup": "import math\nbox = Box()", "tests": ["assert box.f(4) == math.sqrt(16)"]}


@pytest.mark.parametrize(
    "answer",
    [
        f"Sure:\n```python\n{HUMANEVAL['prompt']}{BODY}```\nDone.",
        f"```\ndef add(xs):\n{BODY}```\nand a usage:\n```python\nprint(add([1]))\n```",
        f"```python\ndef add(xs):\n{BODY}",  # cut before the fence was closed
        BODY,  # the completion alone
    ],
)
def test_humaneval_passes_by_its_own_tests(answer: str) -> None:
    assert is_right("humaneval", answer, HUMANEVAL)


@pytest.mark.parametrize("body", ["    return 4\n", "    return (\n", "    exit(0)\n", "    import os; os._exit(0)\n"])
def test_humaneval_fails_by_its_own_tests(body: str) -> None:
    """Promise: wrong code, no code, and code that leaves with status 0 before the tests have run."""
    assert not is_right("humaneval", f"```python\ndef add(xs):\n{body}```", HUMANEVAL)


def test_mbpp_runs_its_setup_after_the_answer() -> None:
    code = "class Box:\n    def f(self, x):\n        return {}"
    assert is_right("mbpp", f"```python\n{code.format('x')}\n```", MBPP)
    assert not is_right("mbpp", f"```python\n{code.format('-x')}\n```", MBPP)


def livecodebench(tests: list[dict[str, str]], name: str | None = None, packed: bool = True) -> dict[str, str]:
    hidden = json.dumps(tests[1:])
    if packed:
        hidden = base64.b64encode(zlib.compress(pickle.dumps(hidden))).decode()
    metadata = json.dumps({"func_name": name} if name else {})
    return {"public_test_cases": json.dumps(tests[:1]), "private_test_cases": hidden, "metadata": metadata}


@pytest.mark.parametrize("packed", [True, False])
def test_livecodebench_compares_what_is_printed_in_public_and_private_tests(packed: bool) -> None:
    tests = [{"input": f"{n}\n", "output": f"{n + 1} \n", "testtype": "stdin"} for n in (1, 5)]
    reference = livecodebench(tests, packed=packed)
    assert is_right("livecodebench", "```python\nprint(int(input()) + 1)\n```", reference)
    assert not is_right("livecodebench", "```python\nprint(2)\n```", reference)  # the public test alone


def test_livecodebench_keeps_lines_apart() -> None:
    """`1 2` is not what `1` and `2` on lines of their own are; spaces and lines at the ends do not count."""
    reference = livecodebench([{"input": "", "output": "1\n2\n", "testtype": "stdin"}])
    assert not is_right("livecodebench", "```python\nprint(1, 2)\n```", reference)
    assert is_right("livecodebench", "```python\nprint('1 ')\nprint('2\\n\\n')\n```", reference)


def test_livecodebench_calls_the_method_that_is_asked_for() -> None:
    tests = [{"input": f"[{n}]\n2", "output": f"[{n}, 2]", "testtype": "functional"} for n in (1, 5)]
    reference = livecodebench(tests, name="join")
    code = "```python\nclass Solution:\n    def join(self, xs: List[int], y: int):\n        return (*xs, {})\n```"
    assert is_right("livecodebench", code.format("y"), reference)
    assert not is_right("livecodebench", code.format("3"), reference)


def test_pickled_test_that_names_code_is_refused(tmp_path: Path) -> None:
    """Promise: a data set's tests are text, and text alone is unpickled."""

    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    reference = livecodebench([{"input": "", "output": "", "testtype": "stdin"}])
    reference["private_test_cases"] = base64.b64encode(zlib.compress(pickle.dumps(Bad()))).decode()
    with pytest.raises(pickle.UnpicklingError, match="may not name"):
        is_right("livecodebench", "print()", reference)
    assert not (tmp_path / "made").exists()


def test_last_block_that_defines_what_is_asked_for_is_taken() -> None:
    answer = "```python\ndef f(): 1\n```\n```py\ndef f(): 2\n```\n```bash\nls\n```"
    assert extract_code(answer, "def f") == "def f(): 2\n"
    assert extract_code("no fence") == "no fence"


def test_missing_scorer_is_said_before_anything_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.evaluation.scoring.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dflash-transformers\[eval\]'.*--no-score"):
        check_scorers(["math", "mbpp"])
    check_scorers(["mbpp"])


HOSTILE = {
    "hangs": "import time\ntime.sleep(60)",
    "spins": "while True: pass",
    "swallows": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "ignores signals": "import signal, time\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "eats memory": "x = [bytearray(10**7) for _ in range(10**4)]",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
    "writes a lot": "while True: print('x' * 10**6)",
    "reads": "input()",
    "exits": "raise SystemExit(0)",
    "is no code": "Sure! Here is (",
}
HOSTILE_CALLS = {
    "forks": "import os\nwhile True: os.fork()",
    "forks away": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
    "starts programs": "import subprocess\nsubprocess.run(['sleep', '60'])",
    "kills the harness": "import os\nos.kill(os.getppid(), 9)",
    "kills all": "import os\nos.kill(-1, 9)",
    "writes a file": "open('a', 'w').write('x' * 10**9)",
    "deletes": "import shutil, os\nshutil.rmtree(os.path.dirname(os.getcwd()))",
    "lifts its limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))",
    "calls home": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
}


@pytest.mark.parametrize("snippet", HOSTILE)
def test_hostile_code_fails_and_the_harness_goes_on(snippet: str) -> None:
    """Promise: code that hangs, eats or floods is killed and counted as failed, soon; nothing of it stays."""
    before, began = set(os.listdir(tempfile.gettempdir())), time.monotonic()
    assert not is_right("mbpp", f"```python\n{HOSTILE[snippet]}\n```", {"setup": "", "tests": ["assert True"]}, SMALL)
    assert time.monotonic() - began < 20  # the clock of a busy machine; alone it is 2
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in left if name.startswith("dflash-")]


@FILTERED
@pytest.mark.parametrize("snippet", HOSTILE_CALLS)
def test_calls_that_reach_beyond_the_process_are_refused(snippet: str) -> None:
    """Promise: no process is started or killed, no file written or deleted, no limit lifted: for root neither."""
    outcome = run_program(HOSTILE_CALLS[snippet] + "\nprint('done')", limits=SMALL)
    assert outcome.status not in (0, None), outcome
    assert "done" not in outcome.output
    assert any(said in outcome.errors for said in ("PermissionError", "ValueError", "BlockingIOError")), outcome


def test_limits_kill_by_the_kernel_and_by_the_clock() -> None:
    assert run_program(HOSTILE["ignores signals"], limits=Limits(60, cpu_seconds=1)).status == -signal.SIGKILL
    assert run_program(HOSTILE["hangs"], limits=Limits(wall_seconds=0.3)).status is None
    assert "MemoryError" in run_program(HOSTILE["eats memory"], limits=SMALL).errors
    assert len(run_program(HOSTILE["writes a lot"], limits=SMALL).output) <= SMALL.file_bytes


def test_program_starts_in_an_empty_folder_without_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    source = (
        "import os, sys\nprint(os.listdir('.'), 'SECRET' in os.environ, sys.flags.isolated, repr(sys.stdin.read()))"
    )
    assert run_program(source).output == "[] False 1 ''\n"
    assert run_program("print(input())", stdin="given\n").output == "given\n"


def test_honest_code_may_use_threads_and_large_numbers() -> None:
    """Promise: what competition solutions do with right is not refused."""
    source = (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "t = threading.Thread(target=lambda: print(deep(5000), len(open(__file__).read()) > 9))\nt.start()\nt.join()"
    )
    assert run_program(source).output == "5000 True\n"


def filtered(machine: str, number: int, arguments: tuple[int, ...] = (), audit: int | None = None) -> int:
    """What the kernel makes of a call, by the filter's program, interpreted naively."""
    audit = sandbox_child.REFUSED[machine]["number"] if audit is None else audit
    data = struct.pack("=IIQ6Q", number, audit, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    program, at, held = sandbox_child.call_filter(machine), 0, 0
    assert len(program) < 256  # so that every skip fits
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == sandbox_child.RETURN:
            return operand
        if code == sandbox_child.LOAD:
            held = struct.unpack_from("=I", data, operand)[0]
            continue
        holds = {
            sandbox_child.EQUALS: held == operand, sandbox_child.AT_LEAST: held >= operand, sandbox_child.ANY_BIT: bool(held & operand)
        }[code]  # fmt: skip
        at += if_true if holds else if_false


@pytest.mark.parametrize("machine", sandbox_child.REFUSED)
def test_filter_refuses_what_it_names_and_allows_the_rest(machine: str) -> None:
    """Promise: on machines that the tests do not run on too."""
    _, refused, opening, cloning = sandbox_child.REFUSED[machine].values()
    for number in refused.values():
        assert filtered(machine, number) == sandbox_child.REFUSE
    for number, place in opening.values():
        before = (0,) * place
        assert filtered(machine, number, (*before, os.O_RDONLY)) == sandbox_child.ALLOW
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT | os.O_WRONLY):
            assert filtered(machine, number, (*before, flags)) == sandbox_child.REFUSE
    assert (
        filtered(machine, cloning["clone"], (0x3D0F00,)) == sandbox_child.ALLOW
    )  # a thread, as the C library asks for it
    assert filtered(machine, cloning["clone"], (signal.SIGCHLD,)) == sandbox_child.REFUSE
    assert filtered(machine, cloning["clone3"]) == sandbox_child.UNKNOWN == 0x50000 | errno.ENOSYS
    assert filtered(machine, 0x40000000 | 59) == sandbox_child.UNKNOWN
    assert filtered(machine, 0, audit=0) == sandbox_child.KILL
    assert filtered(machine, 63) == sandbox_child.ALLOW
    assert len({*refused.values(), *(number for number, _ in opening.values()), *cloning.values()}) == len(
        refused
    ) + len(opening) + len(cloning)
