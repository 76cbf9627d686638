"""What came of each definition, and the sentence that a run ends with."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

from traceproof.reasons import Grade, Verdict
from traceproof.run.records import REFERENCE
from traceproof.run.rows import VerdictRow


class Outcome(StrEnum):
    """What came of a definition; of several that fit, the first one in this order counts."""

    WRONG = "wrong"
    UNVERIFIED = "unverified"
    KNOWN = "known"
    RELAXED = "relaxed"
    AGREED = "agreed"
    CONSISTENT = "consistent"
    UNCONFIRMED = "unconfirmed"
    TWIN = "twin"
    RIGHT = "right"
    NOT_RUN = "not_run"


# How many of each there are, in the order in which it is told.
WORDS: Mapping[Outcome, str] = {
    Outcome.RIGHT: "right",
    Outcome.AGREED: "agreed by a ground truth and their own float64, no oracle",
    Outcome.RELAXED: "accepted by your tolerance, not proved",
    Outcome.KNOWN: "with known findings",
    Outcome.WRONG: "with new findings",
    Outcome.CONSISTENT: "not verified: consistent with their own float64 alone",
    Outcome.UNCONFIRMED: "not verified: right but for a constant that the reference alone states",
    Outcome.UNVERIFIED: "not verified: no oracle",
    Outcome.TWIN: "too large here, judged by a smaller twin alone",
    Outcome.NOT_RUN: "not runnable here",
}
COMPARED = frozenset(Outcome) - {Outcome.UNVERIFIED, Outcome.TWIN, Outcome.NOT_RUN}
OF_GRADE = {Grade.AGREED: Outcome.AGREED, Grade.CONSISTENT: Outcome.CONSISTENT, Grade.TWIN: Outcome.TWIN}


class Outcomes:
    """Notes rows one by one what comes of their definitions."""

    def __init__(self) -> None:
        self._marks: dict[str, set[Outcome]] = defaultdict(set)

    def note(self, row: VerdictRow, finding: str | None) -> None:
        """Note a row and the kind of finding that it is: `new`, `known`, `unexpected`, or None."""
        marks = self._marks[row.definition]
        if finding is not None:
            news = Outcome.UNVERIFIED if row.unjudged else Outcome.WRONG
            marks.add(Outcome.KNOWN if finding == "known" else news)
        elif row.actor != REFERENCE:
            return
        elif row.grade in OF_GRADE:
            marks.add(Outcome.UNCONFIRMED if row.constants else OF_GRADE[row.grade])
        elif row.verdict == Verdict.PASS and not row.twin:
            marks.add(Outcome.RIGHT if row.tolerance is None else Outcome.RELAXED)
        elif row.verdict == Verdict.SKIP:
            marks.add(Outcome.NOT_RUN)

    def by_definition(self) -> dict[str, str]:
        """What came of each definition."""
        return {
            name: str(next((one for one in Outcome if one in marks), Outcome.NOT_RUN))
            for name, marks in sorted(self._marks.items())
        }


def compared(outcomes: Iterable[str]) -> bool:
    """Whether anything was compared at all."""
    return not COMPARED.isdisjoint(outcomes)


def proved(outcomes: Collection[str]) -> bool:
    """Whether anything was compared, and nothing with what itself says alone."""
    return compared(outcomes) and not {Outcome.CONSISTENT, Outcome.UNCONFIRMED} & set(outcomes)


def sentence(summary: Mapping[str, Any]) -> str:
    """`VERIFIED: 48 definitions, 41 right, 6 with known findings, 1 not runnable here`."""
    outcomes: Mapping[str, str] = summary["outcomes"]
    counts = Counter(outcomes.values())
    parts = [f"{counts[one]} {words}" for one, words in WORDS.items() if counts[one]]
    definitions = f"{len(outcomes)} definition{'' if len(outcomes) == 1 else 's'}"
    verdict = "VERIFIED" if summary["verified"] else "NOT VERIFIED"
    return f"{verdict}: {', '.join([definitions, *parts])}{_idle(summary)}"


def _idle(summary: Mapping[str, Any]) -> str:
    """Why nothing was compared, where nothing was."""
    if compared(summary["outcomes"].values()):
        return ""
    skips: Counter[str] = Counter()
    for group in summary["groups"]:
        if group["actor"] == REFERENCE:
            skips.update(group["skips"])
    why = ", ".join(f"{reason} {count}" for reason, count in skips.items()) or "the selection has no case"
    where = " in its own size" if Outcome.TWIN in summary["outcomes"].values() else ""
    return f"; nothing was compared{where}: {why}"
