"""Planted defects of workload lines (TP5xx)."""

from __future__ import annotations

from lint_planted import planted
from lint_samples import ATTENTION, Sample, attention_line, moe_line


@planted("TP501", "not JSON")
def broken_line(sample: Sample) -> None:
    sample.moe_lines.append("{")  # type: ignore[arg-type]


@planted("TP501", "no definition is named 'orphan'")
def orphan(sample: Sample) -> None:
    sample.more["workloads/moe/orphan.jsonl"] = ""


@planted("TP502", "a-3: rows is no axis of")
def unknown_axis(sample: Sample) -> None:
    sample.attention_lines.append(attention_line("a-3", rows=3))


@planted("TP502", "page_size is 8, but const 4")
def other_const(sample: Sample) -> None:
    sample.attention_lines.append(attention_line("a-3", page_size=8))


@planted("TP502", "no size for the var axis seq_len")
def axis_missing(sample: Sample) -> None:
    sample.moe_lines[0]["workload"]["axes"] = {}


@planted("TP503", "no source for the input weights")
def input_missing(sample: Sample) -> None:
    del sample.moe_lines[0]["workload"]["inputs"]["weights"]


@planted("TP503", "bias is no input of")
def input_unknown(sample: Sample) -> None:
    sample.moe_lines[0]["workload"]["inputs"]["bias"] = {"type": "random"}


@planted("TP503", "weights is a tensor, its source is scalar")
def scalar_for_tensor(sample: Sample) -> None:
    sample.moe_lines[0]["workload"]["inputs"]["weights"] = {"type": "scalar", "value": 1.0}


@planted("TP503", "kv_indices indexes something and can not be drawn at random")
def random_index(sample: Sample) -> None:
    sample.attention_lines[0]["workload"]["inputs"]["kv_indices"] = {"type": "random"}


@planted("TP504", "local_expert_offset is 5, but only 0..4 leaves 4 of 8 experts")
def offset_out_of_range(sample: Sample) -> None:
    sample.moe_lines = [moe_line(offset=5)]


@planted("TP504", "local_expert_offset is 4.0, but declared int32")
def offset_float(sample: Sample) -> None:
    sample.moe_lines = [moe_line(offset=4.0)]


@planted("TP504", "a softmax or state scale is positive")
def scale_zero(sample: Sample) -> None:
    for entry in sample.attention_lines:
        entry["workload"]["inputs"]["sm_scale"]["value"] = 0.0


@planted("TP505", f"first used at workloads/gqa_paged/{ATTENTION}.jsonl:1")
def same_uuid(sample: Sample) -> None:
    sample.moe_lines = [moe_line("a-1")]


@planted("TP506", "m-2: the same as m-1, line 1")
def same_line(sample: Sample) -> None:
    sample.moe_lines.append(moe_line("m-2"))


@planted("TP507", "'len_indptr == batch_size + 1' is false: batch_size = 3, len_indptr = 3")
def wrong_sizes(sample: Sample) -> None:
    sample.attention_lines.append(attention_line("a-3", batch_size=3))


@planted("TP508", "total_q = 17, num_kv_indices = 4 pages of 4")
def too_many_queries(sample: Sample) -> None:
    sample.attention_lines.append(attention_line("a-3", total_q=17))


@planted("TP511", "a-3: num_kv_indices = 4, but num_pages = 0")
def no_pages(sample: Sample) -> None:
    sample.attention_lines.append(attention_line("a-3", num_pages=0))


@planted("TP509", "1 of 2 lines, for example ./blob/none.safetensors")
def blob_missing(sample: Sample) -> None:
    source = sample.attention_lines[0]["workload"]["inputs"]["kv_indices"]
    sample.attention_lines[0]["workload"]["inputs"]["kv_indices"] = source | {"path": "./blob/none.safetensors"}


@planted("TP510", "0.35355339059327373 (1 x), 0.353 (1 x); different in float32")
def scale_drifts(sample: Sample) -> None:
    sample.attention_lines[1]["workload"]["inputs"]["sm_scale"]["value"] = 0.353


@planted("TP510", "equal in float32")
def scale_rounded(sample: Sample) -> None:
    sample.attention_lines[1]["workload"]["inputs"]["sm_scale"]["value"] = 0.3535533905932738 + 1e-12
