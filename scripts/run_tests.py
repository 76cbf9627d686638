"""Rule `run_tests`: run the generated tests of one op_type in one stack's environment.

A failing test is a row of the result and no error of the rule: the report decides what is a finding.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from traceproof.actors import built
from traceproof.pipeline import entry, jit
from traceproof.pipeline.gpu_lease import gpus, lease
from traceproof.pipeline.records import OpTypePlan
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.stacks.base import LIBRARIES
from traceproof.store import write_text
from traceproof.testgen.outcomes import Run, junit, run_tests, write_rows
from traceproof.testgen.summary import BAD, SHOWN, failure_line
from traceproof.text import printable
from traceproof.worker import Limits

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--file", type=Path, required=True, help="the generated test file")
PARSER.add_argument("--op-type", required=True)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--cases", type=Path, required=True, help="the op_type's cases, as planned")
PARSER.add_argument("--stack", type=Path, required=True, help="the record of the stack it runs in")
PARSER.add_argument("--caches", type=Path, required=True, help="folder for what is compiled on the way")
PARSER.add_argument("--built", type=Path, nargs="*", default=[], help="what came of the kernel modules")
PARSER.add_argument("--limits", type=json.loads, required=True, help="JSON, `limits` of config.yaml")
PARSER.add_argument("--memory-mb", type=int, required=True, help="what the job is planned to take, MiB")
PARSER.add_argument("--lanes", type=int, default=1, help="definitions that are tested side by side")
PARSER.add_argument("--option", action="append", default=[], help="an option of pytest")
PARSER.add_argument("--rows", type=Path, required=True)
PARSER.add_argument("--junit", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)

# Of one definition's tests together: each case is run by about ten of them, but drawn and solved only once.
PATIENCE = 10


def main() -> None:
    """Run them; what the tests compile stays in a folder of their own, since references run beside it."""
    stack = json.loads(options.stack.read_text(encoding="utf-8"))
    planned = OpTypePlan.read(options.cases).whole
    own = options.caches / "tests" / f"{options.op_type}-{stack['stack']}"
    own.mkdir(parents=True, exist_ok=True)
    stack_workers = StackWorkers.of(own, stack)
    libraries = Path(jit.environment(options.caches, stack)[LIBRARIES])
    limits = options.limits
    order = Run(
        file=options.file,
        op_type=options.op_type,
        stack=stack["stack"],
        dataset=options.dataset,
        digests={name: found.digest for name, found in planned.items()},
        options=[*options.option, f"--memory-gb={limits['memory_gb']}"],
        limits=Limits(
            seconds=PATIENCE * limits["wall_s"],
            memory_bytes=int(limits["memory_gb"] * 2**30),
            output_bytes=int(limits["output_mb"] * 2**20),
        ),
        variables={LIBRARIES: str(libraries)} | built.variables(options.built) if stack_workers.gpu else {},
    )
    with lease(gpus() if stack_workers.gpu else [], memory_mib=options.memory_mb):
        rows = list(
            run_tests(order, stack_workers, scratch=own if stack_workers.gpu else None, lanes=options.lanes)
        )
    failed = [row for row in rows if row["outcome"] in BAD]
    sys.stderr.write(
        f"tests      {options.op_type} in {stack['stack']}: {len(rows)} run, {len(failed)} not passed\n"
    )
    sys.stderr.write("".join(f"  {printable(failure_line(row))}\n" for row in failed[:SHOWN]))
    write_rows(rows, options.rows)
    write_text(options.junit, junit(rows))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
