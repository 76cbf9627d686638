"""Kill a run's processes at random moments, run again, and hold the verdicts against an undisturbed run's.

    python lab/kill_runs.py --work DIR --kills 200

A new copy of this repository verifies definitions of tests/dataset. Each round removes what was finished, starts a
run, kills one of its processes (Snakemake, a job, an interpreter, a worker), and runs the same command until it
ends by itself. Exit code 1: verdicts differ, or a process, a lock or a scratch folder is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from traceproof.stacks import MAIN

ROOT = Path(__file__).resolve().parents[1]
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--work", type=Path, required=True, help="a new folder")
PARSER.add_argument("--kills", type=int, default=200)
PARSER.add_argument("--seed", type=int, default=0)
PARSER.add_argument("--python", default=sys.executable, help="interpreter of the torch stack")
PARTS = ("Snakefile", "rules", "scripts", "envs", "profiles", "src", "sources.lock")
NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")
MOST_RUNS = 4  # until one ends by itself
LONGEST = 60.0  # seconds that an undisturbed run is taken to last at most
# What a row may differ in from run to run.
LOOSE = frozenset({"replay"})


def prepare(folder: Path) -> None:
    """A copy of the repository, set up for a few definitions."""
    folder.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, folder / part)
    for name in NAMES:
        target = folder / "dataset" / "definitions" / f"{name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / "tests" / "dataset" / "definitions" / f"{name}.json", target)
    config = {
        "dataset": {"path": "dataset"},
        "stacks": {MAIN: {"python": options.python}},
        "truths": [],
        "test_sizes": ["small"],
        "known": None,
        "hidden_seed": 1,
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")


def start(folder: Path) -> subprocess.Popen[bytes]:
    """A run, in a session of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.Popen(
        [sys.executable, "-m", "traceproof", "verify", "--cores", "2"],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def below(pid: int) -> list[int]:
    """A process and all that it started, and what the copy's folder is named in."""
    found, waiting = [pid], [pid]
    while waiting:
        children = Path(f"/proc/{waiting.pop()}/task")
        for file in children.glob("*/children"):
            try:
                more = [int(word) for word in file.read_text().split()]
            except OSError:
                continue
            found += more
            waiting += more
    return found


def of_folder(folder: Path) -> Iterator[int]:
    """Processes that work for a copy."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes() + os.fsencode((entry / "cwd").readlink())
            except OSError:
                continue
            if os.fsencode(folder) in line:
                yield int(entry.name)


def verdicts(folder: Path) -> dict[str, list[str]]:
    """Verdict rows by op_type."""
    found = {}
    for path in sorted((folder / "results" / "verdicts").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        kept = [{key: value for key, value in row.items() if key not in LOOSE} for row in rows]
        found[path.stem] = [json.dumps(row, sort_keys=True) for row in kept]
    return found


def left(folder: Path) -> list[str]:
    """Processes, scratch folders and locks that a run left."""
    deadline = time.monotonic() + 15
    while (running := list(of_folder(folder))) and time.monotonic() < deadline:
        time.sleep(0.5)
    store = folder / "results" / "store"
    scratch = [path.name for path in store.glob("scratch-*")] if store.is_dir() else []
    locks = [path.name for path in (folder / ".snakemake" / "locks").glob("*")]
    return [f"process {pid}" for pid in running] + scratch + locks


def disturbed(folder: Path, draw: random.Random) -> str:
    """One round: a killed run, then runs until one ends by itself; what was killed, or why it went wrong."""
    shutil.rmtree(folder / "results", ignore_errors=True)
    shutil.rmtree(folder / ".snakemake", ignore_errors=True)
    run = start(folder)
    time.sleep(draw.uniform(0.5, LONGEST / 3))
    chosen = draw.choice(below(run.pid))
    try:
        name = Path(f"/proc/{chosen}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
        os.kill(chosen, signal.SIGKILL)
    except OSError:
        name = "nothing: it had ended"
    run.wait()
    for _ in range(MOST_RUNS):
        if start(folder).wait() == 0:
            return name
    raise RuntimeError(f"no run ended well after a kill of {name}")


def main() -> int:
    """Print a line per kill."""
    folder = (options.work / "copy").resolve()
    prepare(folder)
    if start(folder).wait() != 0:
        sys.stderr.write("the undisturbed run failed\n")
        return 1
    wanted = verdicts(folder)
    draw = random.Random(options.seed)  # noqa: S311 - whom to kill
    bad = 0
    for number in range(options.kills):
        try:
            name = disturbed(folder, draw)
        except RuntimeError as error:
            name = str(error)
        same, rest = verdicts(folder) == wanted, left(folder)
        bad += not same or bool(rest)
        outcome = "as undisturbed" if same else "VERDICTS DIFFER"
        sys.stdout.write(f"{number}: {outcome}; left: {rest or 'nothing'}; killed {name}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{bad} of {options.kills} went wrong\n")
    return int(bad > 0)


if __name__ == "__main__":
    options = PARSER.parse_args()
    sys.exit(main())
