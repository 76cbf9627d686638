"""PyTorch's scaled dot product attention."""

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.single_decode.ground_truths import PLAIN

NAME = "torch.nn.functional:scaled_dot_product_attention"


def _attend(api: Api, _: Definition, inputs: Values) -> Outputs:
    q, k, v = (tensor(inputs, name) for name in "qkv")

    heads = (one.transpose(0, 1).unsqueeze(0) for one in (q[None], k, v))
    scale = inputs.get("sm_scale")
    found = api[NAME](*heads, scale=None if scale is None else float(scale), enable_gqa=True)
    return {"output": found.squeeze(0).transpose(0, 1).squeeze(0)}


ADAPTERS = (Adapter("functional.scaled_dot_product_attention", PLAIN, apis=(NAME,), call=_attend),)
