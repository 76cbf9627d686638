"""Bring several sources at once, and write down what came of each in repos_config.json."""

import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from traceproof.checkouts.checkout import WantedCheckout, bring, tree_digest
from traceproof.checkouts.gitrun import Git, GitError, Patience
from traceproof.checkouts.packages import bring_package, package_digest
from traceproof.checkouts.pins import ORIGINS, Pin
from traceproof.errors import TraceproofError
from traceproof.files import write_json
from traceproof.programs import ProgressLine
from traceproof.stacks import SourceOrigin

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

    def by_git(name: str, target: Path, pin: Pin) -> dict[str, Any]:
        assert pin.url is not None
        assert pin.commit is not None
        origin = ORIGINS.get(name, SourceOrigin(url=pin.url))
        parts = {"folders": origin.folders, "submodules": origin.submodules}
        wanted = WantedCheckout(url=pin.url, commit=pin.commit, lfs=name in lfs, **parts)
        git = Git(target, patience, lambda said: progress.show(f"{name:11} {said}", of=name), name in lfs)
        return {"status": bring(target, wanted, git), "digest": tree_digest(target)}

    def one(name: str) -> tuple[dict[str, Any], Pin]:
        pin, target = pins[name], target_dir / name
        unpacked = pin.package is not None and target.exists() and not (target / ".git").exists()
        record = _record(target, pin.as_release if unpacked else pin)
        try:
            if pin.commit is not None and not unpacked:
                try:
                    record |= by_git(name, target, pin)
                except GitError as error:
                    if pin.package is None or target.exists():
                        raise
                    record = _record(target, pin.as_release)
                    progress.show(f"{name:11} {fallback(pin, str(pin.url), error)}", of=name, done=True)
            if record["commit"] is None:
                progress.show(f"{name:11} {pin.package} {pin.version}", of=name)
                record["status"], found = bring_package(target, pin.as_release)
                record["digest"] = package_digest(target)
                pin = pin if pin.digests else pin.model_copy(update={"sha256": found.sha256})
        except TraceproofError as error:
            record |= {"status": FAILED, "error": str(error)}
        place = record["commit"] or record["version"]
        progress.show(f"{name:11} {record['status']}  {place}  {target}", of=name, done=True)
        return record, pin

    with ThreadPoolExecutor(max_workers=jobs) as threads:
        results = dict(zip(pins, threads.map(one, pins), strict=True))
    repositories = {name: record for name, (record, _) in results.items()}
    for name, error in unpinned.items():
        repositories[name] = _record(target_dir / name, None) | {"error": error}
        progress.show(f"{name:11} {FAILED}  no commit found", of=name, done=True)
    value = write_records(target_dir, repositories)
    return value, {name: pin for name, (_, pin) in results.items()}


def fallback(pin: Pin, url: str, error: TraceproofError) -> str:
    """Say in a line that a release is taken from the package index, and why git could not bring it."""
    last = error.problems[-1] if error.problems else error.what
    return f"{pin.package} {pin.version} from the package index, since git could not bring it from {url}: {last}"


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
