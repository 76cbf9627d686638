"""PyTorch's write by indices."""

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.page_append.ground_truths import APPEND

NAME = "torch:index_put"


def _append(api: Api, _: Definition, inputs: Values) -> Outputs:
    positions, size = tensor(inputs, "positions").long(), tensor(inputs, "k_cache").shape[1]
    first = tensor(inputs, "kv_indptr").long()[tensor(inputs, "batch_indices").long()]
    at = (tensor(inputs, "kv_indices").long()[first + positions // size], positions % size)
    keys = api[NAME](tensor(inputs, "k_cache"), at, tensor(inputs, "append_key"))
    return {
        "k_cache_out": keys,
        "v_cache_out": api[NAME](tensor(inputs, "v_cache"), at, tensor(inputs, "append_value")),
    }


ADAPTERS = (Adapter("index_put", APPEND, apis=(NAME,), call=_append),)
