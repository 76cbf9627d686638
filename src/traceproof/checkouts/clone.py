"""Bring several sources at once, and write down what came of each in repos_config.json."""

import json
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.checkouts.checkout import Wanted, bring, tree_digest
from traceproof.checkouts.gitrun import Git, Patience
from traceproof.checkouts.packages import bring_package, package_digest
from traceproof.checkouts.pins import ORIGINS, Pin
from traceproof.errors import TraceproofError
from traceproof.files import write_json
from traceproof.stacks import Origin

CONFIG = "repos_config.json"
FAILED = "failed"


@dataclass(slots=True)
class Progress:
    """A line on stderr for each step of each source; on a terminal, a step replaces the one before."""

    quiet: bool = False
    every: float = 5.0  # seconds between lines of one source where lines stay
    _last: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def show(self, name: str, text: str, *, done: bool = False) -> None:
        """Say how far a source is."""
        if self.quiet:
            return
        live = sys.stderr.isatty()
        with self._lock:
            now = time.monotonic()
            if not done and now - self._last.get(name, -self.every) < (0.2 if live else self.every):
                return
            self._last[name] = now
            line = f"{name:11} {text}"
            sys.stderr.write(f"\r\x1b[K{line[:118]}" + ("\n" if done else "") if live else f"{line}\n")
            sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneRequest:
    """What to bring where."""

    pins: Mapping[str, Pin]  # by source name
    target_dir: Path  # each source becomes a folder of its name in it
    jobs: int = 4  # how many at once
    lfs: frozenset[str] = frozenset()  # names of sources whose LFS files are fetched too
    patience: Patience = field(default_factory=Patience)  # with remotes
    # sources for which no commit could be found, and why
    unpinned: Mapping[str, str] = field(default_factory=dict)


def clone_all(order: CloneRequest, progress: Progress) -> tuple[dict[str, Any], dict[str, Pin]]:
    """Bring every source; one that fails does not keep the others.

    Returns:
        What was written to `<target_dir>/repos_config.json`, and the pins with the digests that are known now.

    Raises:
        TraceproofError: the disk is full.
    """
    with ThreadPoolExecutor(max_workers=max(1, order.jobs)) as threads:
        results = list(threads.map(lambda name: _one(name, order, progress), order.pins))
    names = list(order.pins)
    repositories = {name: record for name, (record, _) in zip(names, results, strict=True)}
    for name, error in order.unpinned.items():
        repositories[name] = _record(name, order) | {"error": error}
        progress.show(name, f"{FAILED}  no commit found", done=True)
    value = write_records(order.target_dir, repositories)
    return value, {name: pin for name, (_, pin) in zip(names, results, strict=True)}


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


def _record(name: str, order: CloneRequest) -> dict[str, Any]:
    """What is known of a source before it is brought."""
    pin = order.pins.get(name)
    return {
        "path": str(order.target_dir / name),
        "status": FAILED,
        "url": (pin.url or f"pypi:{pin.package}") if pin is not None else None,
        "commit": pin.commit if pin is not None else None,
        "version": pin.version if pin is not None else None,
        "digest": None,
    }


def _one(name: str, order: CloneRequest, progress: Progress) -> tuple[dict[str, Any], Pin]:
    pin, target = order.pins[name], order.target_dir / name
    record = _record(name, order)
    try:
        if pin.commit is not None and pin.url is not None:
            origin = ORIGINS.get(name, Origin(url=pin.url))
            wanted = Wanted(
                url=pin.url,
                commit=pin.commit,
                folders=origin.folders,
                submodules=origin.submodules,
                lfs=name in order.lfs,
            )
            git = Git(target, order.patience, lambda text: progress.show(name, text), name in order.lfs)
            record["status"] = bring(target, wanted, git)
            record["digest"] = tree_digest(target)
        else:
            progress.show(name, f"{pin.package} {pin.version}")
            record["status"], pin = bring_package(target, pin)
            record["digest"] = package_digest(target)
    except TraceproofError as error:
        record |= {"status": FAILED, "error": str(error)}
    progress.show(name, f"{record['status']}  {pin.commit or pin.version}  {target}", done=True)
    return record, pin
