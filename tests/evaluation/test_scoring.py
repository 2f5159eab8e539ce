"""Answers scored: mathematics by value, code by its tests; and hostile code, which fails and harms nobody."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash.evaluation import Limits, check_scorers, extract_code, is_right, scoring


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is confined on Linux alone")

SMALL = Limits(wall_seconds=1.5, cpu_seconds=1, memory_bytes=2**28, file_bytes=2**20)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("3 + 4 = 7, so \\boxed{7}.", "7"),
        ("We get 7.\n#### 7", "7"),
        ("#### $1,007.", "1007"),
        ("so \\boxed{0.5}", "\\frac{1}{2}"),
        ("\\boxed{\\left(3, \\frac{\\pi}{2}\\right)}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("The final answer is 7. I hope it helps.", "7"),
        ("#### Final answer\nThe final answer is 7.", "7"),
        ("#### 7\n\n#### Check\n3 + 4", "7"),
        ("#### sqrt(2)/2", "\\frac{\\sqrt{2}}{2}"),
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
    with pytest.raises(ValueError, match="may not name"):
        is_right("livecodebench", "print()", reference)
    assert not (tmp_path / "made").exists()


JUNK = {
    "no base64": "!",
    "not compressed": base64.b64encode(b"junk").decode(),
    "cut": base64.b64encode(zlib.compress(pickle.dumps("[]" * 999))[:-9]).decode(),
    "no pickle": base64.b64encode(zlib.compress(b"junk")).decode(),
    "no text": base64.b64encode(zlib.compress(pickle.dumps([1]))).decode(),
    "no JSON": base64.b64encode(zlib.compress(pickle.dumps("["))).decode(),
}


@pytest.mark.parametrize("kind", JUNK)
def test_tests_that_are_junk_are_said(kind: str) -> None:
    reference = livecodebench([]) | {"private_test_cases": JUNK[kind]}
    with pytest.raises(
        ValueError, match=r"^The private tests of a row of LiveCodeBench cannot be read \(.*\): get the"
    ):
        is_right("livecodebench", "print()", reference)


def test_tests_inflate_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a small row does not fill the memory. One of 10 MiB once became 8 GiB."""
    monkeypatch.setattr(scoring, "MAX_INFLATED_BYTES", 2**16)
    tests = [{"input": " " * length, "output": "", "testtype": "stdin"} for length in (1, 2**15)]
    assert is_right("livecodebench", "print()", livecodebench(tests))
    reference = livecodebench([*tests, {"input": " " * 2**24, "output": "", "testtype": "stdin"}])
    tracemalloc.start()
    with pytest.raises(ValueError, match="inflate to more than 65536 bytes"):
        is_right("livecodebench", "print()", reference)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_last_block_that_defines_what_is_asked_for_is_taken() -> None:
    answer = "```python\ndef f(): 1\n```\n```py\ndef f(): 2\n```\n```bash\nls\n```"
    assert extract_code(answer, "def f") == "def f(): 2\n"
    assert extract_code("no fence") == "no fence"


@pytest.mark.parametrize("language", ["text", "bash", "c++", "text title='out'"])
@pytest.mark.parametrize("opening", ["```python", "So: ```python", "```"])
def test_a_block_of_another_language_is_no_code_and_nor_is_what_follows_it(language: str, opening: str) -> None:
    """Bug: its closing fence was taken for an opening one."""
    other = f"```{language}\n2\n```\nDone."
    code = f"{opening}\ndef f(x):\n    return x\n```\n"
    assert extract_code(f"{other}\n{code}Output:\n{other}") == "def f(x):\n    return x\n"


def test_future_imports_of_an_answer_come_first() -> None:
    """Bug: after the preamble, or HumanEval's prompt, they are a SyntaxError."""
    future = "```python\nfrom __future__ import annotations\n"
    assert is_right("humaneval", f"{future}def add(xs: Unknown):\n{BODY}```", HUMANEVAL)
    reference = livecodebench([{"input": "1", "output": "2", "testtype": "stdin"}])
    assert is_right("livecodebench", f"{future}print(int(input()) + 1)\n```", reference)


def test_missing_scorer_is_said_before_anything_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.evaluation.scoring.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run pip install '.*eval\]' in the checkout of dflash, .*--no-score"):
        check_scorers(["math", "mbpp"])
    check_scorers(["mbpp"])


ENDLESS = ("hangs", "spins", "swallows", "ignores signals")  # until the clock kills them
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


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's for this test alone: others evaluate at the same time. Another user may go through it."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("snippet", HOSTILE)
def test_hostile_code_fails_and_the_harness_goes_on(snippet: str, temporary_folder: Path) -> None:
    """Promise: code that hangs, eats or floods is killed and counted as failed, soon; nothing of it stays."""
    limits = replace(SMALL, wall_seconds=0.3) if snippet in ENDLESS else SMALL
    reference = {"setup": "", "tests": ["assert True"]}
    began = time.monotonic()
    assert not is_right("mbpp", f"```python\n{HOSTILE[snippet]}\n```", reference, limits)
    assert time.monotonic() - began < 20  # the clock of a busy machine; alone it is 2
    assert os.listdir(temporary_folder) == []


# What code does that wants to count as right without being so.
BASE = "import atexit, builtins, gc, os, re, select, sys"
SHOUT = """
def shout(*words):
    for number in range(1, 32):
        for word in words:
            try:
                os.write(number, word if isinstance(word, bytes) else word.encode())
            except OSError:
                pass
    os._exit(0)
"""
SEARCH = """
def search():
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        found += frame.f_locals.values()
        frame = frame.f_back
    for thing in gc.get_objects():
        found += thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple, set)) else ()
    return [word for word in found if isinstance(word, bytes) and len(word) == 16] or [b"none"]
"""
CHEATS = {
    "leaves": "os._exit(0)",
    "leaves at the end": "atexit.register(os._exit, 0)\nraise SystemExit(0)",
    "reads its own file": "shout(*re.findall('[0-9a-f]{32}', open(__file__).read()), 'passed')",
    "reads every file beside it": "shout(*(open('../' + n).read() for n in os.listdir('..') if os.path.isfile('../' + n)))",
    "reads its arguments": "shout(*sys.argv, *sys.orig_argv, *os.environ.values())",
    "says all that it finds": "shout(*search())",
    "says all that it finds in its tests": "def f(x): shout(*search())",
    "reads every descriptor": "shout(*(os.read(n, 99) for n in select.select(\n"
    "    [n for n in range(32) if os.path.exists(f'/dev/fd/{n}') or n == 3], [], [], 0.1)[0]))",
    "answers before it is asked": "shout(b'?', b'x' * 16)",
    "replaces what runs the tests": "builtins.exec = builtins.compile = lambda *a, **k: None",
    "replaces what prints": "builtins.print = lambda *a: os.write(1, b'passed')",
    "replaces reads and writes": "os.read = lambda *a: b'x' * 16\nos.write = lambda *a: 16",
    "replaces the errors": "builtins.AssertionError = type('Never', (BaseException,), {})",
    "catches the error": "sys.excepthook = lambda *a: os._exit(0)",
    "leaves when it is called": "def f(x): os._exit(0)",
    "exits when it is called": "def f(x): raise SystemExit(0)",
    "hangs up when it is called": "def f(x): os.closerange(3, 99)",
    "threads": "import threading\nthreading.Timer(0.01, os._exit, [0]).start()\ndef f(x):\n    while True: pass",
}


# Both scorers run a program and its tests in one way; what reaches into a call of the tests is tried with both.
@pytest.mark.parametrize(
    ("scorer", "cheat"),
    [("mbpp", cheat) for cheat in CHEATS]
    + [("humaneval", "says all that it finds in its tests"), ("humaneval", "leaves when it is called")],
)
def test_cheat_does_not_count_as_right(scorer: str, cheat: str) -> None:
    """Promise: only code whose tests ran to their end is right. What says so is not in its process while it runs."""
    code = f"{BASE}\n{SHOUT}{SEARCH}\ndef f(x): return 0\n{CHEATS[cheat]}\n"
    humaneval = {"prompt": "", "test": "def check(f):\n    assert f(3) == 9 and f(4) == 16\n", "entry_point": "f"}
    mbpp = {"setup": "", "tests": ["assert f(3) == 9", "assert f(4) == 16"]}
    limits = Limits(wall_seconds=5, cpu_seconds=1)
    assert not is_right(scorer, f"```python\n{code}```", {"humaneval": humaneval, "mbpp": mbpp}[scorer], limits)


EQUAL_TO_ALL = "class Equal(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"


def test_results_of_livecodebench_are_compared_as_plain_values_outside_of_the_program() -> None:
    """Promise: the right results are never in the program's process, and no class of its own decides."""
    tests = [{"input": str(n), "output": str(n * n), "testtype": "functional"} for n in (3, 4)]
    reference = livecodebench(tests, name="f")
    code = "```python\n{}class Solution:\n    def f(self, x): return {}\n```"
    assert is_right("livecodebench", code.format("", "x * x"), reference)
    for cheat in (
        code.format(EQUAL_TO_ALL, "Equal(0)"),
        code.format("import json\njson.loads = lambda s: [[3], [4]]\n", "9"),
        code.format("import os\n", "print('[9, 16') or os._exit(0)"),
        code.format("import json\njson.dumps = lambda *a: '[' * 10**6\n", "0"),
        code.format("import json\njson.dumps = lambda *a: '[' + '9' * 5000 + ']'\n", "0"),
    ):
        assert not is_right("livecodebench", cheat, reference)


KNOWS_THE_SCORER = """
import os, sys
channel = int(sys.orig_argv[-2])
os.write(channel, b"?")
os.read(channel, int.from_bytes(os.read(channel, 8), "big"))
os.write(channel, os.read(channel, 16))
os._exit(0)
"""


@pytest.mark.parametrize("code", [f"{EQUAL_TO_ALL}def f(x): return Equal(0)", KNOWS_THE_SCORER])
def test_what_cannot_hold_where_tests_run_in_the_programs_process(code: str) -> None:
    """SECURITY.md says so: an object may equal everything, and what the scorer's own code does, other code can do."""
    assert is_right("mbpp", f"```python\n{code}\n```", {"setup": "", "tests": ["assert f(3) == 9"]})
