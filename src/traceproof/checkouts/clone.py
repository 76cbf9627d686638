"""Bring several sources at once, and write down what came of each in repos_config.json."""

import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceproof.checkouts.checkout import WantedCheckout, bring, tree_digest
from traceproof.checkouts.gitrun import Git, Patience
from traceproof.checkouts.packages import bring_package, package_digest
from traceproof.checkouts.pins import ORIGINS, Pin, State, resolve
from traceproof.errors import TraceproofError
from traceproof.files import write_json
from traceproof.programs import ProgressLine
from traceproof.stacks import SourceOrigin

CONFIG = "repos_config.json"
FAILED = "failed"
AT_ONCE = 4  # sources


def clone_all(
    pins: Mapping[str, Pin], target_dir: Path, *, lfs: Collection[str], tagged: Collection[str], patience: Patience
) -> tuple[dict[str, Any], dict[str, Pin]]:
    """Bring every source to a folder of its name in `target_dir`; one that fails does not keep the others.

    A release comes from git where its pin has a commit, else from the package index; so does one that git can not
    bring.

    Args:
        pins: by source name.
        target_dir: gets repos_config.json, too.
        lfs: names of sources whose LFS files are fetched too.
        tagged: releases that come from git at the commit of their tag, unless they are there already.
        patience: with remotes.

    Returns:
        What was written to repos_config.json, and the pins with the digests and commits that are known now.

    Raises:
        TraceproofError: the disk is full.
    """
    progress = ProgressLine()

    def by_git(name: str, target: Path, pin: Pin) -> tuple[Pin, State]:
        """Raises TraceproofError: git can not bring it, or has no such tag."""
        origin = ORIGINS.get(name, SourceOrigin(url=str(pin.url)))
        git = Git(target, patience, lambda said: progress.show(f"{name:11} {said}", of=name), name in lfs)
        if pin.commit is None:
            ref, once = f"refs/tags/v{pin.version}", replace(patience, attempts=1)
            commit = resolve(origin.url, ref, git=replace(git, folder=target_dir, patience=once))
            pin = pin.model_copy(update={"url": origin.url, "commit": commit, "ref": ref})
        wanted = WantedCheckout(
            url=str(pin.url),
            commit=str(pin.commit),
            folders=origin.folders,
            submodules=origin.submodules,
            lfs=name in lfs,
        )
        return pin, bring(target, wanted, git)

    def one(name: str) -> tuple[dict[str, Any], Pin]:
        pin, target = pins[name], target_dir / name
        unpacked = pin.package is not None and target.exists() and not (target / ".git").exists()
        from_git = not unpacked and (pin.commit is not None or (name in tagged and not target.exists()))
        taken = pin if from_git else pin.as_release
        about: dict[str, Any] = {"status": FAILED}
        try:
            if from_git:
                try:
                    pin, status = by_git(name, target, pin)
                    taken, about = pin, {"status": status, "digest": tree_digest(target)}
                except TraceproofError as error:
                    if pin.package is None or target.exists():
                        raise
                    taken, from_git = pin.as_release, False
                    what = f"{name}: {pin.package} {pin.version} from the package index, since git could not bring"
                    why = error.problems[-1] if error.problems else error.what
                    progress.show(f"{what} it from {pin.url or ORIGINS[name].url}: {why}", of=name, done=True)
            if not from_git:
                progress.show(f"{name:11} {pin.package} {pin.version}", of=name)
                status, found = bring_package(target, taken)
                about = {"status": status, "digest": package_digest(target)}
                pin = pin if pin.digests else pin.model_copy(update={"sha256": found.sha256})
        except TraceproofError as error:
            about["error"] = str(error)
        record = record_of(target, taken) | about
        place = record["commit"] or record["version"]
        progress.show(f"{name:11} {record['status']}  {place}  {target}", of=name, done=True)
        return record, pin

    with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
        results = dict(zip(pins, threads.map(one, pins), strict=True))
    value = write_records(target_dir, {name: record for name, (record, _) in results.items()})
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


def record_of(target: Path, pin: Pin | None) -> dict[str, Any]:
    """What is known of a source before it is brought; None: no pin could be found."""
    return {
        "path": str(target),
        "status": FAILED,
        "url": (pin.url or f"pypi:{pin.package}") if pin is not None else None,
        "commit": pin.commit if pin is not None else None,
        "version": pin.version if pin is not None else None,
        "digest": None,
    }
