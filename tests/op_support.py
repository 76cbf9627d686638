"""What the tests of ops share: our small definitions, their cases, and the judge's word on any outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.draw import Draw, fingerprint
from traceproof.judge.output import Ruling
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase

torch.set_num_threads(1)  # the tensors are small and the machine is shared
ROOT = Path(__file__).parent / "dataset" / "definitions"
CPU = torch.device("cpu")
NO_KEYS = frozenset({"cascade_merge"})  # where the LSE of a state without keys is an input: minus infinity

Outputs = Sequence[torch.Tensor] | torch.Tensor
Kernel = Callable[[Definition, Values], Outputs]


@cache
def load(op_type: str, name: str) -> Definition:
    """One of our own definitions."""
    return read(json.loads((ROOT / op_type / f"{name}.json").read_text(encoding="utf-8"))).definition


def definitions(op_type: str) -> list[Definition]:
    """All of our own definitions of an op_type, by name."""
    return [load(op_type, path.stem) for path in sorted((ROOT / op_type).glob("*.json"))]


OWN = [definition for op_type in registry.known() for definition in definitions(op_type)]


def variant(definition: Definition, **const: int) -> Definition:
    """The definition with other sizes of const axes."""
    changed = definition.as_json()
    for name, value in const.items():
        changed["axes"][name]["value"] = value
    return Definition.model_validate(changed)


def cases(definition: Definition, *sizes: str, seed: int = 0) -> list[Case]:
    """The cases of the sizes (small and medium unless named), the edge and the adversarial ones."""
    op = registry.get(definition.op_type).of_form(definition)
    return list(op.cases(definition, sizes=sizes or ("small", "medium"), seed=seed))


def case_named(definition: Definition, name: str) -> Case:
    """One case by its id."""
    return next(case for case in cases(definition, "small", "medium", "large") if case.id == name)


def inputs_of(definition: Definition, case: Case) -> Values:
    """The case's inputs on the CPU, drawn anew."""
    draw = Draw(definition=definition.name, case=case.id, seed=case.seed, device=CPU)
    return registry.get(definition.op_type).of_form(definition).inputs(definition, case, draw)


def tensor(values: Values, name: str) -> torch.Tensor:
    """One input that must be a tensor."""
    value = values[name]
    assert isinstance(value, torch.Tensor)
    return value


def reference(definition: Definition, values: Values) -> Outputs:
    """What the definition's own code gives."""
    outputs: Outputs = function_of(definition)(*values.values())
    return outputs


def truth(definition: Definition, values: Values) -> Tensors:
    """Oracle and baselines as the judge wants them: by output, then by what they are."""
    return registry.get(definition.op_type).of_form(definition).expected(definition, values)


def judged(definition: Definition, case: Case, outputs: Outputs, known: Tensors) -> dict[str, Ruling]:
    """The judge's ruling on each output."""
    op = registry.get(definition.op_type).of_form(definition)
    given = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    assert len(given) == len(definition.outputs)
    subject = SolvedCase(definition=definition, op=op, case=case, inputs={}, oracle=known, seed=0)
    return {name: subject.ruling(name, actual) for actual, name in zip(given, definition.outputs, strict=True)}


def failures(definition: Definition, kernel: Kernel, *sizes: str) -> dict[str, str]:
    """`case output` -> message, for every output of every case that the judge does not pass."""
    found = {}
    for case in cases(definition, *sizes):
        inputs = inputs_of(definition, case)
        known = truth(definition, inputs)
        outputs = kernel(definition, inputs)
        for name, ruling in judged(definition, case, outputs, known).items():
            if ruling.verdict != Verdict.PASS:
                found[f"{case.id} {name}"] = ruling.message
    return found


def assert_inputs_fit(subject: SolvedCase, *, again: bool = True) -> None:
    """Inputs have the schema's order, shapes and dtypes; drawn `again` they are the same; a seed matters."""
    definition, case, values = subject.definition, subject.case, subject.inputs
    assert list(values) == list(definition.inputs)
    for name, spec in definition.inputs.items():
        value = values[name]
        shape = definition.shape_of(spec, case.axes)
        if value is None:
            assert spec.optional, name
        elif shape is None:
            assert isinstance(value, str if spec.dtype == "string" else float | int), name
        else:
            assert isinstance(value, torch.Tensor)
            assert tuple(value.shape) == shape, name
            assert value.dtype == TORCH_DTYPES[spec.dtype], name
            assert value.is_contiguous(), name
            if value.dtype.is_floating_point and value.numel():
                low, high = (value if value.itemsize > 1 else value.float()).aminmax()
                assert math.isfinite(high), name
                assert math.isfinite(low) or definition.op_type in NO_KEYS, name
    if not again:
        return
    prints = _prints(values)
    assert prints == _prints(inputs_of(definition, case))
    other = Case(case.id, case.size, case.axes, case.seed + 1, case.params)
    if case.id != "edge-empty":  # where nothing is computed, nothing need be drawn
        assert prints != _prints(inputs_of(definition, other))


def _prints(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: fingerprint(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }


def reference_outputs(subject: SolvedCase) -> Tensors:
    """What the definition's own code gives, as many times as the judge wants draws."""
    run, names = function_of(subject.definition), subject.definition.outputs
    found = []
    for _ in range(max(1, subject.trials)):
        outputs = run(
            *(value.clone() if isinstance(value, torch.Tensor) else value for value in subject.inputs.values())
        )
        found.append((outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs))
    assert len(found[0]) == len(names)
    if subject.trials:
        return {name: torch.stack(values) for name, values in zip(names, zip(*found, strict=True), strict=True)}
    return dict(zip(names, found[0], strict=True))


def function_of(definition: Definition) -> Callable[..., Any]:
    """The function in a definition's reference."""
    return _loaded(definition.reference)


@cache
def _loaded(reference: str) -> Callable[..., Any]:
    module = ModuleType("reference")
    exec(compile(reference, "reference", "exec"), module.__dict__)  # noqa: S102 - our own code
    run: Callable[..., Any] = module.run
    return run
