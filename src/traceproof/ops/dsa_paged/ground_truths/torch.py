"""PyTorch's attention over the tokens that a sparse index names."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, scalar, tensor
from traceproof.ops.attention import by_sdpa
from traceproof.ops.dsa_paged.ground_truths import SPARSE


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """An index is a token of the flattened cache; a negative one is padding."""
    q = torch.cat([tensor(inputs, "q_nope"), tensor(inputs, "q_pe")], -1)
    values = tensor(inputs, "ckv_cache").flatten(0, 1)[:, None]
    latent = torch.cat([values, tensor(inputs, "kpe_cache").flatten(0, 1)[:, None]], -1)
    parts = []
    for row, indices in enumerate(tensor(inputs, "sparse_indices").long()):
        tokens = indices[indices >= 0]
        keys = (latent[tokens], values[tokens])
        parts.append(by_sdpa(api, q[row : row + 1], keys, scale=scalar(inputs, "sm_scale"), causal=False))
    outputs = dict(zip(("output", "lse"), map(torch.cat, zip(*parts, strict=True)), strict=True))
    return {name: outputs[name] for name in definition.outputs}


ADAPTERS = (Adapter("scaled_dot_product_attention", SPARSE, _call, ("attention", "attention_kernels")),)
