"""The gated delta rule: decode, several tokens with states between, and prefill."""

from traceproof.ops.record import OpType

OP = OpType(family="gdn", long=True, compiles_late=("flashinfer", "fla", "sglang"), staged=True)
