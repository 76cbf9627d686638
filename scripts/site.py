"""Rule `site`: the pages of a finished run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from traceproof.pipeline import entry
from traceproof.site.build import build
from traceproof.site.finished import Finished

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--results", type=Path, required=True)
PARSER.add_argument("--run", type=Path, required=True, help="the run's folder")
PARSER.add_argument("--audit", type=Path, nargs="?", help="what `traceproof audit-tests --json` wrote")
PARSER.add_argument("--out", type=Path, required=True, help="folder of the site")
PARSER.add_argument("--table", type=Path, required=True, help="file of the verdicts' table, for other reports")
PARSER.add_argument("--plots", type=Path, required=True, help="file of the margins' plots, for other reports")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Write the pages."""
    finished = Finished(options.results, options.run, options.audit)
    built = build(finished, options.out, (options.table, options.plots))
    sys.stderr.write(f"site       {built.pages} pages in {built.folder}\n")


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
