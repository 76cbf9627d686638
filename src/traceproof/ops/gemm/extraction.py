"""Projections in models, and their definitions."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Choice, Extraction, Facts, call_of, dtype_name


def _linear(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    rows, *columns = module.weight.shape
    dtype = dtype_name(module.weight)
    facts: Facts = {
        "dtype": dtype,
        "rank_n": getattr(module, "output_size_per_partition", rows),
        "rank_k": getattr(module, "input_size_per_partition", columns[-1]),  # of a packed weight, too
        "conv": len(columns) > 1,
    }
    facts["full_n"] = getattr(module, "output_size", rows)
    facts["full_k"] = getattr(module, "input_size", columns[-1])
    if dtype not in WHOLE:
        facts["scheme"] = _scheme(module, dtype)
    if hasattr(module, "total_num_kv_heads"):
        # With more ranks than KV heads each rank holds a copy, and output_size counts the copies.
        queries = module.total_num_heads * module.head_size
        keys_values = module.total_num_kv_heads * (module.head_size + module.v_head_size)
        facts["full_n"] = queries + keys_values
    return facts


WHOLE = ("bfloat16", "float16", "float32")


def _scheme(module: Any, dtype: str) -> str:  # noqa: ANN401
    """How a weight is quantised, by its dtype and the shape of its scales."""
    if "float8" not in dtype and dtype != "int8":
        return f"{dtype} packed by {type(module.quant_method).__name__}"
    block = getattr(getattr(module.quant_method, "quant_config", None), "weight_block_size", None)
    scales = getattr(module, "weight_scale", None)
    if block:
        return f"{dtype} by block {block[0]}x{block[1]}"
    each = "row" if scales is not None and scales.dim() > 1 else "tensor"
    return f"{dtype} by {each}"


SMALL_N, SMALL_K = 192, 320  # of a projection's twin: no powers of two, so that a swapped axis shows


def gemm(n: int, k: int, *, role: str, note: str = "", rank: bool = False) -> Draft:
    """C = A @ B.T in float16, as the dataset has it whatever dtype the model runs in."""
    twin = gemm(SMALL_N, SMALL_K, role=role) if n * k > SMALL_N * SMALL_K else None
    share = "one rank's share of " if rank else ""
    made = draft(__package__, "gemm", {"n": n, "k": k}, twin=twin)
    return replace(made, description=f"{made.description}: {share}{role}. {note}".strip(), tp=rank)


def _call(module: Module, _: Reading) -> Kernel | str:
    facts = module.facts
    if facts["conv"]:
        return "causal convolution: no op_type"
    note = ""
    if facts["dtype"].startswith("float8"):
        note = (
            f"SGLang launches it with {facts['dtype']} weights; the definition keeps the dataset's float16 form."
        )
    scheme = ["scheme"] if "scheme" in facts else []
    return call_of(module, "linear", "full_n", "full_k", "rank_n", "rank_k", *scheme, note=note)


def _head(module: Module, _: Reading) -> Kernel:
    """The logits projection, split by tokens of the vocabulary."""
    facts = module.facts
    n, k = facts["vocab"], facts["hidden"]
    return call_of(module, "linear", full_n=n, full_k=k, rank_n=facts.get("rank_vocab", n), rank_k=k)


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    """Transformers' weights are the whole ones; a rank has all of it, or its share of rows or of columns."""
    n, k, rank_n, rank_k = (call[name] for name in ("full_n", "full_k", "rank_n", "rank_k"))
    tp = evidence.parallel.tp
    rows = rank_k == k and n // tp <= rank_n <= n  # more than a share where ranks hold copies of KV heads
    shares = {k // tp, k // evidence.parallel.attention}
    if not rows and (rank_n != n or rank_k not in shares):
        return f"SGLang's rank has {rank_n} x {rank_k}, which is no share of {n} x {k} by {tp}"
    return evidence.projection(call, n, k)


def _drafts(call: Kernel, choice: Choice) -> Iterator[Draft | str]:
    """The dataset's form, which stands for one in float8, too; what SGLang launches then has no op_type."""
    scheme = dict(call.facts).get("scheme")
    if scheme is None or str(scheme).startswith("float8"):
        yield _draft(call, choice)
    if scheme is not None:
        yield f"projection in {scheme}: no op_type"


def _draft(call: Kernel, choice: Choice) -> Draft:
    rank = choice.per_rank
    n, k = (call["rank_n"], call["rank_k"]) if rank else (call["full_n"], call["full_k"])
    role = " and ".join(path.removeprefix("model.layers.*.") for path in call.paths)
    return gemm(n, k, role=role, note=call.note, rank=rank)


EXTRACTION = Extraction(
    readers=dict.fromkeys(("LinearBase", "Linear", "MoEGate"), ("linear", _linear)),
    calls={"linear": _call, "lm_head": _head},
    differs={"linear": _differs},
    drafts={"linear": _drafts},
)
