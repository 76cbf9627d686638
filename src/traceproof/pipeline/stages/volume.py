"""How much a plan's outputs take on disk: told before a run writes much, and refused past a limit."""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from traceproof.errors import TraceproofError
from traceproof.pipeline.plan_facts import PlanFacts

GIB = 1 << 30
TOLD_BYTES = 4 * GIB  # a run that may write more says so
ORACLE_BYTES = 16  # of the oracle per element: the value and what it is judged by, in float64


def check(plans: Iterable[Path], store: Path, *, actors: int, limit_gb: float | None) -> None:
    """Tell how much a run of so many actors, the oracle aside, may write where that is much.

    Raises TraceproofError: the store may grow beyond its limit.
    """
    facts = [PlanFacts.read(path) for path in plans]
    needed = sum(actors * one.output_bytes + ORACLE_BYTES * one.elements for one in facts)
    if needed <= TOLD_BYTES and limit_gb is None:
        return
    free = shutil.disk_usage(next(path for path in (store, *store.parents) if path.exists())).free
    room = "`traceproof clean --unreachable` or `--older-than DAYS` makes room."
    told = f"This run may write up to {needed / GIB:.1f} GiB of outputs, less what the store {store} has of them"
    if limit_gb is not None:  # else nobody waits until all files are counted
        there = sum(path.lstat().st_size for path in store.rglob("*.safetensors")) if store.is_dir() else 0
        if there + needed > limit_gb * GIB:
            todo = f"Select less, leave workload lines out (workloads: false), or raise the limit. {room}"
            what = f"{told}; it holds {there / GIB:.1f} GiB, and limits.store_gb is {limit_gb:g}"
            raise TraceproofError(what, todo=todo)
    if needed > TOLD_BYTES:
        sys.stderr.write(f"{told}; {free / GIB:.1f} GiB are free. {room}\n")
