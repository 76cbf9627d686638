"""Measure a dry run's baselines with flashinfer-bench, and write the traces that `publish --traces` takes.

Runs in an interpreter with flashinfer-bench and the packages that the baselines call, on a machine with a GPU:

    python scripts/evaluate.py --dataset DATASET --bundles results/publish --out results/traces
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from flashinfer_bench.bench import Benchmark, BenchmarkConfig  # type: ignore[import-untyped, import-not-found, unused-ignore]
from flashinfer_bench.data import TraceSet  # type: ignore[import-untyped, import-not-found, unused-ignore]

PARSER = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
PARSER.add_argument("--dataset", type=Path, required=True, help="the dataset that was verified")
PARSER.add_argument("--bundles", type=Path, required=True, help="folder of dry runs: <bundle>/files/")
PARSER.add_argument("--out", type=Path, required=True, help="gets traces/<op_type>/<definition>.jsonl")
PARSER.add_argument("--definitions", nargs="*", help="only these")


def main() -> int:
    """Measure; 1 if a trace did not pass, or nothing was measured."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        names = _collect(root)
        config = BenchmarkConfig(definitions=sorted(names))
        Benchmark(TraceSet.from_path(str(root)), config).run_all(dump_traces=True)
        shutil.copytree(root / "traces", options.out / "traces", dirs_exist_ok=True)
    lines = [line for path in options.out.rglob("*.jsonl") for line in path.read_text().splitlines()]
    found = Counter(json.loads(line)["evaluation"]["status"] for line in lines)
    sys.stdout.write(f"{len(names)} definitions: {dict(found)}\n")
    return 0 if found and set(found) == {"PASSED"} else 1


def _collect(root: Path) -> set[str]:
    """Lay the bundles' solutions, own workloads and blobs beside their definitions; the definitions' names."""
    names = set()
    for folder in sorted(options.bundles.glob("*/files")):
        for kind in ("blob", "solutions"):
            if (folder / kind).is_dir():
                shutil.copytree(folder / kind, root / kind, dirs_exist_ok=True)
    for part in sorted((options.bundles / "parts").iterdir()):
        own = list(part.glob("workloads/*/*.jsonl"))
        if not own or (options.definitions and part.name not in options.definitions):
            continue
        names.add(part.name)
        shutil.copytree(part / "workloads", root / "workloads", dirs_exist_ok=True)
        found = next((options.dataset / "definitions").rglob(f"{part.name}.json"))
        target = root / found.relative_to(options.dataset)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, target)
    return names


if __name__ == "__main__":
    options = PARSER.parse_args()
    raise SystemExit(main())
