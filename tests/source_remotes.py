"""Local git remotes and source packages for the tests of cloning: small, and as broken as a test wants them."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from traceproof.checkouts.gitrun import Patience

SOON = Patience(attempts=2, pause=0.01, stall=1.0)
WHO = {f"GIT_{who}_NAME": "a" for who in ("AUTHOR", "COMMITTER")}
WHO |= {f"GIT_{who}_EMAIL": "a@example.org" for who in ("AUTHOR", "COMMITTER")}
WHO |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *arguments: str) -> str:
    """A git command with a fixed author."""
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, text=True, capture_output=True, env={**os.environ, **WHO}
    ).stdout.strip()


class Upstream:
    """A working repository that is its own remote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        git(folder, "init", "--quiet", "--initial-branch=main")
        for key in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
            git(folder, "config", key, "true")

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def commit(self, files: dict[str, str | bytes | None], message: str = "change") -> str:
        """Write files (None: delete) and commit; the full commit."""
        for name, content in files.items():
            path = self.folder / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        git(self.folder, "add", "--all")
        git(self.folder, "commit", "--quiet", "--allow-empty", "-m", message)
        return git(self.folder, "rev-parse", "HEAD")

    def git(self, *arguments: str) -> str:
        return git(self.folder, *arguments)


def packed(folder: Path, name: str, files: Mapping[str, str]) -> str:
    """Write the source package NAME-1.0.tar.gz; its sha256."""
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for inner, text in files.items():
            member = tarfile.TarInfo(f"{name}-1.0/{inner}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()
