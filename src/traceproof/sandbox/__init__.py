"""Runs code that may crash, hang or be hostile, in a process of its own, under limits."""

from traceproof.sandbox.model import GIB, KIB, MIB, Limits, Reply, Status
from traceproof.sandbox.pool import Pool, WorkerSession

__all__ = ["GIB", "KIB", "MIB", "Limits", "Pool", "Reply", "Status", "WorkerSession"]
