"""Rule `report`: all verdicts in one summary."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof import entry
from traceproof.stages.report import report

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--verdicts", type=Path, nargs="*", required=True)
PARSER.add_argument("--known", type=Path, nargs="?", help="the file of known findings")
PARSER.add_argument("--summary", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Summarise."""
    report(options.verdicts, options.summary, known=options.known)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
