"""Laws of cascade_merge."""

import torch

from traceproof.ops.common.laws import BATCH, other_inputs, scaled
from traceproof.ops.laws import Experiment, Law, Subject

SHIFT = 2.0  # exact beside the logarithms that are drawn


def _shifted(subject: Subject) -> Experiment | None:
    """Every logarithm larger by one number, and so the merged one."""
    names = [name for name in subject.inputs if name[0] == "s"]
    if subject.inputs.get("mask") is not None or "spread" in subject.case.params or "level" in subject.case.params:
        return None
    values = subject.with_inputs(**{name: subject.tensor(name) + SHIFT for name in names})
    merged = list(subject.definition.outputs)[1]
    return other_inputs(
        values,
        lambda outputs: {name: value - SHIFT if name == merged else value for name, value in outputs.items()},
    )


def _exchanged(subject: Subject) -> Experiment | None:
    """The states of a row in another order."""
    if subject.inputs.get("mask") is not None:
        return None
    if "v_a" in subject.inputs:
        order = {"v_a": "v_b", "v_b": "v_a", "s_a": "s_b", "s_b": "s_a"}
    elif "v_other" in subject.inputs:
        order = {"v": "v_other", "v_other": "v", "s": "s_other", "s_other": "s"}
    else:
        values = subject.with_inputs(v=subject.tensor("v").flip(1), s=subject.tensor("s").flip(1))
        return other_inputs(values)
    values = subject.with_inputs(**{name: subject.tensor(other) for name, other in order.items()})
    return other_inputs(values)


def _doubled(subject: Subject) -> Experiment | None:
    names = [name for name in subject.inputs if name[0] == "v"]
    first = next(iter(subject.definition.outputs))

    def halved(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value / 2 if name == first else value for name, value in outputs.items()}

    return scaled(*names, output=halved)(subject)


LAWS = (
    *BATCH,
    Law("states exchanged", _exchanged),
    Law("values doubled", _doubled, exact=True),
    Law("logarithms shifted", _shifted),
)
