"""Compiled files of a solution: kept from a first worker, and put back for each later one. Standard library only.

Compilers find their own files again by path and time. So the workers of a solution use the same folder and module
name, one after the other, and each finds there what the first one compiled and nothing that another one left.
"""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from traceproof.owner import own_folder
from traceproof.reading import remove_tree
from traceproof.run.caches import FOLDER

FOLDERS = (
    FOLDER,
    ".cache",
    ".triton",
)  # below a worker's home: where compilers put what they are not told to elsewhere


def new_name() -> str:
    """A module's name that says nothing."""
    return f"m{secrets.token_hex(6)}"


@dataclass(frozen=True, slots=True)
class CompiledFiles:
    """What one solution compiles."""

    scratch: Path  # the folder of its workers, of which one is there at a time
    kept: Path  # where its compiled files are kept; no worker sees it
    name: str = field(default_factory=new_name)  # of the module that it becomes
    keeping: bool = False  # whether what the next worker compiles is kept

    @classmethod
    @contextlib.contextmanager
    def new(cls) -> Iterator[Self]:
        """Those of a solution that has compiled nothing yet; removed in the end."""
        with own_folder("scratch") as scratch, own_folder("traceproof") as kept:
            yield cls(scratch, kept / "files")

    @contextlib.contextmanager
    def restored(self) -> Iterator[Path]:
        """The folder for one worker, which must have ended when it is asked for again."""
        self._clear()
        if self.kept.is_dir():
            shutil.copytree(self.kept, self.scratch, symlinks=True, dirs_exist_ok=True)
        yield self.scratch
        if self.keeping:
            self._keep()
        self._clear()

    def _keep(self) -> None:
        """Keep what is compiled; links are left out: those to trusted kernels are made again, none is followed."""
        for name in FOLDERS:
            compiled = self.scratch / name
            if not compiled.is_dir() or compiled.is_symlink():
                continue
            try:
                shutil.copytree(compiled, self.kept / name, symlinks=True, ignore=_links)
            except (OSError, shutil.Error):  # a pipe, a file without permission: nothing that a compiler leaves
                remove_tree(self.kept)  # each worker compiles again
                return

    def _clear(self) -> None:
        for path in list(self.scratch.iterdir()):
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)


def _links(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if (Path(folder) / name).is_symlink()}
