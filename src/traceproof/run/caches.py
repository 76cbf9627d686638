"""Compiler caches of a worker that runs strangers' code: its own to write, those of trusted code to read.

Some of PyTorch's operators compile Triton kernels on a GPU (2.14: products with an inner dimension of 1, sums,
top-k), so a reference needs a cache that it may write; so does a solution that calls a package which compiles its
kernels when they are called. What it compiles must reach nobody else.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = "compiled"  # below the scratch folder
TRITON = "TRITON_CACHE_DIR"
PLACES = re.compile(r"_(CACHE_DIR|WORKSPACE_BASE)$")  # names of variables that say where a package compiles to
GROUP = "__grp__*"  # Triton writes it last: a kernel whose folder holds one is whole


def readable(environment: Mapping[str, str]) -> list[Path]:
    """Folders of compiled kernels that an isolated worker may read, by the environment of its stack."""
    return [Path(environment[TRITON])] if TRITON in environment else []


def use_own(scratch: Path) -> None:
    """Point this process's compilers at folders below its own, where kernels of trusted code are linked."""
    for name in filter(PLACES.search, list(os.environ)):
        own = scratch / FOLDER / name.lower()
        own.mkdir(parents=True, exist_ok=True)
        if name == TRITON:
            _link(Path(os.environ[name]), own)
        os.environ[name] = str(own)


def _link(compiled: Path, own: Path) -> None:
    """Link every whole kernel of `compiled` into `own`."""
    if not compiled.is_dir():
        return
    for kernel in compiled.iterdir():
        target = own / kernel.name
        if any(kernel.glob(GROUP)) and not target.exists():
            target.symlink_to(kernel)
