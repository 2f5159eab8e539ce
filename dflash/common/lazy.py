"""Public names of a package on first use (PEP 562): importing torch takes seconds, which the command line shows a bar for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names_of: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose modules hold these names; an unknown one is an AttributeError."""
    module_of = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(module_of))}."
            )
        return getattr(import_module(f".{module_of[name]}", package), name)

    return get, lambda: sorted(module_of)
