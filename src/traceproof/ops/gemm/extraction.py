"""Projections in models, and their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from traceproof.ops.drafts import Draft, const, fill, tensor, var
from traceproof.ops.extraction import Choice, Extraction, Kernel, kernel

if TYPE_CHECKING:
    from traceproof.extract.formulas import Model
    from traceproof.extract.reading import Module, Reading


Facts = dict[str, Any]


def _dtype(tensor: Any) -> str:  # noqa: ANN401 - a tensor or a parameter
    return str(tensor.dtype).removeprefix("torch.")


def _linear(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    rows, *columns = module.weight.shape
    facts: Facts = {
        "dtype": _dtype(module.weight),
        "rank_n": rows,
        "rank_k": columns[-1],
        "conv": len(columns) > 1,
    }
    facts["full_n"] = getattr(module, "output_size", rows)
    facts["full_k"] = getattr(module, "input_size", columns[-1])
    if hasattr(module, "total_num_kv_heads"):
        # With more ranks than KV heads each rank holds a copy, and output_size counts the copies.
        queries = module.total_num_heads * module.head_size
        keys_values = module.total_num_kv_heads * (module.head_size + module.v_head_size)
        facts["full_n"] = queries + keys_values
    return facts


SMALL_N, SMALL_K = 192, 320  # of a projection's twin: no powers of two, so that a swapped axis shows


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
        reference=fill(__package__, "gemm", n=n, k=k),
        tp=rank,
        twin=twin,
    )


def _call(module: Module, _: Reading) -> Kernel | str:
    facts = module.facts
    if facts["conv"]:
        return "a causal convolution; the dataset has no op_type for it"
    note = ""
    if facts["dtype"].startswith("float8"):
        note = (
            f"SGLang launches it with {facts['dtype']} weights; the definition keeps the dataset's float16 form."
        )
    names = {name: facts[name] for name in ("full_n", "full_k", "rank_n", "rank_k")}
    return kernel("linear", count=module.count, path=module.path, note=note, **names)


def _formulas(model: Model) -> Iterator[Kernel]:
    """The projections of MLPs; those of attention and of routers are with their formulas."""
    for mlp in model.mlps:
        if mlp.gated:
            yield model.columns(f"{mlp.holder}gate_up_proj", 2 * mlp.width, model.hidden, mlp.count)
        else:
            yield model.columns(f"{mlp.holder}up_proj", mlp.width, model.hidden, mlp.count)
        yield model.rows(f"{mlp.holder}down_proj", model.hidden, mlp.width, mlp.count)


def _draft(call: Kernel, choice: Choice) -> Draft:
    rank = choice.per_rank
    n, k = (call["rank_n"], call["rank_k"]) if rank else (call["full_n"], call["full_k"])
    role = " and ".join(path.removeprefix("model.layers.*.") for path in call.paths)
    return gemm(n, k, role=role, note=call.note, rank=rank)


EXTRACTION = Extraction(
    readers=dict.fromkeys(("LinearBase", "Linear", "MoEGate"), ("linear", _linear)),
    calls={"linear": _call},
    formulas=_formulas,
    drafts={"linear": lambda call, choice: [_draft(call, choice)]},
)
