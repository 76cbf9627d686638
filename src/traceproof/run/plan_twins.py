"""Plans of definitions that do not fit: the twin judged in place of one, or why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass

from traceproof.dataset.definition import Definition
from traceproof.ops.cases import EDGE
from traceproof.reasons import Skip
from traceproof.run.records import PlannedCase, SkipNote


@dataclass(frozen=True, slots=True)
class PlannedTwin:
    """A twin, how its axes differ in words, and its cases."""

    definition: Definition
    told: str
    cases: Sequence[PlannedCase]


def too_large(cases: Sequence[PlannedCase]) -> bool:
    """Whether no case but edge cases, which may hold nothing at all, is run, and some are too large."""
    reasons = [case.skip and case.skip.reason for case in cases if case.case.size != EDGE]
    return None not in reasons and Skip.DOES_NOT_FIT in reasons


def noted(case: PlannedCase, twin: PlannedTwin | str) -> PlannedCase:
    """A case of a definition that does not fit: not run, and it says what becomes of the definition.

    An edge case that would fit is not run either: that alone would prove nothing, and count.
    """
    if case.skip is not None and case.skip.reason != Skip.DOES_NOT_FIT:
        return case
    why = "the definition's ordinary cases do not fit" if case.skip is None else case.skip.message
    told = f"no smaller twin: {twin}" if isinstance(twin, str) else f"judged by a smaller twin: {twin.told}"
    return case.model_copy(update={"skip": SkipNote(reason=Skip.DOES_NOT_FIT, message=f"{why}; {told}")})
