"""Laws of single_decode."""

from traceproof.ops.common.single_laws import LAWS

__all__ = ["LAWS"]
