"""Run suites of reference tests, a process per file: sizes, outcomes and times of ours and of others."""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from traceproof.testgen.generate import PLACE, Divergences, GenerateOptions, generate

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True, help="a folder with definitions/")
PARSER.add_argument("--suite", type=Path, nargs="*", default=[], help="folders of other suites' test_*.py")
PARSER.add_argument("--no-own", action="store_true", help="leave our own suite out")
PARSER.add_argument("--device", default="cpu", help="where our suite runs; others choose for themselves")
PARSER.add_argument("--python", default=sys.executable, help="interpreter with pytest, torch and ground truths")
PARSER.add_argument("--jobs", type=int, default=1, help="files at once")
PARSER.add_argument("--threads", type=int, help="OMP_NUM_THREADS of a file; default: its part of the cores")
PARSER.add_argument("--seconds", type=float, default=300.0, help="limit of one file")
PARSER.add_argument("--total", type=float, default=float("inf"), help="limit of everything, in seconds")
PARSER.add_argument("--durations", type=int, default=8, help="how many of a file's slowest tests to report")
PARSER.add_argument("--files", nargs="*", help="only files of these names")
PARSER.add_argument("--keyword", default="", help="pytest's -k")
PARSER.add_argument("--out", type=Path, required=True, help="JSON, written again after each file")
PLUGIN = Path(__file__).with_name("_outcome_log.py")
STARTED = time.monotonic()


def main() -> int:
    """Prints one line per file; everything else is in --out."""
    options = PARSER.parse_args()
    if options.threads is None:
        options.threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = [folder.resolve() for folder in options.suite]
        if not options.no_own:
            root = Path(scratch) / "dataset"
            shutil.copytree(options.dataset / "definitions", root / "definitions")
            generate(GenerateOptions(root=root, everything=True), Divergences(verdicts=None, known=None))
            folders.insert(0, root / PLACE)
        for folder in folders:
            ours = folder.is_relative_to(scratch)
            extra = [f"--device={options.device}"] if ours else []
            _suite("generated" if ours else folder.name, folder, extra, options, found)
    return 0


def _suite(name: str, folder: Path, extra: Sequence[str], options: Any, found: list[dict[str, Any]]) -> None:  # noqa: ANN401 - parsed options
    """Every file of a suite; the suite's entry in `found` and --out grows with each."""
    paths = [p for p in sorted(folder.glob("test_*.py")) if not options.files or p.name in options.files]
    beside = [path for path in sorted(folder.rglob("*.py")) if path not in paths]
    lines = sum(_lines(path) for path in beside) if not options.files else None
    rows: list[dict[str, Any]] = []
    found.append({})
    started = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(_file, path, extra, options) for path in paths]):
            row = done.result()
            rows = sorted([*rows, row], key=lambda row: str(row["file"]))
            sys.stdout.write(f"{row['file']}: {row['outcomes']} in {row['wall_s']} s; {row['said']}\n")
            sys.stdout.flush()
            found[-1] = {
                "suite": name,
                "files": len(rows),
                "lines": sum(row["lines"] for row in rows),
                "lines_beside": lines,
                "classes": sum(row["classes"] for row in rows),
                "outcomes": dict(sum((Counter(row["outcomes"]) for row in rows), Counter())),
                "wall_s": round(time.monotonic() - started, 1),
                "rows": rows,
            }
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _file(path: Path, extra: Sequence[str], options: Any) -> dict[str, Any]:  # noqa: ANN401 - parsed options
    """One file in a process of its own, which is ended with all its compilers when its time is up."""
    started = time.monotonic()
    seconds = min(options.seconds, options.total - (started - STARTED))
    if seconds <= 0:
        return {"file": path.name, "wall_s": 0.0, "said": "not started", **_sizes(path), **_outcomes("", 0)}
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        log.touch()
        said = _run(path, [*extra, *(["-k", options.keyword] if options.keyword else [])], seconds, options, log)
        lines = log.read_text(encoding="utf-8")
    wall = round(time.monotonic() - started, 1)
    return {"file": path.name, "wall_s": wall, "said": said, **_sizes(path), **_outcomes(lines, options.durations)}


def _run(path: Path, extra: Sequence[str], seconds: float, options: Any, log: Path) -> str:  # noqa: ANN401 - parsed options
    """Run a file's tests, and say how that ended."""
    shutil.copyfile(PLUGIN, log.with_name(PLUGIN.name))  # alone: lab has names that suites may use too
    places = [str(log.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(options.threads),
        "OUTCOME_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(places),
    }
    command = [options.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN.stem, str(path)]
    with (log.parent / "said").open("w+") as said:
        child = subprocess.Popen(
            [*command, *extra],
            cwd=path.parent,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"not done after {seconds:.0f} s"
        said.seek(0)
        return f"exit {status}: {said.read().strip().splitlines()[-1:]}"


def _sizes(path: Path) -> dict[str, int]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {"lines": _lines(path), "classes": sum(isinstance(node, ast.ClassDef) for node in tree.body)}


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _outcomes(log: str, durations: int) -> dict[str, Any]:
    """Counts, reasons of skips, what failed, the slowest tests, and what a stopped run left, out of the log."""
    how: dict[str, str] = {}
    skips: Counter[str] = Counter()
    times: Counter[str] = Counter()
    failed: list[dict[str, str]] = []
    collected, running = 0, None
    for line in map(json.loads, filter(lambda line: line.endswith("}"), log.splitlines())):  # the last may be cut
        collected = line.get("collected", collected)
        test = line.get("test") or line.get("begun", "")
        name = test.partition("::")[2] or test
        if "outcome" not in line:
            running = name or running
            continue
        times[name] += line["s"]
        if line["outcome"] == "failed":
            how[name] = "failure" if line["when"] == "call" else "error"
            failed.append({"test": name, "message": line["message"]})
        elif line["outcome"] == "skipped":
            how[name] = "skipped"
            skips[line["message"].partition(":")[0]] += 1
        elif line["when"] == "call":
            how[name] = "passed"
        running = None if line["when"] == "teardown" else running
    return {
        "outcomes": dict(Counter(how.values())),
        "skips": dict(skips),
        "failed": failed,
        "slowest": [{"s": round(s, 2), "test": name} for name, s in times.most_common(durations)],
        "left": max(0, collected - len(how)),
        "stopped_in": running,
    }


if __name__ == "__main__":
    sys.exit(main())
