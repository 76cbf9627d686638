"""quantize_fp8: q = x / scale in fp8 (e4m3), scale = a block's largest magnitude / 448."""

from traceproof.ops.common.quant import FP8_MAX
from traceproof.ops.common.rounding import REASON, quantising_op
from traceproof.ops.compare import Close

OP = quantising_op("quantize_fp8", FP8_MAX, Close(rms=0.035, reason=REASON))
