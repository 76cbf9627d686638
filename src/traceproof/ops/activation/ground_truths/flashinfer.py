"""FlashInfer's gated activations."""

from __future__ import annotations

from traceproof.ops.activation.forms import GELU, SILU, TANH
from traceproof.ops.activation.ground_truths import fused

PLACES = {
    SILU: "flashinfer.activation:silu_and_mul",
    GELU: "flashinfer.activation:gelu_and_mul",
    TANH: "flashinfer.activation:gelu_tanh_and_mul",
}
ADAPTERS = fused(PLACES)
