"""Planted defects of tags (TP4xx)."""

from __future__ import annotations

from lint_planted import planted
from lint_samples import Sample, moe_line


@planted("TP401", "'layout:nhd': no namespace 'layout'")
def unknown_namespace(sample: Sample) -> None:
    sample.attention["tags"].append("layout:nhd")


@planted("TP401", "'stage:indexer': stage is one of decode, mtp, prefill")
def unknown_stage(sample: Sample) -> None:
    sample.moe["tags"].append("stage:indexer")


@planted("TP401", "'fast': no such flag")
def unknown_flag(sample: Sample) -> None:
    sample.moe["tags"].append("fast")


@planted("TP402", "'ep:banana': ep must be a positive whole number")
def banana(sample: Sample) -> None:
    sample.moe["tags"].append("ep:banana")


@planted("TP402", "'model:': empty namespace or value")
def empty_value(sample: Sample) -> None:
    sample.moe["tags"].append("model:")


@planted("TP402", "'ep:2' is there twice")
def repeated_tag(sample: Sample) -> None:
    sample.moe["tags"].append("ep:2")


@planted("TP403", "no stage:*")
def no_stage(sample: Sample) -> None:
    sample.attention["tags"].remove("stage:prefill")


@planted("TP403", "no quantization:*, though tensors are float8_e4m3fn")
def no_quantization(sample: Sample) -> None:
    sample.moe["tags"].remove("quantization:float8_e4m3fn")


@planted("TP403", "no tp:*, though the description says 'TP=2'")
def no_tp(sample: Sample) -> None:
    sample.attention["tags"].remove("tp:2")


@planted("TP403", "no status:*")
def no_status(sample: Sample) -> None:
    sample.attention["tags"].remove("status:draft")


@planted("TP404", "status is draft and verified")
def two_statuses(sample: Sample) -> None:
    sample.attention["tags"].append("status:verified")


@planted("TP404", "stage:decode, but the name says prefill")
def other_stage(sample: Sample) -> None:
    sample.attention["tags"][1] = "stage:decode"


@planted("TP404", "quantization:float8_e5m2, but no tensor is float8_e5m2")
def other_type(sample: Sample) -> None:
    sample.moe["tags"][3] = "quantization:float8_e5m2"


@planted("TP404", "tp:4, but the description says 'TP=2'")
def other_tp(sample: Sample) -> None:
    sample.attention["tags"][3] = "tp:4"


@planted("TP405", "'tiny-1b' (1 x) beside 'Tiny_1b' (1 x)")
def two_spellings(sample: Sample) -> None:
    sample.moe["tags"][1] = "model:Tiny_1b"


@planted("TP405", "'tiny' (1 x) beside 'tiny-1b' (1 x)")
def size_left_out(sample: Sample) -> None:
    sample.moe["tags"][1] = "model:tiny"


@planted("TP406", "2 of 3 definitions gqa_paged_prefill_causal_h#_kv#_d#_ps# have fused:*")
def drift(sample: Sample) -> None:
    sample.copy_of_attention(8)["tags"].append("fused")
    sample.copy_of_attention(2)["tags"].append("fused")


@planted("TP411", "ep:4, but num_experts = 8, num_local_experts = 4")
def other_ep(sample: Sample) -> None:
    sample.moe["tags"][2] = "ep:4"


@planted("TP411", "but no ep:2")
def no_ep(sample: Sample) -> None:
    del sample.moe["tags"][2]


@planted("TP411", "no whole number of ranks")
def broken_ep(sample: Sample) -> None:
    sample.moe["axes"]["num_experts"]["value"] = 9


@planted("TP412", "num_qo_heads times tp is [16]; 2 of tiny-1b's others say 8")
def other_total(sample: Sample) -> None:
    sample.copy_of_attention(8)
    sample.copy_of_attention(2)["tags"][3] = "tp:8"


@planted("TP413", "ep:2, but num_local_experts = 4 of qwen3-30b-a3b's 128: ep:32")
def ep_of_another_model(sample: Sample) -> None:
    sample.moe["tags"] = [tag.replace("tiny-1b", "qwen3-30b-a3b") for tag in sample.moe["tags"]]


@planted("TP413", "no ep:*, but num_local_experts = 4 of mixtral-8x7b's 8: ep:2")
def no_ep_of_a_rank_s_share(sample: Sample) -> None:
    sample.moe["axes"]["num_experts"]["value"] = 4
    sample.moe["tags"] = [tag.replace("tiny-1b", "mixtral-8x7b") for tag in sample.moe["tags"] if "ep:" not in tag]
    sample.moe_lines = [moe_line(offset=0)]


@planted("TP413", "of llama-3.1-8b's 32: tp:")
def tp_of_another_model(sample: Sample) -> None:
    sample.attention["tags"] = [tag.replace("tiny-1b", "llama-3.1-8b") for tag in sample.attention["tags"]]


@planted("TP421", "no fi_api:*, though FlashInfer has kernels for moe")
def no_api(sample: Sample) -> None:
    del sample.moe["tags"][4]


@planted("TP422", "flashinfer.prefill has no Missing")
def unknown_api(sample: Sample) -> None:
    sample.attention["tags"][4] = "fi_api:flashinfer.prefill.Missing"
