"""Root mean square norm, plain or after adding a residual."""

from traceproof.ops.record import OpType

OP = OpType(family="rmsnorm", long=True)
