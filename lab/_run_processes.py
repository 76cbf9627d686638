"""Processes of a run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def command_line(pid: int) -> str:
    """What a process was started as; empty: it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def parent(pid: int) -> int:
    """The process that started it; 0: it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def of_run(root: int) -> list[int]:
    """Process ids of a run: its own process, and its descendants."""
    started: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        started.setdefault(parent(int(entry.name)), []).append(int(entry.name))
    found = [root]
    for pid in found:  # it grows on the way
        found += started.get(pid, [])
    return found


def of_folder(folder: Path) -> list[int]:
    """Process ids of all that name a folder: in their arguments, environment, or as the folder they work in."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if os.fsencode(folder) in said + os.fsencode((entry / "cwd").readlink()):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]
