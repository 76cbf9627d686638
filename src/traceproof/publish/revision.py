"""A revision of a repository on a hub: its files, and what they hold."""

from __future__ import annotations

import hashlib
import re
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.untrusted.names import confined

if TYPE_CHECKING:
    from traceproof.publish.hub import Hub

COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
MOST_FILES = 500_000


class Revision:
    """A revision of the repository, as a base."""

    def __init__(self, hub: Hub, name: str, cache: Path) -> None:
        self._hub = hub
        self._cache = cache
        with hub.answer(f"the revision {name}"):
            info = hub.api.repo_info(hub.repository, repo_type="dataset", revision=name)
            self.revision = str(info.sha)
            if not COMMIT.fullmatch(self.revision):
                raise ValueError(f"{self.revision[:80]!r} is no commit")

    @cached_property
    def _tree(self) -> dict[str, Any]:
        from huggingface_hub.hf_api import RepoFile

        api = self._hub.api
        with self._hub.answer("its files"), self._hub.watch.listing():
            listed = api.list_repo_tree(
                self._hub.repository, repo_type="dataset", revision=self.revision, recursive=True
            )
            found = {item.path: item for item in islice(listed, MOST_FILES + 1) if isinstance(item, RepoFile)}
            if len(found) > MOST_FILES:
                raise ValueError(f"more than {MOST_FILES} files")
        return found

    def paths(self) -> frozenset[str]:
        """All files."""
        return frozenset(self._tree)

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        if path not in self._tree:
            return None
        api = self._hub.api
        with self._hub.answer(f"the file {path}"):
            local = api.hf_hub_download(
                self._hub.repository, path, repo_type="dataset", revision=self.revision, cache_dir=self._cache
            )
            confined(Path(local), within=self._cache)
        return Path(local).read_bytes()

    def holds(self, path: str, data: bytes) -> bool:
        """Whether it has exactly this file, by its digest."""
        item = self._tree.get(path)
        if item is None:
            return False
        if item.lfs is not None:
            return bool(item.lfs.sha256 == hashlib.sha256(data).hexdigest())
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()  # as git does
        return bool(item.blob_id == blob)
