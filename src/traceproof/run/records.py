"""Records that cross a process or a file border; those of a plan, and what they share with others.

Each is checked once, where it is read; code in between uses attributes. Fields that a record was made without
are not written, so that a verdict's columns are those that it has something to say in.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import explain
from traceproof.errors import TraceproofError
from traceproof.files import BorderError, read_regular, sealed, unsealed
from traceproof.ops.cases import Case, Further
from traceproof.reasons import Skip

WHOLE = "*"  # the `output` of a row about a case as a whole
REFERENCE = "reference"
ORACLE = "oracle"
SHADOW = "shadow"  # the reference in float64, where there is no oracle
FLOOR = "baseline"
TWIN = "@twin"  # after the name of the definition that it stands in for
PLAN_BYTES = 1 << 30  # of a plan file
GROUP = 64  # definitions of one job: an op_type of more has several, each of so many by name
INDEX = "index.json"  # beside the plans
AGAIN = "Run the same command again: finished rows are kept."


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
    further: Further | None = None  # how a sampler draws on after its trials; None: it does not

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

    @classmethod
    def alone(
        cls, definition: Definition, cases: Iterable[PlannedCase], no_oracle: str | None, nonce: int = 0
    ) -> Self:
        """A definition with cases that no plan file has."""
        return cls(
            path="",
            digest=definition.digest,
            no_oracle=no_oracle,
            nonce=nonce,
            definition=definition.as_json(),
            cases=tuple(cases),
        )

    @property
    def parsed(self) -> Definition:
        """The definition."""
        return Definition.model_validate(self.definition)

    @property
    def reference(self) -> str:
        """Source of its reference."""
        return str(self.definition["reference"])

    def lacks(self, implementation: str) -> SkipNote | None:
        """What the definition lacks for an implementation, so that no worker is asked; None: nothing."""
        if implementation == REFERENCE and not self.reference:
            return SkipNote(reason=Skip.NO_REFERENCE, message="the definition has no reference")
        return None

    def holding(self, cases: Iterable[PlannedCase]) -> Self:
        """The same with some of the cases."""
        return self.model_copy(update={"cases": tuple(cases)})


class BrokenFile(Record):
    """A file of the dataset that is no definition, or can not be planned with."""

    path: str
    message: str


def groups(count: int) -> list[str]:
    """What tells the jobs over so many definitions of one op_type apart, as a suffix of their files' names."""
    most = -(-count // GROUP)
    return [f".{number}-of-{most}" for number in range(1, most + 1)] if most > 1 else [""]


class OpTypePlan(Record):
    """The cases of one op_type's definitions: what the rule `cases` writes and every later one reads."""

    version: Literal[1] = 1
    op_type: str
    dataset: str
    context: str = ""  # digest of what planned it; empty: it may not be made use of when planning again
    definitions: dict[str, PlannedDefinition]  # by name; a twin by its definition's and TWIN
    broken: tuple[BrokenFile, ...]

    @classmethod
    def read(cls, path: Path, group: str | None = None) -> Self:
        """Read a plan file; with a group, what that job of the op_type runs, and no more is checked than that.

        Raises TraceproofError: it is no plan, another version's, or damaged; it is removed, to be made again.
        """
        try:
            found = json.loads(unsealed(bytes(read_regular(path, most=PLAN_BYTES))))
            return cls.model_validate(found if group is None else _of_group(found, group))
        except (BorderError, ValueError) as error:
            path.unlink(missing_ok=True)
            path.with_name(INDEX).unlink(missing_ok=True)
            raise TraceproofError(f"{path} can not be read", problems=[explain(error)], todo=AGAIN) from error

    def as_text(self) -> str:
        """What its file holds."""
        return sealed(self.model_dump_json(indent=1))

    def of_group(self, group: str) -> Self:
        """What one of the op_type's jobs runs, the first of them its broken files too.

        Raises TraceproofError: there is no such group.
        """
        return self.model_copy(update=_of_group(dict(self), group))

    @property
    def groups(self) -> list[str]:
        """What tells its jobs apart."""
        return groups(len(self.whole))

    @property
    def whole(self) -> dict[str, PlannedDefinition]:
        """The dataset's definitions, by name: all but twins."""
        return {name: entry for name, entry in self.definitions.items() if not entry.twin}

    @property
    def to_run(self) -> Iterator[PlannedCase]:
        """The cases that are not skipped, of all definitions."""
        return (case for entry in self.definitions.values() for case in entry.cases if case.skip is None)


def _of_group(plan: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The fields of a plan that holds one group's definitions. Raises TraceproofError: there is no such group."""
    definitions = plan["definitions"]
    names = sorted(name for name in definitions if not name.endswith(TWIN))
    if group not in groups(len(names)):
        raise TraceproofError(f"the plan of {plan['op_type']} has no group {group!r}", todo=AGAIN)
    at = groups(len(names)).index(group) * GROUP
    wanted = {key for name in names[at : at + GROUP] for key in (name, name + TWIN)}
    mine = {name: entry for name, entry in definitions.items() if name in wanted}
    return {**plan, "definitions": mine, "broken": () if at else plan["broken"]}


class Listed(Record):
    """What the rules have to know of an op_type's plan and jobs."""

    digests: dict[str, str]  # of what each of its jobs runs, by group
    definitions: tuple[str, ...]  # the dataset's, by name
    cases: int  # how many there are, those that are skipped too
    # mem_mb, gpu_mb: MiB of the host and of a GPU that a job takes; no gpu_mb: it opens none
    mem_mb: int
    gpu_mb: int
    lanes: int  # definitions that a job runs side by side
    builds: float  # seconds that the slowest kernel build takes, about
    seconds: float  # and the calls of the longest job


class Index(Record):
    """All plans of a run."""

    version: Literal[1] = 1
    dataset: str
    op_types: dict[str, Listed]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it. Raises TraceproofError: it is none, or damaged; it is removed, to be made again."""
        try:
            return cls.model_validate_json(unsealed(bytes(read_regular(path, most=PLAN_BYTES))))
        except (BorderError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise TraceproofError(f"{path} can not be read", problems=[explain(error)], todo=AGAIN) from error

    def as_text(self) -> str:
        """What its file holds."""
        return sealed(self.model_dump_json(indent=1))

    def files(self, op_type: str) -> list[str]:
        """What the verdict files of an op_type are called, one per job, without their ending."""
        return [f"{op_type}{group}" for group in groups(len(self.op_types[op_type].definitions))]
