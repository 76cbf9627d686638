"""Laws of layernorm."""

from traceproof.ops.common.laws import BATCH, columns, other_inputs, unchanged
from traceproof.ops.laws import Experiment, Law, Subject


def _opposite(subject: Subject) -> Experiment:
    """The other sign of the rows and of the bias, and so of the result."""
    values = subject.with_inputs(hidden_states=-subject.tensor("hidden_states"), bias=-subject.tensor("bias"))
    return other_inputs(values, lambda outputs: {name: -value for name, value in outputs.items()}, unchanged)


LAWS = (*BATCH, Law("columns permuted", columns), Law("sign of x and of the bias", _opposite, exact=True))
