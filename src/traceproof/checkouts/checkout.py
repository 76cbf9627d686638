"""One repository at one commit in one folder: cloned whole or not at all, updated without touching anyone's work.

A clone grows in a folder beside its target and is renamed there once it is complete and checked. An existing
checkout is moved to another commit in place, and a note in its .git says so while that happens. What a killed
update left is set aside, whatever is in it, and cloned anew.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout
from git import GitCommandError, Repo, Tree

from traceproof.checkouts.gitrun import Git, GitError
from traceproof.checkouts.pins import State
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors, write_json

NOTE = "traceproof.json"  # in .git: the commit that this program checked out last
MOVING = "traceproof-moving"  # in .git while an update runs
ASIDE = "interrupted"  # ends the name of a folder that a killed update left, and that is kept
MOST_FILES = 500_000  # of one commit; the largest source has a fiftieth of that
PARTIAL = "--filter=blob:none"


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

    Raises:
        TraceproofError: not possible; says why. An existing folder is as it was, or is put right by the next run.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            if (target / ".git" / MOVING).exists():
                _set_aside(target, git)
            elif target.is_dir() and any(target.iterdir()):
                return _update(target, wanted, replace(git, folder=target))
            scratch = target.with_name(f".cloning-{target.name}")
            shutil.rmtree(scratch, ignore_errors=True)  # what a killed clone left
            try:
                fill(scratch, wanted, replace(git, folder=scratch))
                if target.is_dir():
                    target.rmdir()  # empty
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return State.CLONED


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
    _set_remote(git, wanted.url)
    _fetch(git, wanted.commit)
    _bounded_tree(folder, wanted.commit)
    if wanted.folders:
        git.local("sparse-checkout", "set", "--cone", "--", *wanted.folders)
    git.network("checkout", "--quiet", "--detach", wanted.commit)  # it fetches missing blobs
    _finish(folder, wanted, git)


def tree_digest(folder: Path) -> str:
    """Git's own digest of the files of the commit that is checked out."""
    return Git(folder).local("rev-parse", "HEAD^{tree}").strip()


def _set_remote(git: Git, url: str) -> None:
    """Point `origin` at the URL."""
    remotes = git.local("remote").split()
    git.local("remote", "set-url" if "origin" in remotes else "add", "origin", url)


def _has_commit(git: Git, commit: str) -> bool:
    """Whether a commit is there, with all its trees."""
    try:
        with Repo(git.folder) as repository:
            return repository.commit(commit).hexsha == commit
    except (ValueError, GitCommandError):
        return False


def _fetch(git: Git, commit: str) -> None:
    """Bring one commit, without history and, if possible, files. Raises GitError: the remote does not give it."""
    plain = ("fetch", "--progress", "--no-tags", "--depth=1")
    try:
        git.network(*plain, PARTIAL, "origin", commit)
    except GitError as error:
        if "unadvertised" in error.output or "filter" in error.output:
            # A server that gives neither single commits nor partial clones: take all its branches and tags.
            git.network("fetch", "--progress", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*")
        else:
            raise
    if not _has_commit(git, commit):
        todo = "Check that the commit (all 40 digits) was pushed there and was not rewritten since."
        raise GitError(f"{git.folder}: {commit} is not a commit of the remote", output="", final=True, todo=todo)


def _bounded_tree(folder: Path, commit: str) -> None:
    """Look whether a commit has a number of files that can be checked out, before any is written.

    A few folders that hold each other's content many times over are millions of files, and few bytes to fetch.
    Raises GitError: it has more than MOST_FILES, or cannot be listed.
    """
    try:
        with Repo(folder) as repository:
            files = _files(repository.commit(commit).tree, {})
    except (ValueError, GitCommandError, RecursionError) as error:
        todo = "Run the same command again; if it stays so, check the repository."
        what = f"the files of {commit} cannot be listed"
        raise GitError(what, output=str(error), final=False, todo=todo) from error
    if files > MOST_FILES:
        raise GitError(
            f"{commit} has more than {MOST_FILES} files, which no source of kernels has; nothing was checked out",
            output="",
            final=True,
            todo="Look at what the repository holds, and give another commit.",
        )


def _files(tree: Tree, known: dict[str, int]) -> int:
    """How many files lie below a folder; one that stands in several places is looked at once."""
    if tree.hexsha not in known:
        known[tree.hexsha] = sum(_files(item, known) if isinstance(item, Tree) else 1 for item in tree)
    return known[tree.hexsha]


def _finish(folder: Path, wanted: WantedCheckout, git: Git) -> None:
    """Submodules, LFS, the final check, and the note that says which commit was put there."""
    for path in _submodules(wanted, git):
        git.network("submodule", "update", "--init", "--force", "--depth=1", "--", path)
    if wanted.lfs:
        _pull_lfs(git)
    _check(folder, wanted, git)
    write_json(folder / ".git" / NOTE, {"commit": wanted.commit, "url": wanted.url})


def _submodules(wanted: WantedCheckout, git: Git) -> list[str]:
    """Those of the wanted submodules that the commit has: older and newer ones may have others."""
    return [
        path for path in wanted.submodules if git.local("ls-tree", wanted.commit, "--", path).startswith("160000 ")
    ]


def _pull_lfs(git: Git) -> None:
    try:
        git.network("lfs", "pull")
    except GitError as error:
        if "is not a git command" not in error.output:
            raise
        raise TraceproofError(
            "the files in LFS can not be fetched: git-lfs is not installed",
            todo="Install it (Debian: apt install git-lfs), or leave out --lfs: sources need none.",
        ) from error


def _check(folder: Path, wanted: WantedCheckout, git: Git) -> None:
    """Check that commit, files and wanted submodules are there, with content. Raises GitError: not so."""
    head = git.commit("HEAD")
    changed = changes(git)
    empty = [path for path in _submodules(wanted, git) if not any((folder / path).glob("[!.]*"))]
    if head != wanted.commit or changed or empty:
        raise GitError(
            f"{folder} did not become a checkout of {wanted.commit}",
            output="\n".join([f"HEAD is {head}", *changed, *(f"submodule {path} is empty" for path in empty)]),
            final=True,
            todo="Run the same command again; if it stays so, delete the folder.",
        )


def changes(git: Git) -> list[str]:
    """Tracked files that differ from HEAD, submodules included; untracked files are nobody's business."""
    text = git.local("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames")
    return [entry[3:] for entry in text.split("\0") if entry]


def _set_aside(target: Path, git: Git) -> None:
    """Rename what a killed update left: half of it may be git's, some of it somebody's."""
    number = 1
    while (aside := target.with_name(f"{target.name}.{ASIDE}-{number}")).exists():
        number += 1
    target.rename(aside)
    git.report(f"an update was killed here: what it left is {aside}")


def _update(target: Path, wanted: WantedCheckout, git: Git) -> State:
    """Move an existing checkout to the wanted commit.

    Raises TraceproofError: something there is somebody's own; it is left alone.
    """
    _ours(target, git)
    changed = changes(git)
    if changed:
        todo = "Commit them on a branch or put them elsewhere, then run again; or use another --target-dir."
        raise TraceproofError(f"{target} has local changes; they are left alone", problems=changed[:10], todo=todo)
    head = git.commit("HEAD")
    if head == wanted.commit:
        _finish(target, wanted, git)  # submodules and LFS files may be newly wanted
        return State.PRESENT
    _no_loose_commits(target, head, git)
    moving = target / ".git" / MOVING
    moving.touch()
    written = False  # whether something of the checkout may be there
    try:
        _set_remote(git, wanted.url)
        if not _has_commit(git, wanted.commit):
            _fetch(git, wanted.commit)
        _bounded_tree(target, wanted.commit)
        written = True
        git.network("checkout", "--quiet", "--detach", wanted.commit)
    except GitError as error:
        written = written and "would be overwritten" not in error.output  # git checks that before it writes
        if written or "would be overwritten" not in error.output:
            raise
        raise TraceproofError(
            f"{target} has files of its own where the commit has others; they are left alone",
            problems=error.problems,
            todo="Move them elsewhere and run again.",
        ) from error
    finally:
        if not written:
            moving.unlink()
    _finish(target, wanted, git)
    moving.unlink()
    return State.UPDATED


def _ours(target: Path, git: Git) -> None:
    """Refuse a folder that is no repository of its own: git would look further up and find another."""
    if not (target / ".git").exists():
        todo = "Move it away, or give another --target-dir."
        raise TraceproofError(f"{target} exists and is no git repository; it is left alone", todo=todo)
    try:
        git.local("rev-parse", "--verify", "--quiet", "HEAD^{tree}")
    except GitError as error:
        raise TraceproofError(
            f"{target} is a damaged repository; it is left alone",
            problems=error.problems,
            todo="Save what is yours in it, delete it and run again.",
        ) from error


def _no_loose_commits(target: Path, head: str, git: Git) -> None:
    """Refuse to leave a commit that no branch, tag or note holds: it would be as good as lost.

    Raises TraceproofError: HEAD is such a commit.
    """
    with suppress(OSError, ValueError):
        note: dict[str, str] = json.loads((target / ".git" / NOTE).read_text(encoding="utf-8"))
        if note.get("commit") == head:
            return
    if git.local("for-each-ref", "--count=1", "--contains", head).strip():
        return
    raise TraceproofError(
        f"{target} stands on the commit {head[:12]}, which no branch holds; it is left alone",
        todo=f"Name it (git -C {target} branch mine), then run again.",
    )
