"""Which op_types there are, and the Op of each."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.ops.base import Op

SHARED = frozenset({"base", "cases", "compare", "registry", "generic", "common"})


@cache
def known() -> tuple[str, ...]:
    """The op_types with an op of their own, sorted; nothing is imported."""
    folder = str(Path(__file__).parent)
    return tuple(sorted(found.name for found in pkgutil.iter_modules([folder]) if found.name not in SHARED))


@cache
def get(op_type: str) -> Op:
    """The op of an op_type; the generic op (no oracle) for one that has no module here."""
    if op_type not in known():
        from traceproof.ops.generic import GenericOp

        return GenericOp(op_type)
    module = importlib.import_module(f"traceproof.ops.{op_type}")
    op: Op = module.OP
    if op.op_type != op_type:
        raise ValueError(f"traceproof.ops.{op_type}.OP calls itself {op.op_type!r}")
    return op


def for_definition(definition: Definition) -> tuple[Op, str | None]:
    """The op that draws a definition's inputs, and why there is no oracle (None: there is one)."""
    from traceproof.ops.base import Unsupported
    from traceproof.ops.generic import GenericOp

    op = get(definition.op_type)
    try:
        op.check(definition)
    except Unsupported as unknown:
        return GenericOp(definition.op_type), str(unknown)
    return op, None
