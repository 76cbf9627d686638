"""Laws of page_append."""

from traceproof.ops.common.laws import other_inputs, permuted, reordered, scaled, times
from traceproof.ops.laws import Experiment, Law, Subject, permutation

TOKENS = ("positions", "batch_indices", "append_key", "append_value")


def _pages(subject: Subject) -> Experiment:
    """The pages at other places, and the table says so."""
    order = permutation(subject, len(subject.tensor("k_cache")))
    table = subject.tensor("kv_indices")
    moved = {name: subject.tensor(name)[order] for name in ("k_cache", "v_cache")}
    values = subject.with_inputs(**moved, kv_indices=order.argsort()[table.long()].to(table.dtype))
    return other_inputs(values, right=reordered(order, 0))


LAWS = (
    Law("tokens in another order", permuted(dict.fromkeys(TOKENS, 0)), exact=True),
    Law("pages permuted", _pages, exact=True),
    Law("keys doubled", scaled("append_key", "k_cache", output=times(0.5, "k_cache_out")), exact=True),
)
