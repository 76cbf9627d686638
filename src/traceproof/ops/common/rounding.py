"""Metamorphic relations of quantising rows by a scale per block."""

from traceproof.ops.common.laws import BATCH, other_inputs, times
from traceproof.ops.laws import Experiment, Law, Subject, Tensors


def _doubled(subject: Subject) -> Experiment:
    values = subject.with_inputs(x=subject.tensor("x") * 2)
    return other_inputs(values, times(0.5, "scale"))


def _opposite(subject: Subject) -> Experiment:
    values = subject.with_inputs(x=-subject.tensor("x"))

    def sides(outputs: Tensors) -> Tensors:
        return {**outputs, "q": (-outputs["q"].float()).to(outputs["q"].dtype)}

    return other_inputs(values, sides)


LAWS = (*BATCH, Law("x doubled", _doubled, exact=True), Law("sign of x", _opposite, exact=True))
