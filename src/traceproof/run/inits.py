"""Inputs that a definition's own `init` makes: untrusted code, called once per case and believed nothing.

It is called while planning, read by the policy and shut in as references are, and once more where cases are run:
tensors are never kept. What it gives is read by every implementation. It must have the definition's dtypes and
shapes; the var axes follow from them. A number that it leaves out is drawn by role; what is optional stays out.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save

from traceproof.dataset.constraints import System
from traceproof.dataset.definition import Definition, Dialect, TensorSpec
from traceproof.dataset.dialects import COLUMNS, HELD, entry_of, run_of_init
from traceproof.digests import code_digest, digest_json
from traceproof.errors import TraceproofError
from traceproof.files import read_sealed, sealed, write_text
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.run.case import COLUMN_MAJOR, fingerprints
from traceproof.run.schema import PlannedCase, PlannedDefinition
from traceproof.run.untrusted import CallError, UntrustedSource, loaded, refusal
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import GIB, Limits, Pool

SEED = "seed"


class InitError(ValueError):
    """An `init` that left no usable inputs; the text says why."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a call of `init` gave: sizes of all var axes, and the inputs that it made."""

    axes: Mapping[str, int]
    scalars: Mapping[str, bool | int | float] = field(default_factory=dict)  # Python numbers by input
    tensors: Tensors = field(default_factory=dict)  # the others
    columns: frozenset[str] = frozenset()  # those whose last two axes lie the other way round in memory


@dataclass(frozen=True, slots=True)
class Maker:
    """A definition's `init`, loaded in a worker of its own."""

    definition: Definition
    source: UntrustedSource

    def make(self, wanted: Mapping[str, int], seed: int) -> Made:
        """The inputs for sizes near the wanted ones; those that `init` has no parameter for are its own to choose.

        Raises InitError: it raises, or gives other shapes or dtypes than the definition's.
        """
        given: Values = {name: wanted.get(name, seed) for name in self.source.definition.inputs}
        sizes = {**self.definition.const_axes, **wanted}
        try:
            taken = self.source.run(Case("init", "small", {**sizes, SEED: seed}, seed), given, seed=seed)
        except CallError as error:
            raise InitError(f"init: {error.told}") from error
        held = {name.removesuffix(HELD): one for name, one in taken.outputs.items() if name.endswith(HELD)}
        turned = frozenset(name.removesuffix(COLUMNS) for name in taken.outputs if name.endswith(COLUMNS))
        return replace(_checked(self.definition, held, wanted), columns=turned)


@contextmanager
def maker(definition: Definition, pool: Pool, limits: Limits) -> Iterator[Maker]:
    """Load a definition's `init` in a new worker. Raises InitError: it has none, or the policy refuses it."""
    entry = entry_of(definition.init or "", (definition.init_entry or "",), handed_on=True)
    refused = refusal(definition.init or "")
    if entry is None or refused is not None:
        raise InitError(f"init may not run: {refused.message}" if refused is not None else "there is no init")
    free = [name for name in entry.required if name in definition.var_axes]
    if "axes" in entry.parameters:
        free = list(definition.var_axes)
    text = run_of_init(definition.as_json(), entry, free, definition.const_axes)
    number, flag = {"shape": None, "dtype": "int64"}, {"shape": None, "dtype": "bool"}
    called = Definition.model_validate(
        {
            "name": definition.name,
            "op_type": definition.op_type,
            "axes": {name: axis.model_dump() for name, axis in definition.axes.items()},
            "inputs": dict.fromkeys([*free, SEED], number),
            "outputs": {f"{name}{HELD}": spec.model_dump() for name, spec in definition.inputs.items()}
            | {f"{name}{COLUMNS}": flag for name, spec in definition.inputs.items() if len(spec.shape or ()) > 1},
            "reference": text,
            "dialect": Dialect.TRACE_DUMP.value,
        }
    )
    with loaded(called, pool, limits=limits, source=text, ours=True) as source:
        yield Maker(definition, source)


def _checked(definition: Definition, given: Tensors, wanted: Mapping[str, int]) -> Made:
    """What came back, by the definition's shapes and dtypes. Raises InitError: it does not fit them."""
    sizes = dict(definition.const_axes)
    scalars: dict[str, bool | int | float] = {}
    tensors: Tensors = {}
    for name, spec in definition.inputs.items():
        if name not in given:
            continue
        value = given[name]
        if spec.shape is None:
            if value.numel() != 1:
                raise InitError(f"init gives {name} the shape {list(value.shape)}, the definition says a number")
            scalars[name] = value.item()
        else:
            tensors[name] = _fitting(name, value, spec, spec.shape, sizes)
    tensors_of = (name for name, spec in definition.inputs.items() if spec.shape is not None and not spec.optional)
    lacking = sorted(set(tensors_of) - tensors.keys())
    if lacking:
        raise InitError(f"init gives no tensor for {', '.join(lacking)}")
    known = {name: size for name, size in sizes.items() if name in definition.axes}
    found = System(tuple(definition.axes), definition.constraints or ()).solve(known, wanted)
    if found is None:
        raise InitError(f"init gives sizes that violate the constraints {list(definition.constraints or ())}")
    return Made({name: found[name] for name in definition.var_axes}, scalars, tensors)


def _fitting(
    name: str, value: torch.Tensor, spec: TensorSpec, shape: tuple[str, ...], sizes: dict[str, int]
) -> torch.Tensor:
    """A tensor that has its definition's dtype and shape; `sizes` gets the axes that it shows."""
    said = f"the definition says {spec.dtype} {list(shape)}"
    if value.dtype != TORCH_DTYPES.get(spec.dtype) or value.dim() != len(shape):
        raise InitError(f"init gives {name} as {value.dtype} {list(value.shape)}, {said}")
    for axis, size in zip(shape, value.shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            raise InitError(f"init gives {name} as {list(value.shape)}, {said} with {axis} = {sizes[axis]}")
    return value


MEMORY_BYTES = 6 * GIB  # of one `init`
LIMITS = Limits(seconds=20.0, setup_seconds=60.0, memory_bytes=MEMORY_BYTES)
DRAWN = "by init"
WANTED = "wanted"  # key of such a case's drawing instructions: the sizes that were asked for
INPUTS = "inputs"  # folder of what was made, without the tensors


class Inits:
    """Calls of `init` while planning; the sizes and the content of what each gave are kept."""

    def __init__(self, folder: Path, conceal: Sequence[Path] = (), *, weak: bool = False) -> None:
        """`folder` is that of the results. `weak`: they may run where isolation is not whole."""
        self._folder = folder
        self._pool = untrusted_pool(conceal=[folder, *conceal], weak=weak)  # which starts when it is first needed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, if there are any."""
        self._pool.close()

    def filled(self, definition: Definition, planned: Sequence[PlannedCase]) -> Sequence[PlannedCase]:
        """The cases with inputs made by `init` in place of those drawn by role, if it can be run here.

        Whoever wrote `init` knows which values are allowed, so tied, tiny and large ones are left out. Where it
        gives none, all cases are drawn by role, and say why.
        """
        drawn = {entry.id: entry for entry in planned if entry.skip is None and entry.case.params.get("drawn")}
        wanted = [entry for entry in drawn.values() if entry.case.size != "adversarial"]
        if definition.init is None or not wanted:
            return planned
        made, why = self._made(definition, wanted)
        changed = made or {name: _noted(entry, why) for name, entry in drawn.items()}
        return [changed.get(entry.id, entry) for entry in planned if entry.id in changed or entry.id not in drawn]

    def _made(self, definition: Definition, wanted: Sequence[PlannedCase]) -> tuple[dict[str, PlannedCase], str]:
        """The cases that `init` makes inputs for, by id, and why it makes none for the first that it does not.

        None where it does not run at all, or makes none for a case that is run again or hidden: without these, no
        case is judged whole.
        """
        made: dict[str, PlannedCase] = {}
        why = ""
        try:
            with maker(definition, self._pool, LIMITS) as source:
                for entry in sorted(wanted, key=lambda entry: not (entry.repeat or entry.hidden)):
                    try:
                        made[entry.id] = self._case(source, entry)
                    except InitError as error:
                        why = why or str(error)
                        if entry.repeat or entry.hidden:
                            raise
        except InitError as error:
            return {}, str(error)
        return made, why

    def _case(self, source: Maker, entry: PlannedCase) -> PlannedCase:
        """One case with inputs that `init` makes, described as it made them now or before."""
        definition, case = source.definition, entry.case
        key = digest_json(
            [definition.digest, code_digest("sandbox", "run"), torch.__version__, dict(case.axes), case.seed]
        )
        path = self._folder / INPUTS / f"{key}.json"
        try:
            record = read_sealed(path)
        except TraceproofError:
            made = source.make(case.axes, case.seed)
            record = {"axes": dict(made.axes), "scalars": dict(made.scalars), "columns": sorted(made.columns)}
            record["names"] = fingerprints({**made.tensors})
            write_text(path, sealed(json.dumps(record)))
        filled = _described(case, record)
        update = {
            "case": filled,
            "digest": filled.digest,
            "memory": GenericOp(definition.op_type).memory(definition, filled),
            "blobs": record["names"],
        }
        return entry.model_copy(update=update)


def _described(case: Case, record: Mapping[str, Any]) -> Case:
    """A case with the inputs that a record describes; where its tensors lie is said when they are made again."""
    inputs: dict[str, Any] = {
        name: {"type": "scalar", "value": value} for name, value in record["scalars"].items()
    }
    inputs |= {name: {"type": "safetensors", "tensor_key": name} for name in record["names"]}
    for name in record["columns"]:
        inputs[name][COLUMN_MAJOR] = True
    params = {"drawn": DRAWN, WANTED: dict(case.axes), "inputs": inputs}
    return Case(case.id, case.size, record["axes"], case.seed, params)


@contextmanager
def made_again(entry: PlannedDefinition, pool: Pool) -> Iterator[PlannedDefinition]:
    """A planned definition with the inputs that its `init` makes, as files in this process's memory.

    Whoever may open them reads them there, until the context ends.
    """
    with ExitStack() as files, ExitStack() as worker:
        source: Maker | None = None
        cases = []
        for planned in entry.cases:
            case, wanted = planned.case, planned.case.params.get(WANTED)
            if wanted is None or planned.skip is not None:
                cases.append(planned)
                continue
            try:
                source = source or worker.enter_context(maker(entry.parsed, pool, LIMITS))
                made = source.make(wanted, case.seed)
                if made.axes != case.axes:
                    raise InitError(f"init gives the sizes {dict(made.axes)}; planned were {dict(case.axes)}")  # noqa: TRY301
                file = files.enter_context(os.fdopen(os.memfd_create("inputs"), "wb"))
                file.write(save({name: value.contiguous() for name, value in made.tensors.items()}))
                file.flush()
                said = {"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"}
            except InitError as error:
                said = {"unmade": str(error)}
            inputs = {name: {**described, **said} for name, described in case.params["inputs"].items()}
            placed = replace(case, params={**case.params, "inputs": inputs})
            cases.append(planned.model_copy(update={"case": placed}))
        yield entry.holding(cases)


def _noted(entry: PlannedCase, why: str) -> PlannedCase:
    """A case drawn by role, which says why its inputs are not those of `init`."""
    case = entry.case
    noted = Case(case.id, case.size, case.axes, case.seed, {**case.params, "init": why})
    return entry.model_copy(update={"case": noted, "digest": noted.digest})
