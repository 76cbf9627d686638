"""Kill a run's processes at random moments, damage what it kept, and hold its verdicts against undisturbed ones.

    python lab/kill_runs.py --work DIR --kills 200 --damages 100 --side-by-side 5 --full-disks 10

A new copy of this repository verifies definitions of tests/dataset, of which one is made wrong. A round of kills
removes what was finished, starts a run, and kills several of its processes, one after the other. A run that has
ended is started again before the next kill. A damage flips a byte of a kept file, cuts it, or empties it. Side by
side are two runs of one selection, and two of one op_type each. For full disks (root alone may mount one) the copy
lies on a small file system, on which a file takes all but some bytes, until the run has ended.

No other run may be under way on the machine, unless it has another /dev/shm (`unshare --mount`).
What comes after a disturbance has to end as an undisturbed run does, with its verdicts: one run, or a second one
after a run that ends with exit code 2. Exit code 1: it did not, or a process, a lock or a scratch folder is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from traceproof.run.cache import FILE
from traceproof.run.entry import FINDINGS, UNFINISHED
from traceproof.stacks import MAIN

say = partial(print, flush=True)  # a line, at once

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("Snakefile", "rules", "scripts", "envs", "profiles", "src", "sources.lock")
DATASET = ROOT / "tests" / "dataset" / "definitions"
NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")
WRONG = ("* weight.float()", "* weight.float() * 1.02")  # in a copy of the first, whose rows fail
HALF = 0.5
DISK_BYTES = 256 << 20  # of a file system that is made full: the copy's code takes a tenth of it
LONGEST_WAIT = 2.0  # seconds before a process is killed
LEAVE_SECONDS = 15.0  # that processes of a run may take to end
KEPT = {FILE, "cases", "history", "stacks", "summary.json", "verdicts"}  # what is damaged
# What a process is called by: a word of its command line. The first that fits.
KINDS = {"traceproof.sandbox": "sandbox", "scripts/": "job", "snakemake": "Snakemake", "traceproof": "command"}
Verdicts = Mapping[str, list[str]]  # rows by op_type


def command_line(pid: int) -> str:
    """What a process was started as; empty: it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def parent(pid: int) -> int:
    """The process that started it; 0: it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def of_run(root: int) -> list[int]:
    """Process ids of a run: its own process, and its descendants."""
    started: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        started.setdefault(parent(int(entry.name)), []).append(int(entry.name))
    found = [root]
    for pid in found:  # it grows on the way
        found += started.get(pid, [])
    return found


def of_folder(folder: Path) -> list[int]:
    """Process ids of all that name a folder: in their arguments, environment, or as the folder they work in."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if os.fsencode(folder) in said + os.fsencode((entry / "cwd").readlink()):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


@dataclass
class Copy:
    """A copy of the repository, set up for a few definitions, with its own folder for temporary files."""

    folder: Path
    python: str
    seconds: float = 0.0  # that an undisturbed run takes
    wanted: Verdicts = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.temporary, self.results = self.folder / "t", self.folder / "results"
        self.log = self.folder.with_name("log")  # beside it, since its disk may be full

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
            shutil.copy2(DATASET / f"{name}.json", target)
        wrong = json.loads((DATASET / f"{NAMES[0]}.json").read_text(encoding="utf-8"))
        if WRONG[0] not in wrong["reference"]:
            raise SystemExit(f"{NAMES[0]} holds no {WRONG[0]!r} to be made wrong")
        wrong |= {"name": f"{wrong['name']}_wrong", "reference": wrong["reference"].replace(*WRONG)}
        target = self.folder / "dataset" / "definitions" / f"{NAMES[0]}_wrong.json"
        target.write_text(json.dumps(wrong), encoding="utf-8")
        config = {
            "dataset": {"path": "dataset"},
            "stacks": {MAIN: {"python": self.python}},
            "truths": ["torch"],
            "test_sizes": ["small"],
            "known": None,
            "hidden_seed": 1,
        }
        (self.folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """A run, in a session of its own."""
        added = {"PYTHONPATH": str(self.folder / "src"), "TMPDIR": str(self.temporary)}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "traceproof", "verify", "--cores", "2", *options],
                cwd=self.folder,
                env=os.environ | added,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def clear(self) -> None:
        """Remove what was finished."""
        for path in [*self.results.glob("*"), self.folder / ".snakemake"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def verdicts(self, run: str = ".") -> Verdicts:
        """Verdict rows of a run's folder below the results; without commands, which name its selection."""
        found = {}
        for path in sorted((self.results / run / "verdicts").glob("*.jsonl")):
            rows = [json.loads(line) | {"repeat": ""} for line in path.read_text(encoding="utf-8").splitlines()]
            found[path.stem] = [json.dumps(row, sort_keys=True) for row in rows]
        return found

    def left(self) -> list[str]:
        """Processes, scratch folders, temporary files and locks that runs left."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while (running := of_folder(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.5)
        places = (
            self.results.glob("scratch*"),
            Path("/dev/shm").glob("scratch*"),  # noqa: S108 - memory, as a folder
            self.results.rglob(".*.[0-9]*"),  # what becomes a file in one rename
            # Snakemake's own is empty, and stays where Snakemake is killed.
            (path for path in self.temporary.iterdir() if not path.name.startswith("snakemake")),
            (self.folder / ".snakemake" / "locks").glob("*"),
        )
        return [f"process {pid}" for pid in running] + [path.name for place in places for path in place]

    def after(self, *, first: int = FINDINGS) -> str:
        """What is wrong once a run has ended well, a second one where the first could not finish; empty: nothing.

        `first`: how a run before that ended, which counts as the first where it could not finish.
        """
        codes = [first] if first == UNFINISHED else []
        while not codes or (codes == [UNFINISHED]):
            codes.append(self.start().wait())
        wrong = [] if codes[-1] == FINDINGS else [f"ENDED WITH {codes}"]
        wrong += [] if self.verdicts() == self.wanted else ["VERDICTS DIFFER"]
        return "; ".join(wrong + [f"LEFT {name}" for name in self.left()])

    def undisturbed(self) -> None:
        """Take the time and the verdicts of a run that nobody disturbs."""
        began = time.monotonic()
        code = self.start().wait()
        self.seconds, self.wanted = time.monotonic() - began, self.verdicts()
        left = self.left()
        if code != FINDINGS or left:
            raise SystemExit(f"the undisturbed run ended with {code} and left {left}: see {self.log}")


def kind(pid: int) -> str:
    """What a process of a run is; empty: it has ended."""
    line = command_line(pid)
    name = next((name for word, name in KINDS.items() if word in line), "other" if line else "")
    forked = name == "job" and command_line(parent(pid)) == line
    return "worker" if forked else name


def kill_one(run: subprocess.Popen[bytes], name: str, draw: random.Random) -> bool:
    """Kill one of a run's processes of some kind. False: there is none."""
    found = [pid for pid in of_run(run.pid) if kind(pid) == name]
    try:
        os.kill(draw.choice(found), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return False
    return True


def disturbed(copy: Copy, kills: int, draw: random.Random) -> tuple[list[str], str]:
    """A round: the kinds of processes killed, and what went wrong."""
    copy.clear()
    killed: list[str] = []
    run = copy.start()
    while len(killed) < kills:
        name = draw.choice([*KINDS.values(), "worker"])
        while run.poll() is None:
            time.sleep(draw.uniform(0.0, LONGEST_WAIT))
            if kill_one(run, name, draw):
                killed.append(name)
                break
        if run.poll() == FINDINGS:  # all done before the next kill
            copy.clear()
        if run.poll() is not None and len(killed) < kills:
            run = copy.start()
    run.wait()
    return killed, copy.after()


def damaged(copy: Copy, draw: random.Random) -> tuple[str, str]:
    """Damage a kept file and run again: what was done to which, and what went wrong."""
    files = [path for path in sorted(copy.results.rglob("*")) if path.is_file() and path.stat().st_size]
    parts = {path.relative_to(copy.results).parts[0]: path for path in draw.sample(files, len(files))}
    path = parts[draw.choice(sorted(parts.keys() & KEPT))]
    data = bytearray(path.read_bytes())
    damage = draw.choice(["flipped", "cut", "emptied"])
    if damage == "flipped":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        del data[draw.randrange(len(data)) if damage == "cut" else 0 :]
    path.write_bytes(data)
    wrong = copy.after()
    if wrong or path.name == FILE:  # the next damage is to find everything whole
        copy.clear()
        copy.start().wait()
    return f"{damage} {path.relative_to(copy.results)}", wrong


def side_by_side(copy: Copy, draw: random.Random) -> tuple[str, str]:
    """Two runs at once, of one selection or of two: which, and what went wrong."""
    copy.clear()
    apart: list[tuple[str, ...]] = [("--op-type", name.partition("/")[0]) for name in NAMES]
    selections = apart if draw.random() < HALF else [(), ()]
    runs = []
    for selection in selections:
        runs.append(copy.start(*selection))
        time.sleep(draw.uniform(0.0, 0.5 * copy.seconds))
    codes = [run.wait() for run in runs]
    wrong = [f"ENDED WITH {codes}"] if set(codes) - {0, FINDINGS, UNFINISHED} else []
    if selections == apart and UNFINISHED not in codes:
        found: dict[str, list[str]] = {}
        for folder in (copy.results / "selections").iterdir():
            found |= copy.verdicts(f"selections/{folder.name}")
        wrong += [] if found == copy.wanted else ["VERDICTS OF SELECTIONS DIFFER"]
    wrong += [text] if (text := copy.after(first=max(codes))) else []
    return f"{'two selections' if selections == apart else 'one selection'}, exit codes {codes}", "; ".join(wrong)


@contextmanager
def disk_of_its_own(folder: Path) -> Iterator[None]:
    """A small file system in the place of a folder. Raises SystemExit: this process may not mount one."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        raise SystemExit("a full disk needs the right to mount one: run this as root, or leave --full-disks out")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def filled(copy: Copy, draw: random.Random, used: int) -> tuple[str, str]:
    """A run that meets a full disk, and one after there is room again: the room, and what went wrong."""
    copy.clear()
    room, ballast = draw.randrange(used), copy.folder / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(copy.folder).free - room))
    at = copy.log.stat().st_size
    code = copy.start().wait()
    last = copy.log.read_bytes()[at:].decode(errors="replace").strip().rpartition("\n")[2]
    ballast.unlink()
    wrong = [] if code == UNFINISHED else [f"ENDED WITH {code}"]
    wrong += [] if "MiB are free" in last or "No space left" in last else ["LAST LINE"]
    wrong += [text] if (text := copy.after()) else []
    return f"room for {room} bytes: {last}", "; ".join(wrong)


def main() -> int:
    """Print a line per round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a new folder; sockets lie in it: a short path")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-round", type=int, default=16, help="kills before the verdicts are compared")
    parser.add_argument("--damages", type=int, default=0, help="files to damage, one after the other")
    parser.add_argument("--side-by-side", type=int, default=0, help="rounds of two runs at once")
    parser.add_argument("--full-disks", type=int, default=0, help="rounds on a disk that is too small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the torch stack")
    options = parser.parse_args()
    copy = Copy((options.work / "copy").resolve(), options.python)
    with disk_of_its_own(copy.folder) if options.full_disks else nullcontext():
        return rounds(copy, options)


def rounds(copy: Copy, options: argparse.Namespace) -> int:
    """All rounds; gives the exit code."""
    copy.prepare()
    copy.undisturbed()
    used = sum(path.stat().st_size for path in copy.results.rglob("*") if path.is_file())
    say(f"undisturbed: {copy.seconds:.0f} s, {sum(map(len, copy.wanted.values()))} verdict rows, {used} bytes")
    draw = random.Random(options.seed)  # noqa: S311 - whom to kill
    total, bad = Counter[str](), 0
    for number in range(options.damages):
        what, wrong = damaged(copy, draw)
        bad += bool(wrong)
        say(f"damage {number + 1}: {wrong or 'as undisturbed'}; {what}")
    while (done := total.total()) < options.kills:
        killed, wrong = disturbed(copy, min(options.per_round, options.kills - done), draw)
        total.update(killed)
        bad += bool(wrong)
        say(f"{total.total()} kills: {wrong or 'as undisturbed'}; killed {', '.join(killed)}")
    for _ in range(options.side_by_side):
        what, wrong = side_by_side(copy, draw)
        bad += bool(wrong)
        say(f"side by side: {wrong or 'as undisturbed'}; {what}")
    for _ in range(options.full_disks):
        what, wrong = filled(copy, draw, used)
        bad += bool(wrong)
        say(f"full disk: {wrong or 'as undisturbed'}; {what}")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(total.items()))
    say(f"{bad} rounds went wrong; killed: {counts}; {options.damages} files damaged")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
