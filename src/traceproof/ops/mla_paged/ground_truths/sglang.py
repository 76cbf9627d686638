"""SGLang's absorbed multi-head latent attention over pages: decode and causal prefill.

One key head: keys are the latent and the rotated part side by side, as SGLang caches them, values the latent part.
"""

from __future__ import annotations

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, names, tensor
from traceproof.ops.base import Values
from traceproof.ops.common.ground_truths.attention import paged_tokens
from traceproof.ops.common.ground_truths.sglang import DTYPES, SM, decode, extend, heads_fit, wide


def _query(inputs: Values) -> torch.Tensor:
    return torch.cat([tensor(inputs, "q_nope"), tensor(inputs, "q_pe")], -1)


def _cache(inputs: Values) -> tuple[torch.Tensor, torch.Tensor]:
    latent = tensor(inputs, "ckv_cache")
    keys = torch.cat([latent, tensor(inputs, "kpe_cache")], -1).flatten(0, 1)[:, None]
    return keys, keys[..., : latent.shape[-1]]


def _decode(api: Api, definition: Definition, inputs: Values) -> Outputs:
    rows = list(paged_tokens(inputs, tensor(inputs, "ckv_cache").shape[1]))
    outputs = decode(api, inputs, _query(inputs), _cache(inputs), rows)
    return {name: outputs[name] for name in definition.outputs}


def _prefill(api: Api, definition: Definition, inputs: Values) -> Outputs:
    rows = list(paged_tokens(inputs, tensor(inputs, "ckv_cache").shape[1]))
    outputs = extend(api, inputs, _query(inputs), _cache(inputs), rows)
    return {name: outputs[name] for name in definition.outputs}


def _accepts(definition: Definition) -> bool:
    return wide(definition, "ckv_cache", "kpe_cache")


def _accepts_decode(definition: Definition) -> bool:
    return _accepts(definition) and heads_fit(definition, "q_nope", 1)


COMMON = names("q_nope q_pe ckv_cache kpe_cache kv_indptr kv_indices sm_scale")

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
        rows="q_nope",
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
        rows="q_nope",
    ),
)
