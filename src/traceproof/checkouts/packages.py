"""A released package as a source: its file is fetched, checked, unpacked and renamed, and never run.

For source packages `pip download` builds metadata, which runs setup.py, and no option turns that off. So the index
that the user has configured for pip is read here, by the simple repository API (JSON or HTML).
"""

import ast
import hashlib
import html
import json
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import requests
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from traceproof import programs
from traceproof.checkouts.pins import Pin, State
from traceproof.digests import digest_files
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors, write_json

NOTE = ".traceproof-source.json"  # file in an unpacked package: its pin, and the digest of its files
PUBLIC = "https://pypi.org/simple"
SECONDS = 15.0  # to connect, and between two parts of an answer
PIECE = 1 << 20  # bytes
HREF = re.compile(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)""", re.IGNORECASE)
TODO = "Check the version, the network and `pip config list`."


def bring_package(target: Path, pin: Pin) -> tuple[State, Pin]:
    """Make `target` the unpacked files of a release; returns what was done, and the pin with the file's digest.

    A wheel is preferred; a source package is taken where there is none. Nothing of the package is run. Raises
    TraceproofError: it can not be fetched, is not the pinned file, or the folder holds something else.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        present = _present(target)
        if present is not None and present.digests <= (pin.digests or present.digests):
            named = (pin.package, pin.version, pin.folder)
            if (present.package, present.version, present.folder) == named:
                return State.PRESENT, (pin if pin.digests else present)
        with tempfile.TemporaryDirectory(prefix=f".fetching-{target.name}-", dir=target.parent) as scratch:
            archive = _download(pin, Path(scratch) / "download")
            sha256 = checked_digest(archive, pin.digests)
            unpacked = Path(scratch) / "unpacked"
            unpack(archive, unpacked)
            content = unpacked / (pin.folder or ".")
            if not content.is_dir():
                raise TraceproofError(f"{archive.name} has no folder {pin.folder}", todo="Correct sources.lock.")
            completed = pin.model_copy(update={"sha256": sha256})
            note = {"pin": completed.model_dump(exclude_none=True), "files": package_digest(content)}
            write_json(content / NOTE, note)
            if target.exists():
                target.rename(Path(scratch) / "old")
            content.rename(target)
    return (State.CLONED if present is None else State.UPDATED), (pin if pin.digests else completed)


def package_digest(folder: Path) -> str:
    """Digest of an unpacked package's files, without bytecode, links and our note."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != NOTE and "__pycache__" not in path.parts and not path.is_symlink()
    )
    return digest_files(files, root=folder)


def _present(target: Path) -> Pin | None:
    """The pin of what was unpacked here; None: nothing is there. Raises TraceproofError: it was changed."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        note = json.loads((target / NOTE).read_text(encoding="utf-8"))
        pin, files = Pin.model_validate(note["pin"]), note["files"]
    except (OSError, ValueError, KeyError) as error:
        what = f"{target} exists and is no unpacked package; it is left alone"
        raise TraceproofError(what, todo="Move it away, or give another --target-dir.") from error
    if files != package_digest(target):
        todo = "Put them elsewhere and delete the folder, then run again; or use another --target-dir."
        raise TraceproofError(f"{target} has local changes; they are left alone", todo=todo)
    return pin


def _download(pin: Pin, folder: Path) -> Path:
    """Download the wheel; the source package if there is none, or if only a folder of it is wanted."""
    if pin.folder is not None:
        return download_sdist(str(pin.package), str(pin.version), folder)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{pin.package}=={pin.version}"]
    if programs.run(command).returncode == 0:
        return next(folder.iterdir())
    return download_sdist(str(pin.package), str(pin.version), folder)


def checked_digest(file: Path, wanted: Collection[str]) -> str:
    """A downloaded file's sha256. Raises TraceproofError: it is none of the wanted ones (empty: any is right)."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if wanted and digest not in wanted:
        problems = [*(f"expected sha256 {one}" for one in sorted(wanted)), f"got      sha256 {digest}"]
        todo = "Run again in case the download was damaged; if it stays so, find out why first. A release may "
        todo += "have one file per platform: then its pin lists the sha256 of each."
        raise TraceproofError(f"{file.name} is not the file that was pinned", problems=problems, todo=todo)
    return digest


def unpack(archive: Path, target: Path, *, folder: str = "") -> None:
    """Unpack a wheel, or the top folder's content of a source package; only `folder` in it, if given.

    Raises TraceproofError: it is damaged.
    """
    target.mkdir(parents=True)
    below, leading = PurePosixPath(folder).parts, 0 if archive.suffix == ".whl" else 1
    try:
        for name, content in _members(archive):
            whole = PurePosixPath(name)
            parts = whole.parts[leading:]
            if whole.is_absolute() or ".." in whole.parts or not parts or parts[: len(below)] != below:
                continue
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise TraceproofError(f"{archive.name} can not be unpacked: {error}") from error


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, open file) of each file in a wheel or source package."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if not info.is_dir():
                    with wheel.open(info) as content:
                        yield info.filename, content
        return
    with tarfile.open(archive) as source:
        for member in source:
            read = source.extractfile(member) if member.isfile() else None
            if read is not None:
                yield member.name, read


def download_sdist(package: str, version: str, folder: Path) -> Path:
    """Download the source package of a version into a new folder; returns its path.

    Raises TraceproofError: there is none, or it can not be fetched.
    """
    options, name = _pip_options(), canonicalize_name(package)
    indexes = [options.get("index-url", PUBLIC), *options.get("extra-index-url", "").split()]
    if options.get("no-index", "0").lower() in {"1", "true", "yes", "on"}:
        indexes = []
    places = [*options.get("find-links", "").split(), *(f"{index.rstrip('/')}/{name}/" for index in indexes)]
    problems: list[str] = []
    with requests.Session() as session:
        session.verify = options.get("cert", True)
        for place in places:
            try:
                for file, url in _links(session, place):
                    if _is_sdist(file, package, version):
                        return _fetched(session, url, folder / Path(file).name)
            except (OSError, ValueError) as error:  # also of requests; the next place may have it
                problems.append(f"{place}: {' '.join(str(error).split())[:300]}")
            else:
                problems.append(f"{place}: no source package of this version")
    what = f"pip's indexes have no source package {package}=={version}"
    raise TraceproofError(what, problems=problems, todo=TODO)


def newest(package: str) -> str:
    """The newest version of a package in pip's indexes, pre-releases aside.

    Raises TraceproofError: they have none.
    """
    done = programs.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", package])
    match = re.match(r"\S+ \((\S+)\)", done.stdout)
    if done.returncode or match is None:
        what = f"pip's indexes tell no newest version of {package}"
        raise TraceproofError(what, problems=done.stderr.splitlines()[-3:], todo=TODO)
    return match[1]


def _is_sdist(name: str, package: str, version: str) -> bool:
    try:
        name_and_version = parse_sdist_filename(name)
        return name_and_version == (canonicalize_name(package), Version(version))
    except (InvalidSdistFilename, InvalidVersion):
        return False


def _fetched(session: requests.Session, url: str, target: Path) -> Path:
    """Copy a file from a folder or a server."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if "://" in url:
        with session.get(url, stream=True, timeout=SECONDS) as answer, target.open("wb") as file:
            answer.raise_for_status()
            for piece in answer.iter_content(PIECE):
                file.write(piece)
    else:
        shutil.copyfile(url, target)
    return target


def _pip_options() -> dict[str, str]:
    """Options of pip, by name, in pip's order of precedence."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = programs.run(command)
    if done.returncode:
        raise TraceproofError("pip does not tell its configuration", problems=done.stderr.splitlines()[-3:])
    by_place: dict[tuple[int, str], str] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in {"global", "download", ":env:"}:
            by_place[("global", "download", ":env:").index(section), option] = str(ast.literal_eval(value))
    return {option: by_place[order, option] for order, option in sorted(by_place)}


def _links(session: requests.Session, place: str) -> Iterator[tuple[str, str]]:
    """(name, address) of the files in a folder, or on an index's page. Raises OSError, ValueError."""
    if "://" not in place:
        yield from ((file.name, str(file)) for file in sorted(Path(place).expanduser().iterdir()))
        return
    answer = session.get(place, headers={"Accept": "text/html"}, timeout=SECONDS)
    answer.raise_for_status()
    for href in HREF.findall(answer.text):
        url = urldefrag(urljoin(answer.url, html.unescape(href))).url  # it may have been redirected
        yield unquote(urlsplit(url).path.rpartition("/")[2]), url
