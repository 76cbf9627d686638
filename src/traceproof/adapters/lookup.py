"""Which adapter serves a definition in a stack."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from traceproof.adapters.base import Adapter, Stack
from traceproof.dataset.definition import Definition

STACKS = ("flashinfer", "sglang", "fla", "torch")  # in the specified order of priority


@cache
def stack(name: str) -> Stack:
    """A stack's API table."""
    found: Stack = importlib.import_module(f"traceproof.adapters.{name}.api").STACK
    return found


@cache
def op_types(name: str) -> frozenset[str]:
    """The op_types that a stack has adapters for; nothing of them is imported."""
    package = importlib.import_module(f"traceproof.adapters.{name}")
    return frozenset(found.name for found in pkgutil.iter_modules(package.__path__) if found.name != "api")


def adapters(name: str, op_type: str) -> tuple[Adapter, ...]:
    """A stack's adapters for an op_type, in order of preference."""
    if op_type not in op_types(name):
        return ()
    found: tuple[Adapter, ...] = importlib.import_module(f"traceproof.adapters.{name}.{op_type}").ADAPTERS
    return found


def adapter(name: str, definition: Definition) -> Adapter | None:
    """The first adapter of a stack that has the definition's form."""
    return next((item for item in adapters(name, definition.op_type) if item.matches(definition)), None)
