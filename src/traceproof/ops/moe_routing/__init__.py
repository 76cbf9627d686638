"""The experts of each token: softmax over router logits, the best of them, their weights."""

from traceproof.ops.record import OpType

OP = OpType(family="routing")
