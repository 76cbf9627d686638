"""Cost as a dataset grows: planning, a first run, a run with nothing to do, and one with one reference edited.

Every definition is a renamed copy of a small one in tests/dataset. Prints a Markdown table for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "tests" / "dataset" / "definitions"


def generate(folder: Path, count: int, op_types: Sequence[str]) -> list[Path]:
    """Write `count` definitions, spread over the templates of some op_types."""
    templates = [
        json.loads(path.read_text()) for op in op_types for path in sorted((TEMPLATES / op).glob("*.json"))
    ]
    written = []
    for index in range(count):
        template = templates[index % len(templates)]
        name = f"{template['name']}_copy{index:05d}"
        path = folder / "definitions" / template["op_type"] / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(template | {"name": name}))
        written.append(path)
    return written


def run(target: str, dataset: Path, results: Path, cores: int) -> float:
    """Wall-clock seconds of one snakemake call. Raises SystemExit: it failed."""
    config = results.with_suffix(".json")
    settings = {"dataset": {"pypi": None, "path": str(dataset)}, "results": str(results)}
    config.write_text(json.dumps(settings | {"test_sizes": ["small"], "known": None}))
    command = [sys.executable, "-m", "snakemake", "--cores", str(cores), "--configfile", str(config), "--", target]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout[-3000:] + done.stderr[-3000:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return time.monotonic() - started


def measure(count: int, folder: Path, cores: int, op_types: Sequence[str]) -> str:
    """One row of the table."""
    dataset, results = folder / f"dataset-{count}", folder / f"results-{count}"
    files = generate(dataset, count, op_types)
    plan = run(str(results / "cases" / "index.json"), dataset, results, cores)
    first = run("verify_all", dataset, results, cores)
    nothing = run("verify_all", dataset, results, cores)
    edited = json.loads(files[0].read_text())
    edited["reference"] += "\n# edited\n"
    files[0].write_text(json.dumps(edited))
    edit = run("verify_all", dataset, results, cores)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    rows = sum(len(path.read_bytes().splitlines()) for path in (results / "verdicts").glob("*.jsonl"))
    return f"| {count:,} | {rows:,} | {plan:.1f} | {first:.0f} | {nothing:.1f} | {edit:.1f} | {peak:.2f} |"


def main() -> int:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--op-type", nargs="+", required=True, help="whose definitions are copied")
    options = parser.parse_args()
    columns = "definitions | rows | plan, s | first run, s | nothing to do, s | one edited, s | peak, GiB"
    sys.stdout.write(f"| {columns} |\n{'|---:' * 7}|\n")
    with tempfile.TemporaryDirectory() as folder:
        for count in options.count:
            sys.stdout.write(measure(count, Path(folder), options.cores, options.op_type) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
