"""Build the stacks' environments, then import in each all that its adapters name (`nox -s stacks`).

No GPU is needed. What lacks the NVIDIA driver's library alone is no fault here, and said.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from traceproof.environments.building import FOLDER, Installation, ready
from traceproof.environments.imports import DRIVER, Imports, check
from traceproof.errors import TraceproofError
from traceproof.stacks import ENVIRONMENTS

ROOT = Path(__file__).resolve().parent.parent
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", action="append", choices=ENVIRONMENTS, help="more than once for several; else all")
PARSER.add_argument("--no-index", action="store_true", help="ask no package index")
PARSER.add_argument("--find-links", type=Path, help="folder of packages, with --no-index: see `nox -s bundle`")


def main() -> int:
    """Exit code 1: something can not be imported; 2: an environment can not be built."""
    options = PARSER.parse_args()
    if options.no_index:
        os.environ["PIP_NO_INDEX"] = "1"
    if options.find_links is not None:
        os.environ["PIP_FIND_LINKS"] = str(options.find_links.absolute())
    failed = False
    for name in options.stack or ENVIRONMENTS:
        started = time.monotonic()
        try:
            ready(Installation.at(name, str(FOLDER / name / "bin" / "python")), root=ROOT, say=_say)
        except TraceproofError as error:
            _say(str(error))
            return 2
        built = time.monotonic() - started
        found = check(name, root=ROOT)
        imported = time.monotonic() - started - built
        sys.stdout.write(f"{name:11} {_summary(found)}\n  built in {built:.0f} s, imported in {imported:.0f} s\n")
        sys.stdout.flush()
        failed = failed or bool(found.problems)
    return int(failed)


def _summary(found: Imports) -> str:
    good = len(found.names) - len(found.problems)
    lines = [f"{good} of {len(found.names)} imported"]
    if found.behind_driver:
        lines.append(f"  {len(found.behind_driver)} of them lack the NVIDIA driver's library ({DRIVER}) alone:")
        lines += [f"    {name}" for name in found.behind_driver]
    if found.problems:
        lines.append("  can not be imported, the driver's library aside:")
        lines += [f"    {name}: {problem}" for name, problem in found.problems.items()]
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
