"""What came of known bugs as solutions, as a table."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ACCEPTED, REFUSED, SAME, ABSENT = "accepted", "refused", "same bits", "does not apply"


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of one answer, and for what it was refused."""

    answer: str
    wrong: bool
    outcome: str
    reason: str

    @property
    def bad(self) -> bool:
        """Whether the judge was wrong."""
        return self.outcome == (ACCEPTED if self.wrong else REFUSED)


def table(found: Mapping[tuple[str, str], Sequence[Judged]]) -> Iterator[str]:
    """Counts per definition, and what the judge was wrong about, as Markdown."""
    columns = "wrong refused", ACCEPTED, SAME, ABSENT, "right accepted", REFUSED
    yield f"| op_type | definition | {' | '.join(columns)} | seen |"
    yield f"|---|---|{'---:|' * len(columns)}---|"
    total: Counter[tuple[bool, str]] = Counter()
    for (op_type, name), judged in sorted(found.items()):
        counts = Counter((one.wrong, one.outcome) for one in judged)
        total.update(counts)
        reasons = Counter(part for one in judged if one.wrong for part in one.reason.split(", ") if part)
        seen = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        yield f"| {op_type} | {name} | {_cells(counts)} | {seen} |"
    yield f"| all | {len(found)} | {_cells(total)} | |"
    for (_, name), judged in sorted(found.items()):
        for one in (one for one in judged if one.bad):
            kind = "wrong" if one.wrong else "right"
            yield f"\n{name}: {kind} answer {one.answer!r} {one.outcome} ({one.reason})"


def _cells(counts: Counter[tuple[bool, str]]) -> str:
    wrong = [counts[True, outcome] for outcome in (REFUSED, ACCEPTED, SAME, ABSENT)]
    right = [counts[False, outcome] for outcome in (ACCEPTED, REFUSED)]
    return " | ".join(map(str, (*wrong, *right)))
