r"""Verify the same lock in two fresh folders, and compare all digests.

    python lab/reproduce.py --dataset tests/dataset --source sglang=DIR --work DIR

The dataset and the source (an unpacked package) become local git repositories; each folder is a new copy of this
repository with the same sources.lock and config.yaml, and no results. One interpreter runs all stacks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from traceproof.checkouts.pins import ORIGINS
from traceproof.run.records import INDEX, OpTypePlan
from traceproof.stacks import MAIN, PACKAGES

ROOT = Path(__file__).resolve().parents[1]
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--source", required=True, metavar="STACK=DIR", help="a stack and its unpacked package")
PARSER.add_argument("--work", type=Path, required=True, help="a new folder")
PARSER.add_argument("--python", default=sys.executable, help="interpreter of all stacks")
WHO = ("-c", "user.name=reproduce", "-c", "user.email=reproduce@example.org")
# What a verdict row may differ in: times, and where the machine had its peak.
TIMES = frozenset({"seconds", "peak_bytes", "time", "repeat"})
Digests = Mapping[str, Mapping[str, str]]


def upstream(folder: Path, content: Path, place: str) -> tuple[str, str]:
    """A repository that holds a folder's content; its URL and commit."""
    shutil.copytree(content, folder / place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)

    def git(*arguments: str) -> str:
        command = ["git", *WHO, *arguments]
        return subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    git("config", "uploadpack.allowFilter", "true")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    git("add", "--all", "--force")
    git("commit", "--quiet", "--message", "all")
    return f"file://{folder.resolve()}", git("rev-parse", "HEAD")


def verify(folder: Path, dataset: tuple[str, str], stack: str, source: tuple[str, str]) -> Digests:
    """A fresh copy, verified; its digests by kind."""
    folder.mkdir()
    for name in ("src", "scripts", "rules", "profiles", "envs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "Snakefile", folder)
    here = {"python": options.python}
    stacks: dict[str, object] = dict.fromkeys((MAIN, *PACKAGES), here)
    stacks[stack] = here | {"source": "locked"}
    config = {
        "hidden_seed": 0,
        "dataset": {"git": {"url": dataset[0], "commit": dataset[1], "folder": "dataset"}},
        "stacks": stacks,
        "test_sizes": ["small"],
        "known": None,
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    lock = {"sources": {stack: {"url": source[0], "commit": source[1]}}}
    (folder / "sources.lock").write_text(json.dumps(lock), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "traceproof", "verify", "--cores", "1"]
    if subprocess.run(command, cwd=folder, env=environment, check=False).returncode == 2:
        sys.exit(f"{folder} could not be verified")
    return digests(folder / "results")


def digests(results: Path) -> Digests:
    """Digests by kind and name."""
    found: dict[str, dict[str, str]] = {"definitions": {}, "cases": {}, "verdicts": {}}
    for path in (path for path in (results / "cases").glob("*.json") if path.name != INDEX):
        for name, entry in OpTypePlan.read(path).definitions.items():
            found["definitions"][name] = entry.digest
            found["cases"] |= {f"{name} {case.id}": case.digest for case in entry.cases}
    for path in (results / "verdicts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        kept = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
        found["verdicts"][path.stem] = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    return found


def main() -> int:
    """Exit code 1: a digest differs."""
    stack, _, content = options.source.partition("=")
    options.work.mkdir(parents=True)
    dataset = upstream(options.work / "dataset-upstream", options.dataset, "dataset")
    source = upstream(options.work / f"{stack}-upstream", Path(content), ORIGINS[stack].place or "src")
    first, second = (verify(options.work / name, dataset, stack, source) for name in ("first", "second"))
    different = 0
    for kind, one in first.items():
        other = second[kind]
        names = [name for name in sorted({**one, **other}) if one.get(name) != other.get(name)]
        different += len(names)
        sys.stdout.write(f"{kind:12} {len(one)} in the first, {len(other)} in the second, {len(names)} differ")
        sys.stdout.write(f": {', '.join(names[:5])}\n" if names else "\n")
    return int(different > 0)


if __name__ == "__main__":
    options = PARSER.parse_args()
    sys.exit(main())
