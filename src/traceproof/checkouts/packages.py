"""A released version of a package as a source: its file is fetched, checked, unpacked and renamed, and never run.

Of a source package, `pip download` builds the metadata, which runs its setup.py; no option turns that off. So the
index that the user's pip is set up for is read here, by the simple repository API (JSON or HTML).
"""

import ast
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

import requests
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, Field
from urllib3.exceptions import HTTPError

from traceproof import programs
from traceproof.checkouts.pins import Pin, State
from traceproof.digests import digest_files
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors, write_json

NOTE = ".traceproof-source.json"  # in an unpacked package: what it is, and the digest of its files
PUBLIC = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
SECONDS = 15.0  # for a server to connect, and between two pieces of an answer
PAGE_BYTES, PAGE_SECONDS = 64 << 20, 120.0
FILE_BYTES, FILE_SECONDS = 2 << 30, 1800.0
PIECE = 1 << 20
TODO = "Check the version, the network and `pip config list`."


def bring_package(target: Path, pin: Pin) -> tuple[State, Pin]:
    """Make `target` the unpacked files of a released version; a pin without a digest comes back with the file's.

    A wheel is preferred, a source package is taken where there is none. Nothing of the package is run. Raises
    TraceproofError: it can not be had, is not the pinned file, or the folder holds something else.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        found = _present(target)
        if found is not None and found.digests <= (pin.digests or found.digests):
            named = (pin.package, pin.version, pin.folder)
            if (found.package, found.version, found.folder) == named:
                return State.PRESENT, (pin if pin.digests else found)
        with tempfile.TemporaryDirectory(prefix=f".fetching-{target.name}-", dir=target.parent) as scratch:
            archive = _download(pin, Path(scratch) / "download")
            sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
            if pin.digests and sha256 not in pin.digests:
                wanted = [f"expected sha256 {one}" for one in sorted(pin.digests)]
                raise TraceproofError(
                    f"{archive.name} is not the file that sources.lock names",
                    problems=[*wanted, f"got      sha256 {sha256}"],
                    todo="Run again in case the download was damaged; if it stays so, find out why first. "
                    "A release may have one file per platform: then sources.lock lists the sha256 of each.",
                )
            unpacked = Path(scratch) / "unpacked"
            unpack(archive, unpacked)
            content = unpacked / (pin.folder or ".")
            if not content.is_dir():
                raise TraceproofError(f"{archive.name} has no folder {pin.folder}", todo="Correct sources.lock.")
            whole = pin.model_copy(update={"sha256": sha256})
            note = {"pin": whole.model_dump(exclude_none=True), "files": package_digest(content)}
            write_json(content / NOTE, note)
            old = Path(scratch) / "old"
            if target.exists():
                target.rename(old)
            content.rename(target)
    return (State.CLONED if found is None else State.UPDATED), (pin if pin.digests else whole)


def package_digest(folder: Path) -> str:
    """Digest of an unpacked package's files; what Python writes beside them does not count."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != NOTE and "__pycache__" not in path.parts and not path.is_symlink()
    )
    return digest_files(files, root=folder)


def _present(target: Path) -> Pin | None:
    """What was unpacked here; None: nothing is here."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        note = json.loads((target / NOTE).read_text(encoding="utf-8"))
        pin, files = Pin.model_validate(note["pin"]), note["files"]
    except (OSError, ValueError, KeyError) as error:
        raise TraceproofError(
            f"{target} exists and is no unpacked package; it is left alone",
            todo="Move it away, or give another --target-dir.",
        ) from error
    if files != package_digest(target):
        todo = "Put them elsewhere and delete the folder, then run again; or use another --target-dir."
        raise TraceproofError(f"{target} has local changes; they are left alone", todo=todo)
    return pin


def _download(pin: Pin, folder: Path) -> Path:
    """The wheel, which pip only copies; the source package where there is none, or a folder of it is meant."""
    if pin.folder is not None:
        return download_sdist(str(pin.package), str(pin.version), folder, sha256=None)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{pin.package}=={pin.version}"]
    if programs.run(command).returncode == 0:
        return next(folder.iterdir())
    return download_sdist(str(pin.package), str(pin.version), folder, sha256=None)


def unpack(archive: Path, target: Path, *, folder: str = "") -> None:
    """Unpack a wheel, or what a source package holds below its first folder; of `folder` in it alone, if given.

    Raises TraceproofError: it is damaged.
    """
    target.mkdir(parents=True)
    wanted, first = PurePosixPath(folder).parts, 0 if archive.suffix == ".whl" else 1
    try:
        for name, content in _members(archive):
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


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of a wheel or of a source package."""
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


class Link(NamedTuple):
    """A file of an index: its name, where it lies, and its sha256 if the index says it."""

    name: str
    url: str
    sha256: str | None


def download_sdist(package: str, version: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Fetch the source package of a version into a new folder; the file.

    Raises TraceproofError: there is none, it can not be fetched, or it is not the file of the digest.
    """
    options, name = _pip_options(), canonicalize_name(package)
    indexes = [options.get("index-url", PUBLIC), *options.get("extra-index-url", "").split()]
    if options.get("no-index", "0").lower() in {"1", "true", "yes", "on"}:
        indexes = []
    places = [*options.get("find-links", "").split(), *(f"{index.rstrip('/')}/{name}/" for index in indexes)]
    certificates = options.get("cert")
    problems: list[str] = []
    for place in places:
        try:
            for link in _links(place, certificates):
                if _is_sdist(link.name, package, version):
                    folder.mkdir(parents=True, exist_ok=True)
                    target, digest = folder / Path(link.name).name, hashlib.sha256()
                    with target.open("wb") as file:
                        for piece in _content(link.url, certificates, most=FILE_BYTES, seconds=FILE_SECONDS):
                            digest.update(piece)
                            file.write(piece)
                    _expect(link, sha256, digest.hexdigest())
                    return target
        except (OSError, ValueError) as error:  # of requests, too: the next place may have it
            problems.append(f"{place}: {' '.join(str(error).split())[:300]}")
        else:
            problems.append(f"{place}: no source package of this version")
    raise TraceproofError(
        f"pip's indexes have no source package {package}=={version}", problems=problems, todo=TODO
    )


def _expect(link: Link, pinned: str | None, digest: str) -> None:
    for wanted in (pinned, link.sha256):
        if wanted not in {None, digest}:
            raise TraceproofError(
                f"{link.name} is not the file that {'was pinned' if wanted == pinned else 'its index names'}",
                problems=[f"expected sha256 {wanted}", f"got      sha256 {digest}"],
                todo="Run again in case the download was damaged; if it stays so, find out why first.",
            )


def _is_sdist(name: str, package: str, version: str) -> bool:
    try:
        found = parse_sdist_filename(name)
        return found == (canonicalize_name(package), Version(version))
    except (InvalidSdistFilename, InvalidVersion):
        return False


def _pip_options() -> dict[str, str]:
    """Options of pip by name; what stands later in pip's order of precedence wins."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = programs.run(command)
    if done.returncode:
        raise TraceproofError("pip does not tell its configuration", problems=done.stderr.splitlines()[-3:])
    found: dict[tuple[int, str], str] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in {"global", "download", ":env:"}:
            found[("global", "download", ":env:").index(section), option] = str(ast.literal_eval(value))
    return {option: found[order, option] for order, option in sorted(found)}


def _links(place: str, certificates: str | None) -> Iterator[Link]:
    """Links of a folder, or of a page."""
    path = _path(place)
    if path is not None and path.is_dir() and not (path / "index.html").is_file():
        yield from (Link(one.name, one.as_uri(), None) for one in sorted(path.absolute().iterdir()))
        return
    base = place if path is None else (path / "index.html" if path.is_dir() else path).absolute().as_uri()
    page = b"".join(_content(base, certificates, most=PAGE_BYTES, seconds=PAGE_SECONDS))
    if page.lstrip().startswith(b"{"):
        for file in _Page.model_validate_json(page).files:
            yield Link(file.filename, urljoin(base, file.url), file.hashes.get("sha256"))
        return
    reader = _Anchors()
    reader.feed(page.decode("utf-8", "replace"))
    for href in reader.found:
        url, fragment = urldefrag(urljoin(base, href))
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        yield Link(unquote(urlsplit(url).path.rpartition("/")[2]), url, sha256)


class _File(BaseModel):
    """A file of a page in JSON."""

    filename: str
    url: str
    hashes: dict[str, str] = Field(default_factory=dict)


class _Page(BaseModel):
    """A page in JSON."""

    files: list[_File]


class _Anchors(HTMLParser):
    """Collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an anchor's target."""
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _path(place: str) -> Path | None:
    """The path of a folder or of a file: URL; None: it is elsewhere."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(place).expanduser() if not parts.scheme else None


def _content(url: str, certificates: str | None, *, most: int, seconds: float) -> Iterator[bytes]:
    """The content of a URL, piece by piece.

    Raises:
        OSError: it can not be read, or takes too long.
        ValueError: it is larger than `most`, or of a kind that is not read.
    """
    path = _path(url)
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    size, end = 0, time.monotonic() + seconds
    with nullcontext() if path is None else path.open("rb") as file:
        for piece in _pieces(url, certificates) if file is None else iter(partial(file.read, PIECE), b""):
            size += len(piece)
            if size > most:
                raise ValueError(f"more than {most >> 20} MiB")
            if time.monotonic() > end:
                raise TimeoutError(f"not done after {seconds:g} s")
            yield piece


def _pieces(url: str, certificates: str | None) -> Iterator[bytes]:
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ValueError(f"{urlsplit(url).scheme}: addresses are not read")
    verify, headers = certificates or True, {"Accept": ACCEPT}
    try:
        with requests.get(url, headers=headers, stream=True, timeout=SECONDS, verify=verify) as answer:
            answer.raise_for_status()
            while piece := answer.raw.read1(PIECE, decode_content=True):  # what is there, however little
                yield piece
    except HTTPError as error:  # urllib3's own, while the answer comes in
        raise OSError(str(error)) from error
