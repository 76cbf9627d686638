"""Which op_types there are, found by their folders, and what each of them holds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import Dialect
from traceproof.errors import TraceproofError
from traceproof.ops.record import OpType

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.ops.base import Op

FOLDER = Path(__file__).resolve().parent
ORACLE = "oracle"  # the file that makes a folder an op_type


@cache
def declarations() -> Mapping[str, tuple[str, Op]]:
    """Every op that is declared, with its module: in files of `families`, and of packages that are installed.

    Such a package names a module of its own as an entry point of the group `traceproof.ops`. All without PyTorch.
    Raises TraceproofError: such a module can not be imported, or two declare one op_type.
    """
    from traceproof.ops.base import Op

    places = [f"traceproof.ops.families.{path.stem}" for path in sorted(FOLDER.glob("families/[a-z]*.py"))]
    others = {entry.value: entry for entry in metadata.entry_points(group="traceproof.ops")}
    found: dict[str, tuple[str, Op]] = {}
    for place in (*places, *sorted(others)):
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            if place not in others:
                raise
            dist = others[place].dist
            package = place if dist is None else dist.name
            raise TraceproofError(
                f"{package} names {place} as a module of ops, which can not be imported: {error}. Take torch from "
                f"traceproof.lazy there, or uninstall {package}"
            ) from error
        for op in vars(module).values():
            if not (isinstance(op, Op) and op.family):
                continue
            if found.setdefault(op.op_type, (place, op))[1] is not op:
                raise TraceproofError(f"{found[op.op_type][0]} and {place} both declare {op.op_type}")
    return found


def declared(op_type: str) -> Op | None:
    """The op of that name; None: none is declared."""
    found = declarations().get(op_type)
    return None if found is None else found[1]


def file_of(op_type: str) -> Path | None:
    """The file that declares an op_type; None: none does."""
    if op_type not in declarations():
        return None
    return Path(str(sys.modules[declarations()[op_type][0]].__file__))


@cache
def known() -> tuple[str, ...]:
    """The op_types, sorted."""
    return tuple(sorted({path.parent.name for path in FOLDER.glob(f"*/{ORACLE}.py")} | declarations().keys()))


def module(op_type: str, part: str = ORACLE) -> str | None:
    """Name of the module with one part of an op_type, e.g. `ground_truths.torch`; None: there is none."""
    if op_type in declarations():
        place, op = declarations()[op_type]
        kind, _, source = part.partition(".")
        holds = {ORACLE: True, "constants": bool(op.rules), "ground_truths": source in op.truths}
        if kind in holds:
            return place if holds[kind] else None
    for place in (f"{op_type}.{part}", f"common.{getattr(record(op_type), 'kin', '')}_{part}"):
        if op_type in known() and FOLDER.joinpath(*place.split(".")).with_suffix(".py").is_file():
            return f"traceproof.ops.{place}"
    return None


def deciding(op_type: str) -> tuple[str, ...]:
    """Names of the modules that decide its verdicts and are imported by its name: oracle, rules of constants."""
    if op_type in declarations():
        return (declarations()[op_type][0],)
    constants = module(op_type, "constants")
    return (module(op_type) or "traceproof.ops.generic", *([constants] if constants else []))


def attribute(op_type: str, part: str, name: str) -> Any:  # noqa: ANN401 - the caller says what it is
    """What the module of one part of an op_type calls by that name; None: there is no such module."""
    found = module(op_type, part)
    return None if found is None else getattr(importlib.import_module(found), name)


@cache
def record(op_type: str) -> OpType | Op:
    """The facts of an op_type; those of none for one that has no folder here."""
    if op_type not in known():
        return OpType(family="")
    own = declared(op_type)
    if own is not None:
        return own
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
    own = declared(op_type)
    if own is not None:
        return own
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
