"""The arrows of the package, and what shipped files may hold. Each rule is also shown to fail on a planted line."""

import ast
import re
import sys
from pathlib import Path

import pytest

import dflash


PACKAGE = Path(dflash.__file__).parent
FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
SHIPPED = {name.removeprefix("model/") for name in FILES if name.startswith("model/")} - {"__init__"}

# The shipped files in the order in which they are read: each imports files before it, and those after it only (lazy).
ORDER = (
    "configuration_dflash",
    "attention_dflash",
    "cache_dflash",
    "proposals_dflash",
    "verification_dflash",
    "step_dflash",
    "modeling_dflash",
    "decoding_dflash",
    "generation_dflash",
)
# The model's own methods enter the loop, and transformers 4.57 ships only the files that this one names.
LAZY = {"modeling_dflash": {"decoding_dflash", "generation_dflash"}}
# The rooms from the ground up: each imports rooms before it alone. Of a room that has a face nothing else is imported
# (`from dflash.evaluation import x`); `common` and `model` have none, each of their files is a door.
FLOORS = ("common", "model", "checkpoints", "training", "regeneration", "evaluation", "cli")
DOORS = {"common", "model"}
APART = {("evaluation", "training"), ("evaluation", "regeneration")}  # side by side
OUTERMOST = {"__main__", "notebooks"}  # stand on the command line's room and may use its insides
OUTSIDE = {"torch", "transformers"}
REGISTRATION = [
    "from dflash.checkpoints import dialects",
    "from .configuration_dflash import DFlashConfig",
    "DFlashConfig.reader = dialects",
]
FORBIDDEN = {
    "prints": r"\bprint\(",
    "parses arguments": r"\bargparse\b",
    "reads the environment": r"\bos\.(environ|getenv)\b",
    "opens a connection": r"\b(import|from) (socket|urllib|http|requests|ssl)\b",
    "writes a file": r"""\bopen\([^)]*["'][wax]|\.write_(text|bytes)\(""",
    "owns a clock": r"\b(import time|from time|import datetime|from datetime|torch\.cuda\.synchronize)\b",
}


def imports(source: str) -> list[tuple[str, int, bool]]:
    """`(module, number of leading dots, is inside a function)` of every import."""
    tree = ast.parse(source)
    inside = {node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0, node in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.level, node in inside))
    return found


def faults(name: str, source: str) -> list[str]:
    """What file `name` of the package does that it must not."""
    found = shipped_faults(name.removeprefix("model/"), source) if name.startswith("model/") else []
    room = name.split("/")[0]
    for module, level, _ in imports(source):
        if level > 1:
            found.append(f"reaches above its folder for {module}")
        path = f"{'/'.join(name.split('/')[:-1])}/{module}".strip("/") if level else module.removeprefix("dflash.")
        if not level and module.split(".")[0] != "dflash":
            continue
        other, *insides = re.split(r"[./]", path)
        if other == room or other not in {*FLOORS, *OUTERMOST} or name == "model/__init__":
            continue
        if (
            other in OUTERMOST
            or (room in FLOORS and FLOORS.index(other) > FLOORS.index(room))
            or (room, other) in APART
        ):
            found.append(f"imports {other}, which does not stand below it")
        if insides and other not in DOORS and room not in OUTERMOST:
            found.append(f"imports the inside of {other}")
    return found


def shipped_faults(name: str, source: str) -> list[str]:
    """What the shipped file `name` does that breaks remote code or the order of the files."""
    code = ast.unparse(ast.parse(source))  # no comments
    found = [what for what, pattern in FORBIDDEN.items() if re.search(pattern, code)]
    if name == "proposals_dflash" and "owns a clock" in found:  # which measures how long forwards take
        found.remove("owns a clock")
    if name == "generation_dflash" and "writes a file" in found:  # into a folder that is about to be uploaded
        found.remove("writes a file")
    if name == "__init__":  # not shipped: where the package gives the shipped files its readers, and nothing more
        code = [ast.unparse(node) for node in ast.parse(source).body if not isinstance(node, ast.Expr)]
        return found + ["holds code"] * (code != REGISTRATION)
    before = set(ORDER[: ORDER.index(name)])
    for module, level, is_lazy in imports(source):
        if level == 0 and module.split(".")[0] not in OUTSIDE | set(sys.stdlib_module_names):
            found.append(f"imports {module}")
        if level == 1 and module not in before and not (is_lazy and module in LAZY.get(name, ())):
            found.append(f"imports .{module}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node) or ""
            found += [
                f"docstring line {line.strip()!r}" for line in text.splitlines() if re.match(r"\s*from\s+\.", line)
            ]
    return found


@pytest.mark.parametrize("name", sorted(FILES))
def test_file_keeps_to_its_place(name: str) -> None:
    assert faults(name, FILES[name]) == []


def test_the_shipped_files_are_few_and_their_order_is_written_down() -> None:
    assert set(ORDER) == SHIPPED
    assert len(SHIPPED) <= 9
    listed = [line.split("`")[1] for line in FILES["model/__init__"].splitlines() if line[:1].isdigit()]
    assert listed == list(ORDER)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model/modeling_dflash", "from .generation_dflash import spec_generate"),
        ("model/cache_dflash", "from .generation_dflash import Block"),
        ("model/cache_dflash", "def f():\n    from .generation_dflash import Block"),
        ("model/configuration_dflash", "from . import cache_dflash"),
        ("model/configuration_dflash", "from .evaluation import timed_blocks"),
        ("model/configuration_dflash", "from dflash.model.cache_dflash import PreallocatedCache"),
        ("model/configuration_dflash", "import numpy"),
        ("model/configuration_dflash", "def f():\n    '''Doc.\n\n    from .foo import bar\n    '''"),
        ("model/verification_dflash", "print('x')"),
        ("model/verification_dflash", "import argparse"),
        ("model/verification_dflash", "import os\nX = os.environ['X']"),
        ("model/verification_dflash", "import os\nX = os.getenv('X')"),
        ("model/verification_dflash", "import socket"),
        ("model/verification_dflash", "open('x', 'w')"),
        ("model/verification_dflash", "import time"),
        ("model/verification_dflash", "torch.cuda.synchronize()"),
        ("model/__init__", "from .modeling_dflash import DFlashDraftModel"),
        ("evaluation/timing", "from ..model.generation_dflash import Block"),
        ("evaluation/timing", "from dflash.cli import main"),
        ("evaluation/timing", "from dflash.training.losses import loss"),
        ("training/trainer", "import dflash.checkpoints.folders"),
        ("training/trainer", "from dflash.regeneration import regenerate"),
        ("evaluation/timing", "from dflash.training import Trainer"),
        ("checkpoints/folders", "from dflash.cli.terminal import BlockPrinter"),
        ("common/stopwatch", "from dflash.model.modeling_dflash import DFlashDraftModel"),
        ("cli/bench", "from dflash.notebooks import show_blocks"),
    ],
)
def test_planted_fault_is_found(name: str, source: str) -> None:
    assert faults(name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model/modeling_dflash", "def f():\n    from .generation_dflash import spec_generate"),
        ("training/trainer", "from dflash.model.cache_dflash import PreallocatedCache"),
        ("model/proposals_dflash", "import time"),
        ("cli/bench", "from dflash.evaluation import timed_blocks"),
        ("regeneration/run", "from dflash.training import Example"),
        ("notebooks", "from .cli.terminal import TextStream"),
        ("evaluation/methods", "from .timing import timed_blocks\nfrom dflash.checkpoints import save_checkpoint"),
        ("model/configuration_dflash", "# print(x)\nimport torch.nn\nimport math"),
    ],
)
def test_what_is_allowed_is_not_called_a_fault(name: str, source: str) -> None:
    assert faults(name, source) == []


TESTS = Path(__file__).parent
MOST_INSIDES = 30


def insides(source: str) -> list[str]:
    """Modules inside a room with a face that `source` imports from."""
    modules = [module.split(".") for module, level, _ in imports(source) if not level]
    return [
        ".".join(parts)
        for parts in modules
        if parts[0] == "dflash" and len(parts) > 2 and parts[1] in set(FLOORS) - DOORS
    ]


def test_tests_mostly_come_in_by_the_front_door() -> None:
    """What a test takes from a room's inside keeps that inside as it is: few do."""
    found = {path.name: insides(path.read_text()) for path in TESTS.rglob("*.py")}
    assert sum(map(len, found.values())) <= MOST_INSIDES, {name: modules for name, modules in found.items() if modules}


def test_an_import_of_an_inside_is_counted() -> None:
    assert insides("def f():\n    from dflash.training.losses import LOSSES\nimport dflash.cli.app") == [
        "dflash.cli.app",
        "dflash.training.losses",
    ]
    assert (
        insides("from dflash.training import Trainer\nfrom dflash.common.files import write_text\nimport torch") == []
    )
