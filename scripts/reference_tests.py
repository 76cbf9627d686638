"""The rule `tests`: write reference tests of every definition into a dataset."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from traceproof import entry
from traceproof.store import write_json
from traceproof.testgen.generate import Order, generate
from traceproof.testgen.known import Divergences

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--sizes", nargs="+", required=True)
PARSER.add_argument("--tolerance", type=json.loads, default=None)
PARSER.add_argument("--verdicts", type=Path, required=True)
PARSER.add_argument("--known", type=Path, nargs="*", default=[])
PARSER.add_argument("--force", action="store_true")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """A definition that can not be read is reported and gets no test; it does not fail the rule."""
    order = Order(
        root=options.dataset,
        everything=True,
        sizes=tuple(options.sizes),
        tolerance=options.tolerance,
        force=options.force,
    )
    known = options.known[0] if options.known else None
    result = generate(order, Divergences(verdicts=options.verdicts, known=known))
    for problem in result.problems:
        sys.stderr.write(f"no test: {problem}\n")
    write_json(options.out, result.as_json())


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
