"""Laws of page_append."""

from traceproof.ops.common.laws import other_inputs, scaled, times, unchanged
from traceproof.ops.laws import Experiment, Law, Subject, Tensors, permutation

TOKENS = ("append_key", "append_value", "batch_indices", "positions")


def _tokens(subject: Subject) -> Experiment | None:
    """The tokens in another order."""
    count = len(subject.tensor("positions"))
    if count < 2:
        return None
    order = permutation(subject, count)
    return other_inputs(
        subject.with_inputs(**{name: subject.tensor(name)[order] for name in TOKENS}), unchanged, unchanged
    )


def _pages(subject: Subject) -> Experiment:
    """The pages at other places, and the table says so."""
    order = permutation(subject, len(subject.tensor("k_cache")))
    table = subject.tensor("kv_indices")
    moved = {name: subject.tensor(name)[order] for name in ("k_cache", "v_cache")}
    values = subject.with_inputs(**moved, kv_indices=order.argsort()[table.long()].to(table.dtype))

    def back(outputs: Tensors) -> Tensors:
        return {name: value[order] for name, value in outputs.items()}

    return other_inputs(values, unchanged, back)


LAWS = (
    Law("tokens in another order", _tokens, exact=True),
    Law("pages permuted", _pages, exact=True),
    Law("keys doubled", scaled("append_key", "k_cache", output=times(0.5, "k_cache_out")), exact=True),
)
