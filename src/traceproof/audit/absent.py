"""Stand-ins for absent packages that a test file imports; their functions raise when they are called."""

import ast
import importlib.util
from collections.abc import Callable

from traceproof.untrusted.stand_ins import StandIns


class AbsentError(RuntimeError):
    """A function of a package that is not installed was called."""


def _raising(place: str) -> Callable[..., None]:
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
    StandIns(absent, _raising).install()
    return tuple(sorted(absent))
