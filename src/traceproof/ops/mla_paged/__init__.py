"""Multi-head latent attention over a paged cache."""

from traceproof.ops.record import OpType

OP = OpType(family="mla", kin="attention", staged=True)
