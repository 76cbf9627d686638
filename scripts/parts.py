"""What of a bundle needs torch: baselines, workload lines and their tensors. Runs in the torch stack."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from traceproof.errors import TraceproofError
from traceproof.publish.parts import Answers, write_parts

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument(
    "--op-type",
    type=Path,
    nargs="+",
    action="append",
    required=True,
    metavar=("CASES", "MANIFEST"),
    help="an op_type's plan, and the manifests of its references' outputs; once per op_type",
)
PARSER.add_argument("--ledger", type=Path, required=True)
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--store", type=Path, required=True, help="where those outputs are")
PARSER.add_argument("--only", nargs="*", required=True, help="names of the definitions wanted")


if __name__ == "__main__":
    options = PARSER.parse_args()
    for cases, *manifests in options.op_type:
        try:
            answers = Answers.of(manifests, options.store) if manifests else None
            write_parts(cases, options.ledger, options.out, only=frozenset(options.only), answers=answers)
        except TraceproofError as error:
            sys.stderr.write(f"op_type {cases.stem}: {error}\n")
            raise SystemExit(2) from None
    gc.freeze()  # ending, Python would look for cycles in all of torch: half a second
