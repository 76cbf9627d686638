"""PyTorch's attention over ragged keys and values."""

from itertools import pairwise

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.common.attention_ground_truths import RAGGED
from traceproof.ops.common.ground_truths.attention import by_row


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q, k, v = (tensor(inputs, name) for name in ("q", "k", "v"))
    bounds = tensor(inputs, "kv_indptr").tolist()
    keys = ((k[start:end], v[start:end]) for start, end in pairwise(bounds))
    return by_row(api, definition, inputs, q, keys)


ADAPTERS = (Adapter("scaled_dot_product_attention", RAGGED, _call, ("attention", "attention_kernels")),)
