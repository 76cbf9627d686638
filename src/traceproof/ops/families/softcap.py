"""Soft capping of logits, as in Gemma's last layer: a tanh keeps each of them within the cap."""

from __future__ import annotations

from traceproof.dataset.constants import NUMBER, STATES, Rule
from traceproof.ops.adapter import Api, Definition, Given, Outputs, dtype_of
from traceproof.ops.base import Tensors
from traceproof.ops.formula import Form, Mutant, Wide
from traceproof.ops.op import Op


def softcap(wide: Wide, *, within: float = 1.0, outside: float = 1.0, bent: bool = True) -> Tensors:
    """`cap * tanh(x / cap)` [n v]; mutants multiply the cap `within` or `outside`, or clamp (not `bent`)."""
    x, cap = wide["logits"], wide.number("cap")
    y = x / (cap * within)
    return {"output": (y.tanh() if bent else y.clamp(-1, 1)) * (cap * outside)}


SOFTCAP = Op(
    "softcap",
    Form("logits[n v] -> output[n v]", softcap, constants=("cap",)),
    Form("logits[n v] cap -> output[n v]", softcap),
    family="logits",
    rules=(
        Rule(
            name="cap",
            label="soft cap",
            assigned=("cap", "soft_cap", "softcap"),
            described=((rf"\b(?:soft )?cap\b{STATES}{NUMBER}", None),),
            named=((r"^softcap_c(\d+)_", None),),
            config=("final_logit_softcapping",),
        ),
    ),
    scalars={"cap": 30.0},
    adversarial={"bend": {"scale": 30.0}, "far": {"scale": 300.0}, "tiny": {"scale": 1e-3}},
    mutants=(
        Mutant("cap x 2", within=2.0, outside=2.0),
        Mutant("cap / 2", within=0.5, outside=0.5),
        Mutant("not divided by the cap", within=1 / 30),
        Mutant("not multiplied by the cap", outside=1 / 30),
        Mutant("cut off in place of bent", bent=False),
    ),
)
TANH = "torch:tanh"


@SOFTCAP.truth("torch", "tanh", TANH, serves="logits -> output", rows=None)
def _pytorch(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """In float32, as kernels compute."""
    cap = definition.constants.number("cap")
    return {"output": (api[TANH](inputs["logits"].float() / cap) * cap).to(dtype_of(definition.outputs["output"]))}
