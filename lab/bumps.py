r"""Bump a stack's pin through released versions and planted edits, and tabulate what each bump reran.

    python lab/bumps.py --stack fla --release fla_core-0.5.0/ fla_core-0.6.0/ --dataset DIR --work DIR \\
        --plant "one kernel:fla/ops/gated_delta_rule/wy_fast.py:BT = =>BT = 1 *"

Each --release is an unpacked package. They are committed one after another to a local repository, then one commit
for each planted edit. A bump pins the next commit with `traceproof clone-repos` and runs `traceproof verify`. The
interpreter of all stacks, `--python`, needs only torch: a ground truth without its GPU is a skip, its job runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from traceproof.bumps.touches import Touch, changed_parts, touches
from traceproof.checkouts.pin import ORIGINS
from traceproof.checkouts.tree import CommitTree
from traceproof.pipeline.adapters import op_types
from traceproof.pipeline.stages.manifest import manifests_of
from traceproof.stacks import MAIN, PACKAGES, truths_of

ROOT = Path(__file__).resolve().parents[1]
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--stack", choices=PACKAGES, required=True)
PARSER.add_argument("--release", type=Path, nargs="+", required=True, help="unpacked packages, oldest first")
PARSER.add_argument("--plant", action="append", default=[], metavar="LABEL:FILE:OLD=>NEW", help="one commit")
PARSER.add_argument(
    "--dataset", type=Path, nargs="+", required=True, help="one definition per op_type of the stack's is taken"
)
PARSER.add_argument("--work", type=Path, required=True, help="a new folder")
PARSER.add_argument("--python", default=sys.executable, help="interpreter of all stacks")
WHO = ("-c", "user.name=bumps", "-c", "user.email=bumps@example.org", "-c", "gc.auto=0")


def git(folder: Path, *arguments: str) -> str:
    """Standard output of git."""
    command = ["git", *WHO, *arguments]
    return subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def commit(upstream: Path, label: str) -> tuple[str, str]:
    """Commit all; the label and the commit."""
    git(upstream, "add", "--all", "--force")
    git(upstream, "commit", "--quiet", "--message", label)
    return label, git(upstream, "rev-parse", "HEAD")


def history(upstream: Path) -> list[tuple[str, str]]:
    """Commit the releases and the planted edits; (label, commit), oldest first."""
    upstream.mkdir(parents=True)
    git(upstream, "init", "--quiet", "--initial-branch=main")
    for key in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
        git(upstream, "config", key, "true")
    place = upstream / (ORIGINS[options.stack].place or "src")
    commits = []
    for release in options.release:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(release, place, ignore=shutil.ignore_patterns("__pycache__"))
        commits.append(commit(upstream, release.name))
    for plant in options.plant:
        label, name, edit = plant.split(":", 2)
        old, _, new = edit.partition("=>")
        path = place / name
        text = path.read_text(encoding="utf-8")
        if old not in text:
            sys.exit(f"{name} does not hold {old!r}")
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        commits.append(commit(upstream, f"{label}: {name}"))
    return commits


def repository(folder: Path) -> None:
    """A copy of this repository, with results of its own, whose stack takes its source from the lock."""
    folder.mkdir()
    for name in ("src", "scripts", "rules", "profiles", "envs"):  # copies: an edit meanwhile would rerun things
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "Snakefile", folder)
    chosen: dict[str, Path] = {}
    for dataset in options.dataset:
        for path in sorted((dataset / "definitions").glob("*/*.json")):
            if path.parent.name in op_types(options.stack):
                chosen.setdefault(path.parent.name, path)
    for op_type, path in chosen.items():
        target = folder / "dataset" / "definitions" / op_type / path.name
        target.parent.mkdir(parents=True)
        shutil.copy2(path, target)
    here = {"python": options.python}
    stacks = {MAIN: here, **{name: here | {"source": None} for name in PACKAGES}}
    stacks[options.stack] = here | {"source": "locked"}
    config = {
        "dataset": {"path": "dataset"},
        "stacks": stacks,
        "truths": truths_of(options.stack),
        "test_sizes": ["small"],
        "known": None,
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")


def traceproof(folder: Path, *arguments: str) -> str:
    """Run a command of the copy; what it printed."""
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "traceproof", *arguments],
        cwd=folder,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode == 2:  # findings are no business of this script
        sys.exit(done.stdout)
    return done.stdout


def depends(upstream: Path, at: str) -> dict[str, Touch]:
    """What each op_type depends on at a commit; read while the tree is open."""
    tree = CommitTree(upstream, at)
    found = touches(options.stack, tree)
    for touch in found.values():
        assert touch.digest  # read now
    tree.close()
    return found


def keys(folder: Path) -> dict[tuple[str, str], str]:
    """The key of every output of the stack's ground truths, by op_type and case."""
    found: dict[tuple[str, str], str] = {}
    folders = (folder / "results" / "actors").glob("*")
    for path in (found for op_type in folders for found in manifests_of(op_type, options.stack)):
        for definition, cases in json.loads(path.read_text(encoding="utf-8"))["cases"].items():
            found |= {(path.parent.name, f"{definition} {case}"): record["key"] for case, record in cases.items()}
    return found


def counted(things: Iterable[tuple[str, str]]) -> str:
    """How many an op_type, as text."""
    counts = Counter(op_type for op_type, _ in things)
    return ", ".join(f"{op_type} {count}" for op_type, count in sorted(counts.items())) or "none"


def main() -> None:
    """Print one row per bump."""
    upstream, folder, stack = options.work / "upstream", options.work / "repository", options.stack
    options.work.mkdir(parents=True)
    commits = history(upstream)
    repository(folder)
    out = sys.stdout
    out.write(
        "| bump to | parts that changed, of those that an op_type depends on | outputs to run again | kept |"
    )
    out.write(" jobs of reference, oracle, judge | s |\n|---|---|---|---|---|---|\n")
    before: dict[str, Touch] = {}
    old: dict[tuple[str, str], str] = {}
    for label, at in commits:
        after = depends(upstream, at)
        affected = [
            f"{name} {len(changed_parts(before[name], touch))}/{len({**before[name].parts, **touch.parts})}"
            for name, touch in after.items()
            if before and touch.digest != before[name].digest
        ]
        url = f"{stack}=file://{upstream.resolve()}"
        traceproof(folder, "clone-repos", stack, "--url", url, "--commit", f"{stack}={at}")
        started = time.monotonic()
        said = traceproof(folder, "verify", "--cores", "1")
        took = time.monotonic() - started
        new = keys(folder)
        jobs = [line.rpartition(" s  ")[2].split() for line in said.splitlines() if line.startswith("[")]
        counts = Counter(job[2] if job[0] == "actor" else job[0] for job in jobs)
        cells = [
            label,
            ", ".join(affected) or ("none" if before else "all"),
            counted(one for one, key in new.items() if old.get(one) != key),
            counted(one for one, key in new.items() if old.get(one) == key),
            f"{counts['reference']}, {counts['oracle']}, {counts['judge']}",
            f"{took:.0f}",
        ]
        out.write(f"| {' | '.join(cells)} |\n")
        out.flush()
        before, old = after, new


if __name__ == "__main__":
    options = PARSER.parse_args()
    main()
