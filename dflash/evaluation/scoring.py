"""Decides whether an answer is right: mathematics by `math-verify`, code by running the task's own tests under limits."""

import base64
import io
import json
import os
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from dflash.common.messages import INSTALL_EXTRAS, first_line

from .sandbox import Limits, run_program, why_unconfined


# Names that competition solutions expect, as in LiveCodeBench's own runner.
PREAMBLE = (
    "from typing import *\nfrom collections import *\nfrom itertools import *\nfrom functools import *\n"
    "from heapq import *\nfrom bisect import *\nfrom math import *\nfrom builtins import *\n"
    "import sys, math, heapq, bisect, itertools, functools, collections, string, re, random\n"
    "sys.setrecursionlimit(50000)\n"
)

# A fenced block by its language, to the end of the answer if it is cut. Of Python a block may begin within a line.
BLOCK = re.compile(
    r"(?:^[ \t]*```[ \t]*(\w*)[^\n`]*|```[ \t]*(?:python|py|python3)?[ \t]*)\n(.*?)(?:```|\Z)",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
PYTHON = ("", "python", "py", "python3")

# What Python takes at the beginning of a program alone.
FUTURE_IMPORT = re.compile(r"^from __future__ import (?:\([^)]*\)|.*)", re.MULTILINE)

# A result after hashes. Words alone are a heading.
AFTER_HASHES = re.compile(r"####+\s*(?![A-Za-z][A-Za-z ]+:?[ ]*(?:\n|$))([^#\s].*)")

# Of a LiveCodeBench row's private tests, which are some ten megabytes on average.
MAX_INFLATED_BYTES = 2**29


def is_right(scorer: str, answer: str, reference: Any, limits: Limits | None = None) -> bool:
    """Whether `answer`, without its part before `</think>`, is right by a scorer of [`SCORERS`]. It raises for no answer."""
    final = answer.rsplit("</think>", 1)[-1]
    if final.lstrip().startswith("<think>"):  # cut before the thinking ended
        return False
    return SCORERS[scorer](final, reference, limits or Limits())


def check_scorers(scorers: Iterable[str], unsafe_code: bool = False) -> None:
    """Raises ValueError with the remedy if one of these scorers cannot work here.

    Scorers of code need a system that can confine a program, unless `unsafe_code` is set.
    """
    names = set(scorers)
    unscored = "leave the answers unscored with --no-score"
    if "math" in names and find_spec("math_verify") is None:
        raise ValueError(
            f"Mathematics is scored by math-verify, which is not installed: run {INSTALL_EXTRAS} in the checkout of dflash, or "
            f"{unscored}."
        )
    if names <= {"math"}:
        return
    if os.name != "posix":
        raise ValueError(f"Code is run under limits that {sys.platform} lacks: use Linux or macOS, or {unscored}.")
    problem = None if unsafe_code else why_unconfined()
    if problem is not None:
        raise ValueError(
            f"Code that the target writes cannot be confined here ({problem}): {unscored}, or run it all the same with "
            "--unsafe-code."
        )


def _math(answer: str, reference: str, limits: Limits) -> bool:
    r"""Equal as mathematics: \boxed{…}, `#### n`, or a number named as the answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    results = AFTER_HASHES.findall(answer)
    if results and "\\boxed" not in answer:
        number = re.sub(r"[,$]", "", results[-1]).rstrip(". ")
        answer = f"\\boxed{{{number}}}"
    # The last number alone would be a chance hit in an answer that was cut.
    configs = [
        LatexExtractionConfig(try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    expected = parse(f"${reference}$")
    parsed = parse(answer, extraction_config=configs)
    return bool(verify(expected, parsed))


def _humaneval(answer: str, reference: Mapping[str, str], limits: Limits) -> bool:
    name = reference["entry_point"]
    head = f"def {name}"
    code = extract_code(answer, head)
    # The prompt's imports and helpers come first; its unfinished function is valid with its docstring alone.
    between = "\n" if head in code else ""
    program = _future_first(reference["prompt"] + between + code)
    tests = f"{reference['test']}\n\ncheck({name})"
    return _passes(program, tests, limits)


def _mbpp(answer: str, reference: Mapping[str, Any], limits: Limits) -> bool:
    tests = "\n".join(reference["tests"])
    # The set-up comes after the answer: in some rows it uses what the answer defines.
    return _passes(extract_code(answer), f"{reference['setup']}\n{tests}", limits)


def _livecodebench(answer: str, reference: Mapping[str, str], limits: Limits) -> bool:
    program = _future_first(PREAMBLE + extract_code(answer))
    tests = _livecodebench_tests(reference)
    if any(test["testtype"] == "functional" for test in tests):
        metadata = json.loads(reference["metadata"] or "{}") or {}
        name = metadata.get("func_name", "")
        arguments = []
        expected = []
        for test in tests:
            lines = test["input"].split("\n")
            arguments.append(list(map(json.loads, lines)))
            expected.append(json.loads(test["output"]))
        return _results(program, name, arguments, limits) == expected
    for test in tests:
        outcome = run_program(program, test["input"], limits)
        if outcome.status != 0 or _lines(outcome.output) != _lines(test["output"]):
            return False
    return True


Scorer = Callable[[str, Any, Limits], bool]
SCORERS: dict[str, Scorer] = {"math": _math, "humaneval": _humaneval, "mbpp": _mbpp, "livecodebench": _livecodebench}


def extract_code(answer: str, wanted: str = "") -> str:
    """The last block of Python with `wanted`, else the last one, else the whole answer; a cut block runs to the end."""
    blocks = [block for language, block in BLOCK.findall(answer) if language.lower() in PYTHON]
    holding = [block for block in blocks if wanted in block]
    return (holding or blocks or [answer])[-1]


def _future_first(program: str) -> str:
    """The program with its imports from `__future__` before what stands there."""
    return "\n".join([*FUTURE_IMPORT.findall(program), FUTURE_IMPORT.sub("", program)])


def _passes(program: str, tests: str, limits: Limits) -> bool:
    """Whether the program and then its tests run to the end: one that exits with status 0 before has not passed."""
    outcome = run_program(program, limits=limits, tests=tests)
    return outcome.status == 0 and outcome.passed


def _results(program: str, name: str, arguments: Sequence[Sequence[Any]], limits: Limits) -> Any:
    """What a solution's method returns for each of `arguments`, as plain values; `None` if it does not return.

    They are compared in this process: what is right never enters the program's.
    """
    calls = (
        "import json as _json\n"
        f"_results = [Solution().{name}(*_call) for _call in _json.loads({json.dumps(arguments)!r})]\n"
        "print()\n"
        "print(_json.dumps(_results))"
    )
    outcome = run_program(program, limits=limits, tests=calls)
    if outcome.status != 0 or not outcome.passed:
        return None
    *_, last_line = outcome.output.rstrip("\n").split("\n")
    try:
        return json.loads(last_line)
    except (ValueError, RecursionError):
        return None


def _lines(text: str) -> list[list[str]]:
    """Words by line, without spaces at the ends of lines and empty lines at the end of the text."""
    return [line.split() for line in text.strip().split("\n")]


def _livecodebench_tests(reference: Mapping[str, str]) -> list[dict[str, str]]:
    """Public and private tests; the private ones are JSON, or that pickled as a string, compressed and in base64."""
    private = reference["private_test_cases"]
    try:
        tests = json.loads(private)
    except json.JSONDecodeError:
        tests = _unpacked(private)
    return json.loads(reference["public_test_cases"]) + tests


def _unpacked(private: str) -> list[dict[str, str]]:
    """Tests that are JSON, pickled as a string, compressed and in base64."""
    try:
        inflater = zlib.decompressobj()
        pickled = inflater.decompress(base64.b64decode(private), MAX_INFLATED_BYTES)
        if inflater.unconsumed_tail:
            raise ValueError(f"they inflate to more than {MAX_INFLATED_BYTES} bytes")
        return json.loads(_StringUnpickler(io.BytesIO(pickled)).load())
    except Exception as error:  # a pickle of junk raises anything
        raise ValueError(
            f"The private tests of a row of LiveCodeBench cannot be read ({first_line(error)}): get the data set again."
        ) from error


class _StringUnpickler(pickle.Unpickler):
    """Reads plain values; refuses names, by which a pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses."""
        raise pickle.UnpicklingError(f"a test may not name {module}.{name}")
