"""Rule `actor`: run one actor over one op_type's cases."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from traceproof.actors import built
from traceproof.actors.registry import ACTORS
from traceproof.pipeline import entry, job_client
from traceproof.pipeline.gpu_lease import gpus, lease, workers
from traceproof.pipeline.load import Load
from traceproof.pipeline.stages.actor import run
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.worker import Limits

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--actor", required=True)
PARSER.add_argument("--cases", type=Path, required=True)
PARSER.add_argument("--shard", default="", help="which of the actor's jobs this is; empty: its only one")
PARSER.add_argument("--stack", type=Path, required=True, help="the record of the stack it runs in")
PARSER.add_argument("--manifest", type=Path, required=True)
PARSER.add_argument("--store", type=Path, required=True)
PARSER.add_argument("--caches", type=Path, required=True, help="folder for what is compiled on the way")
PARSER.add_argument("--built", type=Path, nargs="*", default=[], help="what came of the kernel modules")
PARSER.add_argument("--code", required=True, help="digest of the code that outputs depend on")
PARSER.add_argument("--limits", type=json.loads, required=True, help="JSON, `limits` of config.yaml")
PARSER.add_argument("--lanes", type=int, required=True, help="definitions that run side by side")
PARSER.add_argument("--force", action="store_true", help="run what the store holds too")
PARSER.add_argument(
    "--allow-weak-isolation", action="store_true", help="run references where they can not be isolated whole"
)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Run it."""
    stack = json.loads(options.stack.read_text(encoding="utf-8"))
    stack_workers = StackWorkers.of(options.caches, stack)
    load = Load(options.cases.parent, side_by_side=stack_workers.gpu)
    opened = stack_workers.gpu and load.opens_gpu(options.cases.stem, options.actor)
    if opened:  # while the driver says what GPUs there are, which takes a second at first
        stack_workers.start(trusted=ACTORS[options.actor].trusted)
    found = gpus(job_client.folder()) if opened else []
    limits = options.limits
    job = Job(
        actor=options.actor,
        code=options.code,
        stack={key: stack[key] for key in ("digest", "versions", "device")},
        threads=1,
        lanes=options.lanes,
        limits=Limits(
            seconds=limits["wall_s"],
            memory_bytes=int(limits["memory_gb"] * 2**30),
            output_bytes=int(limits["output_mb"] * 2**20),
        ),
        build_seconds=limits["build_s"],
        force=options.force,
        weak_isolation=options.allow_weak_isolation,
        stack_workers=stack_workers,
        variables=built.variables(options.built) if stack_workers.gpu else {},
        workers=workers(found) if opened else None,
    )
    with lease(found, memory_mib=load.gpu_mb(options.cases.stem, options.actor) if opened else 0):
        run(options.cases, options.manifest, options.store, job, shard=options.shard)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
