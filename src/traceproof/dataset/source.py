"""Where a dataset comes from, as config.yaml says it: a package, a repository, or a folder."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

from traceproof.checkouts.pin import Commit, PackageName, Sha256, Url, Version

CLOSED = ConfigDict(extra="forbid", frozen=True)
Text = Annotated[str, StringConstraints(min_length=1)]


class Short(BaseModel):
    """An object that a text alone stands for: the value of its key SHORT."""

    model_config = CLOSED
    SHORT: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        return {cls.SHORT: value} if isinstance(value, str) else value


class Pypi(BaseModel):
    """A folder inside a released sdist; pip fetches it from whatever index the user's pip is set up for."""

    model_config = CLOSED
    package: PackageName
    version: Version
    sha256: Sha256
    folder: Text = "."


class Git(BaseModel):
    """A folder of a git repository at one commit; any URL that git understands, with git's own credentials."""

    model_config = CLOSED
    url: Url
    commit: Commit
    folder: Text = "."


class Dataset(Short):
    """Where the definitions come from: exactly one of the three; null counts as not given."""

    SHORT = "path"
    pypi: Pypi | None = None
    git: Git | None = None
    path: Path | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("pypi", "git", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(repr(name) for name in given) or "none"
            raise ValueError(f"give exactly one of 'pypi', 'git' and 'path', not {found}")
        return self
