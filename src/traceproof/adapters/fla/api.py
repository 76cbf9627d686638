"""What Flash Linear Attention's APIs are called. Read off fla-core 0.6.0."""

from __future__ import annotations

from types import MappingProxyType

from traceproof.adapters.base import Stack

STACK = Stack(
    name="fla",
    package="fla",
    distribution="fla-core",
    apis=MappingProxyType(
        {
            "chunk": ("fla.ops.gated_delta_rule:chunk_gated_delta_rule",),
            "recurrent": ("fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",),
        }
    ),
)
