"""The interpreter that a stack's jobs share: what it imports, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceproof import jit

PRELOAD = ("torch", "traceproof.actors.preload")
STACK = "TRACEPROOF_STACK"  # variable: a worker that served one stack is not given to another


def environment(caches: Path, stack: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of a stack's workers: the same for all of its jobs, however many cores one has.

    Args:
        caches: folder for what is compiled on the way.
        stack: the stack's record.
    """
    threads = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    if stack["device_type"] != "cuda":
        return threads
    return threads | {STACK: stack["stack"]} | jit.environment(caches, stack)
