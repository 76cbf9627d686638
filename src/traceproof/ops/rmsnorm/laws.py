"""Laws of norms."""

from traceproof.ops.common.laws import BATCH, columns, negated, other_inputs, scaled, times
from traceproof.ops.laws import Experiment, Law, Outputs, Subject, Tensors, doubled

LARGE = 64.0  # of norm 1 data: beside its mean square no eps in use is seen in float32


def _norm_scale(subject: Subject) -> Experiment:
    """The norm of x and of 2 x, both far from eps."""
    names = [name for name in ("hidden_states", "residual") if name in subject.inputs]
    large = {name: subject.tensor(name) * LARGE for name in names}
    calls = (
        subject.with_inputs(**large),
        subject.with_inputs(**{name: doubled(value) for name, value in large.items()}),
    )

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        return dict(outputs[2]), times(2, "residual_out")(outputs[1])

    return Experiment(calls, sides)


def _exchanged(subject: Subject) -> Experiment | None:
    if "residual" not in subject.inputs:
        return None
    one, other = subject.tensor("hidden_states"), subject.tensor("residual")
    return other_inputs(subject.with_inputs(hidden_states=other, residual=one))


LAWS = (
    *BATCH,
    Law("x doubled, far from eps", _norm_scale),
    Law("weight doubled", scaled("weight", output=times(0.5, "output")), exact=True),
    Law("sign of x", negated("hidden_states", "residual"), exact=True),
    Law("columns permuted", columns),
    Law("hidden states and residual exchanged", _exchanged, exact=True),
)
