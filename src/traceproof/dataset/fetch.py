"""Where a dataset comes from (a package, a repository, a folder), and fetching it.

A fetched dataset is a folder `<root>/<slug>/`, moved there in one rename once it is complete and checked. So an
existing one is complete, and the network is not used for it again.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

from traceproof.checkouts.pins import Commit, PackageName, Sha256, Url, Version
from traceproof.dataset.tree import is_dataset
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import disk_errors, kept_json, write_json
from traceproof.programs import telling

CLOSED = ConfigDict(extra="forbid", frozen=True)
Text = Annotated[str, StringConstraints(min_length=1)]


class Short(BaseModel):
    """An object that may be written as plain text, which is then the value of its key SHORT."""

    model_config = CLOSED
    SHORT: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        return {cls.SHORT: value} if isinstance(value, str) else value


class PypiSource(BaseModel):
    """A folder inside a released sdist; fetched by pip, from the index that the user has configured."""

    model_config = CLOSED
    package: PackageName
    version: Version
    sha256: Sha256
    folder: Text = "."


class GitSource(BaseModel):
    """A folder of a git repository at one commit; any URL that git understands, with git's own credentials."""

    model_config = CLOSED
    url: Url
    commit: Commit
    folder: Text = "."


class Dataset(Short):
    """Where definitions come from: exactly one of the three; null counts as absent."""

    SHORT = "path"
    pypi: PypiSource | None = None
    git: GitSource | None = None
    path: Path | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        sources = [name for name in ("pypi", "git", "path") if getattr(self, name) is not None]
        if len(sources) != 1:
            listed = " and ".join(repr(name) for name in sources) or "none"
            raise ValueError(f"give exactly one of 'pypi', 'git' and 'path', not {listed}")
        return self

    def record(self, folder: Path) -> dict[str, str | None]:
        """Its entry in the list of sources, once it is in `folder`."""
        git, pypi = self.git, self.pypi
        return {
            "path": str(folder.absolute()),
            "status": "present",
            "url": git.url if git is not None else f"pypi:{pypi.package}" if pypi is not None else None,
            "commit": git.commit if git is not None else None,
            "version": pypi.version if pypi is not None else None,
            "digest": scan_digest(folder),
        }


FETCHED = ".fetched.json"  # file in a fetched dataset's folder: its source, and its scan_digest after fetching


def folder_of(dataset: Dataset, *, root: Path) -> Path:
    """The folder of the dataset once fetched: one in `root`, or the configured path itself."""
    if dataset.pypi is not None:
        text, source = f"{dataset.pypi.package}-{dataset.pypi.version}", dataset.pypi.model_dump()
    elif dataset.git is not None:
        name = re.sub(r"[^A-Za-z0-9._-]", "", dataset.git.url.rstrip("/").rpartition("/")[2]).removesuffix(".git")
        text, source = f"{name.lstrip('.-') or 'git'}-{dataset.git.commit[:12]}", dataset.git.model_dump()
    else:
        assert dataset.path is not None
        return dataset.path
    return root / f"{text}-{digest_json(source)[:8]}"  # the digest tells sources apart


def fetch(dataset: Dataset, *, root: Path) -> Path:
    """The dataset's folder, fetched first if it is missing.

    Raises TraceproofError: the source can not be reached, does not match its digest, or holds no definitions.
    Nothing is left behind then.
    """
    folder = folder_of(dataset, root=root)
    if dataset.path is not None:
        _check(folder, f"dataset.path {folder}")
    elif not (folder / "definitions").is_dir():
        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as name:
                scratch = Path(name)
                with telling("fetching the dataset"):
                    if dataset.pypi is not None:
                        filled = _from_pypi(dataset.pypi, scratch)
                    elif dataset.git is not None:
                        filled = _from_git(dataset.git, scratch)
                (filled / FETCHED).unlink(missing_ok=True)
                try:
                    filled.rename(folder)  # replaces an empty folder
                except OSError:
                    if not (folder / "definitions").is_dir():  # else another run was faster, with the same content
                        raise
    if dataset.path is None and not (folder / FETCHED).is_file():
        about = {"source": dataset.model_dump(mode="json"), "scan": scan_digest(folder)}
        write_json(folder / FETCHED, about)
    return folder


def _check(folder: Path, what: str) -> None:
    if not is_dataset(folder):
        problems = [f"expected {folder.name}/definitions/<op_type>/<name>.json"]
        todo = "Give the folder that holds definitions/ in config.yaml (dataset.*.folder or dataset.path)."
        raise TraceproofError(f"{what} holds no definitions", problems=problems, todo=todo)


def _from_pypi(source: PypiSource, scratch: Path) -> Path:
    """Download and unpack a released dataset; returns its folder."""
    from traceproof.checkouts.packages import checked_digest, download_sdist, unpack

    archive = download_sdist(source.package, source.version, scratch / "download")
    checked_digest(archive, {source.sha256})
    try:
        unpack(archive, scratch / "unpacked", folder=source.folder)
    except TraceproofError as error:
        raise TraceproofError(f"dataset.pypi: {error}") from error
    dataset = scratch / "unpacked" / source.folder
    _check(dataset, f"dataset.pypi: folder {source.folder!r} of {archive.name}")
    return dataset


def _from_git(source: GitSource, scratch: Path) -> Path:
    """Check out a dataset's commit; returns its folder."""
    # imported here: they need GitPython, which other environments lack
    from traceproof.checkouts import checkout, gitrun

    target = scratch / "checkout"
    folders = () if source.folder in {".", ""} else (source.folder,)
    try:
        wanted_checkout = checkout.WantedCheckout(url=source.url, commit=source.commit, folders=folders)
        checkout.fill(target, wanted_checkout, gitrun.Git(target))
    except gitrun.GitError as error:
        what = f"dataset.git: commit {source.commit} of {source.url} could not be fetched"
        todo = "Check the URL, the commit (all 40 digits, pushed there) and your git credentials."
        raise TraceproofError(what, problems=[error.what, *error.problems], todo=todo) from error
    dataset = target / source.folder
    if not dataset.resolve().is_relative_to(target.resolve()):
        raise TraceproofError(f"dataset.git: folder {source.folder!r} lies outside the repository")
    _check(dataset, f"dataset.git: folder {source.folder!r} of {source.url} at {source.commit[:12]}")
    shutil.rmtree(target / ".git")
    return dataset


def untouched(folder: Path) -> bool:
    """Whether a fetched dataset is unchanged since, or was not fetched."""
    fetched = kept_json(folder / FETCHED)
    return not fetched or fetched.get("scan") == scan_digest(folder)


def scan_digest(folder: Path) -> str:
    """Digest of names, sizes and times of a dataset's definitions, workloads and blobs; no file is opened.

    It tells when to plan again: 5,000 files take well under a second. The plan itself goes by content.
    """
    paths = [path for path in folder.glob("*.json") if path.name != FETCHED]  # dumped traces
    for name in ("definitions", "workloads", "blob"):
        for parent, _, names in os.walk(folder / name, followlinks=True):  # blobs are opened through links, too
            paths += (Path(parent, file) for file in names)
    statuses = ((path, path.stat()) for path in paths if path.is_file())
    return digest_json(sorted((str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in statuses))
