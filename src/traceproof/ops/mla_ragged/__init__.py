"""Multi-head latent attention over ragged keys and values."""

from traceproof.ops.record import OpType

OP = OpType(family="mla", kin="attention", staged=True)
