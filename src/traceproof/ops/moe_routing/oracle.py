"""moe_routing: softmax over the router's logits, the k best experts, best first, weights as is or of sum 1."""

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import TORCH_DTYPES, Tensors, Value
from traceproof.ops.cases import Case
from traceproof.ops.compare import Exact
from traceproof.ops.formula import Form, FormulaOp, Wide


def chosen(wide: Wide) -> Tensors:
    """Weights and experts; a reference says RENORMALIZE = 1 where the weights of a token sum to 1."""
    logits = wide["router_logits"]
    count = wide.definition.const_axes[(wide.definition.outputs["topk_ids"].shape or ("", ""))[1]]
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    weights = powers / powers.sum(-1, keepdim=True)
    best, experts = weights.sort(dim=-1, descending=True, stable=True)
    best = best[:, :count]
    if wide.number("renormalize"):
        best = best / best.sum(-1, keepdim=True)
    return {"topk_weights": best, "topk_ids": experts[:, :count]}


class MoeRouting(FormulaOp):
    """Logits of a row at equal steps in any order, so that the k best are told apart in every precision."""

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """Ranks of drawn numbers, brought to a spread."""
        rows, experts = definition.shape_of(spec, case.axes) or (0, 0)
        ranks = draw.uniform(name, (rows, experts)).argsort(-1).argsort(-1).to(torch.float32)
        step = 2.0 ** -(max(experts - 1, 1).bit_length() - 3)
        spread = torch.exp2(-(torch.arange(rows, device=ranks.device) % 3.0))[
            :, None
        ]  # unlike that of the next row
        made = (ranks - experts // 2) * spread * (step * float(case.params.get("scale", 1.0)))
        return made.to(TORCH_DTYPES[spec.dtype])


OP = MoeRouting(
    "moe_routing",
    Form("router_logits[n e] -> topk_weights[n k] topk_ids[n k]", chosen, constants=("renormalize",)),
    adversarial={"near": {"scale": 0.125}, "far": {"scale": 4.0}, "huge": {"scale": 32.0}},
    gates={"topk_ids": Exact("no two experts are equally good")},
    roundings={"topk_weights": 16.0},
)
