"""PyTorch: its operators as ground truths, and the main stack: planning, references, oracles, judging."""

from traceproof.stacks import GroundTruth, Stack

STACK = Stack(
    name="torch",
    truths=(GroundTruth(name="torch", label="PyTorch", calls="PyTorch's own operator", priority=40),),
    package="torch",
    distribution="torch",
    versions=("numpy", "nvidia-cublas", "nvidia-cudnn-cu13", "pydantic", "safetensors", "triton"),
    apis={
        "linear": ("torch.nn.functional:linear",),
        "rms_norm": ("torch.nn.functional:rms_norm",),
        "attention": ("torch.nn.functional:scaled_dot_product_attention",),
        "attention_kernels": ("torch.nn.attention:sdpa_kernel",),
    },
    main=True,
    cpu="cpu",
    gb={"cpu": 1.0},
    caches={"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"},
    variables=("TRITON_",),
)
