"""A dataset repository of the small hub: a bare git repository, an LFS store and its discussions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WHEN = "2026-01-01T00:00:00.000Z"
POINTED = re.compile(rb"version https://git-lfs\S+\noid sha256:([0-9a-f]{64})\nsize (\d+)\n")
COMMIT = re.compile(r"[0-9a-f]{40}")
KNOWN: dict[tuple[Path, tuple[str, ...]], bytes] = {}  # by repository and question
PERSON = {"GIT_AUTHOR_NAME": "hub", "GIT_AUTHOR_EMAIL": "hub@example.org", "GIT_CONFIG_GLOBAL": os.devnull}
PERSON |= {"GIT_COMMITTER_NAME": "hub", "GIT_COMMITTER_EMAIL": "hub@example.org", "GIT_CONFIG_SYSTEM": os.devnull}


class Refusal(Exception):  # noqa: N818 - an answer
    """An answer other than 200."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers, self.body = status, message, headers or {}, body


class Repository:
    """One dataset: a bare git repository and its discussions."""

    def __init__(self, folder: Path) -> None:
        self.git_dir, self.lfs, self.file = folder / "git", folder / "lfs", folder / "discussions.json"
        if not self.git_dir.exists():
            self.lfs.mkdir(parents=True)
            self.git("init", "--quiet", "--bare", "--initial-branch=main", str(self.git_dir), bare=False)

    def git(self, *arguments: str, data: bytes | None = None, bare: bool = True, index: str = "") -> bytes:
        command = ["git", *(["--git-dir", str(self.git_dir)] if bare else []), *arguments]
        environment = {**os.environ, **PERSON, **({"GIT_INDEX_FILE": index} if index else {})}
        done = subprocess.run(command, input=data, capture_output=True, env=environment, check=False)
        if done.returncode:
            raise Refusal(404, done.stderr.decode())
        return done.stdout

    def known(self, *arguments: str) -> bytes:
        """What a commit or a blob says, which stays so."""
        if (self.git_dir, arguments) not in KNOWN:
            KNOWN[self.git_dir, arguments] = self.git(*arguments)
        return KNOWN[self.git_dir, arguments]

    def discussions(self) -> list[dict[str, Any]]:
        return json.loads(self.file.read_text()) if self.file.exists() else []

    def discuss(self, name: str, title: str, text: str) -> None:
        """Open a pull request with a first comment; `name` is the repository's."""
        found, author = self.discussions(), {"name": "writer"}
        comment = {"edited": False, "hidden": False, "latest": {"raw": text}}
        event = {"id": "1", "type": "comment", "createdAt": WHEN, "author": author, "data": comment}
        entry = {"num": len(found) + 1, "title": title, "status": "open", "isPullRequest": True}
        entry |= {"createdAt": WHEN, "author": author, "repo": {"name": name, "type": "dataset"}}
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps([*found, entry | {"events": [event]}]))
        partial.replace(self.file)

    def head(self, revision: str) -> str:
        ask = self.known if COMMIT.fullmatch(revision) else self.git
        return ask("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()

    def seed(self, source: Path, message: str = "Add the dataset") -> str:
        """Commit a folder's files to main."""
        files = {
            p.relative_to(source).as_posix(): p.read_bytes() for p in sorted(source.rglob("*")) if p.is_file()
        }
        return self.commit_files("refs/heads/main", files, message)

    def commit_files(self, ref: str, files: Mapping[str, bytes | None], message: str, parent: str = "") -> str:
        """Add, replace or (None) delete files in one commit."""
        try:
            parent = parent or self.head(ref)
        except Refusal:
            parent = ""
        with tempfile.TemporaryDirectory() as scratch:
            index = str(Path(scratch) / "index")
            if parent:
                self.git("read-tree", parent, index=index)
            lines = []
            for path, content in files.items():
                blob = "0" * 40 if content is None else ""
                if content is not None:
                    blob = self.git("hash-object", "-w", "--stdin", data=content).decode().strip()
                lines.append(f"{'0' if content is None else '100644'} {blob}\t{path}")
            self.git("update-index", "--index-info", data="\n".join(lines).encode() + b"\n", index=index)
            tree = self.git("write-tree", index=index).decode().strip()
        parents = ["-p", parent] if parent else []
        commit = self.git("commit-tree", tree, *parents, data=message.encode()).decode().strip()
        self.git("update-ref", ref, commit)
        return commit

    def tree(self, revision: str) -> list[dict[str, Any]]:
        entries = []
        for line in self.known("ls-tree", "-r", "-l", "-z", self.head(revision)).decode().split("\0")[:-1]:
            meta, path = line.split("\t")
            _, _, blob, size = meta.split()
            entry: dict[str, Any] = {"type": "file", "path": path, "oid": blob, "size": int(size)}
            if entry["size"] < 200 and (found := POINTED.fullmatch(self.known("cat-file", "blob", blob))):
                entry["lfs"] = {"oid": found[1].decode(), "size": int(found[2]), "pointerSize": entry["size"]}
                entry["size"] = int(found[2])
            entries.append(entry)
        return entries

    def read(self, revision: str, path: str) -> bytes:
        data = self.known("cat-file", "blob", f"{self.head(revision)}:{path}")
        found = POINTED.fullmatch(data)
        return (self.lfs / found[1].decode()).read_bytes() if found else data
