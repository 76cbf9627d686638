"""Laws of dequantize_fp8."""

from traceproof.ops.common.laws import BATCH, scaled, times
from traceproof.ops.laws import Law

LAWS = (*BATCH, Law("scales doubled", scaled("scale", output=times(0.5, "y")), exact=True))
