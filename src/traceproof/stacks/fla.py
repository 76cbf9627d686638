"""Flash Linear Attention. API names are those of fla-core 0.6.0."""

from traceproof.stacks import GroundTruth, SourceOrigin, Stack

STACK = Stack(
    name="fla",
    truths=(GroundTruth(name="fla", label="FLA", calls="Flash Linear Attention's kernel", priority=30),),
    package="fla",
    distribution="fla-core",
    formerly=("flash-linear-attention",),
    apis={
        "chunk": ("fla.ops.gated_delta_rule:chunk_gated_delta_rule",),
        "recurrent": ("fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",),
    },
    origin=SourceOrigin(url="https://github.com/fla-org/flash-linear-attention.git", package="fla-core"),
    linear_attention=True,
)
