"""Rule `jit`: build the kernel modules that one op_type's definitions need in a stack."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from traceproof.pipeline import entry, jit
from traceproof.store import write_json

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--cases", type=Path, required=True)
PARSER.add_argument("--stack", type=Path, required=True, help="the record of the stack")
PARSER.add_argument("--caches", type=Path, required=True, help="folder for what is compiled")
PARSER.add_argument("--seconds", type=float, required=True, help="limit of one module")
PARSER.add_argument("--out", type=Path, required=True, help="what came of each module")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Build what is missing, side by side; a failed module is a record, not a failed job."""
    stack = json.loads(options.stack.read_text(encoding="utf-8"))
    record = {}
    if stack["capability"] is not None:
        major, minor = map(int, stack["capability"].split("."))
        modules = jit.needed(options.cases, stack["stack"], (major, minor))
        os.environ.update(jit.environment(options.caches, stack))
        at_once = jit.side_by_side(jit.available_memory(), os.cpu_count() or 1)
        building = jit.build(stack["stack"], modules.values(), at_once=at_once, seconds=options.seconds)
        for module, built in building:
            record[module.label] = dataclasses.asdict(built)
            sys.stderr.write(f"jit        {module.label}  {built.status}  {built.seconds:.0f} s\n")
    write_json(options.out, record)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
