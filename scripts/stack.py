"""Rule `stack`: record what a stack is."""

import argparse
from pathlib import Path

from traceproof.environments.building import Installation
from traceproof.environments.package import record_stack
from traceproof.run import entry
from traceproof.run.sources import folder_of

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", required=True)
PARSER.add_argument("--python", required=True)
PARSER.add_argument("--source", required=True, help="where its package is taken from: locked, a folder, or empty")
PARSER.add_argument("--linked", type=Path, required=True, help="folder from which such a package is imported")
PARSER.add_argument("--cuda-home", required=True, help="toolkit of the machine; empty: its environment's")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Ask its interpreter."""
    stack = Installation.at(options.stack, options.python, cuda_home=options.cuda_home)
    checkout = folder_of(options.stack, options.source) if options.source else None
    record_stack(stack, checkout, linked=options.linked, out=options.out)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
