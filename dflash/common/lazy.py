"""Public names of a package on first use (PEP 562), because importing torch takes seconds."""

import ast
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, file: str, renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package, for the names that its `file` imports under `if TYPE_CHECKING`.

    `renamed` gives old names their new ones, in this package or, with dots, in another one; they are kept for one release
    with a DeprecationWarning.
    """
    block = next(node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    module_of = {}
    for node in imports:
        module = f"{package}.{node.module}" if node.level else str(node.module)
        module_of.update({alias.name: module for alias in node.names})

    def get(name: str) -> Any:
        if renamed and name in renamed:
            home, _, new = renamed[name].rpartition(".")
            warnings.warn(f"{package}.{name} is now {home or package}.{new}.", DeprecationWarning, stacklevel=2)
            return getattr(import_module(home or package), new)
        if name not in module_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(module_of))}."
            )
        return getattr(import_module(module_of[name]), name)

    return get, lambda: sorted(module_of)
