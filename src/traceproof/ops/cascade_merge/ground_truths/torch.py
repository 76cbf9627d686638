"""PyTorch's softmax over the states, in float32 as kernels compute: NaN, here 0, where all states are empty."""

import math
from dataclasses import replace

import torch

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.cascade_merge.ground_truths import MANY, PAIR

SOFTMAX, SUM = "torch:softmax", "torch:logsumexp"


def _states(inputs: Values) -> tuple[torch.Tensor, torch.Tensor]:
    if "v" in inputs:
        return tensor(inputs, "v").float(), tensor(inputs, "s")
    pairs = [(tensor(inputs, f"v_{name}").float(), tensor(inputs, f"s_{name}")) for name in "ab"]
    return torch.stack([v for v, _ in pairs], 1), torch.stack([s for _, s in pairs], 1)


def _merged(api: Api, definition: Definition, inputs: Values) -> Outputs:
    v, s = _states(inputs)
    scaled = s * math.log(2.0)
    merged = (v * api[SOFTMAX](scaled, 1).nan_to_num(0.0).unsqueeze(-1)).sum(1)
    level = api[SUM](scaled, 1) / math.log(2.0)
    return {"v_merged": merged.to(TORCH_DTYPES[definition.outputs["v_merged"].dtype]), "s_merged": level}


PAIRED = Adapter("softmax", replace(PAIR, rows=None), _merged, (SOFTMAX, SUM))
ADAPTERS = (PAIRED, replace(PAIRED, signature=replace(MANY, rows=None)))
