"""Plant violations into the kernels of a library, one at a time, and lint them: what is not found is printed.

A cast of a program id to int64 is taken out, or a mask. Not everything that is not found is a miss: a cast may be
one of two, a mask may be true for every element. These are for a reader to judge.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from traceproof.kernel_lint import lint_kernels

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("folder", type=Path)
PARSER.add_argument("--exclude", nargs="*", default=[], help="parts of paths to leave out")
PARSER.add_argument("--count", type=int, default=60, help="of each kind")
PARSER.add_argument("--seed", type=int, default=11)
CAST = re.compile(r"tl\.program_id\(\d\)(\.to\(tl\.int64\))")
MASKS = {"mask", "boundary_check", "other"}


def main() -> int:
    """Prints what was not found, and how much was."""
    options = PARSER.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 - a sample
    paths = [p for p in sorted(options.folder.rglob("*.py")) if not any(x in str(p) for x in options.exclude)]
    kinds: dict[str, Callable[[str], Iterator[tuple[int, str]]]] = {"cast": without_cast, "mask": without_mask}
    for kind, plant in kinds.items():
        sites = [(path, *site) for path in paths for site in plant(path.read_text(encoding="utf-8"))]
        found = 0
        chosen = draw.sample(sites, min(options.count, len(sites)))
        for path, line, text in chosen:
            if findings(text) > findings(path.read_text(encoding="utf-8")):
                found += 1
            else:
                shown = path.read_text(encoding="utf-8").splitlines()[line - 1].strip()
                sys.stdout.write(f"not found: {path.relative_to(options.folder)}:{line}: {shown[:120]}\n")
        sys.stdout.write(f"{kind}: {found} of {len(chosen)} found, out of {len(sites)} places\n")
    return 0


def findings(text: str) -> int:
    """How many findings a file has."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernels.py"
        path.write_text(text, encoding="utf-8")
        return len(lint_kernels(path).findings)


def without_cast(text: str) -> Iterator[tuple[int, str]]:
    """Every way to take out one cast of a program id: its line, and the file then."""
    for match in CAST.finditer(text):
        yield text.count("\n", 0, match.start(1)) + 1, text[: match.start(1)] + text[match.end(1) :]


def without_mask(text: str) -> Iterator[tuple[int, str]]:
    """Every way to take the mask out of one access."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) in {"tl.load", "tl.store"}):
            continue
        if {keyword.arg for keyword in node.keywords} & {"mask", "boundary_check"}:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            kept = ast.Call(node.func, node.args, [one for one in node.keywords if one.arg not in MASKS])
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield node.lineno, (data[:begin] + ast.unparse(kept).encode() + data[end:]).decode()


if __name__ == "__main__":
    sys.exit(main())
