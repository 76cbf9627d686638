"""Runs code that may crash, hang or be hostile, in a process of its own, under limits."""

from traceproof.sandbox.model import GIB, KIB, MIB, Isolation, ItemOutcome, Limits, Refused, Status
from traceproof.sandbox.pool import Pool, Session

__all__ = ["GIB", "KIB", "MIB", "Isolation", "ItemOutcome", "Limits", "Pool", "Refused", "Session", "Status"]
