"""A repository's files, in a folder or in a commit."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from traceproof.errors import TraceproofError

# Never part of a repository's own code, wherever they stand.
IGNORED = frozenset({".git", "__pycache__", ".venv", ".venvs", ".tox", ".nox", "node_modules", ".snakemake"})


class Tree(ABC):
    """Files by path, relative to the root, with `/`."""

    @property
    @abstractmethod
    def files(self) -> frozenset[str]:
        """All files."""

    @abstractmethod
    def read(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Contents of files that are there."""

    @cached_property
    def folders(self) -> frozenset[str]:
        """All folders with a file somewhere below them; the root is `""`."""
        found = {""}
        for name in self.files:
            parent = name.rpartition("/")[0]
            while parent not in found:
                found.add(parent)
                parent = parent.rpartition("/")[0]
        return frozenset(found)


class FolderTree(Tree):
    """The files of a folder as they are now."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise TraceproofError(f"{root} is not a folder")
        self.root = root

    @cached_property
    def files(self) -> frozenset[str]:
        """All files but those in ignored folders."""
        found: list[str] = []
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            with os.scandir(self.root / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name not in IGNORED:
                            waiting.append(name)
                    elif entry.is_file():
                        found.append(name)
        return frozenset(found)

    def read(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Contents of files."""
        return {name: (self.root / name).read_bytes() for name in names}


class CommitTree(Tree):
    """The files of a commit; nothing is checked out."""

    def __init__(self, root: Path, commit: str) -> None:
        self.root = root
        self.commit = commit

    @cached_property
    def files(self) -> frozenset[str]:
        """All files; submodules are not looked into."""
        listed = git(self.root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", self.commit)
        return frozenset(name for name in listed.decode(errors="surrogateescape").split("\0") if name)

    def read(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Contents of files, by one git process."""
        wanted = list(names)
        asked = "".join(f"{self.commit}:{name}\n" for name in wanted).encode(errors="surrogateescape")
        answer = git(self.root, "cat-file", "--batch", given=asked)
        contents: dict[str, bytes] = {}
        at = 0
        for name in wanted:
            end = answer.index(b"\n", at)
            head = answer[at:end].split()
            if head[-1] == b"missing":  # a submodule
                at = end + 1
                continue
            size = int(head[-1])
            contents[name] = answer[end + 1 : end + 1 + size]
            at = end + 1 + size + 1
        return contents


def git(root: Path, *arguments: str, given: bytes = b"") -> bytes:
    """Standard output of a git command that only reads.

    Raises:
        TraceproofError: it failed.
    """
    done = subprocess.run(["git", *arguments], cwd=root, input=given, capture_output=True, check=False)
    if done.returncode:
        raise TraceproofError(
            f"git {' '.join(arguments)} in {root} ended with {done.returncode}",
            problems=[line for line in done.stderr.decode(errors="replace").splitlines() if line][-3:],
            todo="Check that both commits are there (a shallow clone holds one only: git fetch --depth=1 ...).",
        )
    return done.stdout


def changed_between(root: Path, before: str, after: str) -> list[str]:
    """Files that differ between two commits; a renamed one counts under both names."""
    listed = git(root, "diff", "--name-only", "-z", "--no-renames", before, after, "--")
    return [name for name in listed.decode(errors="surrogateescape").split("\0") if name]


def parents(name: str) -> Iterable[str]:
    """The folders above a file, the nearest first; the root is `""`."""
    for parent in PurePosixPath(name).parents:
        yield "" if str(parent) == "." else str(parent)
