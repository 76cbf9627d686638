"""What the first jobs of a run wait for, started while Snakemake is imported and reads its rules: interpreters.

Started as `python -m traceproof.pipeline.ahead RECORD CACHES KIND...`, with the environment of a job: a stack's
record, the folder for what is compiled, and whose workers are needed, `trusted` and `untrusted`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from traceproof.actors.registry import ACTORS
from traceproof.pipeline import job_client, job_server
from traceproof.pipeline.gpu_lease import gpus
from traceproof.pipeline.stages.stack_workers import StackWorkers

if TYPE_CHECKING:
    from traceproof.pipeline.flow import Pipeline

TRUSTED, UNTRUSTED = "trusted", "untrusted"
STARTED = "TRACEPROOF_AHEAD"  # variable that tells Snakemake that the command which started it has done this


def start(flow: "Pipeline", environment: Mapping[str, str] = os.environ) -> list[subprocess.Popen[bytes]]:
    """Start it for every stack that a run before has recorded: for a run that is sure to run every actor.

    The environment is that of the run's Snakemake, whose jobs look for it there.
    """
    kinds: dict[str, set[str]] = {}
    for actor in flow.actors:
        kinds.setdefault(ACTORS[actor].stack, set()).add(TRUSTED if ACTORS[actor].trusted else UNTRUSTED)
    begun = []
    for stack, needed in kinds.items():
        records = (flow.root / flow.sources.record(stack, op_type) for op_type in flow.op_types())
        found = next(filter(Path.is_file, records), None)
        if found is not None:
            command = [flow.python(stack), "-P", "-m", __name__, str(found), flow.caches, *sorted(needed)]
            variables = {**environment, "PYTHONPATH": flow.sources.path(stack)}
            begun.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables, cwd=flow.root, process_group=0)
            )
    return begun


def main(arguments: Sequence[str]) -> int:
    """Have the interpreters and the job server started, and the driver asked which GPUs there are."""
    record, caches, *kinds = arguments
    workers = StackWorkers.of(Path(caches), json.loads(Path(record).read_text(encoding="utf-8")))
    for kind in kinds:
        workers.start(trusted=kind == TRUSTED)
    folder = job_client.folder()
    connection = job_server.start(folder) if folder is not None else None
    if connection is not None:
        connection.close()
    gpus(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
