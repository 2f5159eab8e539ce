"""The arrows of the package, and what shipped files may hold. Each rule is also shown to fail on a planted line."""

import ast
import re
import sys
from pathlib import Path

import pytest

import dflash


PACKAGE = Path(dflash.__file__).parent
FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
SHIPPED = {name for name in FILES if name.endswith("_dflash")}

# A shipped file may import these siblings and no others; (lazy) ones inside a function alone.
ARROWS = {
    "configuration_dflash": {"dialects_dflash"},
    # Lazily the loop, and with it every file that the loop needs: transformers 4.57 ships only what this file names.
    "modeling_dflash": {
        "attention_dflash", "configuration_dflash", "dialects_dflash", "masks_dflash", "(generation_dflash)",
        "(cache_dflash)", "(card_dflash)", "(door_dflash)",
        "(compilation_dflash)", "(conversation_dflash)", "(decoding_dflash)", "(drafting_dflash)", "(judging_dflash)",
        "(latency_dflash)", "(lookup_dflash)", "(pacing_dflash)", "(recurrent_dflash)", "(rows_dflash)", "(target_dflash)",
        "(transfers_dflash)", "(trees_dflash)", "(validation_dflash)", "(verification_dflash)"
    },
    "attention_dflash": set(),
    "masks_dflash": set(),
    "cache_dflash": set(),
    "recurrent_dflash": {"cache_dflash"},
    "transfers_dflash": set(),
    "trees_dflash": set(),
    "compilation_dflash": {"attention_dflash", "cache_dflash", "masks_dflash", "transfers_dflash"},
    "verification_dflash": {"trees_dflash"},
    "rows_dflash": set(),
    "validation_dflash": {"attention_dflash", "recurrent_dflash", "verification_dflash"},
    "target_dflash": {
        "attention_dflash", "cache_dflash", "compilation_dflash", "masks_dflash", "recurrent_dflash", "trees_dflash",
        "validation_dflash", "verification_dflash"
    },
    "conversation_dflash": {"cache_dflash", "target_dflash"},
    "lookup_dflash": {"rows_dflash"},
    "drafting_dflash": {
        "cache_dflash", "compilation_dflash", "conversation_dflash", "latency_dflash", "lookup_dflash", "masks_dflash", "pacing_dflash",
        "rows_dflash", "target_dflash", "trees_dflash", "verification_dflash"
    },
    "judging_dflash": {"rows_dflash", "transfers_dflash", "trees_dflash", "verification_dflash"},
    "decoding_dflash": {
        "compilation_dflash", "conversation_dflash", "drafting_dflash", "judging_dflash", "rows_dflash", "target_dflash",
        "transfers_dflash", "verification_dflash"
    },
    "generation_dflash": {
        "compilation_dflash", "conversation_dflash", "decoding_dflash", "drafting_dflash", "judging_dflash",
        "latency_dflash", "lookup_dflash", "rows_dflash", "target_dflash", "validation_dflash", "verification_dflash"
    },
    "dialects_dflash": set(),
    "card_dflash": set(),
    "door_dflash": set(),
    "latency_dflash": set(),
    "pacing_dflash": {"latency_dflash"},
}  # fmt: skip
# Rooms above the shipped files: entered by their front door (`from dflash.evaluation import x`) alone. `TOP` stands on them all.
ROOMS = {
    "training",
    "evaluation",
    "checkpoints",
    "checking",
    "serving",
    "hub",
    "publishing",
    "embedded",
    "distributions",
    "terminal",
    "notebooks",
    "commands",
    "cli",
}
TOP = {"cli", "commands", "notebooks", "terminal"}
OUTSIDE = {"torch", "transformers"}
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
    found = shipped_faults(name, source) if name.endswith("_dflash") else []
    room = name.split("/")[0]
    for module, level, _ in imports(source):
        if level > 1:
            found.append(f"reaches above its folder for {module}")
        path = f"{'/'.join(name.split('/')[:-1])}/{module}".strip("/") if level else module.removeprefix("dflash.")
        if not level and module.split(".")[0] != "dflash":
            continue
        other, *insides = re.split(r"[./]", path)
        if other in TOP and room not in TOP:
            found.append(f"imports {other}, which is on top")
        if other in ROOMS and other != room and insides and not (room in TOP and other in TOP):
            found.append(f"imports the inside of {other}")
    return found


def shipped_faults(name: str, source: str) -> list[str]:
    """What the shipped file `name` does that breaks remote code or the order of the files."""
    code = ast.unparse(ast.parse(source))  # no comments
    found = [what for what, pattern in FORBIDDEN.items() if re.search(pattern, code)]
    if name == "latency_dflash" and "owns a clock" in found:
        found.remove("owns a clock")
    if name == "card_dflash" and "writes a file" in found:  # into a folder that is about to be uploaded
        found.remove("writes a file")
    for module, level, is_lazy in imports(source):
        if level == 0 and module.split(".")[0] not in OUTSIDE | set(sys.stdlib_module_names):
            found.append(f"imports {module}")
        if level == 1 and module not in ARROWS[name] and not (is_lazy and f"({module})" in ARROWS[name]):
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


def test_every_shipped_file_has_its_arrows_written_down() -> None:
    assert set(ARROWS) >= SHIPPED
    assert len(SHIPPED) >= 5


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("generation_dflash", "from .modeling_dflash import DFlashDraftModel"),
        ("generation_dflash", "def f():\n    from .modeling_dflash import DFlashDraftModel"),
        ("modeling_dflash", "from .generation_dflash import spec_generate"),
        ("cache_dflash", "from .generation_dflash import Block"),
        ("configuration_dflash", "from . import cache_dflash"),
        ("configuration_dflash", "from .evaluation import timed_blocks"),
        ("configuration_dflash", "from dflash.cache_dflash import PreallocatedCache"),
        ("configuration_dflash", "import numpy"),
        ("configuration_dflash", "def f():\n    '''Doc.\n\n    from .foo import bar\n    '''"),
        ("verification_dflash", "print('x')"),
        ("verification_dflash", "import argparse"),
        ("verification_dflash", "import os\nX = os.environ['X']"),
        ("verification_dflash", "import os\nX = os.getenv('X')"),
        ("verification_dflash", "import socket"),
        ("verification_dflash", "open('x', 'w')"),
        ("verification_dflash", "import time"),
        ("verification_dflash", "torch.cuda.synchronize()"),
        ("evaluation/timing", "from ..generation_dflash import Block"),
        ("evaluation/timing", "from dflash.cli import main"),
        ("evaluation/timing", "from dflash.training.losses import loss"),
        ("training/trainer", "import dflash.evaluation.timing"),
        ("hub", "from .terminal import BlockPrinter"),
    ],
)
def test_planted_fault_is_found(name: str, source: str) -> None:
    assert faults(name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("modeling_dflash", "def f():\n    from .generation_dflash import spec_generate"),
        ("conversation_dflash", "from .cache_dflash import PreallocatedCache"),
        ("latency_dflash", "import time"),
        ("cli", "from .evaluation import timed_blocks"),
        ("evaluation/harness", "from .timing import timed_blocks\nfrom dflash.hub import save_checkpoint"),
        ("configuration_dflash", "# print(x)\nimport torch.nn\nimport math"),
    ],
)
def test_what_is_allowed_is_not_called_a_fault(name: str, source: str) -> None:
    assert faults(name, source) == []
