"""Bring several sources at once, and write down what came of each in repos_config.json."""

import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from traceproof.checkouts.checkout import Wanted, bring, tree_digest
from traceproof.checkouts.gitrun import Git, Patience
from traceproof.checkouts.packages import bring_package, package_digest
from traceproof.checkouts.pins import ORIGINS, Pin
from traceproof.errors import TraceproofError
from traceproof.files import write_json
from traceproof.programs import ProgressLine
from traceproof.stacks import Origin

CONFIG = "repos_config.json"
FAILED = "failed"


def clone_all(  # noqa: PLR0913 - what to bring, where, and how
    pins: Mapping[str, Pin],
    target_dir: Path,
    *,
    jobs: int,
    lfs: Collection[str],
    patience: Patience,
    unpinned: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, Pin]]:
    """Bring every source to a folder of its name in `target_dir`; one that fails does not keep the others.

    Args:
        pins: by source name.
        target_dir: gets repos_config.json, too.
        jobs: how many at once.
        lfs: names of sources whose LFS files are fetched too.
        patience: with remotes.
        unpinned: sources for which no commit could be found, and why.

    Returns:
        What was written to repos_config.json, and the pins with the digests that are known now.

    Raises:
        TraceproofError: the disk is full.
    """
    progress = ProgressLine()

    def one(name: str) -> tuple[dict[str, Any], Pin]:
        pin, target = pins[name], target_dir / name
        record = _record(target, pin)
        try:
            if pin.commit is not None and pin.url is not None:
                origin = ORIGINS.get(name, Origin(url=pin.url))
                parts = {"folders": origin.folders, "submodules": origin.submodules}
                wanted = Wanted(url=pin.url, commit=pin.commit, lfs=name in lfs, **parts)
                git = Git(target, patience, lambda said: progress.show(f"{name:11} {said}", of=name), name in lfs)
                record["status"] = bring(target, wanted, git)
                record["digest"] = tree_digest(target)
            else:
                progress.show(f"{name:11} {pin.package} {pin.version}", of=name)
                record["status"], pin = bring_package(target, pin)
                record["digest"] = package_digest(target)
        except TraceproofError as error:
            record |= {"status": FAILED, "error": str(error)}
        progress.show(f"{name:11} {record['status']}  {pin.commit or pin.version}  {target}", of=name, done=True)
        return record, pin

    with ThreadPoolExecutor(max_workers=jobs) as threads:
        results = dict(zip(pins, threads.map(one, pins), strict=True))
    repositories = {name: record for name, (record, _) in results.items()}
    for name, error in unpinned.items():
        repositories[name] = _record(target_dir / name, None) | {"error": error}
        progress.show(f"{name:11} {FAILED}  no commit found", of=name, done=True)
    value = write_records(target_dir, repositories)
    return value, {name: pin for name, (_, pin) in results.items()}


def write_records(target_dir: Path, repositories: Mapping[str, Any]) -> dict[str, Any]:
    """Put records into `<target_dir>/repos_config.json`; its content. Raises TraceproofError: the disk is full."""
    path = target_dir / CONFIG
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["repositories"]
    except (OSError, ValueError, KeyError, TypeError):
        before = {}  # what can not be read has nothing to keep
    kept = before if isinstance(before, dict) else {}
    value = {"target_dir": str(target_dir), "repositories": dict(sorted((kept | dict(repositories)).items()))}
    write_json(path, value)
    return value


def _record(target: Path, pin: Pin | None) -> dict[str, Any]:
    """What is known of a source before it is brought."""
    return {
        "path": str(target),
        "status": FAILED,
        "url": (pin.url or f"pypi:{pin.package}") if pin is not None else None,
        "commit": pin.commit if pin is not None else None,
        "version": pin.version if pin is not None else None,
        "digest": None,
    }
