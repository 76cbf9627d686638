"""What the linter looks at (a dataset, its definitions with their references parsed), and what it finds."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from traceproof.dataset.definition import Definition, Dialect, TensorSpec
from traceproof.dataset.tree import DatasetTree, Workloads
from traceproof.digests import digest_json
from traceproof.lint.reference import Reference


def pointer(*parts: str | int) -> str:
    """A JSON pointer (RFC 6901) of the given keys and indices."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


@dataclass(frozen=True)
class LintedDefinition:
    """A definition that is being looked at."""

    path: Path
    definition: Definition

    @cached_property
    def reference(self) -> Reference:
        """The reference's syntax tree, read."""
        return Reference.parse(self.definition.reference)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The parts of the name between underscores."""
        return tuple(self.definition.name.split("_"))

    @cached_property
    def family(self) -> str:
        """The name without its numbers: definitions of one kind share it."""
        return re.sub(r"\d+", "#", self.definition.name)

    def tags(self, namespace: str) -> tuple[str, ...]:
        """Values of the tags `namespace:value`, without the space that definition.md allows after the colon."""
        return tuple(value for _, key, colon, value in self.tag_parts if colon and key == namespace)

    @cached_property
    def tag_parts(self) -> tuple[tuple[str, str, str, str], ...]:
        """Where each tag stands, its namespace (or flag), its colon and its value, white space aside."""
        found = []
        for at, tag in enumerate(self.definition.tags):
            namespace, colon, value = (part.strip() for part in tag.partition(":"))
            found.append((pointer("tags", at), namespace, colon, value))
        return tuple(found)

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Inputs and outputs that are tensors, by name."""
        both = {**self.definition.inputs, **self.definition.outputs}
        return {name: spec for name, spec in both.items() if spec.shape is not None}


@dataclass(frozen=True)
class LintedDataset:
    """The dataset that is being looked at, and where an unpacked FlashInfer lies, if anywhere."""

    tree: DatasetTree
    flashinfer: Path | None = None

    @cached_property
    def subjects(self) -> tuple[LintedDefinition, ...]:
        """All usable definitions in the published schema, in the order of their paths; the checks are of that."""
        return tuple(
            LintedDefinition(entry.path, entry.definition)
            for entry in self.tree.definitions.values()
            if entry.definition.dialect is Dialect.PUBLISHED
        )

    @cached_property
    def by_family(self) -> Mapping[str, list[LintedDefinition]]:
        """The definitions of each family."""
        found: dict[str, list[LintedDefinition]] = {}
        for subject in self.subjects:
            found.setdefault(subject.family, []).append(subject)
        return found

    @cached_property
    def workloads(self) -> Mapping[str, Workloads]:
        """Workload lines by definition, also of file names that no definition has."""
        return {name: self.tree.workloads(name) for name in self.tree.workload_files}


class Severity(StrEnum):
    """How much a finding matters; a note never makes the command fail."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Code:
    """What a linter looks for: its code, what it finds, what to do, and how much it matters."""

    code: str
    title: str
    todo: str
    severity: Severity


@cache
def codes(prefix: str) -> Mapping[str, Code]:
    """The codes of one linter, all of which begin so, in order."""
    stated = tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))
    found = {code: Code(code, title, todo, Severity(weight)) for code, (weight, title, todo) in stated.items()}
    return {code: one for code, one in found.items() if code.startswith(prefix)}


class Stated(Protocol):
    """A finding of any linter, as baselines and SARIF need it."""

    @property
    def path(self) -> Path:
        """The file, relative to what was read."""

    @property
    def code(self) -> str:
        """The rule's code."""

    @property
    def evidence(self) -> str:
        """What was found."""

    @property
    def fingerprint(self) -> str:
        """Says that two findings are the same one."""

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""


@dataclass(frozen=True, slots=True)
class DatasetFinding:
    """One finding of one rule of the dataset linter."""

    code: str  # the rule's code
    title: str  # the rule's title
    severity: Severity  # how much it matters
    path: Path  # the file, relative to the dataset's root
    line: int  # number of the line in a JSON lines file, from 1; 0 in other files
    field: str  # JSON pointer into the file (or the line); empty for the whole
    evidence: str  # what was found, so that a reader can check it against the file
    todo: str  # what to do

    @property
    def fingerprint(self) -> str:
        """Says that two findings are the same one: moving a line in its file does not change it."""
        return digest_json([self.code, self.path.as_posix(), self.field, self.evidence])

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return asdict(self) | {"path": self.path.as_posix(), "fingerprint": self.fingerprint}


class Hit(NamedTuple):
    """What a check yields: its code, where and what. `path` is filled in for checks of one definition."""

    code: str
    field: str  # JSON pointer into the file (or the line); empty for the whole
    evidence: str  # what was found, so that a reader can check it against the file
    path: Path = Path()
    line: int = 0  # number of the line in a JSON lines file, from 1; 0 in other files
