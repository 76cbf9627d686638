"""What an earlier run planned of an op_type, so that an edit of one definition plans that one alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from traceproof.dataset.tree import Entry, Tree
from traceproof.digests import digest_bytes
from traceproof.pipeline.plan_facts import SUFFIX, PlanFacts
from traceproof.pipeline.records import TWIN, OpTypePlan, PlannedDefinition
from traceproof.pipeline.stages.plan_selection import Selection, broken_of
from traceproof.store import linked
from traceproof.text import printable
from traceproof.untrusted.border import BorderError


def placed(path: Path, out: Path) -> Path:
    """A plan with its facts in the folder of plans, with the times that they have where they are kept."""
    for kept in (path, path.with_suffix(SUFFIX)):
        target = out / kept.name
        if not target.exists() or not target.samefile(kept):
            out.mkdir(parents=True, exist_ok=True)
            linked(kept, target)
    return out / path.name


@dataclass(frozen=True)
class EarlierPlan:
    """A plan in its file, which may be absent or of another context: then nothing of it is made use of."""

    path: Path
    context: str  # what plans now
    made_of: str  # digest of all files that the plan is made of; empty: not known without planning
    varying: frozenset[str]  # definitions whose plan follows from further files
    facts: PlanFacts | None  # those of the file, where it is whole and of the same context

    @classmethod
    def of(cls, path: Path, context: str, tree: Tree, names: Sequence[str], selection: Selection) -> Self:
        """From an op_type's file."""
        if not context or selection.cases:  # which cases there are is told while planning
            return cls(path, "", "", frozenset(), None)
        varying = frozenset(tree.workload_files.keys() & set(names) if selection.workloads else ())
        try:
            facts = PlanFacts.beside(path)
        except BorderError:
            facts = None
        made_of = "" if varying else _made_of(tree, path.stem, names, selection)
        return cls(path, context, made_of, varying, facts if facts and facts.context == context else None)

    @property
    def holds(self) -> bool:
        """Whether the file holds what would be planned."""
        return self.facts is not None and self.made_of != "" and self.facts.made_of == self.made_of

    def entries(self, entry: Entry) -> tuple[PlannedDefinition, PlannedDefinition | None] | None:
        """The plans of a definition and its twin, as `plan` has them; None: they are to be made."""
        name = entry.definition.name
        found = None if self._plan is None or name in self.varying else self._plan.definitions.get(name)
        if found is None or self._plan is None or found.path != printable(entry.path.as_posix()):
            return None
        same = found.digest == entry.digest and found.definition == entry.definition.as_json()
        return (found, self._plan.definitions.get(name + TWIN)) if same else None

    def split(self, planned: OpTypePlan) -> OpTypePlan | None:
        """A new plan with the shards of the earlier one; None: it has other definitions, and is to be split anew.

        With other shards all jobs of the op_type would be others, though next to nothing is to be run.
        """
        if self._plan is None or self._plan.definitions.keys() != planned.definitions.keys():
            return None
        return planned.model_copy(update={"shards": self._plan.shards})

    @cached_property
    def _plan(self) -> OpTypePlan | None:
        return None if self.facts is None else OpTypePlan.read(self.path)


def _made_of(tree: Tree, op_type: str, names: Sequence[str], selection: Selection) -> str:
    """Digest of an op_type's definitions, with where they lie, and of its files that can not be used."""
    entries = [tree.definitions[name] for name in sorted(names)]
    texts = [[entry.path.as_posix(), entry.definition.as_json()] for entry in entries]
    broken = [item.message for item in broken_of(tree, op_type, selection)]
    return digest_bytes(json.dumps([texts, broken]).encode())  # the order of inputs counts, too
