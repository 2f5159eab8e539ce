"""Module paths that moved after 0.1: the old ones import for one release, with a DeprecationWarning."""

import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


MODULES = {"checking": "rules", "hub": "folders"} | {name: name for name in ("embedded", "publishing", "serving")}
NAMES = {"Launch": "ServerCommand", "Plan": "Publication"}
NAMES |= {"launch": "server_command", "plan": "plan_publication", "run": "run_server"}


class MovedModules(MetaPathFinder, Loader):
    """Finds an old path when no file has it, and gives a module that takes its names from the new one."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's, if it moved."""
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == "dflash" and name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Warns once, at the line that imports it."""
        new = import_module(f"dflash.checkpoints.{MODULES[module.__name__.rpartition('.')[2]]}")
        warnings.warn(
            f"{module.__name__} has moved: import from dflash.checkpoints, or {new.__name__}.",
            DeprecationWarning,
            stacklevel=2,
        )
        module.__getattr__ = lambda name: getattr(new, NAMES.get(name, name))  # type: ignore[method-assign]
