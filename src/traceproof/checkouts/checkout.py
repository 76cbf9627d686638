"""Repositories at commits, each in a folder: cloned whole or not at all; several at once, with a record of each.

A clone is made beside its target and replaces it once it is complete and checked, also where another commit was
checked out. A folder that holds a user's own work is never touched.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from traceproof.checkouts.gitrun import Git, GitError, Patience
from traceproof.checkouts.packages import bring_package, package_digest
from traceproof.checkouts.pins import ORIGINS, Pin, State, place_of, resolve
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors, kept_json, write_json
from traceproof.programs import ProgressLine
from traceproof.stacks import SourceOrigin

NOTE = "traceproof.json"  # file in git's folder: the commit that this program checked out
PARTIAL = "--filter=blob:none"
SHOWN = 10  # files that an error lists
CONFIG = "repos_config.json"
FAILED = "failed"
AT_ONCE = 4  # sources cloned at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCheckout:
    """A wanted checkout."""

    url: str  # anything that git understands
    commit: str  # all 40 digits
    folders: tuple[str, ...] = ()  # cone patterns of a sparse checkout; empty: all files
    submodules: tuple[str, ...] = ()  # submodules to fetch, those that the commit has
    lfs: bool = False  # whether files in git LFS are fetched, too


def bring(target: Path, wanted: WantedCheckout, git: Git) -> State:
    """Make `target` a checkout of the commit; `git` has options for another folder.

    Raises TraceproofError: it can not be done, and an existing folder is unchanged.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            here, there = replace(git, folder=target), target.is_dir() and any(target.iterdir())
            if there and _unchanged(target, here) == wanted.commit:
                _finish(target, wanted, here)  # submodules and LFS files may be newly wanted
                return State.PRESENT
            if there:
                _expect_ours(target, here)
            scratch = target.with_name(f".cloning-{target.name}")
            shutil.rmtree(scratch, ignore_errors=True)  # left by a killed clone
            try:
                scratch.mkdir()
                fill(scratch / "new", wanted, replace(git, folder=scratch / "new"))
                if target.exists():
                    target.rename(scratch / "old")
                (scratch / "new").rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return State.UPDATED if there else State.CLONED


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold a file lock, which ends with this process: two runs must not write one folder."""
    try:
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=0):
            yield
    except Timeout:
        todo = "Wait for it to end, then run again."
        raise TraceproofError(f"{target} is being fetched by another run", todo=todo) from None


def fill(folder: Path, wanted: WantedCheckout, git: Git) -> None:
    """Make a new folder a checkout of the commit. Raises TraceproofError: it can not be done."""
    folder.mkdir(exist_ok=True)
    git.local("init", "--quiet")
    git.local("remote", "add", "origin", wanted.url)
    try:
        git.network("fetch", "--progress", "--no-tags", "--depth=1", PARTIAL, "origin", wanted.commit)
    except GitError as error:
        if "unadvertised" not in error.output and "filter" not in error.output:
            raise
        # The server offers neither single commits nor partial clones: fetch all branches and tags.
        git.network("fetch", "--progress", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*")
    try:
        git.commit(wanted.commit)
    except GitError as error:
        todo = "Check that the commit (all 40 digits) was pushed there and was not rewritten since."
        what = f"{folder}: {wanted.commit} is not a commit of the remote"
        raise GitError(what, output="", final=True, todo=todo) from error
    if wanted.folders:
        git.local("sparse-checkout", "set", "--cone", "--", *wanted.folders)
    git.network("checkout", "--quiet", "--detach", wanted.commit)  # fetches missing blobs
    _finish(folder, wanted, git)


def _finish(folder: Path, wanted: WantedCheckout, git: Git) -> None:
    """Fetch submodules and LFS files, check that all is complete, and note the commit."""
    # Not every commit has all wanted submodules.
    listed = {path: git.local("ls-tree", wanted.commit, "--", path) for path in wanted.submodules}
    submodules = [path for path, line in listed.items() if line.startswith("160000 ")]
    for path in submodules:
        git.network("submodule", "update", "--init", "--force", "--depth=1", "--", path)
    if wanted.lfs:
        try:
            git.network("lfs", "pull")
        except GitError as error:
            if "is not a git command" not in error.output:
                raise
            what = "the files in LFS can not be fetched: git-lfs is not installed"
            todo = "Install it (Debian: apt install git-lfs), or leave out --lfs: sources need none."
            raise TraceproofError(what, todo=todo) from error
    head, changed = git.commit("HEAD"), changes(git)
    empty = [path for path in submodules if not any((folder / path).glob("[!.]*"))]
    if head != wanted.commit or changed or empty:
        what = f"{folder} did not become a checkout of {wanted.commit}"
        state = "\n".join([f"HEAD is {head}", *changed, *(f"submodule {path} is empty" for path in empty)])
        todo = "Run the same command again; if it stays so, delete the folder."
        raise GitError(what, output=state, final=True, todo=todo)
    write_json(_note(git), {"commit": wanted.commit, "url": wanted.url})


def _note(git: Git) -> Path:
    return Path(git.local("rev-parse", "--absolute-git-dir").strip()) / NOTE  # a worktree's lies elsewhere


def changes(git: Git) -> list[str]:
    """Tracked files that differ from HEAD, also in submodules."""
    text = git.local("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames")
    return [entry[3:] for entry in text.split("\0") if entry]


def _unchanged(target: Path, git: Git) -> str:
    """The commit that an existing checkout is at.

    Raises TraceproofError: it is no repository itself (git would find one further up), it is damaged, or a tracked
    file was changed.
    """
    if not (target / ".git").exists():
        todo = "Move it away, or give another --target-dir."
        raise TraceproofError(f"{target} exists and is no git repository; it is left alone", todo=todo)
    try:
        head, changed = git.commit("HEAD"), changes(git)
    except GitError as error:
        what = f"{target} is a damaged repository; it is left alone"
        todo = "Save what is yours in it, delete it and run again."
        raise TraceproofError(what, problems=error.problems, todo=todo) from error
    if changed:
        todo = "Put them elsewhere and delete the folder, then run again; or use another --target-dir."
        what = f"{target} has local changes; they are left alone"
        raise TraceproofError(what, problems=changed[:SHOWN], todo=todo)
    return head


def _expect_ours(target: Path, git: Git) -> None:
    """Refuse to replace a checkout with commits, branches or files that this program did not create."""
    noted = kept_json(_note(git)).get("commit")
    foreign = [] if noted == git.commit("HEAD") else ["it stands on a commit that traceproof did not check out"]
    foreign += git.local("for-each-ref", "--format=%(refname)", "refs/heads", "refs/stash").split()
    untracked = git.local("ls-files", "--others", "--exclude-standard", "--exclude=__pycache__/", "-z")
    foreign += [name for name in untracked.split("\0") if name]
    if foreign:
        todo = "Save what is yours elsewhere and delete the folder, then run again; or use another --target-dir."
        what = f"{target} holds work of somebody's own; it is left alone"
        raise TraceproofError(what, problems=foreign[:SHOWN], todo=todo)


# Several sources.


def clone_all(
    pins: Mapping[str, Pin], target_dir: Path, *, lfs: Collection[str], tagged: Collection[str], patience: Patience
) -> tuple[dict[str, dict[str, Any]], dict[str, Pin]]:
    """Bring every source to a folder of its name in `target_dir`; a failure does not keep the others from it.

    A release is taken from git where its pin has a commit, else from the package index, which also replaces git
    where that fails.

    Args:
        pins: by source name.
        target_dir: the folder of all sources.
        lfs: names of sources whose LFS files are fetched, too.
        tagged: releases to take from git at the commit of their tag, unless they are already there.
        patience: with remotes.

    Returns:
        Records of the sources, and the pins, completed by digests and commits.
    """
    progress = ProgressLine()

    def by_git(name: str, target: Path, pin: Pin) -> tuple[Pin, State]:
        """The pin with its commit, and what was done. Raises TraceproofError: git fails, or has no such tag."""
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

    def bring_source(name: str) -> tuple[dict[str, Any], Pin]:
        """Bring a source, by git or as a package; returns its record and its pin."""
        pin, target = pins[name], place_of(name, target_dir)
        unpacked = pin.package is not None and target.exists() and not (target / ".git").exists()
        from_git = not unpacked and (pin.commit is not None or (name in tagged and not target.exists()))
        used_pin = pin if from_git else pin.as_release
        about: dict[str, Any] = {"status": FAILED}
        try:
            if from_git:
                try:
                    pin, status = by_git(name, target, pin)
                    digest = Git(target).local("rev-parse", "HEAD^{tree}").strip()
                    used_pin, about = pin, {"status": status, "digest": digest}
                except TraceproofError as error:
                    if pin.package is None or target.exists():
                        raise
                    used_pin, from_git = pin.as_release, False
                    what = f"{name}: {pin.package} {pin.version} from the package index, since git could not bring"
                    why = error.problems[-1] if error.problems else error.what
                    progress.show(f"{what} it from {pin.url or ORIGINS[name].url}: {why}", of=name, done=True)
            if not from_git:
                progress.show(f"{name:11} {pin.package} {pin.version}", of=name)
                status, release = bring_package(target, used_pin)
                about = {"status": status, "digest": package_digest(target)}
                pin = pin if pin.digests else pin.model_copy(update={"sha256": release.sha256})
        except TraceproofError as error:
            about["error"] = str(error)
        record = record_of(target, used_pin) | about
        place = record["commit"] or record["version"]
        progress.show(f"{name:11} {record['status']}  {place}  {target}", of=name, done=True)
        return record, pin

    with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
        results = dict(zip(pins, threads.map(bring_source, pins), strict=True))
    records = {name: record for name, (record, _) in results.items()}
    return records, {name: pin for name, (_, pin) in results.items()}


def write_records(target_dir: Path, repositories: Mapping[str, Any]) -> dict[str, Any]:
    """Update `<target_dir>/repos_config.json`; returns its content. Raises TraceproofError: the disk is full."""
    path = target_dir / CONFIG
    before = kept_json(path).get("repositories")
    others = before if isinstance(before, dict) else {}
    value = {"target_dir": str(target_dir), "repositories": dict(sorted((others | dict(repositories)).items()))}
    write_json(path, value)
    return value


def record_of(target: Path, pin: Pin | None) -> dict[str, Any]:
    """A source's record before it is brought; `pin` None: none could be found."""
    return {
        "path": str(target),
        "status": FAILED,
        "url": (pin.url or f"pypi:{pin.package}") if pin is not None else None,
        "commit": pin.commit if pin is not None else None,
        "version": pin.version if pin is not None else None,
        "digest": None,
    }
