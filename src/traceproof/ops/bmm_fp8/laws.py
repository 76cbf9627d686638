"""Laws of bmm_fp8."""

from traceproof.ops.common.bmm_laws import PRODUCT
from traceproof.ops.common.laws import scaled, times
from traceproof.ops.laws import Law

LAWS = (*PRODUCT, Law("scale of A doubled", scaled("A_scale", output=times(0.5, "C")), exact=True))
