"""Planted defects of references (TP3xx)."""

from __future__ import annotations

import copy

from lint_planted import planted, replace
from lint_samples import ATTENTION, Sample, axis, tensor


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


@planted("TP301", "run(k_cache, q,")
def swapped_parameters(sample: Sample) -> None:
    replace(sample, "run(q, k_cache,", "run(k_cache, q,")


@planted("TP301", "run takes *args")
def any_parameters(sample: Sample) -> None:
    replace(sample, "sm_scale):", "sm_scale, *rest):")


@planted("TP302", "sm_scale: it is never read")
def unread(sample: Sample) -> None:
    replace(sample, " * sm_scale", "")


@planted("TP302", "v_cache: only its shape or dtype is read")
def only_shape(sample: Sample) -> None:
    replace(sample, "values = v_cache[pages]", "values = k_cache[pages][..., : v_cache.shape[-1]]")


@planted("TP303", "k_cache.zero_()")
def zeroed(sample: Sample) -> None:
    replace(sample, "    return output, lse", "    k_cache.zero_()\n    return output, lse")


@planted("TP303", "page[0] = 0.0")
def written_through_a_view(sample: Sample) -> None:
    replace(
        sample, "    return output, lse", "    page = k_cache.view(-1)\n    page[0] = 0.0\n    return output, lse"
    )


@planted("TP304", "lse holds the values of the input v_cache, unchanged")
def copied(sample: Sample) -> None:
    replace(sample, "    return output, lse", "    same = v_cache.clone().float()\n    return output, same")


@planted("TP305", "return (lse, output)")
def swapped_outputs(sample: Sample) -> None:
    replace(sample, "return output, lse", "return lse, output")


@planted("TP305", "outputs: output")
def two_for_one(sample: Sample) -> None:
    sample.moe["reference"] = sample.moe["reference"].replace("return output", "return scores, output")


@planted("TP305", "run never returns a value")
def no_return(sample: Sample) -> None:
    replace(sample, "    return output, lse\n", "")


@planted("TP306", "asserts num_qo_heads == 32, but num_qo_heads = 4")
def other_heads(sample: Sample) -> None:
    replace(sample, "num_qo_heads == 4", "num_qo_heads == 32")


@planted("TP306", "asserts total_q == 7, but total_q is a var axis")
def fixed_length(sample: Sample) -> None:
    replace(sample, "num_qo_heads == 4", "total_q == 7")


@planted("TP306", "q has the 3 axes")
def other_rank(sample: Sample) -> None:
    replace(sample, "total_q, num_qo_heads, head_dim = q.shape", "total_q, num_qo_heads, head_dim, _ = q.shape")


@planted("TP311", "1e-06")
def hidden_eps(sample: Sample) -> None:
    replace(sample, "logits.softmax(-1)", "(logits + 1e-6).softmax(-1)")


@planted("TP311", "GROUPS = 17")
def hidden_groups(sample: Sample) -> None:
    replace(sample, "    output =", "    GROUPS = 17\n    output =")


@planted("TP312", "masked_fill(hidden, -float('inf')) before softmax")
def nan_row(sample: Sample) -> None:
    replace(sample, "logits.softmax(-1)", "logits.masked_fill(hidden, -float('inf')).softmax(-1)")


@planted("TP313", f"2 definitions: {ATTENTION}, {ATTENTION.replace('h4', 'h8')}")
def same_code(sample: Sample) -> None:
    other = sample.copy_of_attention(8)
    text = sample.attention["reference"].replace("num_qo_heads == 4", "num_qo_heads == 8")
    other["reference"] = text.replace("def run", "# a comment\ndef run")


@planted("TP314", "outputs of its shape: y0, not the sum")
def lost_sum(sample: Sample) -> None:
    add_residual(sample, outputs=1)
