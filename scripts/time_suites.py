"""Run suites of reference tests, a process a file: sizes, outcomes and times of ours, and of others beside it."""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from traceproof.testgen.generate import PLACE, Order, generate
from traceproof.testgen.known import Divergences

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True, help="a folder with definitions/")
PARSER.add_argument("--suite", type=Path, nargs="*", default=[], help="folders of other suites' test_*.py")
PARSER.add_argument("--no-own", action="store_true", help="leave our own suite out")
PARSER.add_argument("--device", default="cpu", help="where our suite runs; others choose for themselves")
PARSER.add_argument("--python", default=sys.executable, help="interpreter with pytest, torch and ground truths")
PARSER.add_argument("--jobs", type=int, default=1, help="files at once")
PARSER.add_argument("--seconds", type=float, default=300.0, help="limit of one file")
PARSER.add_argument("--files", nargs="*", help="only files of these names")
PARSER.add_argument("--keyword", default="", help="pytest's -k")
PARSER.add_argument("--out", type=Path, required=True, help="JSON")


def main() -> int:
    """Prints one line a file; everything else is in --out."""
    options = PARSER.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = [folder.resolve() for folder in options.suite]
        if not options.no_own:
            root = Path(scratch) / "dataset"
            shutil.copytree(options.dataset / "definitions", root / "definitions")
            generate(Order(root=root, everything=True), Divergences(verdicts=None, known=None))
            folders.insert(0, root / PLACE)
        for folder in folders:
            ours = folder.is_relative_to(scratch)
            extra = [f"--device={options.device}"] if ours else []
            found.append({"suite": "generated" if ours else folder.name, **_suite(folder, extra, options)})
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _suite(folder: Path, extra: Sequence[str], options: Any) -> dict[str, Any]:  # noqa: ANN401 - parsed options
    """Every file of a suite."""
    paths = [p for p in sorted(folder.glob("test_*.py")) if not options.files or p.name in options.files]
    started = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda path: _file(path, extra, options), paths))
    total = sum((Counter(row["outcomes"]) for row in rows), Counter())
    beside = [path for path in sorted(folder.rglob("*.py")) if path not in paths]
    return {
        "files": len(rows),
        "lines": sum(row["lines"] for row in rows),
        "lines_beside": sum(_lines(path) for path in beside) if not options.files else None,
        "classes": sum(row["classes"] for row in rows),
        "outcomes": dict(total),
        "wall_s": round(time.monotonic() - started, 1),
        "rows": rows,
    }


def _file(path: Path, extra: Sequence[str], options: Any) -> dict[str, Any]:  # noqa: ANN401 - parsed options
    """One file in a process of its own."""
    keyword = ["-k", options.keyword] if options.keyword else []
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [options.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        started = time.monotonic()
        try:
            done = subprocess.run(
                [*command, str(path), *extra, *keyword],
                cwd=path.parent,
                timeout=options.seconds,
                capture_output=True,
                text=True,
                check=False,
            )
            said = f"exit {done.returncode}: {done.stdout.strip().splitlines()[-1:]}"
        except subprocess.TimeoutExpired:
            said = f"not done after {options.seconds:g} s"
        wall = round(time.monotonic() - started, 1)
        row = {"file": path.name, "wall_s": wall, "said": said, **_sizes(path), **_outcomes(report)}
    sys.stdout.write(f"{path.name}: {row['outcomes']} in {wall} s; {said}\n")
    sys.stdout.flush()
    return row


def _sizes(path: Path) -> dict[str, int]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {"lines": _lines(path), "classes": sum(isinstance(node, ast.ClassDef) for node in tree.body)}


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _outcomes(report: Path) -> dict[str, Any]:
    """Counts, the reasons of skips, what failed, and the slowest tests, out of pytest's XML."""
    if not report.exists():
        return {"outcomes": {}, "skips": {}, "failed": [], "slowest": []}
    counts: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    failed, times = [], []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - written by our own child
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        times.append((float(case.get("time", "0")), name))
        what = next((child for child in case if child.tag in {"failure", "error", "skipped"}), None)
        counts[what.tag if what is not None else "passed"] += 1
        message = "" if what is None else (what.get("message") or "").splitlines()[:1]
        if what is not None and what.tag == "skipped":
            skips["".join(message).partition(":")[0]] += 1
        elif what is not None:
            failed.append({"test": name, "message": "\n".join((what.text or "").splitlines()[:12])[:1200]})
    slowest = [{"s": round(s, 2), "test": name} for s, name in sorted(times, reverse=True)[:8]]
    return {"outcomes": dict(counts), "skips": dict(skips), "failed": failed, "slowest": slowest}


if __name__ == "__main__":
    sys.exit(main())
