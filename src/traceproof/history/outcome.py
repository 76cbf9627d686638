"""What a replay showed: verdicts of the release with a bug against those of the release without it."""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, Field

from traceproof.dataset.fetch import CLOSED
from traceproof.history.catalogue import Bug, Kind, Shows
from traceproof.reasons import Error, Skip, Verdict
from traceproof.run.rows import VerdictRow


class Found(StrEnum):
    """What came of a replay."""

    CAUGHT = "caught"  # a case fails with the bug and passes without it
    MISSED = "missed"
    NOT_HERE = "not reproducible here"


class Why(StrEnum):
    """Why a bug is not reproducible here, where no skip of the pipeline says it."""

    UNREACHABLE = "unreachable"  # no adapter's call reaches the mistake
    NO_RELEASE = "no_release"
    NO_DEFINITION = "no_definition"
    NOT_RUN = "release_not_run"  # one of the releases could not be run


class Outcome(BaseModel):
    """What came of one bug."""

    model_config = CLOSED
    bug: str  # its id
    found: Found  # what came of it
    # reason, message: why it is not reproducible here, or what a miss needs
    reason: Skip | Why | None = None
    message: str = ""
    # bad, good: the releases that were run
    bad: str | None = None
    good: str | None = None
    cases: int = 0  # rows that were compared in both
    flips: tuple[str, ...] = ()  # rows that fail with the bug and pass without it, `definition case output`
    alarms: tuple[str, ...] = ()  # rows that fail without the bug
    # other bugs that the one release has and the other has not: the flips may be theirs
    shared: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()  # other bugs that both releases have: the alarms may be theirs
    seconds: float = 0.0  # wall-clock time of the bug's runs

    @property
    def finding(self) -> bool:
        """Whether it is a miss, or an alarm that no known bug explains."""
        return self.found is Found.MISSED or self.unexplained

    @property
    def unexplained(self) -> bool:
        """Whether a release without the bug fails, and no other known bug explains it."""
        return bool(self.alarms) and not self.remaining


class Rows(BaseModel):
    """Rows by what was compared."""

    # verdict and message by `definition case actor output`
    compared: dict[str, tuple[Verdict, str]] = Field(default_factory=dict)
    skipped: list[tuple[Skip, str]] = Field(default_factory=list)  # reasons and messages of what was not

    @classmethod
    def of(cls, bug: Bug, rows: Sequence[VerdictRow]) -> "Rows":
        """Sort a trial's rows of the bug's cases; of several rows of one output the worst counts.

        A wrong address may end the process where it lies outside all memory: such a crash is a failure.
        """
        sorted_ = cls()
        for row in rows:
            if bug.shown_by and row.case not in bug.shown_by:
                continue
            key = f"{row.definition} {row.case} {row.actor} {row.output}"
            if row.verdict is Verdict.SKIP:
                sorted_.skipped.append((Skip(str(row.reason)), row.message))
            elif key not in sorted_.compared or row.bad:
                crash = bug.kind is Kind.ADDRESS and row.reason == Error.CRASH
                sorted_.compared[key] = Verdict.FAIL if crash else row.verdict, row.message
        return sorted_

    @property
    def broken(self) -> bool:
        """Whether most of what was compared are errors: the release does not run here."""
        errors = [key for key, (verdict, _) in self.compared.items() if verdict is Verdict.ERROR]
        return 2 * len(errors) > len(self.compared)

    @property
    def failing(self) -> dict[str, str]:
        """Messages of the rows that are failures or errors."""
        return {key: message for key, (verdict, message) in self.compared.items() if verdict is not Verdict.PASS}


def judged(bug: Bug, bad: Sequence[VerdictRow], good: Sequence[VerdictRow]) -> Outcome:
    """What two releases' rows say of a bug.

    An error of the release with the bug counts only where the bug is one: a call that the adapter can not make is
    no catch. A case that fails as a whole (a crash) stands for its outputs.
    """
    before, after = Rows.of(bug, bad), Rows.of(bug, good)
    if not before.compared or not after.compared:
        return _nothing(bug, before, after)
    wrong = bug.shows is Shows.WRONG
    for rows in (before, after) if wrong else (after,):
        if rows.broken:
            message = next(said for verdict, said in rows.compared.values() if verdict is Verdict.ERROR)
            return Outcome(bug=bug.id, found=Found.NOT_HERE, reason=Why.NOT_RUN, message=message)
    counted = _without_errors(before) if wrong else before.failing
    passing = {_case(key) for key in after.compared.keys() - after.failing.keys()}
    flips = sorted(key for key in counted if key not in after.failing and _case(key) in passing)
    common = len(before.compared.keys() & after.compared.keys())
    outcome = Outcome(bug=bug.id, found=Found.MISSED, cases=common, alarms=tuple(sorted(after.failing)))
    if flips:
        return outcome.model_copy(
            update={"found": Found.CAUGHT, "flips": tuple(flips), "message": counted[flips[0]]}
        )
    return outcome.model_copy(update={"message": f"would be caught by {bug.cases}: {bug.needs}"})


def _nothing(bug: Bug, before: Rows, after: Rows) -> Outcome:
    """Of a bug of which one release compared nothing: the most frequent reason."""
    skipped = (before if not before.compared else after).skipped
    if not skipped:
        return Outcome(bug=bug.id, found=Found.NOT_HERE, reason=Why.NO_DEFINITION, message="no case was planned")
    (reason, message), _ = Counter(skipped).most_common(1)[0]
    return Outcome(bug=bug.id, found=Found.NOT_HERE, reason=reason, message=message)


def _without_errors(rows: Rows) -> dict[str, str]:
    return {key: said for key, said in rows.failing.items() if rows.compared[key][0] is not Verdict.ERROR}


def _case(key: str) -> str:
    """The case and actor of a row's key."""
    return key.rpartition(" ")[0]
