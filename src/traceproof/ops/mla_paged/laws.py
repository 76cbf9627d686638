"""Laws of mla_paged: those of any attention."""

from traceproof.ops.common.attention_laws import LAWS

__all__ = ["LAWS"]
