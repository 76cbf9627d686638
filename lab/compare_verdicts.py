"""Compare the verdicts of two results folders, row by row; exit code 1: a verdict, reason or number differs.

Every difference is a line. Below them they are counted by op_type and field, with the largest relative difference
of numbers: 1e-16 is another order of a sum, `inf` no number or no number on one side.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = ("definition", "case", "seed", "implementation", "against", "output")
SAME = ("verdict", "reason", "message", "gate", "metrics", "specification", "worst", "grade")


def rows(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """The rows of a results folder by what they are about.

    Raises:
        SystemExit: it holds none.
    """
    found = {}
    for path in sorted(folder.glob("verdicts/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            row.setdefault("implementation", row.get("actor"))  # its name before 2026-11-24
            found[", ".join(str(row.get(name)) for name in KEY)] = row
    if not found:
        raise SystemExit(f"{folder} holds no verdicts/*.jsonl")
    return found


def apart(one: object, other: object) -> float:
    """The largest relative difference of the numbers in two JSON values; inf: something else differs."""
    if one == other:
        return 0.0
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max(apart(one[name], other[name]) for name in one)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / max(abs(one), abs(other))
    return math.inf


def main() -> int:
    """Print what differs, a line each, and how much of what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    before, after = rows(options.before), rows(options.after)
    lines: list[str] = []
    counts, most = Counter[tuple[str, str]](), dict[tuple[str, str], float]()
    for key in sorted(before.keys() | after.keys()):
        if key not in before or key not in after:
            side = options.before if key in before else options.after
            lines.append(f"only in {side}: {key}")
            counts[before.get(key, after.get(key, {}))["op_type"], f"only in {side}"] += 1
            continue
        for name in SAME:
            old, new = before[key].get(name), after[key].get(name)
            if old != new:
                lines.append(f"{key}: {name}: {old!r} -> {new!r}")
                about = after[key]["op_type"], name
                counts[about] += 1
                most[about] = max(most.get(about, 0.0), apart(old, new))
    lines += [
        f"{op_type:24} {what}: {count}, numbers up to {most.get((op_type, what), math.inf):.1e} apart"
        for (op_type, what), count in sorted(counts.items())
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"{len(before)} rows before, {len(after)} after, {counts.total()} differences\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
