"""SGLang's attention over pages with shared key heads: decode and causal prefill."""

from __future__ import annotations

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, dim, names, tensor
from traceproof.ops.base import Values
from traceproof.ops.common.ground_truths.attention import paged_tokens
from traceproof.ops.common.ground_truths.sglang import DTYPES, SM, decode, extend, heads_fit, wide


def _cache(inputs: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages laid end to end."""
    return tensor(inputs, "k_cache").flatten(0, 1), tensor(inputs, "v_cache").flatten(0, 1)


def _decode(api: Api, definition: Definition, inputs: Values) -> Outputs:
    rows = list(paged_tokens(inputs, tensor(inputs, "k_cache").shape[1]))
    outputs = decode(api, inputs, tensor(inputs, "q"), _cache(inputs), rows)
    return {name: outputs[name] for name in definition.outputs}


def _prefill(api: Api, definition: Definition, inputs: Values) -> Outputs:
    rows = list(paged_tokens(inputs, tensor(inputs, "k_cache").shape[1]))
    outputs = extend(api, inputs, tensor(inputs, "q"), _cache(inputs), rows)
    return {name: outputs[name] for name in definition.outputs}


def _accepts(definition: Definition) -> bool:
    return wide(definition, "q", "k_cache", "v_cache")


def _accepts_decode(definition: Definition) -> bool:
    return _accepts(definition) and heads_fit(definition, "q", dim(definition, "k_cache", -2) or 0)


COMMON = names("q k_cache v_cache kv_indptr kv_indices sm_scale")

ADAPTERS = (
    Adapter(
        name="triton_ops.decode_attention_fwd",
        inputs=COMMON,
        optional=names("kv_last_page_len"),
        outputs=names("output lse"),
        accepts=_accepts_decode,
        dtypes=DTYPES,
        apis=("decode_attention",),
        call=_decode,
        sm=SM,
        rows="q",
    ),
    Adapter(
        name="triton_ops.extend_attention_fwd",
        inputs=COMMON | names("qo_indptr"),
        optional=names("kv_last_page_len"),
        outputs=names("output lse"),
        accepts=_accepts,
        dtypes=DTYPES,
        apis=("extend_attention",),
        call=_prefill,
        sm=SM,
        rows="q",
    ),
)
