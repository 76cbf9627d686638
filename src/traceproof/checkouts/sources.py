"""Where the stacks' packages come from, and digests of their files."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from traceproof.checkouts.pins import NAME, read_lock
from traceproof.checkouts.tree import FolderTree
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError

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
    try:
        before = json.loads(cloned.read_text(encoding="utf-8"))["scans"][stack]
    except (OSError, ValueError, KeyError):
        return "as cloned"
    now = scan(folder)
    return "as cloned" if now == before else now
