"""The file by which `force: true` has actors' jobs run again."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from traceproof.store import write_text


@cache
def stamp(root: Path, run: Path, *, force: bool) -> Path:
    """The file, relative to `root`; new, once a process, where `force` asks for it or there was none.

    Args:
        root: the repository.
        run: the selection's folder in it.
        force: whether jobs are to run again.
    """
    path = run / "forced.txt"
    if force or not (root / path).is_file():
        write_text(root / path, f"{time.time_ns() if force else 0}\n")
    return path
