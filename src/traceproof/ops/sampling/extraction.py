"""The sampler that follows a model, and its definitions."""

from collections.abc import Iterator

from traceproof.models.kernel import Kernel, kernel
from traceproof.ops.drafts import Draft, const, fill, tensor, var
from traceproof.ops.extraction import Extraction, held_against

FILTERS = {
    "top_k": ("int32", "How many of the most probable tokens may be drawn, per row."),
    "top_p": ("float32", "Probability mass that may be drawn from, per row."),
}


def samplers(call: Kernel) -> Iterator[Draft]:
    """Top-k, top-p, and both."""
    for names in (("top_k",), ("top_p",), ("top_k", "top_p")):
        yield sampler(names, call["vocab"])


def sampler(names: tuple[str, ...], vocab: int) -> Draft:
    """One sampler over probabilities."""
    kind = "_".join(names)
    inputs = {"probs": tensor("batch_size vocab_size", "float32", "Probabilities, each row sums to one.")}
    inputs |= {name: tensor("batch_size", *FILTERS[name]) for name in names}
    order = ", top-k first" if len(names) > 1 else ""
    return Draft(
        name=f"{kind}_sampling_from_probs_v{vocab}",
        description=f"Draws a token a row after a {' and '.join(names)} filter{order}, vocab_size={vocab}.",
        axes={
            "batch_size": var("Number of sequences."),
            "vocab_size": const(vocab, "Number of tokens in the vocabulary."),
        },
        inputs=inputs,
        outputs={"samples": tensor("batch_size", "int64", "Drawn tokens.")},
        filled=fill(__package__, f"{kind}_sampling", vocab_size=vocab),
        fi_api=f"sampling.{kind}_sampling_from_probs",
        twin=sampler(names, 4096) if vocab > 4096 else None,  # drawing is what costs; the text is the same
    )


EXTRACTION = Extraction(
    once=lambda reading: kernel("sampling", count=1, path="logits_processor", vocab=reading.vocab),
    differs={"sampling": held_against("embedding", lambda facts, _: {"vocab": facts["vocab"]}, counted=False)},
    drafts={"sampling": lambda call, _: samplers(call)},
)
