"""Checkpoint `cases`: decide what will be run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from traceproof.digests import digest_json
from traceproof.pipeline import entry
from traceproof.pipeline.jit import available_memory
from traceproof.pipeline.stages import volume
from traceproof.pipeline.stages.plan_job import planned
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.pipeline.stages.shards import Split
from traceproof.pipeline.stages.stack_workers import StackWorkers

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--stack", type=Path, required=True, help="the torch stack's record")
PARSER.add_argument("--selection", type=json.loads, required=True, help="JSON, the fields of plan.Selection")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--store", type=Path, required=True)
PARSER.add_argument("--caches", type=Path, required=True, help="folder for what is compiled on the way")
PARSER.add_argument("--store-gb", type=json.loads, required=True, help="what the store may grow to, or null")
PARSER.add_argument("--actors", type=int, required=True, help="how many compute a case, the oracle aside")
PARSER.add_argument(
    "--allow-weak-isolation", action="store_true", help="run `init` where it can not be isolated whole"
)
PARSER.add_argument("--code", default="", help="digest of the code that plans depend on; empty: plan all anew")
PARSER.add_argument("--slots", type=int, default=1, help="how many jobs run at once; long ones are split")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Plan."""
    fields: dict[str, Any] = dict(options.selection)
    stack = json.loads(options.stack.read_text(encoding="utf-8"))
    gpu = stack["device_type"] == "cuda"
    if fields["workloads"] == "auto":
        fields["workloads"] = gpu
    selection = Selection.of_json(fields)
    split = Split(slots=options.slots, actors=options.out.parent / "actors", gpu=gpu)
    with StackWorkers.of(options.caches, stack).pool() as pool:
        code = digest_json([options.code, stack["digest"]]) if options.code else ""
        plans = planned(options.dataset, options.out, selection, split, pool, code=code)
    if plans is None:
        plans = running_init(selection, split)
    volume.check(plans, options.store, actors=options.actors, limit_gb=options.store_gb)


def running_init(selection: Selection, split: Split) -> list[Path]:
    """Plan in this process, which may have workers for definitions' own `init`."""
    from traceproof.pipeline.stages.plan import plan  # imports torch
    from traceproof.pipeline.stages.plan_inits import MEMORY_BYTES, Inits

    lanes = max(1, min(len(os.sched_getaffinity(0)), available_memory() // MEMORY_BYTES))
    inits = Inits(options.store, (options.dataset,), weak=options.allow_weak_isolation, lanes=lanes)
    try:
        return plan(options.dataset, options.out, selection, inits, split)
    finally:
        inits.close()


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
