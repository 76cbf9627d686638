"""known.yaml: known findings, each with its reason, so that only new ones fail a run.

An entry names definitions, cases, outputs and an implementation, and the verdict and reason that are expected
there. A reference's fault is in its text: its entry has the definition's digest beside its name, so another
definition of the same name (extracted, or in another dataset) is not meant. A package's fault is in some of its
versions: `versions: flashinfer-python<0.7` names them; other versions are judged as if the entry were not there.
Whatever an entry names and was run must come out exactly so: a pass where a finding is listed fails the run, too.
A checkout has no released version: both results are accepted there.
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
    """Parse one version specifier, or a list of specifiers that all have to hold.

    Raises ValueError: one is not of the form `package<version`, or names a package that no stack records.
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
            hint = "".join(f"did you mean {one!r}? " for one in get_close_matches(read.name, PACKAGES, n=1))
            raise ValueError(f"{text!r} names an unknown package; {hint}known: {', '.join(PACKAGES)}")
        found.append(read)
    return tuple(found)


Names = Annotated[list[str], Field(min_length=1)]
Digests = Annotated[dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]], Field(min_length=1)]


class KnownFinding(BaseModel):
    """One known finding of an implementation: where it shows, what is expected there, and why."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    definitions: Names | Digests  # exact names, or names with digests
    cases: Names  # exact names
    outputs: Names  # exact names; `*`: the row about a case as a whole
    implementation: str = "reference"  # whose verdict it is
    versions: Annotated[tuple[Requirement, ...], PlainValidator(windows)] = ()  # for which it is true; empty: all
    # verdict, reason: what is expected; a skip only of definitions without an oracle
    verdict: Literal["fail", "error", "skip"]
    reason: str
    why: Annotated[str, Field(min_length=20)]  # whose fault it is, and where the evidence is

    @property
    def said(self) -> str:
        """The versions as ` (flashinfer-python<0.7)`; empty where they are not limited."""
        return f" ({', '.join(map(str, self.versions))})" if self.versions else ""

    def means(self, definition: str, digest: str | None) -> bool:
        """Whether the entry is about this definition."""
        if definition not in self.definitions:
            return False
        return not isinstance(self.definitions, dict) or self.definitions[definition] == digest

    def names(self, row: VerdictRow) -> bool:
        """Whether the entry is about this row."""
        return (
            row.implementation == self.implementation
            and self.means(row.definition, row.digests.definition)
            # A known fault need not show in a hidden case.
            and (row.case in self.cases or (is_hidden(row.case) and self.expects(row)))
            # An error stands in the case's row; without it there are rows of outputs instead.
            and (row.output in self.outputs or (self.verdict == "error" and "*" in self.outputs))
        )

    def stands(self, versions: Mapping[str, str]) -> bool | None:
        """Whether it holds for versions; None: one is a checkout's. Raises TraceproofError: one is missing."""
        held: list[bool | None] = []
        for window in self.versions:
            text = versions.get(window.name)
            try:
                version = Version(text or "")
            except InvalidVersion as error:
                there = ", ".join(sorted(versions)) or "nothing known"
                why = f"that environment holds no {window.name}, but {there}"
                why = why if text is None else f"{text!r} is no version of PEP 440"
                todo = "Name a package of the stack that the entry's implementation runs in."
                raise TraceproofError(f"known.yaml, {self.why!r}: versions: {window}: {why}", todo=todo) from error
            # bumps.source gives packages that were never released the public version 0.
            inside = window.specifier.contains(version, prereleases=True)
            held.append(None if version.public == "0" else inside)
        return False if False in held else None if None in held else True

    def expects(self, row: VerdictRow) -> bool:
        """Whether the row has the expected verdict and reason."""
        return row.verdict == self.verdict and row.reason == self.reason


class Known(BaseModel):
    """The whole file of known findings."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    findings: list[KnownFinding] = []

    def entry(self, row: VerdictRow, versions: Mapping[str, str]) -> KnownFinding | None:
        """The first entry about a row that holds; None: none. Raises TraceproofError: a package is missing."""
        named = (entry for entry in self.findings if entry.names(row))
        return next((entry for entry in named if entry.stands(versions) is not False), None)


def read_known(path: Path | None) -> Known:
    """Read the file; None: an empty list. Raises TraceproofError: it is not in this form, with all problems."""
    if path is None:
        return Known()
    try:
        value = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        return Known.model_validate(value or {})
    except ValidationError as error:
        said = ((one["loc"], one["msg"].removeprefix("Value error, ")) for one in error.errors())
        problems = [f"{'.'.join(map(str, where))}: {what}" for where, what in said]
        raise TraceproofError(f"{path} cannot be used", problems=problems) from error
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        todo = "Give the path of a readable YAML file as `known` in config.yaml, or null."
        raise TraceproofError(f"{path} cannot be read: {error}", todo=todo) from error
