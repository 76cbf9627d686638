"""Laws of quantize_fp8."""

from traceproof.ops.common import rounding

LAWS = rounding.LAWS
