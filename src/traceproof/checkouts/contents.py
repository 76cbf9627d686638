"""What a checkout holds: its commit, submodules and LFS files, fetched and checked."""

import json
from dataclasses import dataclass
from pathlib import Path

from git import GitCommandError, Repo, Tree

from traceproof.checkouts.gitrun import Git, GitError
from traceproof.errors import TraceproofError
from traceproof.files import write_json

NOTE = "traceproof.json"  # in .git: the commit that this program checked out last
MOST_FILES = 500_000  # of one commit; the largest source has a fiftieth of that
PARTIAL = "--filter=blob:none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A checkout as it shall be."""

    url: str  # anything that git understands
    commit: str  # all 40 digits
    folders: tuple[str, ...] = ()  # cone patterns of a sparse checkout; empty: everything
    submodules: tuple[str, ...] = ()  # paths of submodules to bring along, as far as the commit has them
    lfs: bool = False  # whether files in LFS are fetched too


def set_remote(git: Git, url: str) -> None:
    """Point `origin` at the URL."""
    remotes = git.local("remote").split()
    git.local("remote", "set-url" if "origin" in remotes else "add", "origin", url)


def has_commit(git: Git, commit: str) -> bool:
    """Whether a commit is there, with all its trees."""
    try:
        with Repo(git.folder) as repository:
            return repository.commit(commit).hexsha == commit
    except (ValueError, GitCommandError):
        return False


def fetch(git: Git, commit: str) -> None:
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
    if not has_commit(git, commit):
        todo = "Check that the commit (all 40 digits) was pushed there and was not rewritten since."
        raise GitError(f"{git.folder}: {commit} is not a commit of the remote", output="", final=True, todo=todo)


def bounded_tree(folder: Path, commit: str) -> None:
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


def finish(folder: Path, wanted: Wanted, git: Git) -> None:
    """Submodules, LFS, the final check, and the note that says which commit was put there."""
    for path in _submodules(wanted, git):
        git.network("submodule", "update", "--init", "--force", "--depth=1", "--", path)
    if wanted.lfs:
        _pull_lfs(git)
    _check(folder, wanted, git)
    write_json(folder / ".git" / NOTE, {"commit": wanted.commit, "url": wanted.url})


def _submodules(wanted: Wanted, git: Git) -> list[str]:
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


def _check(folder: Path, wanted: Wanted, git: Git) -> None:
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


def note(folder: Path, name: str) -> dict[str, str]:
    """What this program left about a checkout in its .git; empty where there is nothing to read."""
    try:
        value: dict[str, str] = json.loads((folder / ".git" / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value
