"""Laws of single_prefill."""

from traceproof.ops.common.single_laws import LAWS

__all__ = ["LAWS"]
