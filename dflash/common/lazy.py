"""Public names of a package on first use (PEP 562): importing torch takes seconds, for which the command line shows a bar."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, names_of: Mapping[str, str | Iterable[str]], renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose modules hold these names; an unknown one is an AttributeError.

    The names of a module are an iterable, or one string with spaces between them. `renamed` gives old names their new ones,
    in this package or, with dots, in another one; they are kept for one release with a DeprecationWarning.
    """
    module_of = {
        name: module
        for module, names in names_of.items()
        for name in (names.split() if isinstance(names, str) else names)
    }

    def get(name: str) -> Any:
        if renamed and name in renamed:
            home, _, new = renamed[name].rpartition(".")
            warnings.warn(f"{package}.{name} is now {home or package}.{new}.", DeprecationWarning, stacklevel=2)
            return getattr(import_module(home or package), new)
        if name not in module_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(module_of))}."
            )
        return getattr(import_module(f".{module_of[name]}", package), name)

    return get, lambda: sorted(module_of)


def names_for_typing(file: str) -> dict[str, list[str]]:
    """The names that a package's `__init__.py` imports under `if TYPE_CHECKING`, by module, for `lazy_names`."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {str(node.module): [alias.name for alias in node.names] for node in imports}
