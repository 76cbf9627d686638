"""A clean dataset of our own for the lint tests, and how to write one to disk."""

from __future__ import annotations

import copy
import json
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

    def copy_of_attention(self, heads: int) -> dict[str, Any]:
        """Another definition of the same kind, added to the dataset; a different computation, so no cluster."""
        other = copy.deepcopy(attention())
        other["name"] = ATTENTION.replace("h4", f"h{heads}")
        other["axes"]["num_qo_heads"]["value"] = heads
        other["tags"][3] = f"tp:{8 // heads}"
        other["description"] = ""
        extra = "    heads = " + " + ".join(["num_qo_heads"] * heads) + "\n"
        text = other["reference"].replace("num_qo_heads == 4", f"num_qo_heads == {heads}")
        other["reference"] = text.replace("    output =", extra + "    output =")
        self.add(other)
        return other

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
