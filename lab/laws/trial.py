"""A definition's reference, shut in, put to its laws, case by case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from laws.check import Agreement, agree, room_for
from traceproof.dataset.definition import Definition
from traceproof.judge.gates import unit_roundoff
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.laws import Experiment, Law, Outputs
from traceproof.run.case import Subject, solve
from traceproof.run.source import CallError, Source
from traceproof.run.tensor_files import same_values
from traceproof.sandbox import Status

# Edge cases hold empty rows, adversarial ones magnitudes; a case's law costs up to four calls.
WANTED = ("small", "medium-0", "edge", "adversarial-rows", "adversarial-holes", "adversarial-boundary")

# Two samples are held against each other, which takes more draws than one against what is exact: so many, unless
# their inputs together have more elements than that.
DRAWS, ELEMENTS = 512, 1 << 21


def subjects_of(definition: Definition, seed: int) -> list[Subject]:
    """The cases that laws are tried on, each drawn and solved."""
    return [solve(definition, case, seed=seed) for case in cases_of(definition, seed)]


def cases_of(definition: Definition, seed: int) -> list[Case]:
    """The cases that laws are tried on."""
    found = (
        registry.get(definition.op_type)
        .of_form(definition)
        .cases(definition, sizes=("small", "medium"), seed=seed)
    )
    return [case for case in found if case.size in WANTED or case.id in WANTED]


def try_law(law: Law, subjects: list[Subject], source: Source) -> dict[str, Any]:
    """`holds`, `cases` that the law says something about, and for the first that breaks it the evidence.

    Where the reference itself does not run on the case's own inputs, that case is left out and named.
    """
    found: dict[str, Any] = {"law": law.name, "cases": 0, "agreement": "", "failing": [], "evidence": ""}
    for subject in subjects:
        experiment = law.design(subject)
        if experiment is None:
            continue
        try:
            original = _call(law, subject, subject.inputs, source)
        except CallError as error:  # that it fails here is the judge's finding
            if error.outcome.status is not Status.ERROR:
                raise
            found["failing"].append(f"{subject.case.id}: {error.told}")
            continue
        found["cases"] += 1
        agreement, evidence = _outcome(law, subject, experiment, original, source)
        if agreement == Agreement.NONE or (law.exact and agreement != Agreement.BITWISE):
            return found | {"agreement": str(Agreement.NONE), "evidence": f"{subject.case.id}: {evidence}"}
        if found["agreement"] != Agreement.ROUNDING:
            found["agreement"] = str(agreement)
    return found


def _call(law: Law, subject: Subject, inputs: Values, source: Source) -> Tensors:
    size = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    more = min(DRAWS, ELEMENTS // max(size, 1)) if subject.trials else 0
    trials = 1 if law.once else max(subject.trials, more)
    return source.run(subject.case, inputs, seed=subject.seed, trials=trials).outputs


def _outcome(
    law: Law, subject: Subject, experiment: Experiment, original: Tensors, source: Source
) -> tuple[Agreement, str]:
    try:
        outputs = _run(experiment, original, lambda inputs: _call(law, subject, inputs, source))
    except CallError as error:  # the law's inputs are as good as the case's own
        if error.outcome.status is not Status.ERROR:
            raise
        return Agreement.NONE, f"the reference fails on the changed inputs: {error.told}"
    left, right = experiment.sides(outputs)
    rooms = None if law.exact else _rooms(subject, experiment)
    worst, evidence = Agreement.BITWISE, ""
    for name, value in right.items():
        room = room_for(rooms, name) if rooms else None
        if law.exact and value.dtype.is_floating_point:
            agreement, text = _exactly(left[name], value)
        else:
            agreement, text = agree(subject, name, left[name], value, room)
        if agreement == Agreement.NONE:
            return agreement, f"{name}: {text}"
        if agreement == Agreement.ROUNDING:
            worst, evidence = agreement, f"{name}: {text}"
    return worst, evidence


def _exactly(left: torch.Tensor, right: torch.Tensor) -> tuple[Agreement, str]:
    if same_values(left, right):
        return Agreement.BITWISE, ""
    if left.shape != right.shape or left.dtype != right.dtype:
        return Agreement.NONE, f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
    differ = ~((left == right) | ((left != left) & (right != right)))  # noqa: PLR0124
    place = tuple(differ.nonzero()[0].tolist())
    count = f"{int(differ.sum())} of {left.numel()}"
    return Agreement.NONE, f"{count} elements differ, first at {list(place)}: {left[place]} and {right[place]}"


def _run(experiment: Experiment, original: Tensors, compute: Callable[[Values], Tensors]) -> Outputs:
    outputs = [original]
    for inputs in experiment.calls:
        outputs.append(compute(inputs(outputs) if callable(inputs) else inputs))
    return outputs


def _rooms(subject: Subject, experiment: Experiment) -> list[tuple[Tensors, Tensors]] | None:
    """Both sides as the floor has them, and as the oracle has them; None where there is no floor."""
    op, definition = subject.op, subject.definition

    def exact(inputs: Values) -> Tensors:
        return {name: value for name, value in op.oracle(definition, inputs).items() if "@" not in name}

    def low(inputs: Values) -> Tensors:
        floor = op.floor(definition, inputs)
        return floor or _bounded(definition, op.oracle(definition, inputs))

    if not op.floor(definition, subject.inputs) and not any(name.endswith("@bound") for name in subject.oracle):
        return None
    return [experiment.sides(_run(experiment, compute(subject.inputs), compute)) for compute in (low, exact)]


def _bounded(definition: Definition, oracle: Tensors) -> Tensors:
    """A matrix product off by its whole bound and a rounding."""
    found = {}
    for name, spec in definition.outputs.items():
        rounding = unit_roundoff(TORCH_DTYPES[spec.dtype])
        found[name] = oracle[name] + oracle[f"{name}@bound"] + rounding * oracle[name].abs()
    return found
