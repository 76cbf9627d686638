"""Rule `judge`: judge every actor's outputs of one op_type."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from traceproof.pipeline import entry, job_client
from traceproof.pipeline.gpu_lease import gpus, lease
from traceproof.pipeline.load import Load
from traceproof.pipeline.stages.judge import judge
from traceproof.pipeline.stages.judge_settings import JudgeSettings
from traceproof.pipeline.stages.stack_workers import StackWorkers

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--cases", type=Path, required=True)
PARSER.add_argument("--manifests", type=Path, nargs="+", required=True)
PARSER.add_argument("--verdicts", type=Path, required=True)
PARSER.add_argument("--stack", type=Path, required=True, help="the record of the stack it runs in")
PARSER.add_argument("--store", type=Path, required=True)
PARSER.add_argument("--caches", type=Path, required=True, help="folder for what is compiled on the way")
PARSER.add_argument("--code", required=True, help="digest of the code that verdicts depend on")
PARSER.add_argument("--tolerance", type=json.loads, default=None, help="a number, or null")
PARSER.add_argument("--repeat", default="", help="further options of commands that repeat a case")
PARSER.add_argument("--threads", type=int, required=True, help="definitions judged side by side")
PARSER.add_argument("--memory-mb", type=int, default=0, help="what the job is planned to take, MiB")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Judge."""
    stack = json.loads(options.stack.read_text(encoding="utf-8"))
    settings = JudgeSettings(
        store=options.store,
        code=options.code,
        tolerance=options.tolerance,
        device=stack["device_type"],
        options=options.repeat,
    )
    stack_workers = StackWorkers.of(options.caches, stack)
    opened = stack_workers.gpu and Load(options.cases.parent, side_by_side=True).opens_gpu(options.cases.stem)
    found = gpus(job_client.folder()) if opened else []
    with lease(found, memory_mib=options.memory_mb), stack_workers.pool() as pool:
        judge(options.cases, options.manifests, options.verdicts, settings, pool, lanes=options.threads)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
