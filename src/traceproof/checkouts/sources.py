"""A repository's files, in a folder or in a commit; and the sources that stacks' packages come from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.pins import NAME, read_lock
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import kept_json

# folders that are never part of a repository's own code
IGNORED = frozenset({".git", "__pycache__", ".venv", ".venvs", ".tox", ".nox", "node_modules", ".snakemake"})


class FolderTree:
    """The files of a folder, by their path in it with `/`."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise TraceproofError(f"{root} is not a folder")
        self.root = root

    @cached_property
    def files(self) -> frozenset[str]:
        """All files, except in ignored folders."""

        def unreadable(error: OSError) -> None:
            raise error

        paths: list[Path] = []
        for folder, inner, names in os.walk(self.root, onerror=unreadable):
            inner[:] = set(inner) - IGNORED
            paths += (Path(folder, name) for name in names)
        return frozenset(path.relative_to(self.root).as_posix() for path in paths if path.is_file())

    def read(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Contents of these files."""
        return {name: (self.root / name).read_bytes() for name in names}


class CommitTree:
    """The files of a commit, which is not checked out."""

    def __init__(self, root: Path, commit: str) -> None:
        self.root = root
        self.commit = commit

    @cached_property
    def blobs(self) -> Mapping[str, str]:
        """Git's digest of every file's content; without submodules."""
        listed = Git(self.root).local("ls-tree", "-r", "-z", "--full-tree", self.commit)
        digests = {}
        for entry in listed.split("\0"):
            about, _, name = entry.partition("\t")
            if " blob " in about:
                digests[name] = about.split()[2]
        return digests

    @cached_property
    def files(self) -> frozenset[str]:
        """All files."""
        return frozenset(self.blobs)

    def read(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Contents of these files. Raises TraceproofError: one can not be read."""
        from git import Repo  # slow to import, and most trees are folders

        try:
            with Repo(self.root, search_parent_directories=True) as repository:
                return {name: repository.odb.stream(bytes.fromhex(self.blobs[name])).read() for name in names}
        except ValueError as error:
            todo = "Check the repository: git fsck."
            raise TraceproofError(f"{self.root}: {self.commit} can not be read", todo=todo) from error


FileTree = FolderTree | CommitTree


def changed_between(root: Path, before: str, after: str) -> list[str]:
    """Files that differ between two commits; renamed ones under both names."""
    listed = Git(root).local("diff", "--name-only", "-z", "--no-renames", before, after, "--")
    return [name for name in listed.split("\0") if name]


def parents(name: str) -> Iterable[str]:
    """The folders above a file, nearest first; the root is ""."""
    for parent in PurePosixPath(name).parents:
        yield "" if str(parent) == "." else str(parent)


# Sources of the stacks' packages.

LOCKED = "locked"  # value in config.yaml: as sources.lock pins it
SOURCES = Path("sources")  # folder of locked sources


class Sources:
    """Sources of the stacks' packages, as configured."""

    def __init__(self, root: Path, results: str, taken: Mapping[str, str | None]) -> None:
        """Paths are relative to `root`. `taken`: by stack, `locked` or a folder; None: the installed package."""
        self._root, self._results, self._taken = root, results, taken
        self.cloned = f"{results}/sources.json"  # result of cloning the locked ones

    def of(self, stack: str) -> str:
        """`locked` or a folder; "": the installed package."""
        return self._taken.get(stack) or ""

    def clones(self, stack: str) -> list[str]:
        """The file that says that a stack's locked source is cloned; [] if it is not locked."""
        return [self.cloned] if self.of(stack) == LOCKED else []

    @cached_property
    def pins(self) -> str:
        """The pins of the locked sources, as JSON."""
        return json.dumps(pins_of(self._taken, root=self._root))

    def state(self, stack: str) -> str:
        """Changes when a file of a stack's source does, except by cloning."""
        source = self.of(stack)
        return source_state(stack, source, root=self._root, cloned=self._root / self.cloned) if source else ""

    def linked(self, stack: str) -> str:
        """The folder of links from which a checkout's package is imported."""
        return f"{self._results}/linked/{stack}"

    def path(self, stack: str) -> str:
        """PYTHONPATH for a stack's processes."""
        return f"{self.linked(stack)}:src" if self.of(stack) else "src"


def pins_of(stacks: Mapping[str, str | None], *, root: Path) -> dict[str, dict[str, Any]]:
    """The pins of the stacks whose source is `locked`, by name. Raises TraceproofError: sources.lock lacks one."""
    names = sorted(name for name, source in stacks.items() if source == LOCKED)
    pins = read_lock(root / NAME) if names else {}
    absent = [name for name in names if name not in pins]
    if absent:
        what = f"{NAME} has no pin of {', '.join(absent)}, which config.yaml takes from there"
        todo = f"Pin it: traceproof clone-repos {' '.join(absent)} --commit {absent[0]}=<40 digits>."
        raise TraceproofError(what, todo=todo)
    return {name: pins[name].model_dump(exclude={"ref"}, exclude_none=True) for name in names}


def source_folder(stack: str, source: str) -> Path:
    """Folder of a stack's source, relative to the repository unless given as absolute."""
    return SOURCES / stack if source == LOCKED else Path(source).expanduser()


def scan(folder: Path) -> str:
    """Digest of names, sizes and times of a checkout's files, which are not opened; "": there is no such folder.

    It tells when to look again; records depend on content.
    """
    if not folder.is_dir():
        return ""
    about = []
    for name in sorted(FolderTree(folder).files):
        status = (folder / name).stat()
        about.append((name, status.st_size, status.st_mtime_ns))
    return digest_json(about)


def source_state(stack: str, source: str, *, root: Path, cloned: Path) -> str:
    """The state of a stack's source; "as cloned" for a locked one that nobody changed since."""
    folder = root / source_folder(stack, source)
    if source != LOCKED:
        return scan(folder)
    before, now = kept_json(cloned).get("scans", {}).get(stack), scan(folder)
    return "as cloned" if before in {None, now} else now
