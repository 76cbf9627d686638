"""Laws of attention of one request."""

from traceproof.ops.common.laws import other_inputs, permuted, scaled, times
from traceproof.ops.laws import Experiment, Law, Subject


def _rescaled(subject: Subject) -> Experiment:
    return other_inputs(subject.with_inputs(q=subject.tensor("q") * 2, k=subject.tensor("k") / 2))


LAWS = (
    Law("v doubled", scaled("v", output=times(0.5, "output")), exact=True),
    Law("q doubled, k halved", _rescaled, exact=True),
    Law("channels of q and k permuted", permuted({"q": -1, "k": -1})),
    Law("channels of v permuted", permuted({"v": -1}, -1)),
)
