"""Running the mutants of a reference past the judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from mutation.mutants import Mutant, mutants
from mutation.trial import Trial
from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.run.source import CallError
from traceproof.sandbox import Limits, Pool, Status


class Fate(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"  # an output was refused, or it did not run to the end
    EQUIVALENT = (
        "equivalent"  # the same outputs on every case, other seeds and sizes, in bits or in float64's digits
    )
    UNREACHED = "unreached"  # the same, and no case executes the changed line
    SURVIVED = "survived"  # other bits, and the judge let it pass


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mutant's fate, and by which case or error."""

    mutant: Mutant
    fate: Fate
    by: str


@dataclass(slots=True)
class Score:
    """Mutants of one definition."""

    definition: str
    op_type: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Fate]:
        """How many of each fate."""
        return Counter(outcome.fate for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """All but the sources, which hold the dataset's code."""
        rows = [asdict(o.mutant) | {"fate": o.fate, "by": o.by} for o in self.outcomes if o.fate != Fate.KILLED]
        for row in rows:
            del row["source"]
        return {"definition": self.definition, "op_type": self.op_type, "counts": dict(self.counts), "kept": rows}


def score(definition: Definition, pool: Pool, *, limits: Limits, sizes: Sequence[str], seed: int) -> Score:
    """Run every mutant of a definition's reference on the cases that a run would use.

    Args:
        definition: the definition.
        pool: workers for strangers' code, see `traceproof.run.source.strangers`.
        limits: of one call.
        sizes: of the cases.
        seed: of the cases.

    Raises:
        TraceproofError: the policy refuses the reference itself.
    """
    try:
        trial = Trial(definition, pool, sizes=tuple(sizes), seed=seed, limits=limits)
    except CallError as error:
        if error.outcome.status is not Status.REFUSED:
            raise
        raise TraceproofError(f"{definition.name}: its reference is refused", problems=[str(error)]) from error
    result = Score(definition.name, definition.op_type)
    for mutant in mutants(definition.reference):
        found = trial.run(mutant)
        result.outcomes.append(Outcome(mutant, Fate(found["fate"]), found["by"]))
    return result
