"""Kill a run's processes at random moments, damage what it kept, and hold its verdicts against undisturbed ones.

    python lab/kill_runs.py --work DIR --kills 200 --damages 100

A new copy of this repository verifies definitions of tests/dataset. A round of kills removes what was finished,
starts a run, and kills several of its processes, one after the other: the command, Snakemake, a job, an
interpreter, a worker. A run that has ended is started again before the next kill, and at
last the command runs until it ends by itself. A damage flips a byte of a finished file, cuts it, or empties it.
Exit code 1: verdicts differ, or a process, a lock or a scratch folder is left.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from _run_processes import of_folder, of_run
from traceproof.stacks import MAIN

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("Snakefile", "rules", "scripts", "envs", "profiles", "src", "sources.lock")
NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")
MOST_RUNS = 4  # until one ends by itself
RETRY_SECONDS = 3.0  # one is refused while a killed one is still ending
LEAVE_SECONDS = 15.0  # that processes of a run may take to end
# What a process is called by: a word of its command line. The first that fits, so the special ones come first.
KINDS = {
    "traceproof.sandbox.zygote": "interpreter or worker",
    "scripts/": "job",
    "snakemake": "Snakemake",
    "traceproof verify": "command",
}
# What a row may differ in from run to run.
LOOSE = frozenset({"replay"})


@dataclass(slots=True)
class Copy:
    """A copy of the repository, set up for a few definitions, with its own folder for temporary files."""

    folder: Path
    python: str
    seconds: float = 0.0  # that an undisturbed run takes
    wanted: dict[str, list[str]] = field(default_factory=dict)

    @property
    def temporary(self) -> Path:
        """Where its runs put temporary files."""
        return self.folder / "t"

    def prepare(self) -> None:
        """Copy what is needed."""
        self.temporary.mkdir(parents=True)
        for part in PARTS:
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, self.folder / part)
        for name in NAMES:
            target = self.folder / "dataset" / "definitions" / f"{name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "tests" / "dataset" / "definitions" / f"{name}.json", target)
        config = {
            "dataset": {"path": "dataset"},
            "stacks": {MAIN: {"python": self.python}},
            "truths": [],
            "test_sizes": ["small"],
            "known": None,
            "hidden_seed": 1,
        }
        (self.folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")

    def start(self) -> subprocess.Popen[bytes]:
        """A run, in a session of its own."""
        added = {"PYTHONPATH": str(self.folder / "src"), "TMPDIR": str(self.temporary)}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "traceproof", "verify", "--cores", "2"],
                cwd=self.folder,
                env=os.environ | added,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def clear(self) -> None:
        """Remove what was finished."""
        shutil.rmtree(self.folder / "results", ignore_errors=True)
        shutil.rmtree(self.folder / ".snakemake", ignore_errors=True)

    def verdicts(self) -> dict[str, list[str]]:
        """Verdict rows by op_type."""
        found = {}
        for path in sorted((self.folder / "results" / "verdicts").glob("*.jsonl")):
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            kept = [{key: value for key, value in row.items() if key not in LOOSE} for row in rows]
            found[path.stem] = [json.dumps(row, sort_keys=True) for row in kept]
        return found

    def left(self) -> list[str]:
        """Processes, scratch folders, temporary files and locks that runs left."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while (running := of_folder(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.5)
        places = (
            (self.folder / "results").glob("scratch*"),
            Path("/dev/shm").glob("scratch*"),  # noqa: S108 - memory, as a folder
            # Snakemake's own is empty, and stays where Snakemake is killed.
            (path for path in self.temporary.iterdir() if not path.name.startswith("snakemake")),
            (self.folder / ".snakemake" / "locks").glob("*"),
        )
        return [f"process {pid}" for pid in running] + [path.name for place in places for path in place]

    def finish(self, what: str) -> str:
        """Run until one ends by itself, and say what is wrong then; empty: nothing."""
        for _ in range(MOST_RUNS):
            if self.start().wait() == 0:
                break
            time.sleep(RETRY_SECONDS)
        else:
            return f"NO RUN ENDED WELL after {what}"
        wrong = [] if self.verdicts() == self.wanted else ["VERDICTS DIFFER"]
        return "; ".join(wrong + [f"left: {name}" for name in self.left()])

    def undisturbed(self) -> None:
        """Take the time and the verdicts of a run that nobody disturbs."""
        began = time.monotonic()
        if self.start().wait() != 0:
            raise SystemExit(f"the undisturbed run failed: see {self.folder / 'log'}")
        self.seconds, self.wanted = time.monotonic() - began, self.verdicts()
        if left := self.left():
            raise SystemExit(f"the undisturbed run left {', '.join(left)}")


def kind(pid: int) -> str:
    """What a process of a run is; empty: it has ended."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return next((name for word, name in KINDS.items() if word in line), "other" if line else "")


def kill_one(run: subprocess.Popen[bytes], draw: random.Random) -> str:
    """Kill a process of a run, of a kind drawn first, and say of which; empty: there was none."""
    kinds: dict[str, list[int]] = {}
    for pid in of_run(run.pid):
        kinds.setdefault(kind(pid), []).append(pid)
    kinds.pop("", None)
    if not kinds:
        return ""
    name = draw.choice(sorted(kinds))
    try:
        os.kill(draw.choice(kinds[name]), signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return name


def disturbed(copy: Copy, kills: int, draw: random.Random) -> tuple[list[str], str]:
    """A round: the kinds of processes killed, and what went wrong."""
    copy.clear()
    killed: list[str] = []
    run = copy.start()
    while len(killed) < kills:
        time.sleep(draw.uniform(0.2, 0.6 * copy.seconds))
        if name := kill_one(run, draw) if run.poll() is None else "":
            killed.append(name)
        if run.poll() == 0:  # all done before the next kill
            copy.clear()
        if run.poll() is not None:  # perhaps refused, since what was killed is still ending
            run = copy.start()
    run.wait()
    return killed, copy.finish(f"kills of {', '.join(killed)}")


def damaged(copy: Copy, draw: random.Random) -> tuple[str, str]:
    """Damage a finished file and run again: what was done to which, and what went wrong."""
    results = copy.folder / "results"
    files = [path for path in results.rglob("*") if path.is_file() and path.stat().st_size]
    files = [path for path in files if "logs" not in path.relative_to(results).parts]
    folders = sorted({path.relative_to(results).parts[:2] for path in files})
    chosen = draw.choice(folders)
    path = draw.choice(sorted(path for path in files if path.relative_to(results).parts[:2] == chosen))
    data = bytearray(path.read_bytes())
    damage = draw.choice(["flipped", "cut", "emptied"])
    if damage == "flipped":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        del data[draw.randrange(len(data)) if damage == "cut" else 0 :]
    path.write_bytes(data)
    what = f"{damage} {path.relative_to(results)}"
    wrong = copy.finish(what)
    if wrong:  # the next damage is to find everything whole
        copy.clear()
        copy.start().wait()
    return what, wrong


def main() -> int:
    """Print a line per round and per damage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a new folder; sockets lie in it: a short path")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-round", type=int, default=8, help="kills before the verdicts are compared")
    parser.add_argument("--damages", type=int, default=0, help="files to damage, one after the other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the torch stack")
    options = parser.parse_args()
    copy = Copy((options.work / "copy").resolve(), options.python)
    copy.prepare()
    copy.undisturbed()
    sys.stdout.write(f"undisturbed: {copy.seconds:.0f} s, {sum(map(len, copy.wanted.values()))} verdict rows\n")
    draw = random.Random(options.seed)  # noqa: S311 - whom to kill
    total, bad = Counter[str](), 0
    while (done := total.total()) < options.kills:
        killed, wrong = disturbed(copy, min(options.per_round, options.kills - done), draw)
        total.update(killed)
        bad += bool(wrong)
        _say(f"{total.total()} kills: {wrong or 'as undisturbed'}; killed {', '.join(killed)}")
    for number in range(options.damages):
        what, wrong = damaged(copy, draw)
        bad += bool(wrong)
        _say(f"damage {number + 1}: {wrong or 'as undisturbed'}; {what}")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(total.items()))
    _say(f"{bad} rounds went wrong; killed: {counts}; {options.damages} files damaged")
    return int(bad > 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
