"""A clean dataset for the lint tests, and defects for each code: what must be said, and the edits that make it."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

ATTENTION = "gqa_paged_prefill_causal_h4_kv2_d8_ps4"
MOE = "moe_fp8_block_scale_renorm_topk2_e4_h256_i128"

ATTENTION_REFERENCE = """
import math
import torch


def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    total_q, num_qo_heads, head_dim = q.shape
    page_size = k_cache.shape[1]
    assert num_qo_heads == 4 and head_dim == 8
    assert total_q == qo_indptr[-1].item()
    output = torch.zeros_like(q)
    lse = torch.full((total_q, num_qo_heads), -float("inf"))
    for row in range(kv_last_page_len.shape[0]):
        pages = kv_indices[kv_indptr[row] : kv_indptr[row + 1]].long()
        length = (len(pages) - 1) * page_size + int(kv_last_page_len[row])
        keys = k_cache[pages].flatten(0, 1)[:length].float().repeat_interleave(2, dim=1)
        values = v_cache[pages].flatten(0, 1)[:length].float().repeat_interleave(2, dim=1)
        first, last = int(qo_indptr[row]), int(qo_indptr[row + 1])
        for token in range(first, last):
            seen = length - (last - token) + 1
            if seen <= 0:
                continue
            logits = torch.einsum("hd,khd->hk", q[token].float(), keys[:seen]) * sm_scale
            output[token] = torch.einsum("hk,khd->hd", logits.softmax(-1), values[:seen])
            lse[token] = logits.logsumexp(-1) / math.log(2.0)
    return output, lse
"""

MOE_REFERENCE = """
import torch

BLOCK = 128


def run(routing_logits, hidden_states, hidden_states_scale, weights, weights_scale, local_expert_offset):
    TOP_K = 2
    hidden = hidden_states.float() * hidden_states_scale.t().repeat_interleave(BLOCK, 1)
    output = torch.zeros_like(hidden)
    scores, experts = routing_logits.float().softmax(-1).topk(TOP_K)
    for local in range(weights.shape[0]):
        wide = weights_scale[local].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        share = (scores * (experts == local + local_expert_offset)).sum(-1, keepdim=True)
        output += share * (hidden @ (weights[local].float() * wide).t())
    return output.to(torch.bfloat16)
"""


def axis(size: int | None = None) -> dict[str, Any]:
    return {"type": "var"} if size is None else {"type": "const", "value": size}


def tensor(dtype: str, *shape: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def attention() -> dict[str, Any]:
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
    free = ("total_q", "num_pages", "len_indptr", "batch_size", "num_kv_indices")
    cache = ("num_pages", "page_size", "num_kv_heads", "head_dim")
    return {
        "name": ATTENTION,
        "op_type": "gqa_paged",
        "description": "Causal prefill over pages of four tokens (TP=2).",
        "tags": ["status:draft", "stage:prefill", "model:tiny-1b", "tp:2", "fi_api:flashinfer.prefill.Prefill"],
        "axes": {name: axis(size) for name, size in sizes.items()} | {name: axis() for name in free},
        "constraints": [
            "len_indptr == batch_size + 1",
            "total_q == qo_indptr[-1].item()",
            "num_kv_indices == kv_indptr[-1].item()",
        ],
        "inputs": {
            "q": tensor("bfloat16", "total_q", "num_qo_heads", "head_dim"),
            "k_cache": tensor("bfloat16", *cache),
            "v_cache": tensor("bfloat16", *cache),
            "qo_indptr": tensor("int32", "len_indptr"),
            "kv_indptr": tensor("int32", "len_indptr"),
            "kv_indices": tensor("int32", "num_kv_indices"),
            "kv_last_page_len": tensor("int32", "batch_size"),
            "sm_scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {
            "output": tensor("bfloat16", "total_q", "num_qo_heads", "head_dim"),
            "lse": tensor("float32", "total_q", "num_qo_heads"),
        },
        "reference": ATTENTION_REFERENCE,
    }


def moe() -> dict[str, Any]:
    sizes = {"num_experts": 8, "num_local_experts": 4, "hidden_size": 256, "intermediate_size": 128}
    blocks = {"num_hidden_blocks": 2, "num_intermediate_blocks": 1}
    return {
        "name": MOE,
        "op_type": "moe",
        "tags": [
            "status:verified",
            "model:tiny-1b",
            "ep:2",
            "quantization:float8_e4m3fn",
            "fi_api:flashinfer.fused_moe.block_scale_fp8_moe",
        ],
        "axes": {name: axis(size) for name, size in (sizes | blocks).items()} | {"seq_len": axis()},
        "inputs": {
            "routing_logits": tensor("float32", "seq_len", "num_experts"),
            "hidden_states": tensor("float8_e4m3fn", "seq_len", "hidden_size"),
            "hidden_states_scale": tensor("float32", "num_hidden_blocks", "seq_len"),
            "weights": tensor("float8_e4m3fn", "num_local_experts", "intermediate_size", "hidden_size"),
            "weights_scale": tensor(
                "float32", "num_local_experts", "num_intermediate_blocks", "num_hidden_blocks"
            ),
            "local_expert_offset": {"shape": None, "dtype": "int32"},
        },
        "outputs": {"output": tensor("bfloat16", "seq_len", "intermediate_size")},
        "reference": MOE_REFERENCE,
    }


def attention_line(uuid: str = "a-1", **axes: int) -> dict[str, Any]:
    blob = {"type": "safetensors", "path": "./blob/indices.safetensors"}
    sizes = {"total_q": 5, "num_pages": 9, "len_indptr": 3, "batch_size": 2, "num_kv_indices": 4} | axes
    inputs: dict[str, Any] = {name: {"type": "random"} for name in ("q", "k_cache", "v_cache")}
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"):
        inputs[name] = blob | {"tensor_key": name}
    inputs["sm_scale"] = {"type": "scalar", "value": 0.35355339059327373}
    return line(ATTENTION, uuid, sizes, inputs)


def moe_line(uuid: str = "m-1", offset: object = 4) -> dict[str, Any]:
    names = ("routing_logits", "hidden_states", "hidden_states_scale", "weights", "weights_scale")
    inputs: dict[str, Any] = {name: {"type": "random"} for name in names}
    inputs["local_expert_offset"] = {"type": "scalar", "value": offset}
    return line(MOE, uuid, {"seq_len": 7}, inputs)


def line(definition: str, uuid: str, axes: dict[str, int], inputs: dict[str, Any]) -> dict[str, Any]:
    workload = {"uuid": uuid, "axes": axes, "inputs": inputs}
    return {"definition": definition, "solution": None, "workload": workload, "evaluation": None}


class Sample:
    """A dataset that a test spoils before it is written."""

    def __init__(self) -> None:
        self.attention = attention()
        self.moe = moe()
        self.attention_lines = [attention_line(), attention_line("a-2", total_q=16)]
        self.moe_lines = [moe_line()]
        self.more: dict[str, object] = {}

    def add(self, definition: dict[str, Any]) -> None:
        path = f"definitions/{definition['op_type']}/{definition['name']}.json"
        self.more[path] = definition

    def write(self, root: Path) -> Path:
        """Write the dataset below `root`; a string is written as it is."""
        files: dict[str, object] = {
            f"definitions/gqa_paged/{ATTENTION}.json": self.attention,
            f"definitions/moe/{MOE}.json": self.moe,
            f"workloads/gqa_paged/{ATTENTION}.jsonl": "\n".join(map(_text, self.attention_lines)),
            f"workloads/moe/{MOE}.jsonl": "\n".join(map(_text, self.moe_lines)),
            "blob/indices.safetensors": "bytes",
        }
        for name, value in (files | self.more).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_text(value), encoding="utf-8")
        return root


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# Defects.
Edit = Callable[[Sample], object]


def _place(sample: Sample, path: str) -> tuple[Any, Any]:
    """What holds the last part of a path such as `moe.tags.2`, and that part."""
    first, *parts = path.split(".")
    place: Any = getattr(sample, first)
    keys = [int(part) if part.isdigit() else part for part in parts]
    for key in keys[:-1]:
        place = place[key]
    return place, keys[-1] if keys else first


def put(path: str, value: object) -> Edit:
    return lambda sample: operator.setitem(*_place(sample, path), value)


def add(path: str, value: object) -> Edit:
    def edit(sample: Sample) -> None:
        holder, key = _place(sample, path)
        (holder if "." not in path else holder[key]).append(value)

    return edit


def drop(path: str) -> Edit:
    return lambda sample: operator.delitem(*_place(sample, path))


def text(old: str, new: str, of: str = "attention") -> Edit:
    def edit(sample: Sample) -> None:
        definition = getattr(sample, of)
        assert old in definition["reference"]
        definition["reference"] = definition["reference"].replace(old, new)

    return edit


def file(path: str, value: object) -> Edit:
    return lambda sample: sample.more.update({path: value})


def another_moe(**changes: object) -> Edit:
    """One more definition like the one of experts, its reference another computation."""

    def edit(sample: Sample) -> None:
        other = copy.deepcopy(sample.moe) | changes
        other["reference"] = other["reference"].replace("BLOCK = 128", "BLOCK = 64 * 2")
        sample.add(other)

    return edit


def model(name: str, of: str) -> Edit:
    def edit(sample: Sample) -> None:
        definition = getattr(sample, of)
        definition["tags"] = [tag.replace("tiny-1b", name) for tag in definition["tags"]]

    return edit


def add_residual(sample: Sample, *, outputs: int) -> None:
    norm = copy.deepcopy(sample.moe)
    both = {"x": tensor("bfloat16", "rows", "width"), "residual": tensor("bfloat16", "rows", "width")}
    norm |= {"name": "fused_add_scale_h16", "op_type": "twice", "tags": ["status:draft", "model:tiny-1b"]}
    norm |= {"inputs": both, "axes": {"rows": axis(), "width": axis(16)}}
    norm["outputs"] = {f"y{index}": tensor("bfloat16", "rows", "width") for index in range(outputs)}
    values = ["y0", "total"][:outputs]
    norm["reference"] = "def run(x, residual):\n    total = x + residual\n    y0 = total * 2\n"
    norm["reference"] += f"    return {', '.join(values)}\n"
    sample.add(norm)


def without_axes(sample: Sample) -> None:
    bad = {key: value for key, value in sample.moe.items() if key != "axes"}
    sample.more["definitions/moe/bad.json"] = bad


def no_sizes_of_batches(sample: Sample) -> None:
    for entry in sample.attention_lines:
        del entry["workload"]["axes"]["batch_size"]


RETURN = "    return output, lse"
TAGS, MOE_TAGS = "attention.tags", "moe.tags"
CONSTRAINTS, LINES = "attention.constraints", "attention_lines"
FIRST_INPUTS, MOE_INPUTS = "attention_lines.0.workload.inputs", "moe_lines.0.workload.inputs"
BLOB = {"type": "safetensors", "path": "./blob/none.safetensors", "tensor_key": "kv_indices"}
# fmt: off
PLANTED: list[tuple[str, str, *tuple[Edit, ...]]] = [
    ("TP101", "not JSON", file("definitions/moe/bad.json", "{")),
    ("TP101", "axes: Field required", without_axes),
    ("TP102", "already taken by", lambda sample: sample.more.update({"definitions/moe/zzz.json": sample.moe})),
    ("TP103", f"name and op_type say definitions/mixture/{MOE}.json", put("moe.op_type", "mixture"),
        drop("moe_lines.0")),
    ("TP103", f"say workloads/moe/{MOE}.jsonl", file(f"workloads/old/{MOE}.jsonl", "")),
    ("TP105", "'ps16': no const axis and no constant is 16", another_moe(name=f"{MOE}_ps16")),
    ("TP201", "'num_heads' is no axis, input or output", add(CONSTRAINTS, "num_heads <= total_q")),
    ("TP202", "true by the declared shapes",
        add(CONSTRAINTS, "q.shape[0] == total_q and k_cache.shape[-1] == head_dim")),
    ("TP202", "only const axes, always true (num_kv_heads = 2, num_qo_heads = 4)",
        add(CONSTRAINTS, "num_qo_heads % num_kv_heads == 0")),
    ("TP203", "'num_qo_heads == num_kv_heads' is false for the const axes",
        add(CONSTRAINTS, "num_qo_heads == num_kv_heads")),
    ("TP204", "const axis top_k = 2 is in no shape and no constraint", put("moe.axes.top_k", axis(2))),
    ("TP205", "only k_cache, v_cache have it", put("attention.inputs.k_cache.optional", value=True),
        put("attention.inputs.v_cache.optional", value=True)),
    ("TP206", "kv_last_page_len [len_indptr] is as long as kv_indptr, which has one entry more",
        put("attention.inputs.kv_last_page_len.shape", ["len_indptr"]), drop("attention.axes.batch_size"),
        drop(f"{CONSTRAINTS}.0"), no_sizes_of_batches),
    ("TP206", "kv_indptr [batch_size] has one entry per sequence",
        put("attention.inputs.kv_indptr.shape", ["batch_size"])),
    ("TP207", "kv_last_page_len has batch_size entries, index pointers len_indptr", drop(f"{CONSTRAINTS}.0")),
    ("TP301", "run(k_cache, q,", text("run(q, k_cache,", "run(k_cache, q,")),
    ("TP301", "run takes *args", text("sm_scale):", "sm_scale, *rest):")),
    ("TP305", "return (lse, output)", text("return output, lse", "return lse, output")),
    ("TP305", "outputs: output", text("return output", "return scores, output", "moe")),
    ("TP305", "run never returns a value", text(f"{RETURN}\n", "")),
    ("TP311", "1e-06", text("logits.softmax(-1)", "(logits + 1e-6).softmax(-1)")),
    ("TP311", "GROUPS = 17", text("    output =", "    GROUPS = 17\n    output =")),
    ("TP312", "masked_fill(hidden, -float('inf')) before softmax",
        text("logits.softmax(-1)", "logits.masked_fill(hidden, -float('inf')).softmax(-1)")),
    ("TP314", "outputs of its shape: y0, not the sum", lambda sample: add_residual(sample, outputs=1)),
    ("TP401", "'layout:nhd': no namespace 'layout'", add(TAGS, "layout:nhd")),
    ("TP401", "'stage:indexer': stage is one of decode, mtp, prefill", add(MOE_TAGS, "stage:indexer")),
    ("TP401", "'fast': no such flag", add(MOE_TAGS, "fast")),
    ("TP402", "'ep:banana': ep must be a positive whole number", add(MOE_TAGS, "ep:banana")),
    ("TP402", "'model:': empty namespace or value", add(MOE_TAGS, "model:")),
    ("TP402", "'ep:2' is there twice", add(MOE_TAGS, "ep:2")),
    ("TP403", "no stage:*", drop(f"{TAGS}.1")),
    ("TP403", "no quantization:*, though tensors are float8_e4m3fn", drop(f"{MOE_TAGS}.3")),
    ("TP403", "no tp:*, though the description says 'TP=2'", drop(f"{TAGS}.3")),
    ("TP403", "no status:*", drop(f"{TAGS}.0")),
    ("TP404", "status is draft and verified", add(TAGS, "status:verified")),
    ("TP404", "stage:decode, but the name says prefill", put(f"{TAGS}.1", "stage:decode")),
    ("TP404", "quantization:float8_e5m2, but no tensor is float8_e5m2",
        put(f"{MOE_TAGS}.3", "quantization:float8_e5m2")),
    ("TP404", "tp:4, but the description says 'TP=2'", put(f"{TAGS}.3", "tp:4")),
    ("TP411", "ep:4, but num_experts = 8, num_local_experts = 4", put(f"{MOE_TAGS}.2", "ep:4")),
    ("TP411", "but no ep:2", drop(f"{MOE_TAGS}.2")),
    ("TP411", "no whole number of ranks", put("moe.axes.num_experts.value", 9)),
    ("TP413", "ep:2, but num_local_experts = 4 of qwen3-30b-a3b's 128: ep:32", model("qwen3-30b-a3b", "moe")),
    ("TP413", "no ep:*, but num_local_experts = 4 of mixtral-8x7b's 8: ep:2", put("moe.axes.num_experts.value", 4),
        drop(f"{MOE_TAGS}.2"), model("mixtral-8x7b", "moe"), put("moe_lines.0", moe_line(offset=0))),
    ("TP413", "of llama-3.1-8b's 32: tp:", model("llama-3.1-8b", "attention")),
    ("TP421", "no fi_api:*, though FlashInfer has kernels for moe", drop(f"{MOE_TAGS}.4")),
    ("TP422", "flashinfer.prefill has no Missing", put(f"{TAGS}.4", "fi_api:flashinfer.prefill.Missing")),
    ("TP501", "not JSON", add("moe_lines", "{")),
    ("TP501", "no definition is named 'orphan'", file("workloads/moe/orphan.jsonl", "")),
    ("TP502", "a-3: rows is no axis of", add(LINES, attention_line("a-3", rows=3))),
    ("TP502", "page_size is 8, but const 4", add(LINES, attention_line("a-3", page_size=8))),
    ("TP502", "no size for the var axis seq_len", put("moe_lines.0.workload.axes", {})),
    ("TP503", "no source for the input weights", drop(f"{MOE_INPUTS}.weights")),
    ("TP503", "bias is no input of", put(f"{MOE_INPUTS}.bias", {"type": "random"})),
    ("TP503", "weights is a tensor, its source is scalar",
        put(f"{MOE_INPUTS}.weights", {"type": "scalar", "value": 1.0})),
    ("TP503", "kv_indices indexes something and can not be drawn at random",
        put(f"{FIRST_INPUTS}.kv_indices", {"type": "random"})),
    ("TP505", f"first used at workloads/gqa_paged/{ATTENTION}.jsonl:1", put("moe_lines.0", moe_line("a-1"))),
    ("TP507", "'len_indptr == batch_size + 1' is false: batch_size = 3, len_indptr = 3",
        add(LINES, attention_line("a-3", batch_size=3))),
    ("TP508", "total_q = 17, num_kv_indices = 4 pages of 4", add(LINES, attention_line("a-3", total_q=17))),
    ("TP509", "1 of 2 lines, for example ./blob/none.safetensors", put(f"{FIRST_INPUTS}.kv_indices", BLOB)),
    ("TP511", "a-3: num_kv_indices = 4, but num_pages = 0", add(LINES, attention_line("a-3", num_pages=0))),
]
# fmt: on
