"""PyTorch's operators."""

from __future__ import annotations

from types import MappingProxyType

from traceproof.adapters.base import Stack

STACK = Stack(
    name="torch",
    package="torch",
    distribution="torch",
    apis=MappingProxyType(
        {
            "linear": ("torch.nn.functional:linear",),
            "rms_norm": ("torch.nn.functional:rms_norm",),
            "attention": ("torch.nn.functional:scaled_dot_product_attention",),
            "attention_kernels": ("torch.nn.attention:sdpa_kernel",),
        }
    ),
)
