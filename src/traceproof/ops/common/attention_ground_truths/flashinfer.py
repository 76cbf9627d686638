"""FlashInfer's causal prefill over ragged keys and values; multi-head latent attention's too."""

from traceproof.ops.adapter import Adapter, Api, Definition, Module, Outputs, Values, dim, scalar, tensor
from traceproof.ops.common.attention_ground_truths import RAGGED
from traceproof.ops.common.ground_truths.flashinfer import (
    SM,
    backend,
    backend_of,
    dtype_name,
    outputs_of,
    prefill_module,
    workspace,
)


def _accepts(definition: Definition) -> bool:
    return all(dim(definition, name, axis) for name in ("q", "k", "v") for axis in (-1, -2))


def _prefill(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q, k, v = (tensor(inputs, name) for name in ("q", "k", "v"))
    wrapper = api["prefill_ragged"](workspace(q.device), "NHD", backend=backend_of(q.device))
    wrapper.plan(
        tensor(inputs, "qo_indptr"),
        tensor(inputs, "kv_indptr"),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        head_dim_vo=v.shape[2],
        causal=True,
        sm_scale=scalar(inputs, "sm_scale"),
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return outputs_of(definition, inputs, wrapper.run(q, k, v, return_lse=True))


def _modules(definition: Definition, capability: tuple[int, int]) -> tuple[Module, ...]:
    q, kv = dtype_name(definition, "q"), dtype_name(definition, "k")
    head_dims = (dim(definition, "q", -1) or 0, dim(definition, "v", -1) or 0)
    return (prefill_module(backend(capability), q, kv, dtype_name(definition, "kv_indptr"), head_dims),)


ADAPTERS = (
    Adapter(
        "BatchPrefillWithRaggedKVCacheWrapper",
        RAGGED,
        _prefill,
        ("prefill_ragged",),
        accepts=_accepts,
        modules=_modules,
        sm=SM,
    ),
)
