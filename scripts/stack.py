"""Checkpoint `stack`: record what a stack is."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof import entry
from traceproof.bumps.keys import record_all
from traceproof.stacks import Stack

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", required=True)
PARSER.add_argument("--python", required=True)
PARSER.add_argument("--source", required=True, help="where its package is taken from: locked, a folder, or empty")
PARSER.add_argument("--linked", type=Path, required=True, help="folder from which such a package is imported")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--records", type=Path, required=True, help="folder of one record an op_type")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Ask its interpreter, and follow what its package's ground truths can run."""
    stack = Stack.at(options.stack, options.python)
    record_all(stack, options.source, linked=options.linked, out=options.out, records=options.records)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
