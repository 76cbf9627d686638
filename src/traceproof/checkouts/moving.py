"""Moving an existing checkout to another commit without touching anyone's work, and going on after a kill.

A note in its .git says while that happens what it is about, to tell what a killed update left from what somebody
edited.
"""

import shutil
from enum import StrEnum
from pathlib import Path

from traceproof.checkouts.contents import (
    NOTE,
    Wanted,
    bounded_tree,
    changes,
    fetch,
    finish,
    has_commit,
    note,
    set_remote,
)
from traceproof.checkouts.git_folder import unlock
from traceproof.checkouts.gitrun import Git, GitError
from traceproof.errors import TraceproofError
from traceproof.files import write_json

MOVING = "traceproof-moving.json"  # in .git while an update runs: from which commit to which
BUSY = "traceproof-busy"  # in .git while a run of this program may hold git's locks there
SAVED = "traceproof-saved"  # in .git: files found changed after a killed update, kept in case somebody edited them


class State(StrEnum):
    """What was done."""

    CLONED = "cloned"
    UPDATED = "updated"
    PRESENT = "present"


def update(target: Path, wanted: Wanted, git: Git) -> State:
    """Move an existing checkout to the wanted commit, and put right what a killed update left.

    Raises TraceproofError: something there is somebody's own; it is left alone.
    """
    _ours(target, git)
    busy = target / ".git" / BUSY
    if busy.exists():
        unlock(target)
    busy.touch()
    try:
        return _move(target, wanted, git)
    finally:  # a kill leaves it, and with it the right to remove locks
        busy.unlink()


def _move(target: Path, wanted: Wanted, git: Git) -> State:
    moving = note(target, MOVING)
    if moving:
        _recover(target, moving, git)
    changed = changes(git)
    if changed:
        todo = "Commit them on a branch or put them elsewhere, then run again; or use another --target-dir."
        raise TraceproofError(f"{target} has local changes; they are left alone", problems=changed[:10], todo=todo)
    head = git.commit("HEAD")
    if head == wanted.commit and not moving:
        finish(target, wanted, git)  # submodules and LFS files may be newly wanted
        return State.PRESENT
    _no_loose_commits(target, head, git)
    set_remote(git, wanted.url)
    if not has_commit(git, wanted.commit):
        fetch(git, wanted.commit)
    bounded_tree(target, wanted.commit)
    write_json(target / ".git" / MOVING, {"from": head, "to": wanted.commit})
    try:
        git.network("checkout", "--quiet", "--detach", wanted.commit)
    except GitError as error:
        if "would be overwritten" not in error.output:
            raise
        (target / ".git" / MOVING).unlink()  # git checks before it writes
        raise TraceproofError(
            f"{target} has files of its own where the commit has others; they are left alone",
            problems=error.problems,
            todo="Move them elsewhere and run again.",
        ) from error
    finish(target, wanted, git)
    (target / ".git" / MOVING).unlink()
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


def _recover(target: Path, moving: dict[str, str], git: Git) -> None:
    """Go on after a killed update: put the files of both commits right, and keep a copy of what stood there.

    Only files that differ between the two commits can be the update's; others are left for the check that follows.
    """
    between = git.network("diff", "--name-only", "-z", "--no-renames", moving["from"], moving["to"]).split("\0")
    touched = (set(changes(git)) & set(between)) - {""}
    for name in touched:
        path = target / name
        if path.is_file():
            kept = target / ".git" / SAVED / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, kept)
    head = git.commit("HEAD")
    for name in sorted(touched):
        _restore(target, head, name, git)
    untracked = git.local("ls-files", "--others", "-z").split("\0")
    for name in (set(untracked) & set(between)) - {""}:  # files that only the other commit has
        (target / name).unlink()


def _restore(target: Path, head: str, name: str, git: Git) -> None:
    if git.local("ls-tree", "--name-only", head, "--", name).strip():
        git.network("checkout", "--quiet", "--force", head, "--", name)
    else:
        git.local("rm", "--quiet", "--cached", "--ignore-unmatch", "--", name)
        (target / name).unlink(missing_ok=True)


def _no_loose_commits(target: Path, head: str, git: Git) -> None:
    """Refuse to leave a commit that no branch, tag or note holds: it would be as good as lost.

    Raises TraceproofError: HEAD is such a commit.
    """
    if head in {note(target, NOTE).get("commit"), note(target, MOVING).get("to")}:
        return
    if git.local("for-each-ref", "--count=1", "--contains", head).strip():
        return
    raise TraceproofError(
        f"{target} stands on the commit {head[:12]}, which no branch holds; it is left alone",
        todo=f"Name it (git -C {target} branch mine), then run again.",
    )
