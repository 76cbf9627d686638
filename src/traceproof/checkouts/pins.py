"""sources.lock: the commit or version of every source. Branches and tags are resolved to commits here."""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.stacks import STACKS, SourceOrigin
from traceproof.text import has_credentials, redacted

if TYPE_CHECKING:
    from traceproof.checkouts.gitrun import Git  # imports packages that stacks lack

NAME = "sources.lock"
PEELED = "^{}"  # suffix by which ls-remote marks an annotated tag's commit
CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)
DATASET = "flashinfer_trace"  # the source that `dataset: locked` in config.yaml means
FULL_COMMIT = re.compile(r"[0-9a-f]{40}")
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
PackageName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
SourceName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$")]
Folder = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9][A-Za-z0-9.+!_-]*$")]


def _plain(url: str) -> str:
    if url.startswith("-"):  # git would take it for an option
        raise ValueError("is not a URL")
    if has_credentials(url):  # it would get into tracked files, logs and pull requests
        raise ValueError(f"holds credentials; give {redacted(url)}, and set up git's credential helper or ssh")
    return url


Url = Annotated[str, StringConstraints(min_length=1), AfterValidator(_plain)]


class State(StrEnum):
    """What was done to a source."""

    CLONED = "cloned"
    UPDATED = "updated"
    PRESENT = "present"


class Pin(BaseModel):
    """One source at one place: a repository's commit, a release of a package, or both, the release as fallback."""

    model_config = CLOSED
    # url, commit: of a repository; any URL that git understands, mirrors by git's own configuration
    url: Url | None = None
    commit: Commit | None = None
    ref: str | None = None  # the branch or tag that `commit` was resolved from; for people, never followed
    # package, version: of a release
    package: PackageName | None = None
    version: Version | None = None
    # of the release's file; several where there is one per platform
    sha256: Sha256 | Annotated[list[Sha256], Field(min_length=1)] | None = None
    # the wanted folder of the source package; None: a wheel's content
    folder: Folder | None = None

    @property
    def digests(self) -> frozenset[str]:
        """Allowed digests of the fetched file; empty: any file."""
        return frozenset([self.sha256] if isinstance(self.sha256, str) else self.sha256 or ())

    @property
    def as_release(self) -> "Pin":
        """The pin without its repository."""
        return self.model_copy(update=dict.fromkeys(("url", "commit", "ref")))

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """Check that a repository and a package are given completely or not at all, and at least one of them."""
        repository = self.url is not None and self.commit is not None
        package = self.package is not None and self.version is not None
        begun = (
            bool(self.url or self.commit or self.ref),
            bool(self.package or self.version or self.sha256 or self.folder),
        )
        if begun != (repository, package) or not (repository or package):
            what = "give 'url' and 'commit', or 'package' and 'version', or both: then git is tried first"
            raise ValueError(what)
        return self


ORIGINS: Mapping[str, SourceOrigin] = {
    **{name: stack.origin for name, stack in STACKS.items() if stack.origin is not None},
    DATASET: SourceOrigin(
        url="https://huggingface.co/datasets/flashinfer-ai/flashinfer-trace",
        package="flashinfer-bench",
        inside="flashinfer_trace",
        folder="flashinfer-trace",
    ),
}


def place_of(name: str, folder: Path) -> Path:
    """The folder of a source, below that of them all."""
    origin = ORIGINS.get(name)
    return folder / (origin.folder if origin is not None and origin.folder else name)


class Locked(BaseModel):
    """Content of sources.lock."""

    model_config = CLOSED
    sources: dict[SourceName, Pin] = Field(default_factory=dict)


def read_lock(path: Path) -> dict[str, Pin]:
    """The pins by source name; {} without the file. Raises TraceproofError, with all problems of the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        return dict(Locked.model_validate(json.loads(text)).sources)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in found]
        raise _unusable(path, problems) from error
    except (ValueError, RecursionError) as error:
        raise _unusable(path, [f"not JSON: {error}"]) from error


def _unusable(path: Path, problems: list[str]) -> TraceproofError:
    todo = "Repair it, or delete the entry and run `traceproof clone-repos` to pin it anew."
    return TraceproofError(f"{path} cannot be used", problems=problems, todo=todo)


def write_lock(path: Path, pins: Mapping[str, Pin]) -> None:
    """Write the pins sorted, so that a changed pin changes a line or two. Raises TraceproofError: disk full."""
    value = {"sources": {name: pins[name].model_dump(exclude_none=True) for name in sorted(pins)}}
    write_text(path, json.dumps(value, indent=2) + "\n")


def lock_digest(pins: Mapping[str, Pin]) -> str:
    """Digest of the pins, without the branch names that commits came from."""
    return digest_json({name: pin.model_dump(exclude={"ref"}, exclude_none=True) for name, pin in pins.items()})


def resolve(url: str, ref: str, *, git: "Git") -> str:
    """The full commit of a branch, a tag, `HEAD` or a full commit.

    Raises TraceproofError: there is no such ref, it is ambiguous, or the remote can not be reached.
    """
    if FULL_COMMIT.fullmatch(ref):
        return ref
    commit_of: dict[str, str] = {}
    for line in git.network("ls-remote", "--", url).splitlines():
        commit, _, name = line.partition("\t")
        commit_of[name] = commit
    names = ("HEAD",) if ref == "HEAD" else (ref, f"refs/tags/{ref}", f"refs/heads/{ref}")
    commits = {commit_of.get(name + PEELED, commit_of[name]) for name in names if name in commit_of}
    if len(commits) > 1:
        todo = f"Say which: refs/tags/{ref} or refs/heads/{ref}."
        raise TraceproofError(f"{ref!r} is both a tag and a branch of {url}, at different commits", todo=todo)
    if not commits:
        todo = "Check the name; a commit is given with all its 40 digits."
        raise TraceproofError(f"{url} has no branch or tag {ref!r}", todo=todo)
    return commits.pop()
