"""Where the stacks' packages come from, and what changes when a file of them does."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from traceproof.checkouts.pins import NAME, read_lock
from traceproof.checkouts.tree import FolderTree
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError

LOCKED = "locked"  # in config.yaml: as sources.lock pins it
SOURCES = Path("sources")  # where `clone-repos` and the rule put what is locked


class Sources:
    """Where the stacks' packages come from."""

    def __init__(self, root: Path, results: str, taken: Mapping[str, str | None]) -> None:
        """Paths are relative to `root`. `taken`: by stack, `locked` or a folder; None: it is the installed one."""
        self._root, self._results, self._taken = root, results, taken
        self.cloned = f"{results}/sources.json"  # what came of those that are taken as sources.lock pins them

    def of(self, stack: str) -> str:
        """`locked`, a folder, or nothing: the installed package."""
        return self._taken.get(stack) or ""

    def clones(self, stack: str) -> list[str]:
        """The file that says that a stack's source is there: one, or none where none is cloned for it."""
        return [self.cloned] if self.of(stack) == LOCKED else []

    @cached_property
    def pins(self) -> str:
        """The pins of the sources that are taken as sources.lock has them, as JSON."""
        return json.dumps(pins_of(self._taken, root=self._root))

    def state(self, stack: str) -> str:
        """Changes when a file of a stack's source does, other than by cloning it."""
        source = self.of(stack)
        return source_state(stack, source, root=self._root, cloned=self._root / self.cloned) if source else ""

    def linked(self, stack: str) -> str:
        """Where a checkout's package is imported from."""
        return f"{self._results}/linked/{stack}"

    def path(self, stack: str) -> str:
        """PYTHONPATH of what runs in a stack."""
        return f"{self.linked(stack)}:src" if self.of(stack) else "src"


def pins_of(stacks: Mapping[str, str | None], *, root: Path) -> dict[str, dict[str, Any]]:
    """The pins of the stacks whose source is `locked`, by name. Raises TraceproofError: sources.lock lacks one."""
    names = sorted(name for name, source in stacks.items() if source == LOCKED)
    pins = read_lock(root / NAME) if names else {}
    absent = [name for name in names if name not in pins]
    if absent:
        raise TraceproofError(
            f"{NAME} has no pin of {', '.join(absent)}, which config.yaml takes from there",
            todo=f"Pin it: traceproof clone-repos {' '.join(absent)} --commit {absent[0]}=<40 digits>.",
        )
    return {name: pins[name].model_dump(exclude={"ref"}, exclude_none=True) for name in names}


def source_folder(stack: str, source: str) -> Path:
    """Where a stack's source lies, relative to the repository unless it is given otherwise."""
    return SOURCES / stack if source == LOCKED else Path(source).expanduser()


def scan(folder: Path) -> str:
    """Digest of names, sizes and times of a checkout's files; nothing is opened. Empty: there is no such folder.

    It says when to look again; the records that come of it go by content.
    """
    if not folder.is_dir():
        return ""
    found = []
    for name in sorted(FolderTree(folder).files):
        status = (folder / name).stat()
        found.append((name, status.st_size, status.st_mtime_ns))
    return digest_json(found)


def source_state(stack: str, source: str, *, root: Path, cloned: Path) -> str:
    """What a stack's source is now; a locked one that nobody touched since it was cloned is always `as cloned`."""
    folder = root / source_folder(stack, source)
    if source != LOCKED:
        return scan(folder)
    try:
        before = json.loads(cloned.read_text(encoding="utf-8"))["scans"][stack]
    except (OSError, ValueError, KeyError):
        return "as cloned"
    now = scan(folder)
    return "as cloned" if now == before else now
