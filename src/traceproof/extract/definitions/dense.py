"""Definitions of norms, projections, rotary embeddings and samplers."""

from __future__ import annotations

from collections.abc import Iterator

from traceproof.extract.definitions.form import Draft, const, tensor, var
from traceproof.extract.kernels import Kernel
from traceproof.extract.skeletons import fill

SMALL_N, SMALL_K = 192, 320  # of a projection's twin: no powers of two, so that a swapped axis shows


def norms(kernel: Kernel) -> Iterator[Draft]:
    """The plain norm; on the residual stream also the one that adds the residual first."""
    yield norm(kernel["hidden"], kernel["eps"], variant=kernel["variant"], fused=False)
    if kernel["stream"]:
        yield norm(kernel["hidden"], kernel["eps"], variant=kernel["variant"], fused=True)


def norm(hidden: int, eps: float, *, variant: str, fused: bool) -> Draft:
    """(gemma_)(fused_add_)rmsnorm; eps stands in the reference and in the description."""
    prefix = "gemma_" if variant == "gemma" else ""
    kind = f"{prefix}fused_add_rmsnorm" if fused else f"{prefix}rmsnorm"
    rows = "batch_size hidden_size"
    inputs = {"hidden_states": tensor(rows, "bfloat16", "Rows to be normalised.")}
    if fused:
        inputs["residual"] = tensor(rows, "bfloat16", "Residual stream, added to hidden_states first.")
    factor = "Factor of each channel, stored minus one." if prefix else "Factor of each channel."
    inputs["weight"] = tensor("hidden_size", "bfloat16", factor)
    api = f"{prefix}fused_add_rmsnorm" if fused else f"{prefix}rmsnorm"
    what = "Fused add and root mean square norm" if fused else "Root mean square norm"
    form = " with the weight stored minus one (Gemma)" if prefix else ""
    return Draft(
        name=f"{kind}_h{hidden}",
        op_type="rmsnorm",
        description=f"{what}{form} over hidden_size={hidden}. Epsilon is {eps:g}.",
        axes={
            "batch_size": var("Number of rows (tokens, or tokens times heads)."),
            "hidden_size": const(hidden, "Width of a row."),
        },
        inputs=inputs,
        outputs={"output": tensor(rows, "bfloat16", "Normalised rows.")},
        reference=fill(kind, hidden_size=hidden, eps=repr(eps)),
        fi_api=f"norm.{api}",
        extra_tags=("fused",) if fused else (),
    )


def gemm(n: int, k: int, *, role: str, note: str = "", rank: bool = False) -> Draft:
    """C = A @ B.T in float16, as the dataset has it whatever dtype the model runs in."""
    twin = gemm(SMALL_N, SMALL_K, role=role) if n * k > SMALL_N * SMALL_K else None
    share = "one rank's share of " if rank else ""
    return Draft(
        name=f"gemm_n{n}_k{k}",
        op_type="gemm",
        description=f"General matrix multiply C = A @ B.T: {share}{role}. {note}".strip(),
        axes={
            "M": var("Number of tokens."),
            "N": const(n, "Output features."),
            "K": const(k, "Input features."),
        },
        inputs={
            "A": tensor("M K", "float16", "Activations."),
            "B": tensor("N K", "float16", "Weight, one row an output feature."),
        },
        outputs={"C": tensor("M N", "float16", "Product.")},
        reference=fill("gemm", n=n, k=k),
        tp=rank,
        twin=twin,
    )


def rope(kernel: Kernel) -> Draft:
    """Rotary embedding from a cache of cosines and sines."""
    head, rotary, style = kernel["head_dim"], kernel["rotary_dim"], kernel["style"]
    pairs = "channel i with channel i + rotary_dim / 2" if style == "neox" else "neighbouring channels"
    return Draft(
        name=f"rope_with_cos_sin_cache_{style}_style_d{head}_rd{rotary}",
        op_type="rope",
        description=f"Rotary embedding of q and k, rotating {pairs} of the first {rotary} of {head} channels.",
        axes={
            "num_tokens": var("Number of tokens."),
            "num_qo_heads": var("Number of query heads."),
            "num_kv_heads": var("Number of key heads."),
            "head_size": const(head, "Channels of a head."),
            "rotary_dim": const(rotary, "Channels that are rotated."),
            "max_seq_len": var("Positions in the cache."),
        },
        inputs={
            "q": tensor("num_tokens num_qo_heads head_size", "bfloat16", "Queries."),
            "k": tensor("num_tokens num_kv_heads head_size", "bfloat16", "Keys."),
            "cos_sin_cache": tensor("max_seq_len rotary_dim", "float32", "A position's cosines, then its sines."),
            "positions": tensor("num_tokens", "int64", "Position of each token."),
        },
        outputs={
            "q_out": tensor("num_tokens num_qo_heads head_size", "bfloat16", "Rotated queries."),
            "k_out": tensor("num_tokens num_kv_heads head_size", "bfloat16", "Rotated keys."),
        },
        reference=fill(f"rope_{style}", head_size=head, rotary_dim=rotary),
        fi_api="rope.apply_rope_with_cos_sin_cache_inplace",
    )


FILTERS = {
    "top_k": ("int32", "How many of the most probable tokens may be drawn, per row."),
    "top_p": ("float32", "Probability mass that may be drawn from, per row."),
}


def samplers(kernel: Kernel) -> Iterator[Draft]:
    """Top-k, top-p, and both."""
    for names in (("top_k",), ("top_p",), ("top_k", "top_p")):
        yield sampler(names, kernel["vocab"])


def sampler(names: tuple[str, ...], vocab: int) -> Draft:
    """One sampler over probabilities."""
    kind = "_".join(names)
    inputs = {"probs": tensor("batch_size vocab_size", "float32", "Probabilities, each row sums to one.")}
    inputs |= {name: tensor("batch_size", *FILTERS[name]) for name in names}
    order = ", top-k first" if len(names) > 1 else ""
    return Draft(
        name=f"{kind}_sampling_from_probs_v{vocab}",
        op_type="sampling",
        description=f"Draws a token a row after a {' and '.join(names)} filter{order}, vocab_size={vocab}.",
        axes={
            "batch_size": var("Number of sequences."),
            "vocab_size": const(vocab, "Number of tokens in the vocabulary."),
        },
        inputs=inputs,
        outputs={"samples": tensor("batch_size", "int64", "Drawn tokens.")},
        reference=fill(f"{kind}_sampling", vocab_size=vocab),
        fi_api=f"sampling.{kind}_sampling_from_probs",
        twin=sampler(names, 4096) if vocab > 4096 else None,  # drawing is what costs; the text is the same
    )
