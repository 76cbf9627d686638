"""How strong the proof behind each passing row of a reference is."""

from collections.abc import Iterable

from traceproof.reasons import Grade, Verdict
from traceproof.run.records import REFERENCE, SHADOW, WHOLE
from traceproof.run.rows import VerdictRow
from traceproof.stacks import TRUTHS


def graded(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    """The rows of one definition; those of the reference that passed by their numbers get their grade.

    A user's tolerance proves nothing, so what it let pass has none.
    """
    found = list(rows)
    kernels = {(row.case, row.output) for row in found if row.actor in TRUTHS and row.verdict is Verdict.PASS}
    return [
        row.changed(grade=_grade(row, kernel=(row.case, row.output) in kernels)) if _has_grade(row) else row
        for row in found
    ]


def _has_grade(row: VerdictRow) -> bool:
    passed = row.actor == REFERENCE and row.verdict is Verdict.PASS
    return passed and row.output != WHOLE and row.tolerance is None


def _grade(row: VerdictRow, *, kernel: bool) -> Grade:
    if row.twin:
        return Grade.TWIN
    if row.against == SHADOW:
        return Grade.AGREED if kernel else Grade.CONSISTENT
    if row.constants:
        return Grade.CONSISTENT
    return Grade.PROVED if kernel else Grade.CHECKED


def shadow_grade(rows: Iterable[Grade]) -> Grade:
    """The grade of a definition without an oracle, of those of its rows: the best one."""
    return Grade.AGREED if Grade.AGREED in set(rows) else Grade.CONSISTENT
