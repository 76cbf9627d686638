"""Which op_types there are, and the op of each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from traceproof.dataset.definition import Dialect
from traceproof.digests import digest_bytes
from traceproof.errors import TraceproofError

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.models.drafts import Extraction
    from traceproof.ops.formula import Mutant
    from traceproof.ops.op import Op

FOLDER = Path(__file__).resolve().parent


@cache
def declarations() -> Mapping[str, tuple[str, Op]]:
    """Every op that is declared, with its module: in files of `families`, and of packages that are installed.

    An installed package names a module as an entry point of the group `traceproof.ops`. None of them may need
    PyTorch when imported. Raises TraceproofError: such a module can not be imported, or two declare one op_type.
    """
    from traceproof.ops.op import Op

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


def file_of(op_type: str) -> Path | None:
    """The file that declares an op_type; None: none does."""
    name = module(op_type)
    return None if name is None else Path(str(sys.modules[name].__file__)).resolve()


def foreign() -> dict[str, str]:
    """The op_types that other packages declare, each with a digest of the file that does."""
    files = {name: path for name in known() if (path := file_of(name)) is not None}
    return {name: digest_bytes(path.read_bytes()) for name, path in files.items() if FOLDER not in path.parents}


def module(op_type: str) -> str | None:
    """Name of the module that declares an op_type; None: none does."""
    return declarations()[op_type][0] if op_type in declarations() else None


@cache
def known() -> tuple[str, ...]:
    """The op_types, sorted."""
    return tuple(sorted(declarations()))


@cache
def families() -> Mapping[str, tuple[str, ...]]:
    """The families with the op_types of each."""
    members: dict[str, tuple[str, ...]] = {}
    for op_type in known():
        family = get(op_type).family
        members[family] = (*members.get(family, ()), op_type)
    return members


@cache
def get(op_type: str) -> Op:
    """The op of an op_type; the generic op (no oracle) for one that is not declared."""
    from traceproof.ops.generic import GenericOp

    return declarations()[op_type][1] if op_type in declarations() else GenericOp(op_type)


@cache
def extractions() -> tuple[Extraction, ...]:
    """How calls are found in a model, of all op_types that say so, in the order of their names."""
    every = (get(op_type).extraction for op_type in known())
    return tuple(extraction for extraction in every if extraction is not None)


def mutants_of(definition: Definition) -> Sequence[Mutant]:
    """The bugs that a kernel of a definition's form could have."""
    op = get(definition.op_type)
    return op.of_form(definition).mutants or op.mutants


def for_definition(definition: Definition) -> tuple[Op, str | None]:
    """The op that draws a definition's inputs, and why there is no oracle (None: there is one)."""
    from traceproof.dataset.constraints import text_of
    from traceproof.ops.base import TORCH_DTYPES, Unsupported
    from traceproof.ops.generic import GenericOp

    op = get(definition.op_type).of_form(definition)
    specs = {} if definition.dialect is Dialect.PUBLISHED else {**definition.inputs, **definition.outputs}
    for name, spec in specs.items():  # a dtype may be unknown, and a text not stated
        if spec.dtype in TORCH_DTYPES or (name in definition.inputs and spec.optional):
            continue
        stated = op.scalars.get(name, text_of(definition, name))
        if name not in definition.inputs or not isinstance(stated, str):
            return GenericOp(definition.op_type), f"the dtype of {name} is {spec.dtype}"
    try:
        op.check(definition)
    except Unsupported as unknown:
        return GenericOp(definition.op_type), str(unknown)
    return op, None
