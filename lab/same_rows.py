"""Hold the verdict rows of two runs against each other: whether a change of the machinery changed one.

    python lab/same_rows.py results/verdicts OTHER/results/verdicts

Each is a folder of verdict files. Prints rows that one run alone has, verdicts and reasons that differ, and how
far margins lie apart (a sampler's draws differ from run to run). Exit code 1: a verdict, reason or row differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from traceproof.run.schema import VerdictRow, each_row

SHOWN = 20
Key = tuple[str, str | None, int | None, str, str, str]


def rows_of(folder: Path) -> dict[Key, VerdictRow]:
    """Rows by what they are about; of a case as a whole, by its gate too."""
    found = {}
    for row in (row for path in sorted(folder.glob("*.jsonl")) for row in each_row(path)):
        gate = row.gate.kind if row.gate is not None else ""
        found[row.definition, row.case, row.seed, row.implementation, row.output, gate] = row
    return found


def main() -> int:
    """Print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    before, after = rows_of(options.before), rows_of(options.after)
    both = sorted(before.keys() & after.keys(), key=str)
    lines = [f"{key} is in one run alone" for key in sorted(before.keys() ^ after.keys(), key=str)]
    told = {key: [(run[key].verdict, run[key].reason) for run in (before, after)] for key in both}
    lines += [f"{key}: {was} before, {now} after" for key, (was, now) in told.items() if was != now]
    pairs = [(before[key].gate, after[key].gate) for key in both]
    apart = [abs((a.margin or 0) - (b.margin or 0)) for a, b in pairs if a is not None and b is not None]
    sys.stdout.writelines(f"{line}\n" for line in lines[:SHOWN])
    moved = [one for one in apart if one]
    most = f", by {max(moved):.3g} at most" if moved else ""
    sys.stdout.write(f"{len(both)} rows, {len(lines)} differ; {len(moved)} margins differ{most}\n")
    return int(bool(lines) or not both)


if __name__ == "__main__":
    sys.exit(main())
