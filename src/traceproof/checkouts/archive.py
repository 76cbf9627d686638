"""Released packages as archives: their plain files, without links and paths that lead out of a folder."""

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from traceproof.errors import TraceproofError


def unpack(archive: Path, target: Path, *, folder: str = "") -> None:
    """Unpack a wheel, or what a source package holds below its first folder; of `folder` in it alone, if given.

    Raises TraceproofError: it is damaged.
    """
    target.mkdir(parents=True)
    wanted, first = PurePosixPath(folder).parts, 0 if archive.suffix == ".whl" else 1
    try:
        for name, content in _wheel(archive) if archive.suffix == ".whl" else _source(archive):
            whole = PurePosixPath(name)
            parts = whole.parts[first:]
            if whole.is_absolute() or ".." in whole.parts or not parts or parts[: len(wanted)] != wanted:
                continue
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise TraceproofError(f"{archive.name} can not be unpacked: {error}") from error


def _wheel(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if not info.is_dir():
                with opened.open(info) as content:
                    yield info.filename, content


def _source(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as opened:
        for member in opened:
            content = opened.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content
