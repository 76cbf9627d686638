"""A stack's package taken from a checkout, instead of the one that is installed in the stack's environment.

The environment still gives everything else: torch, the compilers, the package's own requirements.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import traceproof
from traceproof.checkouts.gitrun import Git
from traceproof.dependents.tree import FolderTree
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.sources.lock import NAME, read_lock
from traceproof.stacks import STACKS
from traceproof.store import write_text

LOCKED = "locked"  # in config.yaml: as sources.lock pins it
FOLDER = Path("sources")  # where `clone-repos` and the rule put what is locked
PLACES = ("", "src", "python")  # where repositories keep their package


def pins_of(stacks: Mapping[str, str | None], *, root: Path) -> dict[str, dict[str, Any]]:
    """The pins of the stacks whose source is `locked`, by name.

    Raises:
        TraceproofError: sources.lock has none for one of them.
    """
    names = sorted(name for name, source in stacks.items() if source == LOCKED)
    pins = read_lock(root / NAME) if names else {}
    absent = [name for name in names if name not in pins]
    if absent:
        raise TraceproofError(
            f"{NAME} has no pin of {', '.join(absent)}, which config.yaml takes from there",
            todo=f"Pin it: traceproof clone-repos {' '.join(absent)} --commit {absent[0]}=<40 digits>.",
        )
    return {name: pins[name].model_dump(exclude={"ref"}, exclude_none=True) for name in names}


def folder_of(stack: str, source: str) -> Path:
    """Where a stack's source lies, relative to the repository unless it is given otherwise."""
    return FOLDER / stack if source == LOCKED else Path(source).expanduser()


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


def state(stack: str, source: str, *, root: Path, cloned: Path) -> str:
    """What a stack's source is now; a locked one that nobody touched since it was cloned is always `as cloned`."""
    folder = root / folder_of(stack, source)
    if source != LOCKED:
        return scan(folder)
    try:
        before = json.loads(cloned.read_text(encoding="utf-8"))["scans"][stack]
    except (OSError, ValueError, KeyError):
        return "as cloned"
    now = scan(folder)
    return "as cloned" if now == before else now


def importable(checkout: Path, stack: str, scratch: Path) -> Path:
    """A folder of links from which a checkout's package can be imported, its kernels' sources and traceproof too.

    traceproof is among them because workers see one folder beside their interpreter's own: the one it lies in.

    Raises:
        TraceproofError: the checkout holds no such package.
    """
    package, origin = STACKS[stack].package, STACKS[stack].origin
    checkout = checkout.absolute()
    place = next((checkout / one for one in PLACES if (checkout / one / package / "__init__.py").is_file()), None)
    if place is None:
        raise TraceproofError(f"{checkout} holds no package {package}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "traceproof").symlink_to(Path(traceproof.__file__).resolve().parent)
    about = list(place.glob("*.dist-info"))
    for one in about:
        (scratch / one.name).symlink_to(one)
    if not about:
        _describe(checkout, stack, scratch)
    data = {name: checkout / path for name, path in (origin.data if origin else {}).items()}
    if (place / package / "data").exists() or not any(path.is_dir() for path in data.values()):
        (scratch / package).symlink_to(place / package)
        return scratch
    (scratch / package / "data").mkdir(parents=True)
    for entry in (place / package).iterdir():
        (scratch / package / entry.name).symlink_to(entry)
    for name, path in data.items():
        (scratch / package / "data" / name).symlink_to(path)
    return scratch


def _describe(checkout: Path, stack: str, scratch: Path) -> None:
    """Say which version the package is, where it was never built: its commit, or that it is nobody's release."""
    label = "edited"
    if (checkout / ".git").exists():
        label = f"g{Git(checkout).local('rev-parse', '--short=12', 'HEAD').strip()}"
    name = STACKS[stack].distribution
    folder = scratch / f"{name.replace('-', '_')}-0+{label}.dist-info"
    write_text(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0+{label}\n")
