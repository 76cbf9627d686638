"""The second pull request: the coverage document of a GitHub repository, as a branch in a local clone.

The clone's working tree, index and other branches are not touched, and nothing is pushed: the branch is there, the
pull request's text is beside it, and the command that pushes it is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traceproof.checkouts.gitrun import Git, tree_with
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.publish.coverage import Row, inserted, section, totals

BRANCH = "traceproof/model-coverage"
TITLE = "docs: bring the coverage of models up to date"
REMOTE = "origin"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A branch that is ready to push."""

    branch: str  # its name
    base: str  # the branch and commit that it goes on top of
    committed: bool  # whether a commit was made; False: the branch holds exactly this already
    text: Path  # file with the pull request's title and text
    command: str  # what pushes it


def prepare(clone: Path, file: str, rows: Sequence[Row], *, origin: str, out: Path) -> Prepared:
    """Commit the document, made where it is absent, to the branch of a clone, and write the pull request's text.

    Raises TraceproofError: it is no clone, the path leaves it, or git knows no author.
    """
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise TraceproofError(f"{file!r} is no path inside {clone}")
    git = Git(clone)
    name = _base(git)
    base = git.commit(name)
    present = git.local("ls-tree", "-z", "--name-only", base, "--", file).strip("\0") == file
    text = git.local("cat-file", "blob", f"{base}:{file}") if present else ""
    tree = tree_with(git.local, base, {file: inserted(text, section(rows, origin)).encode()})
    body = _body(rows, origin, file)
    committed = _commit(git, tree, base, f"{TITLE}\n\n{body}")
    target = out / "coverage" / "pull-request.md"
    write_text(target, f"# {TITLE}\n\n{body}")
    command = f"git -C {clone} push {REMOTE} {BRANCH}"
    return Prepared(BRANCH, f"{name} {base}", committed, target, command)


def _base(git: Git) -> str:
    """The branch to go on top of: the remote's default one, else the clone's current one."""
    found = git.local("for-each-ref", "--format=%(symref:short)", f"refs/remotes/{REMOTE}/HEAD").strip()
    return found or "HEAD"


def _commit(git: Git, tree: str, base: str, message: str) -> bool:
    """One commit on top of the base, put on the branch unless it is there; what it had before is replaced."""
    tip = git.local("for-each-ref", "--format=%(objectname)", f"refs/heads/{BRANCH}").strip()
    if tree == git.local("rev-parse", f"{base}^{{tree}}").strip():
        return False
    if tip:
        same = git.local("rev-parse", f"{tip}^{{tree}}").strip() == tree
        if same and git.local("rev-parse", f"{tip}^").strip() == base:
            return False
        if git.local("branch", "--show-current").strip() == BRANCH:
            todo = f"Change to another branch there: {BRANCH} is written anew."
            raise TraceproofError(f"{git.folder} has {BRANCH} checked out", todo=todo)
    commit = git.local("commit-tree", tree, "-p", base, data=message.encode()).strip()
    git.local("update-ref", f"refs/heads/{BRANCH}", commit, tip or "0" * len(commit))
    return True


def _body(rows: Sequence[Row], origin: str, file: str) -> str:
    lines = [
        f"`{file}` says which kernel definitions of each model are verified. A definition counts as verified",
        "while its reference and at least one ground truth pass every comparison with an independent float64",
        f"oracle. {origin}",
        "",
        *totals(rows),
        "",
        "Only the part between the two `traceproof` marks is written; the rest of the document stays as it is.",
    ]
    return "\n".join(lines) + "\n"
