"""The precision that a solution really used, beside what its definition asks for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from traceproof.judge.precision import examine
from traceproof.run.case import Subject
from traceproof.run.records import PlannedCase
from traceproof.run.source import CallError, Source
from traceproof.solutions.properties import WIDE, chosen
from traceproof.solutions.records import PrecisionResult
from traceproof.solutions.trial import Evaluation

LARGEST = 64 << 20  # bytes that the case may need: the oracle solves it some ten times
ODD = (CallError, RuntimeError, ValueError, IndexError, KeyError)  # of inputs that nobody planned


def precision(evaluation: Evaluation, cases: Sequence[PlannedCase]) -> Iterator[PrecisionResult]:
    """What is seen of each floating-point output; nothing where there is no oracle, or no call left outputs."""
    base = chosen(cases)
    if (
        base is None
        or base.memory > LARGEST
        or evaluation.unknown is not None
        or evaluation.op.trials(evaluation.definition, base.case)
    ):
        return
    subject = evaluation.subject(base.case)
    inputs = {
        name: value
        for name, value in subject.inputs.items()
        if isinstance(value, torch.Tensor) and value.dtype in WIDE and value.numel()
    }
    with evaluation.source() as source:
        for name, spec in evaluation.definition.outputs.items():
            if "float" not in spec.dtype or not inputs:
                continue
            try:
                found = _examined(evaluation, source, subject, inputs, name)
            except ODD:
                continue
            if found is not None:
                yield found


def _examined(
    evaluation: Evaluation, source: Source, subject: Subject, inputs: Mapping[str, torch.Tensor], name: str
) -> PrecisionResult | None:
    """One output."""

    def observe(changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return evaluation.call(source, replace(subject, inputs={**subject.inputs, **changed})).outputs[name]

    def exact(changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return evaluation.op.oracle(evaluation.definition, {**subject.inputs, **changed})[name]

    summed = tuple(one for one in evaluation.op.summed(evaluation.definition) if one in inputs)
    found = examine(inputs, summed, observe, exact)
    if found is None:
        return None
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in inputs.values()})
    asked = f"{', '.join(dtypes)} in, {evaluation.definition.outputs[name].dtype} out"
    return PrecisionResult(output=name, asked=asked, seen=str(found), evidence=found.evidence)
