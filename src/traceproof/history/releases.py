"""Releases of packages as folders: from the package index, or from a folder of wheels where there is none."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from filelock import FileLock
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from traceproof.checkouts.packages import bring_package, unpack
from traceproof.checkouts.pins import Pin
from traceproof.errors import TraceproofError
from traceproof.history.catalogue import Bug

RELEASES = "releases"  # folder of unpacked releases below that of the replays


class NoReleaseError(TraceproofError):
    """A release can not be had here."""


@dataclass(frozen=True)
class Releases:
    """Where releases come from, and where they are unpacked."""

    folder: Path  # of the unpacked releases, each in `<package>-<version>`; sources of others, never committed
    # a folder of wheels to take instead of the index; None: the index that pip is set up for
    wheels: Path | None = None

    def pair(self, bug: Bug, installed: str | None) -> tuple[str, str | None]:
        """The release with the bug and the one without; None for the latter: the installed one.

        Of a folder of wheels, those nearest the fix: the newest that has the bug, the oldest that has not. Raises
        NoReleaseError: the folder holds no release that has the bug, or none that has not.
        """
        if self.wheels is None:
            return bug.last_bad, bug.first_good
        here = sorted(self._files.get(canonicalize_name(bug.package), {}))
        bad = [version for version in here if bug.oldest_bad <= version <= Version(bug.last_bad)]
        good = [version for version in here if version >= Version(bug.first_good)]
        if not bad:
            raise NoReleaseError(
                f"{self.wheels} holds no {bug.package} from {bug.oldest_bad} to {bug.last_bad}",
                todo=f"pip download --no-deps --dest {self.wheels} {bug.package}=={bug.last_bad}",
            )
        if good:
            return str(bad[-1]), str(good[0])
        if installed is not None and Version(installed) >= Version(bug.first_good):
            return str(bad[-1]), None
        raise NoReleaseError(
            f"{self.wheels} holds no {bug.package} from {bug.first_good} on, nor is one installed",
            todo=f"pip download --no-deps --dest {self.wheels} {bug.package}=={bug.first_good}",
        )

    def bring(self, package: str, version: str) -> Path:
        """The folder of an unpacked release; nothing of it is run. Raises NoReleaseError: it can not be had."""
        target = self.folder / f"{canonicalize_name(package)}-{version}"
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / ".lock"):  # trials side by side take the same release
                if self.wheels is None:
                    bring_package(target, Pin(package=package, version=version))
                elif not target.is_dir():
                    self._unpack(self._files[canonicalize_name(package)][Version(version)], target)
        except TraceproofError as error:
            raise NoReleaseError(f"{package} {version} can not be had: {error}") from error
        return target

    @staticmethod
    def _unpack(wheel: Path, target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as scratch:
            unpack(wheel, Path(scratch) / "content")
            (Path(scratch) / "content").rename(target)

    @cached_property
    def _files(self) -> Mapping[str, Mapping[Version, Path]]:
        """Wheels by package and version."""
        found: dict[str, dict[Version, Path]] = {}
        for path in sorted(self.wheels.glob("*.whl")) if self.wheels is not None else ():
            try:
                name, version, _, _ = parse_wheel_filename(path.name)
            except InvalidWheelFilename:
                continue
            found.setdefault(name, {})[version] = path
        return found
