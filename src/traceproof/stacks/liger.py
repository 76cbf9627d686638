"""Liger-Kernel: Triton kernels for training; their forward parts are ground truths. API names are of 0.8.5."""

from traceproof.stacks import GroundTruth, SourceOrigin, Stack

STACK = Stack(
    name="liger",
    truths=(GroundTruth(name="liger", label="Liger-Kernel", calls="Liger-Kernel's kernel", priority=60),),
    package="liger_kernel",
    distribution="liger-kernel",
    apis={
        "rms_norm": ("liger_kernel.ops.rms_norm:rms_norm_forward",),
        "fused_add_rms_norm": ("liger_kernel.ops.fused_add_rms_norm:fused_add_rms_norm_forward",),
        "layer_norm": ("liger_kernel.ops.layer_norm:layer_norm_forward",),
        "rope": ("liger_kernel.ops.rope:rope_forward",),
    },
    triton=True,
    origin=SourceOrigin(
        url="https://github.com/linkedin/Liger-Kernel.git",
        package="liger-kernel",
        folders=("src", "test"),
        place="src",
    ),
)
