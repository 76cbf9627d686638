"""single_decode: attention of one query over all keys of its request, with window, soft cap and sinks."""

from traceproof.ops.base import Tensors
from traceproof.ops.common.single import CASES, SCALARS, SingleOp, attend
from traceproof.ops.formula import Form, Wide


def decode(wide: Wide) -> Tensors:
    """The one query as a request of one."""
    return {"output": attend(wide.changed(q=wide["q"][None]))[0]}


OP = SingleOp(
    "single_decode",
    Form("q[h d] k[l g d] v[l g e] sm_scale? logits_soft_cap? window_left? sinks[h]? -> output[h e]", decode),
    scalars=SCALARS,
    sizes={"l": (17, 1, 64, 300, 33, 1000)},
    adversarial=CASES,
    data=("q", "k"),
    apart=False,
)
