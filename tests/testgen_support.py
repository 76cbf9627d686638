"""Datasets to write tests for."""

from __future__ import annotations

from pathlib import Path

import pytest
from definitions import rmsnorm, write

from traceproof.testgen.generate import Divergences, Generated, GenerateOptions, generate

NOTHING_KNOWN = Divergences()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two definitions."""
    for name in ("rmsnorm_a", "rmsnorm_b"):
        write(tmp_path, rmsnorm(name))
    return tmp_path


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def everything(root: Path, *, force: bool = False) -> Generated:
    return generate(GenerateOptions(root=root, everything=True, force=force), NOTHING_KNOWN)
