"""Rows of a solution's trial."""

from collections.abc import Iterable

from traceproof.judge.output import Ruling
from traceproof.ops.cases import Case
from traceproof.reasons import Failure, Verdict
from traceproof.run.judging import REASONS
from traceproof.run.records import WHOLE
from traceproof.run.source import CallError
from traceproof.solutions.records import Row

UNJOINED = "capturing stream has unjoined work"  # in CUDA's words


def refused(case: Case, error: CallError, variant: str = "") -> Row:
    """The row of a call that left no outputs."""
    ruling = Ruling(Verdict.ERROR, REASONS[error.outcome.status], error.outcome.message, {})
    return row_of(case, WHOLE, ruling, variant)


def left_behind(case: Case, error: CallError, variant: str) -> Row | None:
    """The row of a call whose capture CUDA refused since it left work on another stream; None: another failure."""
    if UNJOINED not in error.outcome.message:
        return None
    message = f"work is left on a stream that nothing waits for: {error.told}"
    return row_of(case, WHOLE, Ruling(Verdict.FAIL, Failure.LATE, message, {}), variant)


def bad(rows: Iterable[Row]) -> list[Row]:
    """Failures and errors."""
    return [row for row in rows if row.bad]


def row_of(case: Case, output: str, ruling: Ruling, variant: str = "") -> Row:
    """The row of a ruling on one output, or on a case as a whole."""
    gate = ruling.details.get("gate") or {}
    failed = ruling.details if ruling.verdict is Verdict.FAIL else {}
    return Row(
        case=case.id,
        size=case.size,
        seed=case.seed,
        axes=dict(case.axes),
        variant=variant,
        output=output,
        verdict=ruling.verdict,
        reason=ruling.reason,
        message=ruling.message,
        margin=gate.get("margin"),
        worst=tuple(failed.get("worst", ())),
        metrics=failed.get("metrics", {}),
    )
