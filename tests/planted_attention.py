"""Small attention definitions of every form, and wrong attentions to plant in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Tensors
from traceproof.ops.common.attention import Operands, Precision, Span, attention

FORMS = (
    "gqa_paged_decode",
    "gqa_paged_decode_page1",
    "gqa_paged_prefill",
    "gqa_ragged",
    "mla_ragged",
    "mla_paged_decode",
    "mla_paged_prefill",
    "dsa_sparse",
)
PAGE = 16
TOPK = 96
Shapes = dict[str, tuple[list[str] | None, str]]

STRUCTURE: Shapes = {
    "qo_indptr": (["len_indptr"], "int32"),
    "kv_indptr": (["len_indptr"], "int32"),
    "kv_indices": (["num_kv_indices"], "int32"),
    "kv_last_page_len": (["batch_size"], "int32"),
    "sm_scale": (None, "float32"),
}


def build(name: str, op_type: str, inputs: Shapes, outputs: Shapes, sizes: Mapping[str, int]) -> Definition:
    """A definition whose axes are const where `sizes` has them and var elsewhere; its reference is never run."""
    used = {axis: None for shape, _ in (*inputs.values(), *outputs.values()) for axis in shape or ()}
    axes = {axis: {"type": "const", "value": sizes[axis]} if axis in sizes else {"type": "var"} for axis in used}
    specs = [
        {key: {"shape": shape, "dtype": dtype} for key, (shape, dtype) in part.items()}
        for part in (inputs, outputs)
    ]
    return Definition.model_validate(
        {
            "name": name,
            "op_type": op_type,
            "axes": axes,
            "inputs": specs[0],
            "outputs": specs[1],
            "reference": "def run():\n    pass\n",
        }
    )


def outputs(rows: str, width: str) -> Shapes:
    return {"output": ([rows, "Hq", width], "bfloat16"), "lse": ([rows, "Hq"], "float32")}


def gqa(*, prefill: bool, page: int, heads: int = 6, kv_heads: int = 2, last: str = "batch_size") -> Definition:
    """gqa_paged with keys 32 and values 48 wide."""
    rows = "total_q" if prefill else "batch_size"
    data: Shapes = {
        "q": ([rows, "Hq", "D"], "bfloat16"),
        "k_cache": (["num_pages", "page_size", "Hkv", "D"], "bfloat16"),
        "v_cache": (["num_pages", "page_size", "Hkv", "Dv"], "bfloat16"),
    }
    structure = {**STRUCTURE, "kv_last_page_len": ([last], "int32")}
    if not prefill:
        del structure["qo_indptr"]
    if page == 1:
        del structure["kv_last_page_len"]
    sizes = {"Hq": heads, "Hkv": kv_heads, "D": 32, "Dv": 48, "page_size": page}
    return build(f"gqa_{prefill}_{page}_{heads}", "gqa_paged", data | structure, outputs(rows, "Dv"), sizes)


def mla(*, prefill: bool, page: int, heads: int = 4, ckv: int = 64, kpe: int = 16) -> Definition:
    """mla_paged."""
    rows = "total_q" if prefill else "batch_size"
    structure = dict(STRUCTURE)
    if not prefill:
        del structure["qo_indptr"]
    sizes = {"Hq": heads, "Dc": ckv, "Dp": kpe, "page_size": page}
    return build(f"mla_{prefill}", "mla_paged", absorbed(rows) | structure, outputs(rows, "Dc"), sizes)


def absorbed(rows: str) -> Shapes:
    return {
        "q_nope": ([rows, "Hq", "Dc"], "bfloat16"),
        "q_pe": ([rows, "Hq", "Dp"], "bfloat16"),
        "ckv_cache": (["num_pages", "page_size", "Dc"], "bfloat16"),
        "kpe_cache": (["num_pages", "page_size", "Dp"], "bfloat16"),
    }


def ragged(op_type: str, *, heads: int, kv_heads: int) -> Definition:
    data: Shapes = {
        "q": (["total_q", "Hq", "D"], "bfloat16"),
        "k": (["total_kv", "Hkv", "D"], "bfloat16"),
        "v": (["total_kv", "Hkv", "Dv"], "bfloat16"),
    }
    structure = {name: STRUCTURE[name] for name in ("qo_indptr", "kv_indptr", "sm_scale")}
    sizes = {"Hq": heads, "Hkv": kv_heads, "D": 48, "Dv": 32}
    return build(f"{op_type}_{heads}", op_type, data | structure, outputs("total_q", "Dv"), sizes)


def sparse() -> Definition:
    inputs = absorbed("num_tokens") | {
        "sparse_indices": (["num_tokens", "topk"], "int32"),
        "sm_scale": (None, "float32"),
    }
    sizes = {"Hq": 4, "Dc": 64, "Dp": 16, "page_size": PAGE, "topk": TOPK}
    return build("sparse", "dsa_paged", inputs, outputs("num_tokens", "Dc"), sizes)


def form(name: str) -> Definition:
    """The definition of a form in FORMS."""
    match name:
        case "gqa_paged_decode" | "gqa_paged_prefill":
            return gqa(prefill=name.endswith("prefill"), page=PAGE)
        case "gqa_paged_decode_page1":
            return gqa(prefill=False, page=1, heads=5, kv_heads=1)
        case "gqa_ragged":
            return ragged(name, heads=6, kv_heads=2)
        case "mla_ragged":
            return ragged(name, heads=3, kv_heads=3)
        case "mla_paged_decode" | "mla_paged_prefill":
            return mla(prefill=name.endswith("prefill"), page=PAGE)
        case "dsa_sparse":
            return sparse()
        case _:
            raise ValueError(name)


Rows = Callable[[torch.Tensor, int, Span], torch.Tensor]
Actor = Callable[[Operands], Tensors]


def low(operands: Operands) -> Tensors:
    """A right attention at the kernel's precision."""
    return attention(operands, Precision(torch.float32, operands.q.dtype))


def seeing(change: Rows) -> Actor:
    """An attention where a query sees `change(rows of its sequence, how many it should see, its own span)`."""

    def actor(operands: Operands) -> Tensors:
        spans = []
        for span in operands.spans:
            for query in range(span.start, span.stop):
                hidden = span.stop - 1 - query if span.causal else 0
                visible = max(0, len(span.rows) - hidden)
                own = Span(query, query + 1, change(span.rows, visible, span), causal=False)
                spans.append(own)
        return low(replace(operands, spans=tuple(spans)))

    return actor


def after(change: Callable[[Tensors], Tensors]) -> Actor:
    return lambda operands: change(low(operands))


def before(change: Callable[[Operands], Operands]) -> Actor:
    return lambda operands: low(change(operands))


def without(rows: torch.Tensor, place: int) -> torch.Tensor:
    return torch.cat([rows[:place], rows[place + 1 :]])


def twice(rows: torch.Tensor, place: int) -> torch.Tensor:
    return torch.cat([rows, rows[place : place + 1]])


def rest_of_page(rows: torch.Tensor, visible: int, span: Span) -> torch.Tensor:
    """The visible rows and what else lies in the sequence's last page."""
    del span
    if visible < len(rows) or not visible:
        return rows[:visible]
    return torch.cat([rows, rows[-1] + 1 + torch.arange(-len(rows) % PAGE)])


def dead_head(results: Tensors) -> Tensors:
    results["output"][:, 1] = 0
    return results


def striped(operands: Operands) -> Operands:
    """Head h reads key head h % Hkv instead of h // ratio."""
    order = torch.arange(operands.q.shape[1]) % operands.k.shape[1]
    return replace(operands, k=operands.k[:, order], v=operands.v[:, order])


def no_maximum(operands: Operands) -> Tensors:
    """Softmax without subtracting the row's maximum, in float32; no mask, so for decode only."""
    results = low(operands)
    for span in operands.spans:
        keys, values = operands.k[span.rows].float(), operands.v[span.rows].float()
        ratio = operands.q.shape[1] // keys.shape[1]
        for query in range(span.start, span.stop):
            wide = operands.q[query].float()
            weights = torch.exp(
                torch.einsum("hd,khd->hk", wide, keys.repeat_interleave(ratio, 1)) * operands.scale
            )
            mixed = torch.einsum("hk,khd->hd", weights, values.repeat_interleave(ratio, 1))
            results["output"][query] = mixed / weights.sum(-1, keepdim=True)
            results["lse"][query] = torch.log2(weights.sum(-1))
    return results


BUGS: dict[str, Actor] = {
    "last token masked": seeing(lambda rows, visible, _: rows[: max(0, visible - 1)]),
    "first token dropped": seeing(lambda rows, visible, _: rows[min(1, visible) : visible]),
    "a token dropped": seeing(lambda rows, visible, _: without(rows[:visible], visible // 3)),
    "a token taken twice": seeing(lambda rows, visible, _: twice(rows[:visible], visible // 3)),
    "last token taken twice": seeing(lambda rows, visible, _: twice(rows[:visible], max(0, visible - 1))),
    "a tile of 32 skipped": seeing(
        lambda rows, visible, _: rows[:visible] if visible < 64 else torch.cat([rows[:32], rows[64:visible]])
    ),
    "uniform softmax": before(lambda operands: replace(operands, q=operands.q * 0)),
    "scale 2 % off": before(lambda operands: replace(operands, scale=operands.scale * 1.02)),
    "natural logarithm": after(lambda results: results | {"lse": results["lse"] * math.log(2.0)}),
    "lse rounded to bfloat16": after(lambda results: results | {"lse": results["lse"].bfloat16().float()}),
    "a dead head": after(dead_head),
    "zeros": after(lambda results: results | {"output": results["output"] * 0}),
    "sums in bfloat16": lambda operands: attention(operands, Precision(torch.bfloat16, torch.bfloat16)),
    "weights in fp8": lambda operands: attention(operands, Precision(torch.float32, torch.float8_e4m3fn)),
}
CAUSAL_BUGS: dict[str, Actor] = {
    "next token seen": seeing(lambda rows, visible, _: rows[: visible + 1]),
    "no mask": seeing(lambda rows, _, __: rows),
    "mask aligned to the start": seeing(
        lambda rows, visible, span: rows[: max(0, visible - len(rows) + span.stop - span.start)]
    ),
}
PAGED_BUGS: dict[str, Actor] = {
    "page table ignored": seeing(lambda rows, visible, _: torch.arange(len(rows))[:visible]),
    "last page ignored": seeing(lambda rows, visible, _: rows[: min(visible, (len(rows) - 1) // PAGE * PAGE)]),
    "last page read whole": seeing(rest_of_page),
}
GROUPED_BUGS: dict[str, Actor] = {
    "wrong head map": before(striped),
    "values of the next head": before(lambda operands: replace(operands, v=operands.v.roll(1, 1))),
}
