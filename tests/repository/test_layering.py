"""The arrows of the package, and what shipped files may hold. Each rule is also shown to fail on a planted line."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash


PACKAGE = Path(dflash.__file__).parent
FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
SHIPPED = {name.removeprefix("model/") for name in FILES if name.startswith("model/")} - {"__init__"}

# The shipped files in the order in which they are read: each imports files before it, and those after it only (lazy).
ORDER = (
    "attention_dflash",
    "cache_dflash",
    "targets_dflash",
    "sequences_dflash",
    "sampling_dflash",
    "acceptance_dflash",
    "drafting_dflash",
    "decoding_dflash",
    "configuration_dflash",
    "heads_dflash",
    "layers_dflash",
    "modeling_dflash",
    "requests_dflash",
    "generation_dflash",
    "pair_dflash",
)
# The model's own methods enter the loop, and transformers 4.57 ships only the files that this one names.
LAZY = {"modeling_dflash": {"requests_dflash", "generation_dflash"}}
# The rooms from the ground up: each imports rooms before it alone. Of a room that has a face nothing else is imported
# (`from dflash.evaluation import x`); `common`, `model` and `engine` have none, each of their files is a door. `dialects` and
# `drafter` are a file each.
FLOORS = (
    "common",
    "model",
    "dialects",
    "engine",
    "drafter",
    "checkpoints",
    "training",
    "regeneration",
    "evaluation",
    "cli",
)
DOORS = {"common", "model", "engine"}
APART = {("evaluation", "training"), ("evaluation", "regeneration")}  # side by side
OUTERMOST = {"__main__", "notebooks", "trl"}  # stand on the command line's room and may use its insides
OUTSIDE = {"torch", "transformers"}
# The door of a pair fetches a pair that is on the Hub, and no checkpoint of a drafter carries it.
OUTSIDE_OF = {"pair_dflash": {"huggingface_hub"}}
# Classes to which `drafter` attaches the reader of dialects and the engine: other rooms take them from there.
ATTACHED = {"DFlashConfig", "DFlashDraftModel"}
# What can keep something for the whole process, if a module holds one that is empty.
COLLECTIONS = {"dict", "set", "list", "defaultdict", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary"}
CLOCKS = r"\b(import time|from time|torch\.cuda\.synchronize)\b"  # which belong to evaluation and common/stopwatch
FORBIDDEN = {
    "prints": r"\bprint\(",
    "parses arguments": r"\bargparse\b",
    "reads the environment": r"\bos\.(environ|getenv)\b",
    "opens a connection": r"\b(import|from) (socket|urllib|http|requests|ssl)\b",
    "writes a file": r"""\bopen\([^)]*["'][wax]|\.write_(text|bytes)\(""",
    "owns a clock": r"\b(import time|from time|import datetime|from datetime|torch\.cuda\.synchronize)\b",
}


parsed = functools.lru_cache(maxsize=1)(ast.parse)  # a file is asked about several times in a row


def import_nodes(node: ast.AST, is_inside: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import below `node`, and whether it is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_inside
        elif not isinstance(child, ast.expr):
            yield from import_nodes(child, is_inside or isinstance(child, ast.FunctionDef))


def imports(source: str) -> list[tuple[str, int, bool]]:
    """`(module, number of leading dots, is inside a function)` of every import."""
    found = []
    for node, is_inside in import_nodes(parsed(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0, is_inside) for alias in node.names]
        else:
            found.append((node.module or "", node.level, is_inside))
    return found


def names_from_model(source: str) -> set[str]:
    """Names that are imported from files of the room `model`."""
    nodes = [node for node, _ in import_nodes(parsed(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in nodes if re.match(r"(dflash\.)?model\.", node.module or "") for alias in node.names}


def says(pattern: str, source: str) -> bool:
    """Whether the code holds a pattern, comments left out."""
    return bool(re.search(pattern, source)) and bool(re.search(pattern, ast.unparse(parsed(source))))


def changes_outside(tree: ast.Module) -> list[str]:
    """What a file changes of other packages, or keeps for the whole process."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    foreign = {alias.asname or alias.name for node in froms for alias in node.names}
    found = []
    for node in ast.walk(tree):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            changed = [target.value for target in node.targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            changed = node.args[:1]
        found += [f"patches {place.id}" for place in changed if isinstance(place, ast.Name) and place.id in foreign]
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        is_call = isinstance(value, ast.Call) and not value.args
        is_empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        if is_empty or (is_call and ast.unparse(value.func).rpartition(".")[2] in COLLECTIONS):  # type: ignore[union-attr]
            found.append(f"keeps state for the whole process: {ast.unparse(statement)}")
    return found


def faults(name: str, source: str) -> list[str]:
    """What file `name` of the package does that it must not."""
    found = shipped_faults(name.removeprefix("model/"), source) if name.startswith("model/") else []
    if says(CLOCKS, source) and not name.startswith("evaluation/") and name != "common/stopwatch":
        found.append("owns a clock")
    room = name.split("/")[0]
    if room in FLOORS and any(module == "dflash" and not level for module, level, _ in imports(source)):
        found.append("imports the roof")
    if room not in {"model", "drafter"} and ATTACHED & names_from_model(source):
        found.append("imports a class that nothing may be attached to yet")
    for module, level, _ in imports(source):
        if level > 1:
            found.append(f"reaches above its folder for {module}")
        path = f"{'/'.join(name.split('/')[:-1])}/{module}".strip("/") if level else module.removeprefix("dflash.")
        if not level and module.split(".")[0] != "dflash":
            continue
        other, *insides = re.split(r"[./]", path)
        if other == room or other not in {*FLOORS, *OUTERMOST}:
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
    found = [what for what, pattern in FORBIDDEN.items() if says(pattern, source)]
    if name == "generation_dflash" and "writes a file" in found:  # into a folder that is about to be uploaded
        found.remove("writes a file")
    if name == "__init__":  # not shipped: it lists the files
        has_code = any(not isinstance(node, ast.Expr) for node in parsed(source).body)
        return found + ["holds code"] * has_code
    found += changes_outside(parsed(source))
    before = set(ORDER[: ORDER.index(name)])
    for module, level, is_lazy in imports(source):
        if level == 0 and module.split(".")[0] not in OUTSIDE | OUTSIDE_OF.get(name, set()) | set(
            sys.stdlib_module_names
        ):
            found.append(f"imports {module}")
        if level == 1 and module not in before and not (is_lazy and module in LAZY.get(name, ())):
            found.append(f"imports .{module}")
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node) or ""
            found += [
                f"docstring line {line.strip()!r}" for line in text.splitlines() if re.match(r"\s*from\s+\.", line)
            ]
    return found


@pytest.mark.parametrize("name", sorted(FILES))
def test_file_keeps_to_its_place(name: str) -> None:
    assert faults(name, FILES[name]) == []


def test_the_order_of_the_shipped_files_is_written_down() -> None:
    assert set(ORDER) == SHIPPED
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
        ("model/acceptance_dflash", "print('x')"),
        ("model/acceptance_dflash", "import argparse"),
        ("model/acceptance_dflash", "import os\nX = os.environ['X']"),
        ("model/acceptance_dflash", "import os\nX = os.getenv('X')"),
        ("model/acceptance_dflash", "import socket"),
        ("model/acceptance_dflash", "open('x', 'w')"),
        ("model/acceptance_dflash", "import time"),
        ("model/acceptance_dflash", "torch.cuda.synchronize()"),
        ("model/__init__", "from .modeling_dflash import DFlashDraftModel"),
        ("model/cache_dflash", "import huggingface_hub"),
        ("model/pair_dflash", "from transformers import PreTrainedModel\nPreTrainedModel.save_pretrained = None"),
        ("model/pair_dflash", "from transformers import GenerationMixin\nsetattr(GenerationMixin, 'generate', None)"),
        ("model/pair_dflash", "import weakref\n_of_models: dict = weakref.WeakKeyDictionary()"),
        ("model/pair_dflash", "_warned = set()"),
        ("model/pair_dflash", "_warned = {}"),
        ("model/__init__", "from dflash import engine"),
        ("model/__init__", "import dflash.engine"),
        ("common/provenance", "from dflash import __version__"),
        ("dialects", "from dflash.checkpoints import save_checkpoint"),
        ("engine/lookup", "import dflash.drafter"),
        ("training/trainer", "from dflash.model.modeling_dflash import DFlashDraftModel"),
        ("notebooks", "from .model.configuration_dflash import DFlashConfig"),
        ("__init__", "from .model.modeling_dflash import DFlashDraftModel"),
        ("model/decoding_dflash", "def f():\n    from dflash.engine import runner"),
        ("engine/lookup", "from dflash.checkpoints import save_checkpoint"),
        ("engine/widths", "from dflash.evaluation import timed_blocks"),
        ("engine/widths", "import time"),
        ("engine/recorded", "def f():\n    torch.cuda.synchronize()"),
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
        ("model/pair_dflash", "from huggingface_hub import snapshot_download"),
        ("training/trainer", "from dflash.drafter import DFlashDraftModel"),
        ("training/trainer", "from dflash.model.configuration_dflash import default_target_layer_ids"),
        (
            "engine/widths",
            "from dflash.model.requests_dflash import Request\nfrom dflash.common.stopwatch import stopwatch",
        ),
        ("evaluation/timing", "import time"),
        ("cli/bench", "from dflash.evaluation import timed_blocks"),
        ("regeneration/run", "from dflash.training import Example"),
        ("notebooks", "from .cli.terminal import TextStream"),
        ("evaluation/methods", "from .timing import timed_blocks\nfrom dflash.checkpoints import save_checkpoint"),
        ("model/configuration_dflash", "# print(x)\nimport torch.nn\nimport math"),
    ],
)
def test_what_is_allowed_is_not_called_a_fault(name: str, source: str) -> None:
    assert faults(name, source) == []


TESTS = Path(__file__).parents[1]
MOST_INSIDES = 30


def insides(source: str) -> list[str]:
    """Modules inside a room with a face that `source` imports from."""
    modules = re.findall(r"^ *(?:from|import) (dflash\.(\w+)\.[\w.]+)", source, re.MULTILINE)
    return [module for module, room in modules if room in set(FLOORS) - DOORS]


def test_tests_mostly_come_in_by_the_front_door() -> None:
    """What a test takes from a room's inside keeps that inside as it is: few do."""
    found = {path.name: insides(path.read_text()) for path in TESTS.rglob("*.py")}
    assert sum(map(len, found.values())) <= MOST_INSIDES, {name: modules for name, modules in found.items() if modules}


def test_an_import_of_an_inside_is_counted() -> None:
    assert insides("def f():\n    from dflash.training.losses import LOSSES\nimport dflash.cli.app") == [
        "dflash.training.losses",
        "dflash.cli.app",
    ]
    assert (
        insides("from dflash.training import Trainer\nfrom dflash.common.files import write_text\nimport torch") == []
    )
