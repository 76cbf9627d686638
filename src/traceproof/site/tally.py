"""Verdicts of one actor on one definition, counted: a cell of the overview, a point of a history."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from traceproof.reasons import Verdict
from traceproof.run.implementations import IMPLEMENTATIONS, PAIR, environment_of
from traceproof.run.rows import VerdictRow
from traceproof.stacks import STACKS, distribution

WORST_FIRST = (Verdict.ERROR, Verdict.FAIL, Verdict.PASS, Verdict.SKIP)


@dataclass(slots=True)
class Tally:
    """Counts of verdicts."""

    counts: Counter[str] = field(default_factory=Counter)  # rows by verdict
    reasons: Counter[str] = field(default_factory=Counter)  # rows that did not pass, by reason
    margin: float | None = None  # largest share of a gate's limit that was used; None: no gate has one

    def add(self, verdict: str, reason: str | None, margin: float | None) -> None:
        """Count a row."""
        self.counts[str(verdict)] += 1
        if reason is not None:
            self.reasons[str(reason)] += 1
        if margin is not None:
            self.margin = margin if self.margin is None else max(self.margin, margin)

    @property
    def verdict(self) -> str:
        """The worst verdict; `skip` only where nothing else is."""
        return str(next((one for one in WORST_FIRST if self.counts[one]), Verdict.SKIP))

    @property
    def bad(self) -> int:
        """Failures and errors."""
        return self.counts[Verdict.FAIL] + self.counts[Verdict.ERROR]

    @property
    def reason(self) -> str:
        """The most frequent reason."""
        return self.reasons.most_common(1)[0][0] if self.reasons else ""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Who ran, on what, in which version."""

    actor: str
    device: str
    version: str


def version_of(actor: str, versions: Mapping[str, Mapping[str, str]]) -> str:
    """Version of the package that an actor's answers come from; of two joined by PAIR, of both."""
    stacks = [environment_of(one) if one in IMPLEMENTATIONS else one for one in actor.split(PAIR)]
    names = {stack: distribution(stack) for stack in stacks}
    found = {stack: versions.get(stack, {}).get(name) for stack, name in names.items()}
    return ", ".join(f"{names[stack]} {version}" for stack, version in found.items() if version)


def by_place(rows: Iterable[VerdictRow]) -> dict[Place, Tally]:
    """The tally of each actor, device and version that rows have, in the order in which they come."""
    found: dict[Place, Tally] = {}
    for row in rows:
        versions = dict.fromkeys(STACKS, row.versions or {})  # those of its own stack, whichever that is
        place = Place(row.actor, row.device or "", version_of(row.actor, versions))
        gate = row.gate
        found.setdefault(place, Tally()).add(row.verdict, row.reason, gate.margin if gate else None)
    return found
