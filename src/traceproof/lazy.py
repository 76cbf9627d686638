"""Replaces packages that may be absent: PyTorch is imported on first use, others get stand-in modules.

The driver reads declarations of ops (names, constants, ground truths, models' calls) and has no PyTorch. So
modules that declare ops take `torch` from here, and do not use it while they are imported: that raises
ImportError, with PyTorch or without.
"""

import sys
from collections.abc import Callable, Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import CO_OPTIMIZED
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414 - exported
else:

    class Lazy:
        """Stands for PyTorch; its attributes are the package's."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the package holds
            user = sys._getframe(1)  # noqa: SLF001 - the cheapest way to know the caller
            if not user.f_code.co_flags & CO_OPTIMIZED:  # the body of a module or of a class
                place = f"{user.f_code.co_filename}:{user.f_lineno}"
                raise ImportError(
                    f"{place}: torch.{name} while the module is imported, and ops are declared where there is no "
                    "PyTorch: use it within a function, or a lambda"
                )
            import torch

            return getattr(torch, name)

    torch = Lazy()

__all__ = ["StandIns", "torch"]


class StandIns(MetaPathFinder, Loader):
    """Finds some packages and all modules in them, which have every name; `made(dotted name)` is its value."""

    def __init__(self, packages: Iterable[str], made: Callable[[str], object]) -> None:
        self._packages, self._made = frozenset(packages), made

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """A specification if the name is one of the packages, or a module in one; else None."""
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module a `__getattr__` that makes its attributes."""

        def attribute(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return self._made(f"{module.__name__}.{name}")

        vars(module)["__getattr__"] = attribute

    def install(self) -> None:
        """Append this to sys.meta_path, so that an installed package takes precedence."""
        sys.meta_path.append(self)
