"""FlashInfer's append, which writes to the caches."""

from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Outputs, Values, dim, tensor
from traceproof.ops.page_append.ground_truths import APPEND

NAME = "flashinfer.page:append_paged_kv_cache"
TABLES = ("kv_indices", "kv_indptr", "kv_last_page_len")
HEAD_DIMS = (64, 128, 256, 512)  # it is compiled for


def _accepts(definition: Definition) -> bool:
    return "kv_last_page_len" in definition.inputs and dim(definition, "append_key", -1) in HEAD_DIMS


def _append(api: Api, _: Definition, inputs: Values) -> Outputs:
    keys, values = tensor(inputs, "k_cache").clone(), tensor(inputs, "v_cache").clone()
    new = [tensor(inputs, name) for name in ("append_key", "append_value", "batch_indices", "positions")]
    if len(new[0]):
        api[NAME](*new, (keys, values), *(tensor(inputs, name) for name in TABLES))
    return {"k_cache_out": keys, "v_cache_out": values}


ADAPTERS = (Adapter("page.append_paged_kv_cache", APPEND, _append, (NAME,), accepts=_accepts, sm=SM75),)
