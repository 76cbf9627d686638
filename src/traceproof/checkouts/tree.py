"""A repository's files, in a folder or in a commit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from traceproof.checkouts.gitrun import Git
from traceproof.errors import TraceproofError

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
