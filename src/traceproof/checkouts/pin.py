"""What a source is, and where the ones that this project is about live."""

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from traceproof.stacks import STACKS
from traceproof.stacks.base import Origin
from traceproof.text import has_credentials, redacted

CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)
DATASET = "flashinfer_trace"  # the source that config.yaml's `dataset: locked` means
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
    if has_credentials(url):  # it would be in tracked files, logs, what a run keeps, and pull requests
        raise ValueError(f"holds credentials; give {redacted(url)}, and set up git's credential helper or ssh")
    return url


Url = Annotated[str, StringConstraints(min_length=1), AfterValidator(_plain)]


class Pin(BaseModel):
    """One source at one place: a repository's commit, or a released version of a package."""

    model_config = CLOSED
    # url, commit: of a repository; anything that git understands, mirrors through git's own configuration
    url: Url | None = None
    commit: Commit | None = None
    ref: str | None = None  # the branch or tag that `commit` was resolved from, for people; never followed
    # package, version: of a released package
    package: PackageName | None = None
    version: Version | None = None
    # of the file that is fetched; several where a release has one file per platform
    sha256: Sha256 | Annotated[list[Sha256], Field(min_length=1)] | None = None
    # of a released package, the folder of its source package that is meant; None: a wheel's content
    folder: Folder | None = None

    @property
    def digests(self) -> frozenset[str]:
        """The digests of which a fetched file must have one; empty: any file will do."""
        return frozenset([self.sha256] if isinstance(self.sha256, str) else self.sha256 or ())

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        repository = self.url is not None and self.commit is not None
        package = self.package is not None and self.version is not None
        released = self.package or self.version or self.sha256 or self.folder
        mixed = (self.url or self.commit or self.ref) and released
        if mixed or repository == package:
            raise ValueError("give either 'url' and 'commit' or 'package' and 'version'")
        return self


ORIGINS: Mapping[str, Origin] = {
    **{name: stack.origin for name, stack in STACKS.items() if stack.origin is not None},
    DATASET: Origin(
        url="https://huggingface.co/datasets/flashinfer-ai/flashinfer-trace",
        package="flashinfer-bench",
        inside="flashinfer_trace",
    ),
}


class Locked(BaseModel):
    """The content of sources.lock."""

    model_config = CLOSED
    sources: dict[SourceName, Pin] = Field(default_factory=dict)
