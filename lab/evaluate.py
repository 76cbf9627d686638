"""Measure a dry run's baselines with flashinfer-bench, and write the traces that `publish --traces` takes.

Runs in an interpreter with flashinfer-bench and the packages that the baselines call, on a machine with a GPU:

    python lab/evaluate.py --dataset DATASET --pull-requests results/publish --out results/traces

`OUT/traces/` gets what passed, `OUT/not_passed.jsonl` what did not, with flashinfer-bench's own log.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

PASSED = "PASSED"
PARSER = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
PARSER.add_argument("--dataset", type=Path, required=True, help="the dataset that was verified")
PARSER.add_argument("--pull-requests", type=Path, required=True, help="folder of dry runs")
PARSER.add_argument("--out", type=Path, required=True, help="gets traces/<op_type>/<definition>.jsonl")
PARSER.add_argument("--definitions", nargs="*", help="only these")
PARSER.add_argument("--warmup", type=int, default=10, help="runs before timing; flashinfer-bench's own default")
PARSER.add_argument("--iterations", type=int, default=50, help="timed runs a trial; likewise")
PARSER.add_argument("--trials", type=int, default=3, help="draws of random inputs a workload; likewise")


def main(options: argparse.Namespace) -> int:
    """Measure; 1 if a trace did not pass, or a definition was not measured."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "dataset"
        os.environ["FIB_CACHE_PATH"] = str(Path(scratch) / "cache")  # builds and logs; read when it is imported
        names = _collect(options, root)
        _benchmark(options, root, sorted(names))
        traces = root / "traces"
        found = [
            (path.relative_to(traces), json.loads(line))
            for path in sorted(traces.rglob("*.jsonl"))
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    for place, trace in found:
        passed = trace["evaluation"]["status"] == PASSED
        if passed:
            trace["evaluation"]["log"] = ""  # what was printed names folders of this machine
        path = options.out / "traces" / place if passed else options.out / "not_passed.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trace) + "\n")
    return _tell(names, [trace for _, trace in found])


def _benchmark(options: argparse.Namespace, root: Path, names: list[str]) -> None:
    from flashinfer_bench.bench import Benchmark, BenchmarkConfig  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from flashinfer_bench.data import TraceSet  # type: ignore[import-untyped, import-not-found, unused-ignore]

    config = BenchmarkConfig(
        definitions=names, warmup_runs=options.warmup, iterations=options.iterations, num_trials=options.trials
    )
    benchmark = Benchmark(TraceSet.from_path(str(root)), config)
    try:
        benchmark.run_all(dump_traces=True)
    finally:
        benchmark.close()


def _tell(names: set[str], traces: list[dict[str, Any]]) -> int:
    """A line a definition: how its traces came out and how much faster than the reference the baseline was."""
    bad = 0
    for name in sorted(names):
        own = [trace for trace in traces if trace["definition"] == name]
        statuses = Counter(trace["evaluation"]["status"] for trace in own)
        faster = [t["evaluation"]["performance"]["speedup_factor"] for t in own if t["evaluation"]["performance"]]
        speed = f"{min(faster):.1f} to {max(faster):.1f} times the reference's speed" if faster else ""
        sys.stdout.write(f"{name}: {dict(statuses) or 'not measured'} {speed}\n")
        bad += set(statuses) != {PASSED}
    sys.stdout.write(f"{len(names)} definitions, {len(traces)} traces, {bad} with one that did not pass\n")
    return int(bad > 0 or not names)


def _collect(options: argparse.Namespace, root: Path) -> set[str]:
    """Lay the solutions, own workloads and blobs beside their definitions; the definitions' names."""
    names = set()
    root.mkdir()
    for part in sorted((options.pull_requests / "parts").iterdir()):
        wanted = not options.definitions or part.name in options.definitions
        if not (wanted and list(part.glob("workloads/*/*.jsonl")) and list(part.glob("solutions/**/*.json"))):
            continue
        names.add(part.name)
        for kind in ("blob", "solutions", "workloads"):
            if (part / kind).is_dir():
                shutil.copytree(part / kind, root / kind, dirs_exist_ok=True)
        found = next((options.dataset / "definitions").rglob(f"{part.name}.json"))
        target = root / found.relative_to(options.dataset)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, target)
    return names


if __name__ == "__main__":
    raise SystemExit(main(PARSER.parse_args()))
