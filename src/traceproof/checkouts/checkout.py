"""One repository at one commit in one folder: cloned whole or not at all.

A clone grows beside its target and takes its place once it is complete and checked, also where a checkout of
another commit is there. A folder that holds anything of somebody's own is left alone.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from traceproof.checkouts.gitrun import Git, GitError
from traceproof.checkouts.pins import State
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors, write_json

NOTE = "traceproof.json"  # in .git: the commit that this program checked out
PARTIAL = "--filter=blob:none"
SHOWN = 10  # files that an error names


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCheckout:
    """A checkout as it shall be."""

    url: str  # anything that git understands
    commit: str  # all 40 digits
    folders: tuple[str, ...] = ()  # cone patterns of a sparse checkout; empty: everything
    submodules: tuple[str, ...] = ()  # paths of submodules to bring along, as far as the commit has them
    lfs: bool = False  # whether files in LFS are fetched too


def bring(target: Path, wanted: WantedCheckout, git: Git) -> State:
    """Make `target` a checkout of the commit, in `git` with another folder.

    Raises TraceproofError: not possible; says why, and an existing folder is as it was.
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
            shutil.rmtree(scratch, ignore_errors=True)  # what a killed clone left
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
    """Hold a lock that ends with this process: two runs must not write one folder."""
    try:
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=0):
            yield
    except Timeout:
        raise TraceproofError(
            f"{target} is being fetched by another run", todo="Wait for it to end, then run again."
        ) from None


def fill(folder: Path, wanted: WantedCheckout, git: Git) -> None:
    """Make a new folder a checkout of the commit. Raises TraceproofError: not possible."""
    folder.mkdir(exist_ok=True)
    git.local("init", "--quiet")
    git.local("remote", "add", "origin", wanted.url)
    try:
        git.network("fetch", "--progress", "--no-tags", "--depth=1", PARTIAL, "origin", wanted.commit)
    except GitError as error:
        if "unadvertised" not in error.output and "filter" not in error.output:
            raise
        # A server that gives neither single commits nor partial clones: take all its branches and tags.
        git.network("fetch", "--progress", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*")
    try:
        git.commit(wanted.commit)
    except GitError as error:
        todo = "Check that the commit (all 40 digits) was pushed there and was not rewritten since."
        what = f"{folder}: {wanted.commit} is not a commit of the remote"
        raise GitError(what, output="", final=True, todo=todo) from error
    if wanted.folders:
        git.local("sparse-checkout", "set", "--cone", "--", *wanted.folders)
    git.network("checkout", "--quiet", "--detach", wanted.commit)  # it fetches missing blobs
    _finish(folder, wanted, git)


def tree_digest(folder: Path) -> str:
    """Git's own digest of the files of the commit that is checked out."""
    return Git(folder).local("rev-parse", "HEAD^{tree}").strip()


def _finish(folder: Path, wanted: WantedCheckout, git: Git) -> None:
    """Submodules, LFS, the check that all is there, and the note that says which commit was put there."""
    # Those of the wanted submodules that the commit has: older and newer ones may have others.
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
            raise TraceproofError(
                "the files in LFS can not be fetched: git-lfs is not installed",
                todo="Install it (Debian: apt install git-lfs), or leave out --lfs: sources need none.",
            ) from error
    head, changed = git.commit("HEAD"), changes(git)
    empty = [path for path in submodules if not any((folder / path).glob("[!.]*"))]
    if head != wanted.commit or changed or empty:
        raise GitError(
            f"{folder} did not become a checkout of {wanted.commit}",
            output="\n".join([f"HEAD is {head}", *changed, *(f"submodule {path} is empty" for path in empty)]),
            final=True,
            todo="Run the same command again; if it stays so, delete the folder.",
        )
    write_json(folder / ".git" / NOTE, {"commit": wanted.commit, "url": wanted.url})


def changes(git: Git) -> list[str]:
    """Tracked files that differ from HEAD, submodules included."""
    text = git.local("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames")
    return [entry[3:] for entry in text.split("\0") if entry]


def _unchanged(target: Path, git: Git) -> str:
    """The commit that an existing folder stands on.

    Raises TraceproofError: it is no repository of its own (git would look further up and find another), damaged,
    or a tracked file was changed.
    """
    if not (target / ".git").exists():
        todo = "Move it away, or give another --target-dir."
        raise TraceproofError(f"{target} exists and is no git repository; it is left alone", todo=todo)
    try:
        head, changed = git.commit("HEAD"), changes(git)
    except GitError as error:
        raise TraceproofError(
            f"{target} is a damaged repository; it is left alone",
            problems=error.problems,
            todo="Save what is yours in it, delete it and run again.",
        ) from error
    if changed:
        todo = "Put them elsewhere and delete the folder, then run again; or use another --target-dir."
        what = f"{target} has local changes; they are left alone"
        raise TraceproofError(what, problems=changed[:SHOWN], todo=todo)
    return head


def _expect_ours(target: Path, git: Git) -> None:
    """Refuse to replace a checkout with commits, branches or files that this program did not put there."""
    try:
        noted = json.loads((target / ".git" / NOTE).read_text(encoding="utf-8"))["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        noted = None
    own = [] if noted == git.commit("HEAD") else ["it stands on a commit that traceproof did not check out"]
    own += git.local("for-each-ref", "--format=%(refname)", "refs/heads", "refs/stash").split()
    untracked = git.local("ls-files", "--others", "--exclude-standard", "--exclude=__pycache__/", "-z")
    own += [name for name in untracked.split("\0") if name]
    if own:
        todo = "Save what is yours elsewhere and delete the folder, then run again; or use another --target-dir."
        what = f"{target} holds work of somebody's own; it is left alone"
        raise TraceproofError(what, problems=own[:SHOWN], todo=todo)
