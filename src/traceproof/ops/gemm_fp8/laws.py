"""Laws of gemm_fp8."""

from traceproof.ops.common.laws import BATCH, scaled, times
from traceproof.ops.laws import Law

LAWS = (
    *BATCH,
    Law("scales of a doubled", scaled("a_scale", output=times(0.5, "out")), exact=True),
    Law("scales of b doubled", scaled("b_scale", output=times(0.5, "out")), exact=True),
)
