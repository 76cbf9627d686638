"""known.yaml: findings that are known, each with its reason, so that only news fails a run.

An entry names definitions, cases, outputs and an implementation, and the verdict and reason code that are expected
there. A fault of a reference is one of its text: there a definition's digest stands beside its name, and another
definition of that name (extracted, or in another dataset) is not meant.
A fault of a package is one of its versions: `versions: flashinfer-python<0.7` says of which.
Of others the entry says nothing: what fails there is news, what passes is fine.
Whatever it names and was run must come out exactly so: a pass where a finding is listed fails the run too. Of a
checkout, which has no released version, either is accepted.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from traceproof.environments.inside import PACKAGES
from traceproof.errors import TraceproofError
from traceproof.ops.cases import is_hidden
from traceproof.run.schema import VerdictRow

EXAMPLE = "flashinfer-python<0.7"


def windows(given: object) -> tuple[Requirement, ...]:
    """Read one specifier, or a list of them that all have to hold.

    Raises ValueError: one is not of the form `package<version`, or names a package that no stack's record has.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{given!r} is neither a specifier nor a list of some; write e.g. {EXAMPLE}")
    found = []
    for text in texts:
        try:
            read = Requirement(text)
        except InvalidRequirement as error:
            said = str(error).splitlines()[0]
            raise ValueError(f"{text!r} is no specifier ({said}); write e.g. {EXAMPLE}") from error
        if not read.specifier or read.extras or read.marker is not None or read.url is not None:
            raise ValueError(f"{text!r} must be a package and versions of it, nothing else; write e.g. {EXAMPLE}")
        read.name = canonicalize_name(read.name)
        if read.name not in PACKAGES:
            close = get_close_matches(read.name, PACKAGES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{text!r} names an unknown package; {hint}known: {', '.join(PACKAGES)}")
        found.append(read)
    return tuple(found)


Names = Annotated[list[str], Field(min_length=1)]
Digests = Annotated[dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]], Field(min_length=1)]


class KnownFinding(BaseModel):
    """One known finding."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    definitions: Names | Digests  # exact names, or names with the digests of what is meant
    # cases, outputs: exact names; `outputs` may hold `*`, the row about a case as a whole
    cases: Names
    outputs: Names
    implementation: str = "reference"  # whose verdict it is
    # package versions that it is true for, as `package<version`, one or a list; none: for all
    versions: Annotated[tuple[Requirement, ...], PlainValidator(windows)] = ()
    # verdict, reason: what is expected; a skip only where there is no oracle
    verdict: Literal["fail", "error", "skip"]
    reason: str
    why: Annotated[str, Field(min_length=20)]  # whose fault it is and where the evidence stands

    @property
    def said(self) -> str:
        """` (flashinfer-python<0.7)`; empty where nothing limits the versions."""
        text = ", ".join(map(str, self.versions))
        return f" ({text})" if text else ""

    def means(self, definition: str, digest: str | None) -> bool:
        """Whether it speaks of a definition."""
        if definition not in self.definitions:
            return False
        return not isinstance(self.definitions, dict) or self.definitions[definition] == digest

    def names(self, row: VerdictRow) -> bool:
        """Whether a verdict row is one that this entry speaks of."""
        return (
            row.implementation == self.implementation
            and self.means(row.definition, row.digests.definition)
            # Which known faults show in a hidden case is left open.
            and (row.case in self.cases or (is_hidden(row.case) and self.expects(row)))
            # An error takes the whole case; where it is gone, there are rows of outputs instead.
            and (row.output in self.outputs or (self.verdict == "error" and "*" in self.outputs))
        )

    def stands(self, versions: Mapping[str, str]) -> bool | None:
        """Whether it is true for these versions, by package; None: not known, since one is a checkout's.

        Raises TraceproofError: one of its packages is not among them.
        """
        held: list[bool | None] = []
        for window in self.versions:
            text = versions.get(window.name)
            try:
                version = Version(text or "")
            except InvalidVersion as error:
                there = ", ".join(sorted(versions)) or "nothing known"
                why = f"{text!r} is no version of PEP 440"
                why = why if text is not None else f"that environment holds no {window.name}, but {there}"
                todo = "Name a package of the stack that the entry's implementation runs in."
                raise TraceproofError(f"known.yaml, {self.why!r}: versions: {window}: {why}", todo=todo) from error
            # bumps.source describes by public version 0 what was never released.
            inside = window.specifier.contains(version, prereleases=True)
            held.append(None if version.public == "0" else inside)
        return False if False in held else None if None in held else True

    def expects(self, row: VerdictRow) -> bool:
        """Whether the row came out as the entry says."""
        return row.verdict == self.verdict and row.reason == self.reason


class Known(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    findings: list[KnownFinding] = []

    def entry(self, row: VerdictRow, versions: Mapping[str, str]) -> KnownFinding | None:
        """The first entry that speaks of a row, in an environment of these package versions.

        Raises TraceproofError: such an entry limits versions of a package that is not among them.
        """
        return next(
            (entry for entry in self.findings if entry.names(row) and entry.stands(versions) is not False), None
        )


def read_known(path: Path | None) -> Known:
    """Read the file; None: nothing is known. Raises TraceproofError: it is not in the form above; all problems."""
    if path is None:
        return Known()
    try:
        value = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        return Known.model_validate(value or {})
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, found['loc']))}: {found['msg'].removeprefix('Value error, ')}"
            for found in error.errors()
        ]
        raise TraceproofError(f"{path} cannot be used", problems=problems) from error
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        todo = "Give the path of a readable YAML file as `known` in config.yaml, or null."
        raise TraceproofError(f"{path} cannot be read: {error}", todo=todo) from error
