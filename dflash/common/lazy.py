"""Public names of a package on first use (PEP 562), because importing torch takes seconds."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package, for the names that its `file` imports under `if TYPE_CHECKING`.

    These imports are what type checkers read, so the names and their modules stand in one place alone.
    """
    block = next(node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If))
    module_of = {
        alias.name: f"{'.' * node.level}{node.module}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in module_of:
            names = ", ".join(sorted(module_of))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {names}.")
        return getattr(import_module(module_of[name], package), name)

    return get, lambda: sorted(module_of)
