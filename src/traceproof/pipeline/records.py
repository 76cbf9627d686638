"""Records that cross a process or a file border; those of a plan, and what they share with others.

Each is checked once, where it is read; code in between uses attributes. Fields that a record was made without
are not written, so that a verdict's columns are those that it has something to say in.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from traceproof.dataset.definition import Definition
from traceproof.dataset.files import explain
from traceproof.errors import TraceproofError
from traceproof.ops.cases import Case
from traceproof.reasons import Skip
from traceproof.untrusted.border import BorderError, read_regular

WHOLE = "*"  # the `output` of a row about a case as a whole
REFERENCE = "reference"
ORACLE = "oracle"
SHADOW = "shadow"  # the reference in float64, where there is no oracle
FLOOR = "floor"
TWIN = "@twin"  # after the name of the definition that it stands in for
PLAN_BYTES = 1 << 30  # of a plan file
EARLIER = "earlier"  # what folders are called in which files stay that Snakemake removes before a job
AGAIN = "Run the same command again: finished outputs are kept."


def earlier(folder: Path) -> Path:
    """Where the files of a folder stay that Snakemake removes before the job that writes it."""
    return folder.with_name(f"{folder.name}-{EARLIER}")


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
    """One case of a plan."""

    case: Case  # sizes and drawing instructions
    digest: str  # of the case
    memory: int  # bytes that the reference or the oracle needs, by the op's estimate
    trials: int  # how often a sampling op is run; 0: it is no such op
    skip: SkipNote | None  # why it is not run; None: it is
    large: bool  # whether the judge computes its oracle chunk by chunk
    nonce: int  # what the seeds of its trials follow from
    repeat: bool = False  # whether it is run again, for determinism and remembered answers
    hidden: str = ""  # options of the command that repeats a hidden case; empty: it is none
    blobs: dict[str, str] = {}  # digest of each file that inputs of a workload line are loaded from
    # kernel_bytes, eager_bytes: what a kernel, or PyTorch's form of one, needs beside that, where it alone gets
    # large tensors
    kernel_bytes: int = 0
    eager_bytes: int = 0
    oracle_bytes: int = 0  # what the oracle alone needs

    @property
    def id(self) -> str:
        """The case's id, unique in its definition."""
        return self.case.id


class PlannedDefinition(Record):
    """One definition of a plan."""

    path: str  # of its file in the dataset
    digest: str  # of the definition
    no_oracle: str | None  # why there is no oracle for it; None: there is one
    nonce: int  # what the hidden cases and the order of calls follow from
    definition: dict[str, Any]  # the definition as JSON, as workers get it
    cases: tuple[PlannedCase, ...]
    twin: str = ""  # which axes are smaller than in the dataset, as `hidden_size 7168 -> 512`; empty: none is

    @property
    def parsed(self) -> Definition:
        """The definition."""
        return Definition.model_validate(self.definition)

    @property
    def reference(self) -> str:
        """Source of its reference."""
        return str(self.definition["reference"])

    def lacks(self, actor: str) -> SkipNote | None:
        """What the definition lacks for an actor, so that no worker is asked; None: nothing."""
        if actor == REFERENCE and not self.reference:
            return SkipNote(reason=Skip.NO_REFERENCE, message="the definition has no reference")
        if actor == ORACLE and self.no_oracle is not None:
            return SkipNote(reason=Skip.NO_ORACLE, message=self.no_oracle)
        return None

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
    """The cases of one op_type's definitions: what the rule `cases` writes and every later one reads."""

    version: Literal[1] = 1
    op_type: str
    dataset: str
    definitions: dict[str, PlannedDefinition]  # by name; a twin by its definition's and TWIN
    broken: tuple[BrokenFile, ...]
    # for each actor that has several jobs, the names of the definitions of each
    shards: dict[str, tuple[tuple[str, ...], ...]] = {}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a plan file. Raises TraceproofError: it is no plan, or another version's."""
        try:
            return cls.model_validate_json(bytes(read_regular(path, most=PLAN_BYTES)))
        except (BorderError, ValidationError) as error:
            todo = "Remove it and run the same command again: planning makes it anew."
            raise TraceproofError(f"{path} is no plan", problems=[explain(error)], todo=todo) from error

    def as_text(self) -> str:
        """What its file holds."""
        return self.model_dump_json(indent=1) + "\n"

    def of_shard(self, actor: str, shard: str) -> Self:
        """The plan of one of an actor's jobs; an empty shard: all of it. Raises TraceproofError: no such shard."""
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
