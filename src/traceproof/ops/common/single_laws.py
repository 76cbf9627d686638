"""Laws of attention of one request."""

from traceproof.ops.common.laws import other_inputs, scaled, times, unchanged
from traceproof.ops.laws import Experiment, Law, Subject, permutation


def _moved(subject: Subject, *names: str, back: bool = False) -> Experiment:
    """The channels of some inputs in another order; `back`: the output's come in that order, too."""
    order = permutation(subject, subject.tensor(names[0]).shape[-1])
    values = subject.with_inputs(**{name: subject.tensor(name)[..., order] for name in names})
    return other_inputs(
        values,
        unchanged,
        lambda outputs: {name: value[..., order] for name, value in outputs.items()} if back else dict(outputs),
    )


def _rescaled(subject: Subject) -> Experiment:
    return other_inputs(
        subject.with_inputs(q=subject.tensor("q") * 2, k=subject.tensor("k") / 2), unchanged, unchanged
    )


LAWS = (
    Law("v doubled", scaled("v", output=times(0.5, "output")), exact=True),
    Law("q doubled, k halved", _rescaled, exact=True),
    Law("channels of q and k permuted", lambda subject: _moved(subject, "q", "k")),
    Law("channels of v permuted", lambda subject: _moved(subject, "v", back=True)),
)
