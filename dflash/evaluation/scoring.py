"""Whether an answer is right: mathematics by `math-verify`, code by running the task's own tests under limits."""

import base64
import io
import json
import os
import pickle
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from .sandbox import Limits, run_program


# Names that competition solutions expect, as in LiveCodeBench's own runner.
PREAMBLE = (
    "from typing import *\nfrom collections import *\nfrom itertools import *\nfrom functools import *\n"
    "from heapq import *\nfrom bisect import *\nfrom math import *\nfrom builtins import *\n"
    "import sys, math, heapq, bisect, itertools, functools, collections, string, re, random\n"
    "sys.setrecursionlimit(50000)\n"
)


def is_right(scorer: str, answer: str, reference: Any, limits: Limits | None = None) -> bool:
    """Whether `answer`, without its part before `</think>`, is right by a scorer of [`SCORERS`]; no answer raises."""
    final = answer.rsplit("</think>", 1)[-1]
    if final.lstrip().startswith("<think>"):  # cut before the thinking ended
        return False
    return SCORERS[scorer](final, reference, limits or Limits())


def check_scorers(scorers: Iterable[str]) -> None:
    """Raises ValueError with the remedy if one of these scorers cannot work here."""
    for scorer in scorers:
        said = None
        if scorer == "math" and find_spec("math_verify") is None:
            install = "pip install 'dflash-transformers[eval]'"
            said = f"Mathematics is scored by math-verify, which is not installed: {install}"
        if scorer != "math" and os.name != "posix":
            said = "Code is run under limits that this system lacks: use Linux or macOS"
        if said is not None:
            raise ValueError(f"{said}, or leave the answers unscored with --no-score.")


def _math(answer: str, reference: str, limits: Limits) -> bool:
    r"""Equal as mathematics: \boxed{…}, `#### n`, or a number named as the answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if "\\boxed" not in answer and "####" in answer:
        line = answer.rsplit("####", 1)[1].strip().split("\n")[0]
        answer = f"\\boxed{{{line.replace(',', '').replace('$', '').rstrip('. ')}}}"
    # The last number alone would be a chance hit in an answer that was cut.
    named = {"try_extract_without_anchor": False}
    configs = [LatexExtractionConfig(**named), ExprExtractionConfig(**named)]
    return bool(verify(parse(f"${reference}$"), parse(answer, extraction_config=configs)))


def _humaneval(answer: str, reference: Mapping[str, str], limits: Limits) -> bool:
    name, prompt = reference["entry_point"], reference["prompt"]
    code = extract_code(answer, f"def {name}")
    # The prompt's imports and helpers come first; its unfinished function is valid with its docstring alone.
    program = f"{prompt}\n{code}" if f"def {name}" in code else f"{prompt}{code}"
    return _runs_to_the_end(f"{program}\n\n{reference['test']}\n\ncheck({name})", limits)


def _mbpp(answer: str, reference: Mapping[str, Any], limits: Limits) -> bool:
    tests = "\n".join(reference["tests"])
    # The set-up comes after the answer: in some rows it uses what the answer defines.
    return _runs_to_the_end(f"{extract_code(answer)}\n\n{reference['setup']}\n{tests}", limits)


def _livecodebench(answer: str, reference: Mapping[str, str], limits: Limits) -> bool:
    code, tests = extract_code(answer), _livecodebench_tests(reference)
    name = (json.loads(reference["metadata"] or "{}") or {}).get("func_name")
    if any(test["testtype"] == "functional" for test in tests):
        calls = [([json.loads(line) for line in t["input"].split("\n")], json.loads(t["output"])) for t in tests]
        return _runs_to_the_end(
            f"{PREAMBLE}{code}\n\nimport json as _json\n"
            f"for _given, _wanted in _json.loads({json.dumps(calls)!r}):\n"
            f"    _got = Solution().{name}(*_given)\n"
            "    assert _json.loads(_json.dumps(_got)) == _wanted",
            limits,
        )
    for test in tests:
        outcome = run_program(f"{PREAMBLE}{code}", test["input"], limits)
        if outcome.status != 0 or _lines(outcome.output) != _lines(test["output"]):
            return False
    return True


Scorer = Callable[[str, Any, Limits], bool]
SCORERS: dict[str, Scorer] = {"math": _math, "humaneval": _humaneval, "mbpp": _mbpp, "livecodebench": _livecodebench}


def extract_code(answer: str, wanted: str = "") -> str:
    """The last fenced block with `wanted`, else the last block, else the whole answer; a cut block runs to the end."""
    blocks = re.findall(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", answer, re.DOTALL | re.IGNORECASE)
    holding = [block for block in blocks if wanted in block]
    return (holding or blocks or [answer])[-1]


def _runs_to_the_end(program: str, limits: Limits) -> bool:
    """Whether the program reaches its last line: one that exits with status 0 before its tests has not passed them."""
    word = secrets.token_hex(16)
    outcome = run_program(f"{program}\n\nprint()\nprint({word!r})\n", limits=limits)
    return outcome.status == 0 and outcome.output.rstrip().endswith(word)


def _lines(text: str) -> list[list[str]]:
    """Words by line, without spaces at the ends of lines and empty lines at the end of the text."""
    return [line.split() for line in text.strip().split("\n")]


def _livecodebench_tests(reference: Mapping[str, str]) -> list[dict[str, str]]:
    """Public and private tests; the private ones are JSON, or that pickled as a string, compressed and in base64."""
    private = reference["private_test_cases"]
    try:
        hidden = json.loads(private)
    except json.JSONDecodeError:
        hidden = json.loads(_StringUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load())
    return [*json.loads(reference["public_test_cases"]), *hidden]


class _StringUnpickler(pickle.Unpickler):
    """Reads plain values; refuses names, by which a pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses."""
        raise pickle.UnpicklingError(f"A test may not name {module}.{name}.")
