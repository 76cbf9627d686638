"""Laws of gemm_bf16."""

from traceproof.ops.common.bmm_laws import PRODUCT
from traceproof.ops.common.laws import scaled, times
from traceproof.ops.laws import Law

LAWS = (
    *PRODUCT,
    Law(
        "A doubled",
        scaled("A", output=times(0.5, "C")),
        exact=True,
        holds=lambda definition: "bias" not in definition.inputs,
    ),
)
