"""Processes of a run."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path


def of_run(root: int) -> list[int]:
    """Process ids of a run: its own process, and its descendants."""
    children = defaultdict(list)
    waiting = [root]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(entry.name))
    found: list[int] = []
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.append(pid)
            waiting += children[pid]
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
