"""One repository at one commit in one folder: cloned whole or not at all, updated without touching anyone's work.

A clone grows in a folder beside its target and is renamed there once it is complete and checked. What a killed
clone has left is used by the next one. An existing checkout is moved to another commit in place.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from git import Repo

from traceproof.checkouts.contents import Wanted, bounded_tree, fetch, finish, set_remote
from traceproof.checkouts.git_folder import unlock
from traceproof.checkouts.gitrun import Git, GitError
from traceproof.checkouts.moving import State, update
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors


def bring(target: Path, wanted: Wanted, git: Git) -> State:
    """Make `target` a checkout of the commit, in `git` with another folder.

    Raises:
        TraceproofError: not possible; says why. An existing folder is as it was, or is put right by the next run.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            if target.is_dir() and any(target.iterdir()):
                return update(target, wanted, _in(git, target))
            _clone(target, wanted, git)
    return State.CLONED


def scratch_of(target: Path) -> Path:
    """Where a clone of `target` grows."""
    return target.with_name(f".cloning-{target.name}")


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


def _in(git: Git, folder: Path) -> Git:
    return Git(folder, git.patience, git.report, git.lfs)


def _clone(target: Path, wanted: Wanted, git: Git) -> None:
    scratch = scratch_of(target)
    resumed = scratch.is_dir()
    try:
        fill(scratch, wanted, _in(git, scratch))
    except GitError as error:
        if not (error.final or error.corrupt):
            raise  # the network, most likely: what came so far serves the next run
        shutil.rmtree(scratch, ignore_errors=True)
        if not resumed:
            raise
        # The fault may lie in what a killed clone left, so it proves nothing about the remote yet.
        git.report("what an interrupted clone left is of no use; starting over")
        fill(scratch, wanted, _in(git, scratch))
    if target.is_dir():
        target.rmdir()  # empty
    scratch.rename(target)


def fill(scratch: Path, wanted: Wanted, git: Git) -> None:
    """Make a new folder, or what a clone left, a checkout of the commit. Raises TraceproofError: not possible."""
    scratch.mkdir(exist_ok=True)
    if (scratch / ".git").is_dir():
        unlock(scratch)
    git.local("init", "--quiet")
    set_remote(git, wanted.url)
    fetch(git, wanted.commit)
    bounded_tree(scratch, wanted.commit)
    if wanted.folders:
        git.local("sparse-checkout", "set", "--cone", "--", *wanted.folders)
    # By force: nobody but a killed clone has written here. It fetches missing blobs, so it needs the network.
    git.network("checkout", "--quiet", "--force", "--detach", wanted.commit)
    finish(scratch, wanted, git)


def tree_digest(folder: Path) -> str:
    """Git's own digest of the files of the commit that is checked out."""
    with Repo(folder) as repository:
        return repository.head.commit.tree.hexsha
