"""Packages that may be absent: PyTorch, imported when something of it is first used, and modules in their place.

The driver reads what ops say of themselves (names, constants, which ground truths there are, models' calls) and
has no PyTorch. So modules that declare ops take `torch` from here, and use nothing of it while they are imported:
that raises ImportError, with PyTorch as without.
"""

import sys
from collections.abc import Callable, Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import CO_OPTIMIZED
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414 - given on
else:

    class Lazy:
        """Stands for the package; each attribute is the package's own."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the package holds
            user = sys._getframe(1)  # noqa: SLF001 - the cheapest way to know it
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
    """Finds some packages and any module in them, which has every name; `made` gives it by its dotted name."""

    def __init__(self, packages: Iterable[str], made: Callable[[str], object]) -> None:
        self._packages, self._made = frozenset(packages), made

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Give a specification of one of the packages or of a module in it."""
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""

        def attribute(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return self._made(f"{module.__name__}.{name}")

        vars(module)["__getattr__"] = attribute

    def install(self) -> None:
        """Put it last on the import path: a package that is really there wins."""
        sys.meta_path.append(self)
