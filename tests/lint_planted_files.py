"""Planted defects of files, axes, constraints and dtypes (TP1xx, TP2xx)."""

from __future__ import annotations

import copy

from lint_planted import planted, replace
from lint_samples import MOE, Sample, axis


@planted("TP101", "not JSON")
def malformed(sample: Sample) -> None:
    sample.more["definitions/moe/bad.json"] = "{"


@planted("TP101", "axes: Field required")
def key_missing(sample: Sample) -> None:
    bad = {key: value for key, value in sample.moe.items() if key != "axes"}
    sample.more["definitions/moe/bad.json"] = bad


@planted("TP102", "already taken by")
def name_twice(sample: Sample) -> None:
    sample.more["definitions/moe/zzz.json"] = sample.moe


@planted("TP103", f"name and op_type say definitions/mixture/{MOE}.json")
def other_op_type(sample: Sample) -> None:
    sample.moe["op_type"] = "mixture"
    sample.moe_lines = []


@planted("TP103", f"say workloads/moe/{MOE}.jsonl")
def workloads_elsewhere(sample: Sample) -> None:
    sample.more[f"workloads/old/{MOE}.jsonl"] = ""


@planted("TP104", "'weights' is an input and an output")
def shared(sample: Sample) -> None:
    bad = copy.deepcopy(sample.moe) | {"name": "other"}
    bad["outputs"] = {"weights": bad["outputs"]["output"]}
    sample.more["definitions/moe/other.json"] = bad


@planted("TP105", "'ps16': no const axis and no constant is 16")
def wrong_page(sample: Sample) -> None:
    other = copy.deepcopy(sample.moe)
    other["name"] += "_ps16"
    other["reference"] = other["reference"].replace("BLOCK = 128", "BLOCK = 64 * 2")
    sample.add(other)


@planted("TP201", "'num_heads' is no axis, input or output")
def unknown_name(sample: Sample) -> None:
    sample.attention["constraints"].append("num_heads <= total_q")


@planted("TP202", "true by the declared shapes")
def tautology(sample: Sample) -> None:
    sample.attention["constraints"].append("q.shape[0] == total_q and k_cache.shape[-1] == head_dim")


@planted("TP202", "only const axes, always true (num_kv_heads = 2, num_qo_heads = 4)")
def constant(sample: Sample) -> None:
    sample.attention["constraints"].append("num_qo_heads % num_kv_heads == 0")


@planted("TP203", "'num_qo_heads == num_kv_heads' is false for the const axes")
def impossible(sample: Sample) -> None:
    sample.attention["constraints"].append("num_qo_heads == num_kv_heads")


@planted("TP204", "const axis top_k = 2 is in no shape and no constraint")
def unused(sample: Sample) -> None:
    sample.moe["axes"]["top_k"] = axis(2)


@planted("TP205", "only k_cache, v_cache have it")
def optional_only(sample: Sample) -> None:
    for name in ("k_cache", "v_cache"):
        sample.attention["inputs"][name]["optional"] = True


@planted("TP206", "kv_last_page_len [len_indptr] is as long as kv_indptr, which has one entry more")
def long_last_page(sample: Sample) -> None:
    sample.attention["inputs"]["kv_last_page_len"]["shape"] = ["len_indptr"]
    del sample.attention["axes"]["batch_size"], sample.attention["constraints"][0]
    for entry in sample.attention_lines:
        del entry["workload"]["axes"]["batch_size"]


@planted("TP206", "kv_indptr [batch_size] has one entry per sequence")
def short_pointer(sample: Sample) -> None:
    sample.attention["inputs"]["kv_indptr"]["shape"] = ["batch_size"]


@planted("TP207", "kv_last_page_len has batch_size entries, index pointers len_indptr")
def untied(sample: Sample) -> None:
    del sample.attention["constraints"][0]


@planted("TP221", "kv_indices indexes something, but is float32")
def float_index(sample: Sample) -> None:
    sample.attention["inputs"]["kv_indices"]["dtype"] = "float32"


@planted("TP221", "weights is float32, but the definition is for 4-bit weights")
def wide_fp4(sample: Sample) -> None:
    other = copy.deepcopy(sample.moe)
    other["name"] = MOE.replace("fp8", "fp4")
    other["tags"] = [
        "status:draft",
        "model:tiny-1b",
        "ep:2",
        "quantization:nvfp4",
        "fi_api:flashinfer.moe.fp4_moe",
    ]
    for name in ("hidden_states", "weights"):
        other["inputs"][name]["dtype"] = "float32"
    other["reference"] = other["reference"].replace("BLOCK = 128", "BLOCK = 64 * 2")
    sample.add(other)


@planted("TP221", "the definition is for FP8 and has no FP8 tensor")
def no_fp8(sample: Sample) -> None:
    sample.moe["tags"].remove("quantization:float8_e4m3fn")
    for name in ("hidden_states", "weights"):
        sample.moe["inputs"][name]["dtype"] = "bfloat16"


@planted("TP222", "weights is float8_e4m3fn; no input is a scale for it")
def unscaled(sample: Sample) -> None:
    sample.moe["inputs"]["wide"] = sample.moe["inputs"].pop("weights_scale")
    sample.moe["inputs"]["local_expert_offset"] = sample.moe["inputs"].pop("local_expert_offset")
    order = "routing_logits, hidden_states, hidden_states_scale, weights, wide, local_expert_offset"
    text = sample.moe["reference"].replace("weights_scale[", "wide[")
    start, end = text.index("run(") + 4, text.index("):")
    sample.moe["reference"] = (
        text[:start] + order + text[end:].replace("wide = ", "scale = ").replace("* wide)", "* scale)")
    )
    inputs = sample.moe_lines[0]["workload"]["inputs"]
    inputs["wide"] = inputs.pop("weights_scale")


@planted("TP223", "k_cache is declared bfloat16; the reference views it as int16")
def packed(sample: Sample) -> None:
    replace(sample, "keys = k_cache[pages]", "keys = k_cache.view(torch.int16)[pages]")


@planted("TP106", "read as flashinfer_trace_dump")
def dumped(sample: Sample) -> None:
    other = copy.deepcopy(sample.moe) | {"name": "dumped", "check": "def check(): ..."}
    sample.more["definitions/moe/dumped.json"] = other
