"""single_prefill: attention of one request over its keys, causal or not, with window, soft cap and sinks."""

from traceproof.ops.common.single import CASES, SCALARS, SingleOp, attend
from traceproof.ops.formula import Form

OP = SingleOp(
    "single_prefill",
    Form(
        "q[n h d] k[l g d] v[l g e] sm_scale? logits_soft_cap? window_left? sinks[h]? -> output[n h e]",
        lambda wide: {"output": attend(wide)},
    ),
    scalars=SCALARS,
    sizes={"l": (5, 2, 33, 64, 100, 257)},
    adversarial=CASES,
    data=("q", "k"),
    apart=False,
)
