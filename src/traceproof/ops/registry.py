"""Which op_types there are, found by their folders, and what each of them holds."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import Dialect
from traceproof.ops.record import OpType

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.ops.base import Op

FOLDER = Path(__file__).resolve().parent
ORACLE = "oracle"  # the file that makes a folder an op_type


@cache
def known() -> tuple[str, ...]:
    """The op_types with a folder of their own, sorted; nothing is imported."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob(f"*/{ORACLE}.py")))


def module(op_type: str, part: str = ORACLE) -> str | None:
    """Name of the module with one part of an op_type, e.g. `ground_truths.torch`; None: there is none."""
    for place in (f"{op_type}.{part}", f"common.{record(op_type).kin}_{part}"):
        if op_type in known() and FOLDER.joinpath(*place.split(".")).with_suffix(".py").is_file():
            return f"traceproof.ops.{place}"
    return None


def deciding(op_type: str) -> tuple[str, ...]:
    """Names of the modules that decide its verdicts and are imported by its name: oracle, rules of constants."""
    constants = module(op_type, "constants")
    return (module(op_type) or "traceproof.ops.generic", *([constants] if constants else []))


def attribute(op_type: str, part: str, name: str) -> Any:  # noqa: ANN401 - the caller says what it is
    """What the module of one part of an op_type calls by that name; None: there is no such module."""
    found = module(op_type, part)
    return None if found is None else getattr(importlib.import_module(found), name)


@cache
def record(op_type: str) -> OpType:
    """The facts of an op_type; those of none for one that has no folder here."""
    if op_type not in known():
        return OpType(family="")
    found: OpType = importlib.import_module(f"traceproof.ops.{op_type}").OP
    return found


@cache
def families() -> Mapping[str, tuple[str, ...]]:
    """The families with the op_types of each."""
    found: dict[str, tuple[str, ...]] = {}
    for op_type in known():
        found[record(op_type).family] = (*found.get(record(op_type).family, ()), op_type)
    return found


def ground_truth(op_type: str, source: str) -> str | None:
    """Name of the module with an op_type's ground truths from one source; None: there are none."""
    return module(op_type, f"ground_truths.{source}")


@cache
def get(op_type: str) -> Op:
    """The op of an op_type; the generic op (no oracle) for one that has no folder here."""
    name = module(op_type)
    if name is None:
        from traceproof.ops.generic import GenericOp

        return GenericOp(op_type)
    op: Op = importlib.import_module(name).OP
    if op.op_type != op_type:
        raise ValueError(f"{name}.OP calls itself {op.op_type!r}")
    return op


def _check_whole(definition: Definition) -> None:
    """Check what every op relies on. Raises Unsupported: an output's dtype is open, or an input is a text."""
    from traceproof.ops.base import TORCH_DTYPES, Unsupported

    for name, spec in {**definition.inputs, **definition.outputs}.items():
        if spec.dtype not in TORCH_DTYPES:
            raise Unsupported(f"the dtype of {name} is {spec.dtype}")


def for_definition(definition: Definition) -> tuple[Op, str | None]:
    """The op that draws a definition's inputs, and why there is no oracle (None: there is one)."""
    from traceproof.ops.base import Unsupported
    from traceproof.ops.generic import GenericOp

    op = get(definition.op_type).of_form(definition)
    try:
        if definition.dialect is not Dialect.PUBLISHED:
            _check_whole(definition)
        op.check(definition)
    except Unsupported as unknown:
        return GenericOp(definition.op_type), str(unknown)
    return op, None
