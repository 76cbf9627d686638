"""quantize_fp8: q = x / scale in fp8 (e4m3), scale = a block's largest magnitude / 448."""

from traceproof.ops.common.formula import Form, FormulaOp
from traceproof.ops.common.quant import FP8_MAX
from traceproof.ops.common.rounding import ADVERSARIAL, FORM, REASON, ROUNDINGS, quantised
from traceproof.ops.compare import Close

OP = FormulaOp(
    "quantize_fp8",
    Form(FORM, lambda wide: quantised(wide, FP8_MAX)),
    adversarial=ADVERSARIAL,
    gates={"q": Close(rms=0.035, reason=REASON), "scale": Close()},
    roundings=ROUNDINGS,
)
