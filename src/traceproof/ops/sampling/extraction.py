"""The sampler that follows a model, and its definitions."""

from collections.abc import Iterator

from traceproof.models.reading import Kernel, kernel
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Extraction, held_against

FILTERS = ("top_k", "top_p")


def samplers(call: Kernel) -> Iterator[Draft]:
    """Top-k, top-p, and both."""
    for names in (("top_k",), ("top_p",), ("top_k", "top_p")):
        yield sampler(names, call["vocab"])


def sampler(names: tuple[str, ...], vocab: int) -> Draft:
    """One sampler over probabilities."""
    values = {
        "vocab_size": vocab,
        "kind": "_".join(names),
        "filter": " and ".join(names),
        "order": ", top-k first" if len(names) > 1 else "",
    }
    twin = sampler(names, 4096) if vocab > 4096 else None  # drawing is what costs; the text is the same
    return draft(__package__, "sampling", values, without={*FILTERS} - {*names}, twin=twin)


EXTRACTION = Extraction(
    once=lambda reading: kernel("sampling", count=1, path="logits_processor", vocab=reading.vocab),
    differs={"sampling": held_against("embedding", lambda facts, _: {"vocab": facts["vocab"]}, counted=False)},
    drafts={"sampling": lambda call, _: samplers(call)},
)
