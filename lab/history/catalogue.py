"""Bugs that released packages had (`bugs.yaml`), and what verdicts of two releases say of one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError, model_validator
from ruamel.yaml import YAML

from traceproof.dataset.fetch import CLOSED, Text
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.reasons import Error, Skip, Verdict
from traceproof.run.schema import VerdictRow
from traceproof.stacks import STACKS, truths_of

CATALOGUE = Path(__file__).with_name("bugs.yaml")


class Kind(StrEnum):
    """What kind of mistake a bug is."""

    MASK = "mask"
    ADDRESS = "address"
    STATE = "state"
    RACE = "race"
    CACHE = "cache"
    DTYPE = "dtype"
    UNDERFLOW = "underflow"
    TIE = "tie"
    LAYOUT = "layout"
    SCALE = "scale"
    RECURRENCE = "recurrence"


class Hardware(StrEnum):
    """The least that shows a bug; `cpu` means by Triton's interpreter or by a native form."""

    CPU = "cpu"
    GPU = "gpu"
    SM90 = "sm90"
    SM100 = "sm100"


class Shows(StrEnum):
    """How a bug shows: by wrong numbers, by an error or a crash, or by a call that never ends."""

    WRONG = "wrong"
    ERROR = "error"
    HANG = "hang"


class Cases(StrEnum):
    """The class of cases that shows a bug."""

    REGULAR = "regular"
    EDGE = "edge"
    ADVERSARIAL = "adversarial"
    EXTREME_VALUES = "extreme_values"
    FAR_ADDRESSES = "far_addresses"
    LONG_CONTEXTS = "long_contexts"
    ODD_SIZES = "odd_sizes"
    LAYOUTS = "layouts"
    STATE = "state"
    RACES = "races"
    SAMPLERS = "samplers"

    @property
    def stressing(self) -> bool:
        """Whether cases of the class are of size `stress`, as far as an op has them."""
        return self in {Cases.EXTREME_VALUES, Cases.FAR_ADDRESSES, Cases.LONG_CONTEXTS}


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        raise ValueError("is no version") from error
    return text


Release = Annotated[str, AfterValidator(_version)]
DISTRIBUTIONS: Mapping[str, str] = {
    name: stack.name for stack in STACKS.values() if stack.origin for name in (stack.distribution, *stack.formerly)
}


class Bug(BaseModel):
    """One bug."""

    model_config = CLOSED | {"strict": False}
    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]  # its key in the catalogue
    title: Text  # what was wrong
    upstream: Text | None = None  # number of the issue or change, where it is known
    kind: Kind  # of mistake
    op_type: Text  # whose ground truth has it
    package: Text  # the distribution whose releases have it
    since: Release | None = None  # the first release known to have it; None: only `last_bad` is known to
    # last_bad, first_good: the releases before and after the fix
    last_bad: Release
    first_good: Release
    hardware: Hardware  # the least that shows it
    shows: Shows  # how it shows
    cases: Cases  # the class of cases that shows it
    needs: Text  # what such a case has to have
    definitions: tuple[Text, ...] = ()  # patterns of the definitions to run; empty: all of the op_type
    # sizes of const axes to run instead of the definition's
    axes: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    # of inputs and outputs, to run instead of the definition's
    dtypes: dict[str, Text] = Field(default_factory=dict)
    in_turn: bool = False  # whether the definition as it is runs before it with those dtypes, in one process
    shown_by: tuple[Text, ...] = ()  # ids of the cases that show it, which alone are run and counted; empty: all
    ground_truths: tuple[Text, ...] = ()  # of the stack, which alone are run; empty: all
    # of the environment, that the package's own choice of kernels follows
    variables: dict[str, Text] = Field(default_factory=dict)
    # what the releases' sources show: a file of the package, and what changed in it
    evidence: Annotated[dict[str, Text], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.op_type not in registry.known():
            raise ValueError(f"op_type {self.op_type!r} is none; known: {', '.join(registry.known())}")
        if self.package not in DISTRIBUTIONS:
            raise ValueError(f"package {self.package!r} is no stack's; known: {', '.join(DISTRIBUTIONS)}")
        if unknown := set(self.ground_truths) - set(truths_of(self.stack)):
            raise ValueError(f"{', '.join(sorted(unknown))} is no ground truth of the stack {self.stack}")
        if not self.oldest_bad <= Version(self.last_bad) < Version(self.first_good):
            raise ValueError("since, last_bad and first_good are not in order")
        return self

    @property
    def oldest_bad(self) -> Version:
        """The first release known to have it."""
        return Version(self.since or self.last_bad)

    @property
    def stack(self) -> str:
        """The stack that the package is the ground truth of."""
        return DISTRIBUTIONS[self.package]

    def had(self, version: str) -> bool:
        """Whether a release has it, as far as is known."""
        return self.oldest_bad <= Version(version) <= Version(self.last_bad)


@cache
def bugs() -> Mapping[str, Bug]:
    """All bugs by id, sorted. Raises TraceproofError: an entry can not be used."""
    found = YAML(typ="safe").load(CATALOGUE.read_text("utf-8"))["bugs"]
    return MappingProxyType({name: parsed(name, found[name]) for name in sorted(found)})


def parsed(name: str, entry: Mapping[str, Any]) -> Bug:
    """The bug that an entry of the catalogue describes. Raises TraceproofError: it describes none."""
    flat = {key: value for key, value in entry.items() if key not in {"about", "releases"}}
    try:
        return Bug.model_validate({"id": name, **entry.get("about", {}), **entry.get("releases", {}), **flat})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or 'the entry'}: {one['msg']}" for one in error.errors()]
        raise TraceproofError(f"{CATALOGUE.name}: {name} describes no bug", problems=problems) from error


def beside(bug: Bug, version: str) -> set[str]:
    """Ids of other bugs of the same package and op_type that a release has."""
    others = (one for one in bugs().values() if one.id != bug.id)
    return {
        one.id for one in others if (one.package, one.op_type) == (bug.package, bug.op_type) and one.had(version)
    }


def chosen(names: Iterable[str]) -> list[Bug]:
    """The bugs of these ids; all where none is given. Raises TraceproofError: there is no such bug."""
    known, wanted = bugs(), list(names)
    absent = [name for name in wanted if name not in known]
    if absent:
        close = get_close_matches(absent[0], known, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise TraceproofError(
            f"there is no bug {', '.join(absent)}", todo=f"{hint}`python lab/replay_history.py --list` names them."
        )
    return [known[name] for name in wanted] or list(known.values())


class Found(StrEnum):
    """What came of a replay."""

    CAUGHT = "caught"  # a case fails with the bug and passes without it
    MISSED = "missed"
    NOT_HERE = "not reproducible here"


class Why(StrEnum):
    """Why a bug is not reproducible here, where no skip of the pipeline says it."""

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

    # verdict and message by `definition case implementation output`
    compared: dict[str, tuple[Verdict, str]] = Field(default_factory=dict)
    skipped: list[tuple[Skip, str]] = Field(default_factory=list)  # reasons and messages of what was not

    @classmethod
    def of(cls, bug: Bug, rows: Sequence[VerdictRow]) -> Self:
        """Sort a trial's rows of the bug's cases; of several rows of one output the worst counts.

        A wrong address may end the process where it lies outside all memory: such a crash is a failure.
        """
        sorted_ = cls()
        for row in rows:
            if bug.shown_by and row.case not in bug.shown_by:
                continue
            key = f"{row.definition} {row.case} {row.implementation} {row.output}"
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
    """The case and implementation of a row's key."""
    return key.rpartition(" ")[0]
