"""Stand-ins for absent packages that a test file imports; their functions raise when they are called."""

import ast
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AbsentError(RuntimeError):
    """A function of a package that is not installed was called."""


class _Finder(MetaPathFinder, Loader):
    """Finds the given packages and any module in them."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


class _StandIn(ModuleType):
    """Has every name; what is called raises."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any name
        if name.startswith("__"):
            raise AttributeError(name)
        place = f"{self.__name__}.{name}"

        def absent(*_: object, **__: object) -> None:
            raise AbsentError(f"{place} was called, and its package is not installed")

        return absent


def stand_in(source: str) -> tuple[str, ...]:
    """Let every absent package that the source imports be imported; gives their names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    absent = frozenset(name for name in names if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(absent))
    return tuple(sorted(absent))
