"""Pushing to any git remote of a dataset: the bundle as a branch of its own."""

import re
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from traceproof.checkouts.gitrun import MOVED, Git, GitError, Patience, tree_with
from traceproof.errors import TraceproofError
from traceproof.publish.bundle import Bundle
from traceproof.publish.change import Change
from traceproof.publish.push import Again, Outcome, patiently, planned, unlike
from traceproof.text import redacted

PREFIX = "traceproof/"
PATIENCE = Patience(stall=900)  # a remote may check long what it is sent


class Remote:
    """A git remote, with git's own credentials; its default branch is the base, and is never pushed to."""

    def __init__(self, url: str) -> None:
        if url.startswith("-"):
            raise TraceproofError(f"{url!r} is no git remote")
        self.url = url

    def push(self, bundle: Bundle, describe: Callable[[Change], str], *, allow_changes: bool) -> Outcome:
        """Bring the bundle's branch up to date with one commit, and read it back.

        Raises TraceproofError: the remote can not be read or written, or the bundle does not go on top of it.
        """
        return patiently(lambda: self._attempt(bundle, describe, allow_changes=allow_changes))

    def _attempt(self, bundle: Bundle, describe: Callable[[Change], str], *, allow_changes: bool) -> Outcome:
        branch = f"{PREFIX}{bundle.slug}"
        with tempfile.TemporaryDirectory() as scratch:
            clone = _Clone(Path(scratch), self.url)
            base = Commit(clone, clone.default)
            change = planned(bundle, base, allow_changes=allow_changes)
            if not change.files:
                return Outcome(redacted(self.url), base.revision, False, 0)  # noqa: FBT003
            clone.refuse_lfs(change)
            tip = clone.tip(branch)
            commit = clone.commit(
                change.files, [tip] if tip else [], base.revision, f"{bundle.title}\n\n{describe(change)}"
            )
            if commit is not None:
                clone.push(commit, branch, tip)
            head = Commit(_Clone(Path(scratch) / "again", self.url), branch)
            different = unlike(change.files, head.read)
        if different:
            raise TraceproofError(f"{self.url} does not hold what was pushed to {branch}", problems=different)
        return Outcome(f"{redacted(self.url)} {branch}", head.revision, commit is not None, len(change.files))


class _Clone:
    """A bare clone without what is not needed."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.folder = folder / "clone.git"
        folder.mkdir(parents=True, exist_ok=True)
        what = ("clone", "--progress", "--bare", "--no-tags", "--filter=blob:none", "--", url, self.folder.name)
        Git(folder, PATIENCE).network(*what)
        self.runner = Git(self.folder, PATIENCE)

    @cached_property
    def default(self) -> str:
        """The default branch. Raises TraceproofError: the remote has no commits."""
        name = self.git("symbolic-ref", "--short", "HEAD").strip()
        if self.tip(name) is None:
            raise TraceproofError(f"{self.url} has no commit on its default branch")
        return name

    def git(self, *arguments: str, data: bytes = b"", index: Path | None = None) -> str:
        """Standard output of git in the clone."""
        return self.runner.local("--git-dir=.", *arguments, data=data, index=index)

    def tip(self, branch: str) -> str | None:
        """Commit of a branch, if it exists."""
        found = self.git("for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}").strip()
        return found or None

    def refuse_lfs(self, change: Change) -> None:
        """Say so where the remote keeps one of the files in LFS.

        Raises TraceproofError: it does; a pointer without its object would be a broken file.
        """
        names = "\0".join(change.files).encode()
        index = self.folder / "attributes-index"
        self.git("read-tree", self.default, index=index)
        said = self.git("check-attr", "--cached", "-z", "--stdin", "filter", data=names, index=index).split("\0")
        kept = [path for path, _, value in zip(said[::3], said[1::3], said[2::3], strict=False) if value == "lfs"]
        if kept:
            raise TraceproofError(
                f"{self.url} keeps {len(kept)} of these files in LFS, which plain git can not fill",
                problems=kept[:10],
                todo="Push to the hub itself instead (--push).",
            )

    def commit(self, files: dict[str, bytes], tips: list[str], base: str, message: str) -> str | None:
        """A commit of the base's tree with the files on top; None: the branch holds exactly that."""
        tree = tree_with(self.git, base, files)
        if tips and self.git("rev-parse", f"{tips[0]}^{{tree}}").strip() == tree:
            return None
        parents = [*tips]
        if not tips or bool(self.git("rev-list", "--max-count=1", base, f"^{tips[0]}").strip()):
            parents.append(base)
        flags = [flag for parent in parents for flag in ("-p", parent)]
        return self.git("commit-tree", tree, *flags, data=message.encode()).strip()

    def push(self, commit: str, branch: str, tip: str | None) -> None:
        """Push to the bundle's branch, if it is where it was. Raises ValueError: it is the default branch."""
        if branch == self.default or not branch.startswith(PREFIX):
            raise ValueError(f"{branch} is not a bundle's branch; nothing else is ever pushed to")
        lease = f"--force-with-lease=refs/heads/{branch}:{tip or ''}"
        try:
            self.runner.network(
                "--git-dir=.", "push", "--progress", lease, self.url, f"{commit}:refs/heads/{branch}"
            )
        except GitError as error:
            if re.search(MOVED, error.output):
                raise Again(error.output, wait=0.0) from error
            raise


class Commit:
    """A branch's commit, as a base."""

    def __init__(self, clone: _Clone, branch: str) -> None:
        self._clone = clone
        self.revision = clone.tip(branch) or ""

    @cached_property
    def _paths(self) -> frozenset[str]:
        listed = self._clone.git("ls-tree", "-r", "-z", "--name-only", self.revision)
        return frozenset(name for name in listed.split("\0") if name)

    def paths(self) -> frozenset[str]:
        """All files."""
        return self._paths

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        name = f"{self.revision}:{path}"
        # The clone has no contents: git fetches one when it is read.
        return self._clone.runner.content("--git-dir=.", "cat-file", "blob", name) if path in self._paths else None
