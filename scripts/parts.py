"""What of a bundle needs torch: baselines, workload lines and their tensors. Runs in the torch stack."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from traceproof.errors import TraceproofError
from traceproof.publish.parts import Answers, write_parts

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--cases", type=Path, required=True)
PARSER.add_argument("--ledger", type=Path, required=True)
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument(
    "--answers", type=Path, nargs="*", default=[], help="manifests of the references' outputs; need --store"
)
PARSER.add_argument("--store", type=Path)
PARSER.add_argument("--only", nargs="*", required=True, help="names of the definitions wanted")


if __name__ == "__main__":
    options = PARSER.parse_args()
    try:
        answers = Answers.of(options.answers, options.store) if options.answers else None
        write_parts(options.cases, options.ledger, options.out, only=frozenset(options.only), answers=answers)
    except TraceproofError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
