"""Running the mutants of a reference past the judge, inside an isolated worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.mutate.mutants import Mutant, mutants
from traceproof.worker import Isolation, Limits, Pool, Status

SETUP = "traceproof.mutate.trial:setup"
PRELOAD = ("torch", "traceproof.mutate.trial")


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

    Raises:
        TraceproofError: the policy refuses the reference itself.
    """
    found = list(mutants(definition.reference))
    payload = {"definition": definition.as_json(), "sizes": list(sizes), "seed": seed}
    outcomes = pool.run_items(
        setup=SETUP,
        payload=payload,
        items=[{"source": mutant.source, "line": mutant.line, "operator": mutant.operator} for mutant in found],
        limits=limits,
        isolation=Isolation.UNTRUSTED,
    )
    result = Score(definition.name, definition.op_type)
    for outcome in outcomes:
        mutant = found[outcome.index]
        if outcome.status is Status.REFUSED and outcome.message.startswith("setup: "):
            raise TraceproofError(f"{definition.name}: its reference is refused", problems=[outcome.message])
        if outcome.status != Status.OK:
            result.outcomes.append(Outcome(mutant, Fate.KILLED, f"{outcome.status}: {outcome.message[-200:]}"))
        else:
            result.outcomes.append(Outcome(mutant, Fate(outcome.value["fate"]), outcome.value["by"]))
    return result
