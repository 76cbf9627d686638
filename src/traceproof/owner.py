"""Folders that say which process they belong to, so that those of killed ones are told apart and removed."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from traceproof.digests import digest_json
from traceproof.reading import remove_tree

OWNED = re.compile(r"(?:traceproof|scratch)-(?P<owner>[0-9]+\.[0-9]+\.[0-9a-f]+)-.*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from later ones of its number and from those of other machines and containers."""

    text: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process of that number, which must be there."""
        return cls(f"{pid}.{_started(pid)}.{_machine()}")

    @property
    def alive(self) -> bool:
        """Whether it runs, here."""
        with contextlib.suppress(ValueError, OSError):
            pid, started, _ = self.text.split(".")
            return self._here and started == _started(int(pid))
        return False

    @property
    def ended(self) -> bool:
        """Whether it ran here, and does so no more; of another machine's nothing is known."""
        return self._here and not self.alive

    @property
    def _here(self) -> bool:
        return self.text.rpartition(".")[2] == _machine()


def _started(pid: int) -> str:
    """When it started, in ticks since the machine did: field 22 of proc(5)'s stat; "0" for one that is ended."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return "0" if fields[0] == b"Z" else fields[19].decode()


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return digest_json([boot, str(Path("/proc/self/ns/pid").readlink())])[:12]


@contextmanager
def own_folder(kind: str, root: Path | None = None) -> Iterator[Path]:
    """A new folder of this process's alone (`kind`: `scratch` or `traceproof`), removed whatever is in it."""
    folder = new_folder(kind, root)
    try:
        yield folder
    finally:
        remove_tree(folder)


def new_folder(kind: str, root: Path | None = None) -> Path:
    """The same, for whoever removes it himself."""
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{Owner.of(os.getpid()).text}-", dir=root)).resolve()


def sweep(root: Path) -> None:
    """Remove folders whose process has ended here; those of other machines, and of nobody, stay."""
    for path in root.glob("*-*"):
        named = OWNED.fullmatch(path.name)
        owner = Owner(named["owner"]) if named else None
        with contextlib.suppress(FileNotFoundError):  # another run removes it, too
            if owner is not None and owner.ended and path.lstat().st_uid == os.getuid():
                remove_tree(path)
