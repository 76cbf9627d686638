"""quantize_int8: q = x / scale in int8, scale = a block's largest magnitude / 127."""

from traceproof.ops.common.rounding import REASON, quantising_op
from traceproof.ops.compare import Close

INT8_MAX = 127.0
OP = quantising_op("quantize_int8", INT8_MAX, Close(factor=1.1, reason=REASON))
