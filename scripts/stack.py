"""Rule `stack`: record what a stack is."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof.bumps.keys import record_stack
from traceproof.environments.building import Installation
from traceproof.pipeline import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", required=True)
PARSER.add_argument("--python", required=True)
PARSER.add_argument("--source", required=True, help="where its package is taken from: locked, a folder, or empty")
PARSER.add_argument("--state", required=True, help="what that source is now")
PARSER.add_argument("--linked", type=Path, required=True, help="folder from which such a package is imported")
PARSER.add_argument("--cuda-home", required=True, help="toolkit of the machine; empty: its environment's")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Ask its interpreter."""
    stack = Installation.at(options.stack, options.python, cuda_home=options.cuda_home)
    record_stack(stack, options.source, state=options.state, linked=options.linked, out=options.out)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log, shared=options.out)
