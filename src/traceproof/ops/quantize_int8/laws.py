"""Laws of quantize_int8."""

from traceproof.ops.common import rounding

LAWS = rounding.LAWS
