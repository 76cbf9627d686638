"""What the rules look at: a dataset, its definitions with their references parsed, its workload lines."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from traceproof.dataset.definition import Definition, Dialect, TensorSpec
from traceproof.dataset.tree import Tree, Workloads
from traceproof.lint.reference import Reference


@dataclass(frozen=True)
class Subject:
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
        parts = (tag.partition(":") for tag in self.definition.tags)
        return tuple(value.strip() for key, colon, value in parts if colon and key.strip() == namespace)

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Inputs and outputs that are tensors, by name."""
        both = {**self.definition.inputs, **self.definition.outputs}
        return {name: spec for name, spec in both.items() if spec.shape is not None}


@dataclass(frozen=True)
class Dataset:
    """The dataset that is being looked at, and where an unpacked FlashInfer lies, if anywhere."""

    tree: Tree
    flashinfer: Path | None = None

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """All usable definitions in the published schema, in the order of their paths; the rules are of that."""
        return tuple(
            Subject(entry.path, entry.definition)
            for entry in self.tree.definitions.values()
            if entry.definition.dialect is Dialect.PUBLISHED
        )

    @cached_property
    def by_family(self) -> Mapping[str, tuple[Subject, ...]]:
        """The definitions of each family."""
        found: dict[str, list[Subject]] = {}
        for subject in self.subjects:
            found.setdefault(subject.family, []).append(subject)
        return {family: tuple(subjects) for family, subjects in found.items()}

    @cached_property
    def workloads(self) -> Mapping[str, Workloads]:
        """Workload lines by definition, also of file names that no definition has."""
        return {name: self.tree.workloads(name) for name in self.tree.workload_files}
