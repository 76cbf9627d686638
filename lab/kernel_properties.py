"""Prints what the bits of ground truths' kernels depend on: run, addresses, stream, batch, CUDA graph.

    PYTHONPATH=src:lab python lab/kernel_properties.py --dataset DATASET [--truth flashinfer] [--out FOLDER]

Runs in an interpreter that has the packages; what is absent is named. Each (ground truth, op_type) has a process
and a limit of time. `FOLDER/table.md` has the violations and the counts, `FOLDER/results.json` all results, and
`FOLDER/repeats/*.py` a script per violation, which needs torch and the package alone and is tried here: it exits
with 1 where it sees other bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Timer

from traceproof.dataset.tree import read_tree
from traceproof.ops import lookup
from traceproof.stacks import TRUTHS

PROPERTIES = ("determinism", "addresses", "stream", "batch", "graph")
STATES = ("holds", "depends", "not measured")
Result = dict[str, str]


def one(options: argparse.Namespace) -> int:
    """What a process does: the definitions of one op_type by one ground truth, a JSON line per result."""
    import torch

    from kernels.measure import UNMEASURED, Seen, measured

    truth, op_type = options.one
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    for entry in read_tree(options.dataset).definitions.values():
        definition = entry.definition
        if definition.op_type != op_type:
            continue
        try:
            found = measured(truth, definition, device)
        except Exception as error:  # noqa: BLE001 - a package's, and this kernel's result
            last = str(error).strip().splitlines()[-1:] or [""]
            told = f"{type(error).__name__}: {last[0][:200]}"
            found = [Seen(definition.name, truth, "", "all", UNMEASURED, told)]
        for seen in found:
            sys.stdout.write(json.dumps({"op_type": op_type, **seen.as_json()}) + "\n")
            sys.stdout.flush()
    return 0


def run(options: argparse.Namespace, truth: str, op_type: str) -> Iterator[Result]:
    """The results of one process as they come, before its limit of time if it meets that; scripts are tried."""
    command = [sys.executable, __file__, "--dataset", str(options.dataset), "--one", truth, op_type]
    log = options.out / f"{truth}-{op_type}.log"
    named = {"op_type": op_type, "definition": "*", "truth": truth, "property": "all", "state": STATES[2]}
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer = Timer(options.seconds, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                result: Result = json.loads(line)
                try_script(result, options.out / "repeats")
                yield result
        late = not timer.is_alive()
        timer.cancel()
    if process.wait() and late:
        yield {**named, "detail": "stopped by the limit of time"}
    elif process.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or [""]
        yield {**named, "detail": f"the process ended with {process.returncode}: {last[0][:200]}"}


def try_script(result: Result, folder: Path) -> None:
    """Write a violation's script, run it, and note whether it shows the difference."""
    text = result.pop("script", "")
    if result["state"] != STATES[1]:
        return
    if not text:
        result["repeat"] = "none"
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{result['truth']}-{result['definition']}-{result['property']}.py"
    (folder / name).write_text(text, encoding="utf-8")
    others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and not _ours(Path(one))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(others)}
    command = [sys.executable, str(folder / name)]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=90, env=environment, check=False, text=True)
    except subprocess.TimeoutExpired:
        result["repeat"] = f"{name}: not done after 90 s"
        return
    shown = {0: "does not show it", 1: "shows it"}.get(ran.returncode, "fails")
    shown = shown if ran.stdout else f"fails: {ran.stderr.strip()[-200:]}"
    result["repeat"] = f"{name}: {shown}"
    sys.stdout.write(f"{name}: {shown}: {ran.stdout.strip()[:300]}\n")


def _ours(place: Path) -> bool:
    return place.resolve().is_relative_to(Path(__file__).resolve().parents[1])


def table(results: Sequence[Result]) -> Iterator[str]:
    """Counts per ground truth and property, and a row per violation, as Markdown."""
    yield "| ground truth | property | holds | depends | not measured |"
    yield "|---|---|---:|---:|---:|"
    for truth in dict.fromkeys(result["truth"] for result in results):
        for name in PROPERTIES:
            states = Counter(r["state"] for r in results if r["truth"] == truth and r["property"] == name)
            yield f"| {truth} | {name} | {' | '.join(str(states[state]) for state in STATES)} |"
    yield ""
    yield "| ground truth | kernel | definition | sizes | property | seen | repeat |"
    yield "|---|---|---|---|---|---|---|"
    for r in (r for r in results if r["state"] == STATES[1]):
        names = ("truth", "adapter", "definition", "case", "property", "detail", "repeat")
        yield f"| {' | '.join(r.get(name, '') for name in names)} |"
    yield ""
    why = Counter((r["truth"], r["property"], r["detail"][:100]) for r in results if r["state"] == STATES[2])
    yield "| ground truth | property | not measured because | definitions |"
    yield "|---|---|---|---:|"
    for (truth, name, detail), count in sorted(why.items()):
        yield f"| {truth} | {name} | {' '.join(detail.split()).replace('|', '/')} | {count} |"


def main() -> int:
    """Exit code 0: measured, whatever was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, default=Path("tests/dataset"))
    parser.add_argument("--truth", nargs="*", default=list(TRUTHS))
    parser.add_argument("--op-type", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("results/kernel-properties"))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=600.0, help="of one ground truth's op_type")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(options)
    options.out.mkdir(parents=True, exist_ok=True)
    kinds = sorted({entry.definition.op_type for entry in read_tree(options.dataset).definitions.values()})
    wanted = [
        (truth, op_type)
        for truth in options.truth
        for op_type in kinds
        if op_type in lookup.op_types(truth) and (options.op_type is None or op_type in options.op_type)
    ]
    started = time.monotonic()
    results: list[Result] = []
    lock = Lock()

    def measure(truth: str, op_type: str) -> None:
        for result in run(options, truth, op_type):
            with lock:
                results.append(result)
                _write(options.out, results)
        sys.stderr.write(f"{time.monotonic() - started:.0f} s: {truth} {op_type}\n")

    with ThreadPoolExecutor(options.jobs) as threads:
        for future in [threads.submit(measure, truth, op_type) for truth, op_type in wanted]:
            future.result()
    sys.stdout.write("\n".join(table(results)) + "\n")
    return 0


def _write(folder: Path, results: Sequence[Result]) -> None:
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    (folder / "table.md").write_text("\n".join(table(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
