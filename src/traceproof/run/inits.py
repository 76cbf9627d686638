"""Inputs made by a definition's own `init`: untrusted code, called once per case, of which nothing is believed.

Like references it is read by the policy and run isolated; its tensors are never kept on disk. All implementations
get what it returns, which must have the definition's dtypes and shapes; var axes are read off these. A number that
it leaves out is drawn by role; optional inputs stay None.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any

from safetensors.torch import save

from traceproof.dataset.constraints import System
from traceproof.dataset.definition import Definition, Dialect
from traceproof.dataset.dialects import COLUMNS, HELD, entry_of, run_of_init
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.run.case import COLUMN_MAJOR, DESCRIBED
from traceproof.run.schema import PlannedCase, PlannedDefinition
from traceproof.run.untrusted import CallError, loaded, refusal
from traceproof.sandbox import GIB, Limits, Pool

SEED = "seed"


class InitError(ValueError):
    """An `init` gave no usable inputs; the text says why."""


@dataclass(frozen=True, slots=True)
class Made:
    """Result of a call of `init`: sizes of all var axes, and the inputs that it made."""

    axes: Mapping[str, int]
    scalars: Mapping[str, bool | int | float] = field(default_factory=dict)  # Python numbers, by input
    tensors: Tensors = field(default_factory=dict)  # tensors, by input
    columns: frozenset[str] = frozenset()  # names of tensors whose last two axes are exchanged in memory


Make = Callable[[Mapping[str, int], int], Made]


@contextmanager
def maker(definition: Definition, pool: Pool, limits: Limits) -> Iterator[Make]:
    """Load a definition's `init` in a new worker; returns the function that makes inputs for sizes, by a seed.

    Sizes near the wanted ones are chosen by `init` if it has no parameter for them. Raises InitError: there is
    none, or the policy refuses it; later, that it raises, or returns other shapes or dtypes than the definition's.
    """
    entry = entry_of(definition.init or "", (definition.init_entry or "",), handed_on=True)
    refused = refusal(definition.init or "")
    if entry is None or refused is not None:
        raise InitError(f"init may not run: {refused.message}" if refused is not None else "there is no init")
    passed_axes = [name for name in entry.required if name in definition.var_axes]
    if "axes" in entry.parameters:
        passed_axes = list(definition.var_axes)
    text = run_of_init(definition.as_json(), entry, passed_axes, definition.const_axes)
    integer, flag = {"shape": None, "dtype": "int64"}, {"shape": None, "dtype": "bool"}
    caller = Definition.model_validate(
        {
            "name": definition.name,
            "op_type": definition.op_type,
            "axes": {name: axis.model_dump() for name, axis in definition.axes.items()},
            "inputs": dict.fromkeys([*passed_axes, SEED], integer),
            "outputs": {f"{name}{HELD}": spec.model_dump() for name, spec in definition.inputs.items()}
            | {f"{name}{COLUMNS}": flag for name, spec in definition.inputs.items() if len(spec.shape or ()) > 1},
            "reference": text,
            "dialect": Dialect.TRACE_DUMP.value,
        }
    )
    with loaded(caller, pool, limits=limits, source=text, ours=True) as source:

        def make(wanted: Mapping[str, int], seed: int) -> Made:
            given: Values = {name: wanted.get(name, seed) for name in caller.inputs}
            case = Case("init", "small", {**definition.const_axes, **wanted, SEED: seed}, seed)
            try:
                outputs = source.run(case, given, seed=seed).outputs
            except CallError as error:
                raise InitError(f"init: {error.told}") from error
            held = {name.removesuffix(HELD): one for name, one in outputs.items() if name.endswith(HELD)}
            turned = frozenset(name.removesuffix(COLUMNS) for name in outputs if name.endswith(COLUMNS))
            return replace(_checked(definition, held, wanted), columns=turned)

        yield make


def _checked(definition: Definition, returned: Tensors, wanted: Mapping[str, int]) -> Made:
    """Check what `init` returned against the definition's shapes and dtypes. Raises InitError: it does not fit."""
    sizes = dict(definition.const_axes)
    scalars: dict[str, bool | int | float] = {}
    tensors: Tensors = {}
    for name, spec in definition.inputs.items():
        if name not in returned:
            continue
        value = returned[name]
        if spec.shape is None:
            if value.numel() != 1:
                raise InitError(f"init gives {name} the shape {list(value.shape)}, the definition says a number")
            scalars[name] = value.item()
            continue
        stated = f"the definition says {spec.dtype} {list(spec.shape)}"
        if value.dtype != TORCH_DTYPES.get(spec.dtype) or value.dim() != len(spec.shape):
            raise InitError(f"init gives {name} as {value.dtype} {list(value.shape)}, {stated}")
        for axis, size in zip(spec.shape, value.shape, strict=True):
            if sizes.setdefault(axis, size) != size:  # a var axis has the size that it is first seen with
                raise InitError(f"init gives {name} as {list(value.shape)}, {stated} with {axis} = {sizes[axis]}")
        tensors[name] = value
    tensors_of = (name for name, spec in definition.inputs.items() if spec.shape is not None and not spec.optional)
    missing = sorted(set(tensors_of) - tensors.keys())
    if missing:
        raise InitError(f"init gives no tensor for {', '.join(missing)}")
    known_sizes = {name: size for name, size in sizes.items() if name in definition.axes}
    solution = System(tuple(definition.axes), definition.constraints or ()).solve(known_sizes, wanted)
    if solution is None:
        raise InitError(f"init gives sizes that violate the constraints {list(definition.constraints or ())}")
    return Made({name: solution[name] for name in definition.var_axes}, scalars, tensors)


LIMITS = Limits(seconds=20.0, setup_seconds=60.0, memory_bytes=6 * GIB)  # of one call


@contextmanager
def filled(entry: PlannedDefinition, pool: Pool) -> Iterator[PlannedDefinition]:
    """The planned definition, with inputs made by its `init`, if it has one, in place of those drawn by role.

    They are files in this process's memory until the context ends. The author of `init` knows which values are
    allowed, so tied, tiny and large ones are not run. A case that `init` fails for is left out; if it is the
    repeated or a hidden one, or each, all inputs are drawn by role, and params["init"] says why.
    """
    by_role = {one.id: one for one in entry.cases if one.skip is None and one.case.params.get("drawn")}
    to_make = [one for one in by_role.values() if one.case.size != "adversarial"]
    if entry.definition.get("init") is None or not to_make:
        yield entry
        return
    made_cases: dict[str, PlannedCase] = {}
    why = ""
    with ExitStack() as files:
        try:
            with maker(entry.parsed, pool, LIMITS) as make:
                for planned in sorted(to_make, key=lambda one: not (one.repeat or one.hidden)):
                    try:
                        file = files.enter_context(os.fdopen(os.memfd_create("inputs"), "wb"))
                        made_cases[planned.id] = _described(entry.parsed, make, planned, file)
                    except InitError as error:
                        why = why or str(error)
                        if planned.repeat or planned.hidden:
                            raise
        except InitError as error:
            made_cases, why = {}, str(error)
        drawn = {name: _with(one, params={**one.case.params, "init": why}) for name, one in by_role.items()}
        new_cases = made_cases or drawn
        kept = (one for one in entry.cases if one.id in new_cases or one.id not in by_role)
        yield entry.holding(new_cases.get(one.id, one) for one in kept)


def _described(definition: Definition, make: Make, planned: PlannedCase, file: IO[bytes]) -> PlannedCase:
    """A case with inputs made by `init`, tensors written to a file. Raises InitError: it makes none."""
    made = make(planned.case.axes, planned.case.seed)
    file.write(save({name: value.contiguous() for name, value in made.tensors.items()}))
    file.flush()
    inputs: dict[str, Any] = {name: {"type": "scalar", "value": value} for name, value in made.scalars.items()}
    for name in made.tensors:
        source = {"path": f"/proc/{os.getpid()}/fd/{file.fileno()}", "tensor_key": name}
        inputs[name] = {"type": "safetensors", **source, **({COLUMN_MAJOR: True} if name in made.columns else {})}
    described = _with(planned, axes=dict(made.axes), params={"drawn": "by init", DESCRIBED: inputs})
    memory = GenericOp(definition.op_type).memory(definition, described.case)
    return described.model_copy(update={"memory": memory})


def _with(planned: PlannedCase, **changes: Any) -> PlannedCase:  # noqa: ANN401 - fields of a Case
    """A planned case with changed fields of its Case; the digest stays, as what `init` makes follows from that."""
    return planned.model_copy(update={"case": replace(planned.case, **changes)})
