"""Checkpoint `cases`: decide what will be run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from traceproof.files import read_sealed
from traceproof.run import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--stack", type=Path, required=True, help="the torch environment's record")
PARSER.add_argument("--selection", type=json.loads, required=True, help="JSON, the fields of Selection")
PARSER.add_argument("--code", default="", help="digest of the code that plans; empty: plan all anew")
PARSER.add_argument("--results", type=Path, required=True, help="folder for what definitions' own `init` makes")
PARSER.add_argument("--allow-weak-isolation", action="store_true", help="run `init` where isolation is not whole")
PARSER.add_argument("--out", type=Path, required=True, help="the index of the plans, which are written beside it")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Plan."""
    from traceproof.run.inits import Inits
    from traceproof.run.plan import (
        Selection,
        plan,  # imports torch, after interrupts are caught
    )

    stack = read_sealed(options.stack)
    gpu = stack["device_type"] == "cuda"
    fields = dict(options.selection)
    if fields["workloads"] == "auto":
        fields["workloads"] = gpu
    inits = Inits(
        options.results,
        (options.dataset,),
        weak=options.allow_weak_isolation,
        lanes=len(os.sched_getaffinity(0)),
    )
    code = f"{options.code} {stack['digest']}" if options.code else ""
    with inits:
        plan(options.dataset, options.out.parent, Selection.of_json(fields), inits, code=code, gpu=gpu)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
