"""Compare the verdicts of two results folders, row by row; exit code 1: a verdict, reason or number differs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = ("definition", "case", "seed", "actor", "against", "output")
SAME = ("verdict", "reason", "message", "gate", "metrics", "specification", "worst")


def rows(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """The rows of a results folder by what they are about.

    Raises:
        SystemExit: it holds none.
    """
    found = {}
    for path in sorted(folder.glob("verdicts/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[", ".join(str(row.get(name)) for name in KEY)] = row
    if not found:
        raise SystemExit(f"{folder} holds no verdicts/*.jsonl")
    return found


def main() -> int:
    """Print what differs, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    before, after = rows(options.before), rows(options.after)
    lines = [f"only in {options.before}: {key}" for key in before.keys() - after.keys()]
    lines += [f"only in {options.after}: {key}" for key in after.keys() - before.keys()]
    for key in before.keys() & after.keys():
        lines += [
            f"{key}: {name}: {before[key].get(name)!r} -> {after[key].get(name)!r}"
            for name in SAME
            if before[key].get(name) != after[key].get(name)
        ]
    sys.stdout.write("".join(f"{line}\n" for line in sorted(lines)))
    sys.stdout.write(f"{len(before)} rows before, {len(after)} after, {len(lines)} differences\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
