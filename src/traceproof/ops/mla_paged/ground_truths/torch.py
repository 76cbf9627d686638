"""PyTorch's attention in latent space: one key head of both parts side by side, values the latent part."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.common.ground_truths.attention import by_row, paged_tokens
from traceproof.ops.mla_paged.ground_truths import EITHER, unscaled


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q = torch.cat([tensor(inputs, "q_nope"), tensor(inputs, "q_pe")], -1)
    ckv, kpe = tensor(inputs, "ckv_cache"), tensor(inputs, "kpe_cache")
    values = ckv.flatten(0, 1)[:, None]
    latent = torch.cat([values, kpe.flatten(0, 1)[:, None]], -1)
    keys = ((latent[tokens], values[tokens]) for tokens in paged_tokens(inputs, ckv.shape[1]))
    return by_row(api, definition, inputs, q, keys)


ADAPTERS = (
    Adapter("scaled_dot_product_attention", EITHER, _call, ("attention", "attention_kernels"), accepts=unscaled),
)
