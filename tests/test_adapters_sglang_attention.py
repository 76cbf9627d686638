"""SGLang's attention adapters with kernels that PyTorch computes, by the contract read off SGLang's sources."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import op_support as support
import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import lookup
from traceproof.ops.adapter import Adapter
from traceproof.ops.base import Values
from traceproof.ops.families.attention import SPLITS
from traceproof.reasons import Skip
from traceproof.run.implementation import Implementation

MIN_BLOCK = 32  # the decode kernel cuts rows at multiples of it
FORMS = [name for name in planted.FORMS if name != "dsa_sparse"]

pytestmark = pytest.mark.usefixtures("one_thread")


def softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [n, heads, width] over keys [m, key heads, width], weights rounded; log-sum-exp by e."""
    ratio = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(ratio, 1) for x in (k, v))
    logits = torch.einsum("nhd,mhd->hnm", q.float(), wide_k) * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    mixed = torch.einsum("hnm,mhd->nhd", weights.to(v.dtype).float(), wide_v) / total.permute(1, 0, 2)
    return mixed, (logits.amax(-1) + torch.log(total[..., 0])).T


def decode_attention(  # noqa: PLR0913, PLR0917 - the kernel's own arguments
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    *,
    has_mla: bool,
) -> None:
    """Writes what it cut a row into, leaves the rest; a row without tokens would be 0 / 0."""
    assert max_kv_splits == attn_logits.shape[2] == SPLITS
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert attn_lse.is_contiguous()
    assert kv_indices.dtype == torch.int64  # its offsets are products with it
    assert not has_mla or (k_buffer.shape[-1], v_buffer.shape[-1]) == (576, 512)
    attn_logits.fill_(math.nan)
    for row, (start, end) in enumerate(pairwise(kv_indptr.tolist())):
        splits = int(num_kv_splits[row])
        step = math.ceil(math.ceil((end - start) / splits) / MIN_BLOCK) * MIN_BLOCK
        parts = []
        for part in range(splits):
            tokens = kv_indices[start + step * part : min(start + step * (part + 1), end)]
            if len(tokens):
                mixed, lse = softmax(q[row : row + 1], k_buffer[tokens], v_buffer[tokens], sm_scale)
                attn_logits[row, :, part], attn_lse[row, :, part] = mixed[0], lse[0]
                parts.append(part)
        weights = torch.softmax(attn_lse[row, :, parts], -1)[..., None]
        o[row] = (attn_logits[row, :, parts] * weights).sum(1) if parts else math.nan


def extend_attention(  # noqa: PLR0913, PLR0917 - the kernel's own arguments
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: None,
    is_causal: bool,  # noqa: FBT001
    mask_indptr: None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    *,
    sm_scale: float,
    lse_extend: torch.Tensor,
) -> None:
    """Queries see all of their prefix, and of the new tokens those up to their own."""
    assert custom_mask is mask_indptr is None
    assert is_causal
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert max_len_extend == qo_indptr.diff().max()
    assert len(q) == len(k) == len(v) == qo_indptr[-1]
    for (start, end), (first, last) in zip(
        pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=True
    ):
        prefix, count = kv_indices[first:last], end - start
        if count:
            keys = torch.cat([k_buffer[prefix], k[start:end]])
            values = torch.cat([v_buffer[prefix], v[start:end]])
            seen = torch.arange(count)[:, None] + len(prefix)
            hidden = torch.arange(len(keys))[None] > seen
            o[start:end], lse_extend[start:end] = softmax(q[start:end], keys, values, sm_scale, hidden)


API: dict[str, Callable[..., Any]] = {"decode_attention": decode_attention, "extend_attention": extend_attention}


def adapter_of(definition: Definition) -> Adapter:
    """SGLang's adapter for a definition."""
    found = lookup.adapter("sglang", definition)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMS)
def test_the_kernels_are_called_as_they_want_to_be(name: str) -> None:
    definition = planted.form(name)
    adapter = adapter_of(definition)
    called = "decode_attention" if "decode" in name else "extend_attention"
    assert adapter.apis == (called,)

    def run(_: Definition, inputs: Values) -> list[torch.Tensor]:
        outputs = adapter.empty(definition, inputs)
        outputs = adapter.call(API, definition, inputs) if outputs is None else outputs
        return [outputs[name] for name in definition.outputs]

    assert not support.failures(definition, run)


@pytest.mark.parametrize("case", ["small-1", "medium-0", "edge-empty-row", "edge-all-empty"])
def test_latent_attention_at_its_published_widths_says_so(case: str) -> None:
    definition = support.variant(planted.mla(prefill=False, page=16), Dc=512, Dp=64)
    planned = support.case_named(definition, case)
    told: list[bool] = []

    def listening(*arguments: Any, has_mla: bool) -> None:  # noqa: ANN401 - handed on
        told.append(has_mla)
        decode_attention(*arguments, has_mla=has_mla)

    inputs = support.inputs_of(definition, planned)
    outputs = adapter_of(definition).call({"decode_attention": listening}, definition, inputs)
    known = support.truth(definition, support.inputs_of(definition, planned))
    rulings = support.judged(definition, planned, [outputs[name] for name in definition.outputs], known)
    assert {ruling.verdict.value for ruling in rulings.values()} == {"pass"}
    assert told == [True] or (case == "edge-all-empty" and not told)


def test_queries_beyond_the_keys_see_nothing_and_are_not_handed_over() -> None:
    definition = planted.form("gqa_ragged")
    planned = support.case_named(definition, "edge-q-longer")
    inputs = support.inputs_of(definition, planned)
    handed: list[int] = []

    def counting(q: torch.Tensor, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - handed on
        handed.append(len(q))
        extend_attention(q, *arguments, **options)

    outputs = adapter_of(definition).call({"extend_attention": counting}, definition, inputs)
    unseen = outputs["lse"].isinf().all(-1)
    assert handed == [int((~unseen).sum())]
    assert 0 < handed[0] < len(unseen)
    assert not outputs["output"][unseen].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "served"),
    [
        (4, 4, False),  # its kernel rounds every product
        (32, 8, True),
        (128, 1, True),
        (24, 1, True),
        (48, 2, False),  # a tile of 16 heads would reach into the next key head's
        (64, 2, True),
    ],
)
def test_decode_is_left_to_head_counts_that_the_kernel_has_right(
    heads: int, kv_heads: int, *, served: bool
) -> None:
    definition = planted.gqa(prefill=False, page=16, heads=heads, kv_heads=kv_heads)
    assert (lookup.adapter("sglang", definition) is not None) == served
    prefill = planted.gqa(prefill=True, page=16, heads=heads, kv_heads=kv_heads)
    assert lookup.adapter("sglang", prefill) is not None


def test_a_dtype_that_the_kernel_would_round_is_a_typed_skip() -> None:
    described = planted.form("gqa_ragged").as_json()
    for name in "qkv":
        described["inputs"][name]["dtype"] = "float32"
    definition = Definition.model_validate(described)
    found = Implementation("sglang").unavailable(definition)
    assert found is not None
    assert found.reason is Skip.DTYPE_UNSUPPORTED
    assert "float32" in found.message
