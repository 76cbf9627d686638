"""Rule `report`: all verdicts in one summary."""

import argparse
import json
from pathlib import Path

from traceproof.bumps.history import Scope, keep
from traceproof.checkouts.pins import read_lock
from traceproof.files import read_sealed
from traceproof.run import entry
from traceproof.run.report import report

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--verdicts", type=Path, nargs="*", required=True)
PARSER.add_argument("--known", type=Path, nargs="?", help="the file of known findings")
PARSER.add_argument("--stacks", type=Path, nargs="*", required=True, help="records of the environments")
PARSER.add_argument("--lock", type=Path, nargs="?", help="the file of the sources' pins")
PARSER.add_argument("--history", type=Path, required=True, help="folder of kept verdicts")
PARSER.add_argument("--scope", type=json.loads, required=True, help="JSON, the fields of history.Scope, or null")
PARSER.add_argument("--cache", type=Path, help="the file of finished rows, for counts of a verdict file")
PARSER.add_argument("--summary", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Summarise, and keep the verdicts under the digest of all that they stand on, unless a user relaxed them."""
    stacks = [read_sealed(path) for path in options.stacks]
    report(options.verdicts, options.summary, known=options.known, stacks=stacks, cache=options.cache)
    if options.scope is not None:
        pins = read_lock(options.lock) if options.lock else {}
        keep(options.history, options.verdicts, stacks, pins, Scope(**options.scope))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
