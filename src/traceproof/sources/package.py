"""A released version of a package as a source: pip fetches the file, which is checked, unpacked and renamed."""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

from traceproof import programs
from traceproof.checkouts.archive import unpack
from traceproof.checkouts.moving import State
from traceproof.checkouts.package_index import download_sdist
from traceproof.checkouts.pin import Pin
from traceproof.digests import digest_files
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors, write_json

NOTE = ".traceproof-source.json"  # in an unpacked package: what it is, and the digest of its files


def bring_package(target: Path, pin: Pin) -> tuple[State, Pin]:
    """Make `target` the unpacked files of a released version; a pin without a digest comes back with the file's.

    A wheel is preferred, a source package is taken where there is none. Nothing of the package is run. Raises
    TraceproofError: it can not be had, is not the pinned file, or the folder holds something else.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        found = _present(target)
        if found is not None and _is(found, pin):
            return State.PRESENT, (pin if pin.digests else found)
        with tempfile.TemporaryDirectory(prefix=f".fetching-{target.name}-", dir=target.parent) as scratch:
            archive = _download(pin, Path(scratch) / "download")
            sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
            _expect(pin, archive, sha256)
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


def _is(found: Pin, pin: Pin) -> bool:
    """Whether what was unpacked is what is pinned."""
    same = (found.package, found.version, found.folder) == (pin.package, pin.version, pin.folder)
    return same and (not pin.digests or found.digests <= pin.digests)


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


def _expect(pin: Pin, archive: Path, sha256: str) -> None:
    if pin.digests and sha256 not in pin.digests:
        raise TraceproofError(
            f"{archive.name} is not the file that sources.lock names",
            problems=[*(f"expected sha256 {one}" for one in sorted(pin.digests)), f"got      sha256 {sha256}"],
            todo="Run again in case the download was damaged; if it stays so, find out why before you trust it. A "
            "release may have one file per platform: then sources.lock lists the sha256 of each.",
        )
