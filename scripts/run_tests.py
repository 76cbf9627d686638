"""Rule `run_tests_of`: run the generated tests of one op_type in one stack's environment.

A failing test is a row of the result and no error of the rule: the report decides what is a finding.
"""

import argparse
import json
import sys
from pathlib import Path

from traceproof.files import write_text
from traceproof.run import entry, jit
from traceproof.run.records import OpTypePlan
from traceproof.run.workers import Environment
from traceproof.sandbox import Limits
from traceproof.stacks.base import LIBRARIES
from traceproof.testgen.running import BAD, SHOWN, Run, failure_line, junit, run_tests, write_rows
from traceproof.text import printable

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--file", type=Path, required=True, help="the generated test file")
PARSER.add_argument("--cases", type=Path, required=True, help="the op_type's cases, as planned")
PARSER.add_argument("--stack", type=Path, required=True, help="the record of the stack it runs in")
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--caches", type=Path, required=True, help="folder for what is compiled on the way")
PARSER.add_argument("--limits", type=json.loads, required=True, help="JSON, `limits` of config.yaml")
PARSER.add_argument("--lanes", type=int, default=1, help="definitions that are tested side by side")
PARSER.add_argument("--option", action="append", default=[], help="an option of pytest")
PARSER.add_argument("--rows", type=Path, required=True)
PARSER.add_argument("--junit", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)

# Of one definition's tests together: each case is run by about ten of them, but drawn and solved only once.
PATIENCE = 10


def main() -> None:
    """Run them; what the tests compile stays in a folder of their own, since references run beside it."""
    record = json.loads(options.stack.read_text(encoding="utf-8"))
    plan, limits, stack = OpTypePlan.read(options.cases), options.limits, record["stack"]
    own = options.caches / "tests" / f"{plan.op_type}-{stack}"
    own.mkdir(parents=True, exist_ok=True)
    on_gpu = record["device_type"] == "cuda"
    order = Run(
        file=options.file,
        op_type=plan.op_type,
        stack=stack,
        dataset=options.dataset,
        digests={name: found.digest for name, found in plan.whole.items()},
        options=[*options.option, f"--memory-gb={limits['memory_gb']}"],
        limits=Limits(
            seconds=PATIENCE * limits["wall_s"],
            memory_bytes=int(limits["memory_gb"] * 2**30),
            output_bytes=int(limits["output_mb"] * 2**20),
        ),
        variables={LIBRARIES: jit.environment(options.caches, record)[LIBRARIES]} if on_gpu else {},
    )
    environment = Environment(name=stack, python=sys.executable, record=record)
    rows = list(run_tests(order, environment, caches=own, lanes=options.lanes))
    failed = [row for row in rows if row["outcome"] in BAD]
    sys.stderr.write(f"tests      {plan.op_type} in {stack}: {len(rows)} run, {len(failed)} not passed\n")
    sys.stderr.write("".join(f"  {printable(failure_line(row))}\n" for row in failed[:SHOWN]))
    write_rows(rows, options.rows)
    write_text(options.junit, junit(rows))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
