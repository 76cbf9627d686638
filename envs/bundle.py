"""Write what environments are installed from to a folder, for a machine without an index (`nox -s bundle`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from traceproof.environments.wheels import bundle
from traceproof.errors import TraceproofError
from traceproof.stacks import ENVIRONMENTS, KERNELS

ROOT = Path(__file__).resolve().parent.parent
DRIVER = "driver"
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--python", required=True, metavar="X.Y", help="version of Python there, e.g. 3.12")
PARSER.add_argument("--out", type=Path, required=True, help="folder that gets the files")
PARSER.add_argument(
    "--stack",
    action="append",
    choices=(DRIVER, *ENVIRONMENTS),
    help="more than once for several; else what a GPU machine uses",
)


def main() -> int:
    """Exit code 2: a file can not be had."""
    options = PARSER.parse_args()
    for name in options.stack or (DRIVER, *KERNELS):
        try:
            sources = bundle(name, options.out, root=ROOT, python=options.python)
        except TraceproofError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        built = f"; built where they are installed: {', '.join(sources)}" if sources else ""
        sys.stdout.write(f"{name:11} all of its packages are in {options.out}{built}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
