"""PyTorch's attention over gathered pages."""

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.common.ground_truths.attention import by_row, paged_tokens
from traceproof.ops.gqa_paged.ground_truths import EITHER


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    k, v = (tensor(inputs, name) for name in ("k_cache", "v_cache"))
    flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
    keys = ((flat_k[tokens], flat_v[tokens]) for tokens in paged_tokens(inputs, k.shape[1]))
    return by_row(api, definition, inputs, tensor(inputs, "q"), keys)


ADAPTERS = (Adapter("scaled_dot_product_attention", EITHER, _call, ("attention", "attention_kernels")),)
