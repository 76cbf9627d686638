"""FlashInfer's paged attention with shared key heads: decode and causal prefill."""

from traceproof.ops.adapter import Adapter, Api, Definition, Module, Outputs, Values, scalar, tensor
from traceproof.ops.common.ground_truths.flashinfer import (
    SM,
    backend,
    backend_of,
    dtype_name,
    last_page_lengths,
    outputs_of,
    prefill_module,
    workspace,
)
from traceproof.ops.gqa_paged.ground_truths import DECODE, PREFILL

# Queries a key head that the CUDA-core decode kernel has in every version; others go through tensor cores.
CUDA_CORE_RATIOS = frozenset({1, 2, 3, 4, 8})


def _shape(definition: Definition) -> tuple[int, int, int, int]:
    """Query heads, key heads, head size, page size; a size that is no const axis gives 0."""
    const = definition.const_axes
    _, heads, head_dim = definition.inputs["q"].shape or ("", "", "")
    _, page, kv_heads, _ = definition.inputs["k_cache"].shape or ("", "", "", "")
    return const.get(heads, 0), const.get(kv_heads, 0), const.get(head_dim, 0), const.get(page, 0)


def _accepts(definition: Definition) -> bool:
    q, cache = definition.inputs["q"].shape or (), definition.inputs["k_cache"].shape or ()
    if len(q) != 3 or len(cache) != 4:
        return False
    heads, kv_heads, head_dim, page = _shape(definition)
    return bool(page) and bool(head_dim) and bool(kv_heads) and heads % kv_heads == 0


def _tensor_cores(definition: Definition) -> bool:
    heads, kv_heads, _, _ = _shape(definition)
    return heads // kv_heads not in CUDA_CORE_RATIOS


def _decode(api: Api, definition: Definition, inputs: Values) -> Outputs:
    sizes = _shape(definition)
    q, k, v = (tensor(inputs, name) for name in ("q", "k_cache", "v_cache"))
    wrapper = api["decode"](workspace(q.device), "NHD", use_tensor_cores=_tensor_cores(definition))
    wrapper.plan(
        tensor(inputs, "kv_indptr"),
        tensor(inputs, "kv_indices"),
        last_page_lengths(inputs, sizes[-1]),
        *sizes,
        pos_encoding_mode="NONE",
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        sm_scale=scalar(inputs, "sm_scale"),
    )
    return outputs_of(definition, inputs, wrapper.run(q, (k, v), return_lse=True))


def _prefill(api: Api, definition: Definition, inputs: Values) -> Outputs:
    sizes = _shape(definition)
    q, k, v = (tensor(inputs, name) for name in ("q", "k_cache", "v_cache"))
    wrapper = api["prefill_paged"](workspace(q.device), "NHD", backend=backend_of(q.device))
    wrapper.plan(
        tensor(inputs, "qo_indptr"),
        tensor(inputs, "kv_indptr"),
        tensor(inputs, "kv_indices"),
        last_page_lengths(inputs, sizes[-1]),
        *sizes,
        causal=True,
        sm_scale=scalar(inputs, "sm_scale"),
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return outputs_of(definition, inputs, wrapper.run(q, (k, v), return_lse=True))


def _dtypes(definition: Definition) -> tuple[str, str, str]:
    return dtype_name(definition, "q"), dtype_name(definition, "k_cache"), dtype_name(definition, "kv_indptr")


def _decode_modules(definition: Definition, _: tuple[int, int]) -> tuple[Module, ...]:
    q, kv, index = _dtypes(definition)
    head_dim = _shape(definition)[2]
    if _tensor_cores(definition):
        return (prefill_module("fa2", q, kv, index, (head_dim, head_dim)),)
    return (Module("gen_decode", (q, kv, q, index, head_dim, head_dim, 0, False, False)),)


def _prefill_modules(definition: Definition, capability: tuple[int, int]) -> tuple[Module, ...]:
    head_dim = _shape(definition)[2]
    return (prefill_module(backend(capability), *_dtypes(definition), (head_dim, head_dim)),)


ADAPTERS = (
    Adapter(
        "BatchDecodeWithPagedKVCacheWrapper",
        DECODE,
        _decode,
        ("decode",),
        accepts=_accepts,
        modules=_decode_modules,
        sm=SM,
    ),
    Adapter(
        "BatchPrefillWithPagedKVCacheWrapper",
        PREFILL,
        _prefill,
        ("prefill_paged",),
        accepts=_accepts,
        modules=_prefill_modules,
        sm=SM,
    ),
)
