"""Routing alone: the experts of each token and their weights, by a softmax over the router's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceproof.dataset.constants import Rule
from traceproof.lazy import torch
from traceproof.ops.adapter import SM80, Api, Definition, Given, Outputs, dtype_of
from traceproof.ops.base import Tensors
from traceproof.ops.compare import Exact
from traceproof.ops.formula import Form, FormulaOp, Mutant, Part, Variant, Wanted, Wide, same

if TYPE_CHECKING:
    from traceproof.draw import Draw


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Over the last axis; the largest is taken out."""
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def sum_one(weights: torch.Tensor) -> torch.Tensor:
    """The weights of each token over their sum."""
    return weights / weights.sum(-1, keepdim=True)


def renormalised(wide: Wide) -> bool:
    """Whether the weights of a token sum to 1."""
    return bool(wide.number("renormalize"))


def route(
    wide: Wide,
    *,
    score: Part = softmax,
    after: Part = same,
    sums: bool | None = None,
    first: int = 0,
    worst: bool = False,
) -> Tensors:
    """The k best of the scores, best first; their weights as they are, or of sum 1.

    Of a mutant: `after` changes the chosen ones' weights, `sums` brings them to 1 or does not, `first` is the rank
    of the first one chosen.
    """
    logits = wide["router_logits"]
    count = wide.definition.const_axes[(wide.definition.outputs["topk_ids"].shape or ("", ""))[1]]
    best, experts = score(logits).sort(dim=-1, descending=not worst, stable=True)
    best, experts = after(best[:, first : first + count]), experts[:, first : first + count]
    if renormalised(wide) if sums is None else sums:
        best = sum_one(best)
    return {"topk_weights": best, "topk_ids": experts}


def ranks(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Logits of a row at equal steps in any order, so that the k best are told apart in every precision."""
    rows, experts = wanted.shape
    order = draw.uniform(wanted.name, (rows, experts)).argsort(-1).argsort(-1).to(torch.float32)
    step = 2.0 ** -(max(experts - 1, 1).bit_length() - 3)
    spread = torch.exp2(-(torch.arange(rows, device=order.device) % 3.0))[:, None]  # unlike that of the next row
    made = (order - experts // 2) * spread * (step * float(wanted.params.get("scale", 1.0)))
    return made.to(wanted.dtype)


MOE_ROUTING = FormulaOp(
    "moe_routing",
    Form("router_logits[n e] -> topk_weights[n k] topk_ids[n k]", route, constants=("renormalize",)),
    family="routing",
    rules=(
        Rule(
            name="renormalize",
            label="renormalisation",
            assigned=("renormalize",),
            described=(
                (r"\b(?:not|without) (?:being )?renormali[sz]", 0),
                (r"(?<!not )(?<!without )\brenormali[sz]|\bsum to 1\b", 1),
            ),
            named=((r"_renorm(?:_|$)", 1), (r"^moe_routing_softmax_e\d+_k\d+$", 0)),
            config=("norm_topk_prob",),
        ),
    ),
    draws={"router_logits": ranks},
    adversarial={"near": {"scale": 0.125}, "far": {"scale": 4.0}, "huge": {"scale": 32.0}},
    gates={"topk_ids": Exact("no two experts are equally good")},
    roundings={"topk_weights": 16.0},
    variants=(
        Variant("by PyTorch", score=lambda logits: torch.softmax(logits, -1)),
        Variant("powers of two", score=lambda logits: torch.softmax(logits.double(), -1).float()),
        # The same where weights sum to 1.
        Variant("softmax over the chosen", applies=renormalised, score=same, after=softmax),
    ),
    mutants=(
        Mutant(
            "softmax over the chosen, summing to 1",
            applies=lambda wide: not renormalised(wide),
            score=same,
            after=softmax,
        ),
        Mutant("sigmoid", score=lambda logits: torch.sigmoid(logits)),
        Mutant("logits as weights", score=same),
        Mutant("weights in bfloat16", after=lambda best: best.bfloat16().float()),
        Mutant("sums not brought to 1", applies=renormalised, sums=False),
        Mutant("the worst experts", worst=True, sums=True),
        Mutant("weights in the opposite order", after=lambda best: best.flip(-1)),
        Mutant("the best expert left out", first=1, sums=True),
        Mutant("halves of the logits", score=lambda logits: softmax(logits / 2)),
    ),
)
ROUTER = "router_logits -> topk_weights topk_ids"
TOPK_SOFTMAX = "sgl_kernel:topk_softmax"
SOFTMAX, LARGEST = "torch:softmax", "torch:topk"


def plain_outputs(definition: Definition) -> bool:
    """Whether weights are float32 and experts int32."""
    outputs = definition.outputs
    return outputs["topk_ids"].dtype == "int32" and outputs["topk_weights"].dtype == "float32"


@MOE_ROUTING.truth(
    "sglang",
    "topk_softmax",
    TOPK_SOFTMAX,
    serves=ROUTER,
    accepts=plain_outputs,
    packages=("sgl_kernel",),
    sm=SM80,
)
def _sglang(api: Api, definition: Definition, inputs: Given) -> Outputs:
    logits = inputs["router_logits"]
    count = definition.const_axes[(definition.outputs["topk_ids"].shape or ("", ""))[1]]
    weights = torch.empty((len(logits), count), dtype=torch.float32, device=logits.device)
    experts = torch.empty((len(logits), count), dtype=torch.int32, device=logits.device)
    api[TOPK_SOFTMAX](weights, experts, logits, bool(definition.constants.number("renormalize")))
    return {"topk_weights": weights, "topk_ids": experts}


@MOE_ROUTING.truth("torch", "softmax", SOFTMAX, LARGEST, serves=ROUTER, rows=None)
def _pytorch(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """In float32, as kernels compute."""
    ids = definition.outputs["topk_ids"]
    count = definition.const_axes[(ids.shape or ("", ""))[1]]
    weights, experts = api[LARGEST](api[SOFTMAX](inputs["router_logits"].float(), -1), count, -1)
    if definition.constants.number("renormalize"):
        weights = weights / weights.sum(-1, keepdim=True)
    return {"topk_weights": weights.to(torch.float32), "topk_ids": experts.to(dtype_of(ids))}
