"""SGLang's compiled gated activations."""

from __future__ import annotations

from traceproof.ops.activation.forms import GELU, SILU, TANH
from traceproof.ops.activation.ground_truths import fused

PLACES = {
    SILU: "sgl_kernel:silu_and_mul",
    GELU: "sgl_kernel:gelu_and_mul",
    TANH: "sgl_kernel:gelu_tanh_and_mul",
}
ADAPTERS = fused(PLACES, packages=("sgl_kernel",))
