"""Rule `site`: the pages of a finished run."""

import argparse
import sys
from pathlib import Path

from traceproof.run import entry
from traceproof.site.build import Finished, build

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--folders", type=Path, nargs=2, required=True, help="of the results, and of the run")
PARSER.add_argument("--audit", type=Path, nargs="?", help="what `traceproof audit-tests --json` wrote")
PARSER.add_argument("--out", type=Path, required=True, help="folder of the site")
PARSER.add_argument("--table", type=Path, required=True, help="file of the verdicts' table, for other reports")
PARSER.add_argument("--plots", type=Path, required=True, help="file of the margins' plots, for other reports")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Write the pages."""
    results, run = options.folders
    finished = Finished(results, run, options.audit)
    built = build(finished, options.out, (options.table, options.plots))
    sys.stderr.write(f"site       {built.pages} pages in {built.folder}\n")


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
