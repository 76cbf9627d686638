"""The verify rules' last step: print the table, and fail on findings. All results stay where they are."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from traceproof.ops.registry import families
from traceproof.pipeline import entry
from traceproof.pipeline.stages.report import absent, failed, table
from traceproof.pipeline.stages.standing import OUTCOME, read_summary

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--summary", type=Path, required=True)
PARSER.add_argument("--run", type=Path, required=True, help="the folder of the run")
PARSER.add_argument("--family", default="", help="the family that was asked for")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Exit code 1: findings."""
    summary = read_summary(options.summary, options.run)
    sys.stdout.write(table(summary))
    if options.family and not summary["groups"]:
        sys.stdout.write(f"{absent(options.family, families(), planned(options.run))}\n")
    sys.stdout.flush()
    code = int(failed(summary))
    if OUTCOME in os.environ:  # tells a command that waits for Snakemake that it got this far
        with contextlib.suppress(FileNotFoundError):  # the command was killed, and its folder has been removed
            Path(os.environ[OUTCOME]).write_text(str(code), encoding="utf-8")
    if code:
        raise SystemExit(code)


def planned(run: Path) -> list[str]:
    """The op_types that were planned."""
    return sorted(path.stem for path in (run / "cases").glob("*.json"))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
