"""Rules `test_file` and `test_support`: write the reference tests of an op_type, or what they need beside them."""

import argparse
import json
import sys
from pathlib import Path

from traceproof.run import entry
from traceproof.run.records import OpTypePlan
from traceproof.testgen.generate import Divergences, GenerateOptions, generate_file, write_support

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--out", type=Path, required=True, help="folder that gets tests/references")
PARSER.add_argument("--cases", type=Path, help="the op_type's cases, as planned; left out: write the support")
PARSER.add_argument("--sizes", nargs="+", default=[])
PARSER.add_argument("--tolerance", type=json.loads, default=None)
PARSER.add_argument("--known", type=Path, nargs="?", help="the file of known findings")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """A definition whose name can not be a class is reported and gets no test; it does not fail the rule."""
    if options.cases is None:
        write_support(options.out)
        return
    planned = OpTypePlan.read(options.cases)
    order = GenerateOptions(
        root=Path(planned.dataset),
        out=options.out,
        definitions=tuple(planned.whole),
        sizes=tuple(options.sizes),
        tolerance=options.tolerance,
    )
    result = generate_file(planned.op_type, order, Divergences(verdicts=None, known=options.known))
    for problem in result.problems:
        sys.stderr.write(f"no test: {problem}\n")


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
