"""The interpreter that a stack's jobs share: what it imports, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceproof import jit
from traceproof.worker.model import NICE

PRELOAD = ("torch", "traceproof.actors.preload")
# What importing SGLang or FLA brings along of torch, three seconds of it: once, and not in each of their workers.
# torch._inductor is not among it: importing it opens the driver.
COMPILER = ("torch._dynamo",)
IMPORT_LONG = frozenset({"sglang", "fla"})
# Importing them is what a run waits for at last, and takes one core; references poll for the GPU on many.
STANDS_BACK = {"torch": "5"}
STACK = "TRACEPROOF_STACK"  # variable: a worker that served one stack is not given to another


def preload(stack: Mapping[str, Any]) -> tuple[str, ...]:
    """What a stack's workers find imported.

    Args:
        stack: the stack's record.
    """
    long = stack["device_type"] == "cuda" and stack["stack"] in IMPORT_LONG
    return (*PRELOAD, *COMPILER) if long else PRELOAD


def environment(caches: Path, stack: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of a stack's workers: the same for all of its jobs, however many cores one has.

    Args:
        caches: folder for what is compiled on the way.
        stack: the stack's record.
    """
    threads = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    if stack["device_type"] != "cuda":
        return threads
    name = stack["stack"]
    return threads | {STACK: name, NICE: STANDS_BACK.get(name, "0")} | jit.environment(caches, stack)
