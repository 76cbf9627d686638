"""Records that cross a process or a file border: a plan, what a run left of a case, a verdict.

Each is checked once, where it is read; code in between uses attributes. Fields that a record was made without
are not written, so that a verdict's columns are those that it has something to say in.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.ops.cases import Case
from traceproof.reasons import Error, Skip
from traceproof.untrusted.border import BorderError, plain_text, read_regular
from traceproof.worker.model import ItemOutcome, Status

WHOLE = "*"  # the `output` of a row about a case as a whole
REFERENCE = "reference"
ORACLE = "oracle"
SHADOW = "shadow"  # the reference in float64, where there is no oracle
FLOOR = "floor"
TWIN = "@twin"  # after the name of the definition that it stands in for
PLAN_BYTES = 1 << 30  # of a plan file
AGAIN = "Run the same command again: finished outputs are kept."


class Record(BaseModel):
    """A frozen record with a closed set of fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def as_json(self) -> dict[str, Any]:
        """The fields that it was made with, as a JSON object."""
        return self.model_dump(exclude_unset=True)


class SkipNote(Record):
    """Why a planned case is not run."""

    reason: Skip
    message: str


class PlannedCase(Record):
    """One case of a plan.

    Attributes:
        case: sizes and drawing instructions.
        digest: of the case.
        memory: bytes that it needs, by the op's estimate.
        trials: how often a sampling op is run; 0: it is no such op.
        skip: why it is not run; None: it is.
        large: whether the judge computes its oracle chunk by chunk.
        nonce: what the seeds of its trials follow from.
        repeat: whether it is run again, for determinism and remembered answers.
        hidden: options of the command that repeats a hidden case; empty: it is none.
        blobs: digest of each file that inputs of a workload line are loaded from.
    """

    case: Case
    digest: str
    memory: int
    trials: int
    skip: SkipNote | None
    large: bool
    nonce: int
    repeat: bool = False
    hidden: str = ""
    blobs: dict[str, str] = {}

    @property
    def id(self) -> str:
        """The case's id, unique in its definition."""
        return self.case.id


class PlannedDefinition(Record):
    """One definition of a plan.

    Attributes:
        path: of its file in the dataset.
        digest: of the definition.
        no_oracle: why there is no oracle for it; None: there is one.
        nonce: what the hidden cases and the order of calls follow from.
        definition: the definition as JSON, as workers get it.
        twin: which axes are smaller than in the dataset, as `hidden_size 7168 -> 512`; empty: none is.
    """

    path: str
    digest: str
    no_oracle: str | None
    nonce: int
    definition: dict[str, Any]
    cases: tuple[PlannedCase, ...]
    twin: str = ""

    @property
    def parsed(self) -> Definition:
        """The definition."""
        return Definition.model_validate(self.definition)

    @property
    def reference(self) -> str:
        """Source of its reference."""
        return str(self.definition["reference"])

    def holding(self, cases: Iterable[PlannedCase]) -> Self:
        """The same with some of the cases."""
        return self.model_copy(update={"cases": tuple(cases)})


class BrokenFile(Record):
    """A file of the dataset that is no definition, or can not be planned with."""

    path: str
    message: str


def shard_names(count: int) -> list[str]:
    """What tells the jobs of an actor over one op_type apart, as a suffix of their files' names."""
    return [f".{number}-of-{count}" for number in range(1, count + 1)] if count > 1 else [""]


class OpTypePlan(Record):
    """The cases of one op_type's definitions: what the rule `cases` writes and every later one reads.

    Attributes:
        definitions: by name; a twin by its definition's and TWIN.
        shards: for each actor that has several jobs, the names of the definitions of each.
    """

    version: Literal[1] = 1
    op_type: str
    dataset: str
    definitions: dict[str, PlannedDefinition]
    broken: tuple[BrokenFile, ...]
    shards: dict[str, tuple[tuple[str, ...], ...]] = {}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a plan file.

        Raises:
            TraceproofError: it is no plan, or another version's.
        """
        try:
            return cls.model_validate_json(bytes(read_regular(path, most=PLAN_BYTES)))
        except (BorderError, ValidationError) as error:
            todo = "Remove it and run the same command again: planning makes it anew."
            raise TraceproofError(f"{path} is no plan", problems=[first_problem(error)], todo=todo) from error

    def as_text(self) -> str:
        """What its file holds."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n"

    def of_shard(self, actor: str, shard: str) -> Self:
        """The plan of one of an actor's jobs; an empty shard is all of it.

        Raises:
            TraceproofError: the plan has no such shard.
        """
        if not shard:
            return self
        parts = self.shards.get(actor, ())
        if shard not in shard_names(len(parts)):
            todo = "Run the same command again: jobs are then those of the plan."
            raise TraceproofError(f"the plan of {self.op_type} has no shard {shard!r} of {actor}", todo=todo)
        names = parts[shard_names(len(parts)).index(shard)]
        return self.model_copy(update={"definitions": {name: self.definitions[name] for name in names}})

    @property
    def whole(self) -> dict[str, PlannedDefinition]:
        """The dataset's definitions, by name: all but twins."""
        return {name: entry for name, entry in self.definitions.items() if not entry.twin}

    @property
    def to_run(self) -> Iterator[PlannedCase]:
        """The cases that are not skipped, of all definitions."""
        return (case for entry in self.definitions.values() for case in entry.cases if case.skip is None)


REASONS: Mapping[Status, Error] = MappingProxyType(
    {
        Status.ERROR: Error.EXCEPTION,
        Status.TIMEOUT: Error.TIMEOUT,
        Status.MEMORY: Error.MEMORY,
        Status.CRASH: Error.CRASH,
        Status.OUTPUT: Error.OUTPUT,
        Status.PROCESSES: Error.PROCESSES,
        Status.REFUSED: Error.REFUSED,
        Status.ISOLATION: Error.ISOLATION,
    }
)
# Outcomes that the same code and inputs would meet again; a timeout or too much memory may be the machine's doing.
LASTING = frozenset({Status.OK, Status.ERROR, Status.OUTPUT, Status.REFUSED})
MOST_SECONDS = 1e9
LISTS = ("mutated", "aliased", "subclassed", "varying", "surplus")  # of names


class RunRecord(Record):
    """What a run left of one case of one actor. The supervisor writes it: workers answer questions.

    Attributes:
        key: digest of all that the outputs depend on; None where nothing was to be run.
        status: ok, error, or skip, which only our own code can say.
        reason, message: unless ok.
        inputs: digest of what was drawn.
        mutated, aliased, subclassed, varying: names of inputs or outputs; `varying` only where it was run again.
        remembered: whether other inputs gave the same bits.
        surplus: outputs that the definition does not have.
        seconds, peak_bytes: wall clock and memory.
        isolation: what was absent, where strangers' code ran without whole isolation.
        tensors: digest of the file of outputs.
        shadow: why the file holds no float64 shadow of the outputs, where one was wanted; empty: it does.
    """

    key: str | None
    status: Literal["ok", "error", "skip"]
    reason: str = ""
    message: str = ""
    inputs: str | None = None
    mutated: tuple[str, ...] = ()
    aliased: tuple[str, ...] = ()
    subclassed: tuple[str, ...] = ()
    varying: tuple[str, ...] | None = None
    surplus: tuple[str, ...] = ()
    remembered: bool = False
    seconds: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 0.0
    peak_bytes: Annotated[int, Field(ge=0)] = 0
    isolation: str = ""
    tensors: str | None = None
    shadow: str | None = None

    @classmethod
    def ok(cls, key: str, outcome: ItemOutcome, facts: Mapping[str, Any], *, inputs: str) -> Self:
        """Outputs are there. `facts` are what a process of ours measured, by name."""
        said: dict[str, Any] = {name: _names(facts[name]) for name in LISTS if name in facts}
        if "shadow" in facts:
            said["shadow"] = plain_text(str(facts["shadow"]))
        if "remembered" in facts:
            said["remembered"] = bool(facts["remembered"])
        return cls(key=key, status="ok", inputs=str(inputs), **said, **_costs(outcome))

    @classmethod
    def error(cls, key: str, outcome: ItemOutcome) -> Self:
        """There is nothing to compare, for the reason that the outcome gives."""
        reason, message = REASONS[outcome.status], plain_text(outcome.message)
        return cls(key=key, status="error", reason=reason, message=message, **_costs(outcome))

    @classmethod
    def skipped(cls, key: str | None, reason: str, message: str) -> Self:
        """Not run, for a reason of the closed list.

        Raises:
            ValueError: the reason is none of them.
        """
        return cls(key=key, status="skip", reason=Skip(reason), message=plain_text(message))

    @classmethod
    def kept(cls, value: Mapping[str, Any] | None, key: str, *, weak: bool) -> Self | None:
        """A record of the store that stands for a case, or None.

        A skip is never kept, and strict runs want strict ones.
        """
        if value is None or value.get("key") != key or value.get("status") not in {"ok", "error"}:
            return None
        if value.get("isolation") and not weak:
            return None
        try:
            return cls.model_validate(value)
        except ValidationError:  # an earlier version's
            return None

    @property
    def essence(self) -> dict[str, Any]:
        """What a verdict depends on."""
        return self.model_dump(exclude_unset=True, exclude={"seconds", "peak_bytes"})


def _names(value: Sequence[Any]) -> tuple[str, ...]:
    return tuple(plain_text(str(name)) for name in value)


def _costs(outcome: ItemOutcome) -> dict[str, Any]:
    costs: dict[str, Any] = {
        "seconds": min(max(outcome.seconds, 0.0), MOST_SECONDS),
        "peak_bytes": min(max(outcome.peak_bytes, 0), 1 << 62),
    }
    return costs | ({"isolation": outcome.isolation} if outcome.isolation else {})


def first_problem(error: Exception) -> str:
    """The first problem of an error."""
    if isinstance(error, ValidationError):
        found = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, found['loc'])) or 'the whole'}: {found['msg']}"
    return str(error)
