"""What git keeps in a repository's folder while a command runs: lock files, and packs that come in."""

import os
from pathlib import Path


def unlock(folder: Path) -> None:
    """Remove lock files of killed git processes; the folder's own lock says that none is running."""
    for lock in (folder / ".git").rglob("*.lock"):
        lock.unlink(missing_ok=True)


def bytes_of_packs(folder: Path) -> int:
    """Bytes in a repository's packs, finished or coming in."""
    total, own = 0, folder / ".git" if (folder / ".git").is_dir() else folder  # or a bare one
    for pack in (own / "objects" / "pack", *(own / "modules").rglob("objects/pack")):
        try:
            with os.scandir(pack) as entries:
                total += sum(entry.stat().st_size for entry in entries)
        except OSError:  # not there yet, or a file that was renamed meanwhile
            continue
    return total
