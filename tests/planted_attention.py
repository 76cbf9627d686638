"""Small attention definitions of every form."""

from __future__ import annotations

from collections.abc import Mapping

from traceproof.dataset.definition import Definition

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
BENT = ("gqa_paged_prefill_windowed", "gqa_paged_decode_sinks")
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


def bent(plain: Definition, **more: str) -> Definition:
    """A form with a window, a soft cap or sinks; these count in no log-sum-exp."""
    entry = plain.as_json()
    entry["name"] = "_".join([plain.name, *more])
    for name, dtype in more.items():
        entry["inputs"][name] = {"shape": ["Hq"] if name == "sinks" else None, "dtype": dtype}
    if "sinks" in more:
        del entry["outputs"]["lse"]
    return Definition.model_validate(entry)


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


def indexer(*, packed: int = 132, kv_heads: int = 1) -> Definition:
    inputs: Shapes = {
        "q_index_fp8": (["batch_size", "heads", "dim"], "float8_e4m3fn"),
        "k_index_cache_fp8": (["num_pages", "page_size", "kv_heads", "packed"], "int8"),
        "weights": (["batch_size", "heads"], "float32"),
        "seq_lens": (["batch_size"], "int32"),
        "block_table": (["batch_size", "max_num_pages"], "int32"),
    }
    sizes = {"heads": 8, "dim": 128, "page_size": PAGE, "kv_heads": kv_heads, "packed": packed, "topk": 64}
    return build("indexer", "dsa_paged", inputs, {"topk_indices": (["batch_size", "topk"], "int32")}, sizes)


def form(name: str) -> Definition:
    """The definition of a form in FORMS."""
    more = {"windowed": {"logits_soft_cap": "float32"}, "sinks": {"sinks": "float32"}}.get(name.rpartition("_")[2])
    if name.startswith("gqa_paged") and not name.endswith("page1"):
        plain = gqa(prefill="prefill" in name, page=PAGE)
        return plain if more is None else bent(plain, window_left="int32", **more)
    match name:
        case "gqa_paged_decode_page1":
            return gqa(prefill=False, page=1, heads=5, kv_heads=1)
        case "gqa_ragged":
            return ragged(name, heads=6, kv_heads=2)
        case "mla_ragged":
            return ragged(name, heads=3, kv_heads=3)
        case "mla_paged_decode" | "mla_paged_prefill" | "dsa_sparse":
            return sparse() if name == "dsa_sparse" else mla(prefill=name.endswith("prefill"), page=PAGE)
        case _:
            raise ValueError(name)


ALL = [*map(form, FORMS + BENT), indexer()]  # none has a reference
