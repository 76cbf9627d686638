"""Rule `run_tests`: print what the generated tests came to, and fail on findings. All results stay."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from traceproof.pipeline import entry
from traceproof.testgen.summary import Report, table

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--tests", type=Path, required=True, help="the report of the generated tests")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Exit code 1: a test failed that is not known to, or none was run."""
    report: Report = json.loads(options.tests.read_text(encoding="utf-8"))
    sys.stdout.write(table(report))
    sys.stdout.flush()
    if not report["passed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
