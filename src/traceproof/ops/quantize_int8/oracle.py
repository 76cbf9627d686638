"""quantize_int8: q = x / scale in int8, scale = a block's largest magnitude / 127."""

from traceproof.ops.common.formula import Form, FormulaOp
from traceproof.ops.common.rounding import ADVERSARIAL, FORM, REASON, ROUNDINGS, quantised
from traceproof.ops.compare import Close

INT8_MAX = 127.0
OP = FormulaOp(
    "quantize_int8",
    Form(FORM, lambda wide: quantised(wide, INT8_MAX)),
    adversarial=ADVERSARIAL,
    gates={"q": Close(factor=1.1, reason=REASON), "scale": Close()},
    roundings=ROUNDINGS,
)
