"""FlashInfer's absorbed multi-head latent attention over pages: decode and causal prefill."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Module, Outputs, Values, dim, scalar, tensor
from traceproof.ops.common.ground_truths.flashinfer import (
    SM,
    backend,
    backend_of,
    dtype_name,
    last_page_lengths,
    outputs_of,
    workspace,
)
from traceproof.ops.mla_paged.ground_truths import EITHER, unscaled


def _accepts(definition: Definition) -> bool:
    return bool(dim(definition, "ckv_cache", 1)) and bool(dim(definition, "ckv_cache", 2)) and unscaled(definition)


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q_nope, q_pe, ckv, kpe = (tensor(inputs, name) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache"))
    kv_indptr = tensor(inputs, "kv_indptr")
    page = ckv.shape[1]
    pages = kv_indptr[1:] - kv_indptr[:-1]
    lengths = torch.clamp(pages - 1, min=0) * page + last_page_lengths(inputs, page)
    causal = "qo_indptr" in inputs
    decode = torch.arange(len(pages) + 1, dtype=torch.int32, device=q_nope.device)
    wrapper = api["mla"](workspace(q_nope.device), backend=backend_of(q_nope.device))
    wrapper.plan(
        tensor(inputs, "qo_indptr") if causal else decode,
        kv_indptr,
        tensor(inputs, "kv_indices"),
        lengths.to(torch.int32),
        q_nope.shape[1],
        q_nope.shape[2],
        q_pe.shape[2],
        page,
        causal,
        scalar(inputs, "sm_scale"),
        q_nope.dtype,
        ckv.dtype,
    )
    return outputs_of(definition, inputs, wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True))


def _modules(definition: Definition, capability: tuple[int, int]) -> tuple[Module, ...]:
    q, kv = dtype_name(definition, "q_nope"), dtype_name(definition, "ckv_cache")
    index = dtype_name(definition, "kv_indptr")
    widths = (dim(definition, "ckv_cache", 2), dim(definition, "kpe_cache", 2))
    return (Module("gen_mla", (backend(capability), q, kv, q, index, *widths, False)),)


ADAPTERS = (
    Adapter("BatchMLAPagedAttentionWrapper", EITHER, _call, ("mla",), accepts=_accepts, modules=_modules, sm=SM),
)
