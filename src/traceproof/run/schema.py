"""Which implementations there are, and what crosses a file border: plans of cases, then verdict rows.

Each is checked once, where it is read; code in between uses attributes. Fields that a value was made without are
not written, so that a verdict's columns are those that it has something to say in.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import explain
from traceproof.errors import TraceproofError
from traceproof.files import BorderError, read_regular, sealed, unsealed
from traceproof.ops import registry
from traceproof.ops.cases import Case, Further
from traceproof.reasons import Failure, Grade, Skip, Unavailable, Verdict
from traceproof.stacks import MAIN, STACK_OF, STACKS, TAGGED, TRUTHS

WHOLE = "*"  # the `output` of a row about a case as a whole
REFERENCE = "reference"
PAIR = "~"  # joins two ground truths where a verdict is about both: `flashinfer~sglang`
ORACLE = "oracle"
SHADOW = "shadow"  # the reference in float64, where there is no oracle
BASELINE = "baseline"
SCALED_DOWN = "@scaled-down"  # after the name of the definition that it stands in for
PLAN_BYTES = 1 << 30  # of a plan file
GROUP = 64  # definitions of one job: an op_type of more has several, each of so many by name
INDEX = "index.json"  # beside the plans
AGAIN = "Run the same command again: finished rows are kept."


IMPLEMENTATIONS: tuple[str, ...] = (REFERENCE, *TRUTHS)


def for_op_type(op_type: str) -> tuple[str, ...]:
    """The implementations of an op_type: its definitions' references, and ground truths that have adapters for it.

    Of an op_type that nobody declares, definitions may name the function that they were dumped from.
    """
    named = () if op_type in registry.known() else tuple(truth.name for truth in STACKS[TAGGED].truths[:1])
    truths = registry.get(op_type).truths
    return (REFERENCE, *(name for name in TRUTHS if name in truths or name in named))


PARALLEL = 4  # definitions of one op_type side by side on a GPU, where references take long, or there are many
DRAWING_WORKERS = 3  # of samplers' ground truths, which may draw for as long as references


def workers_of(parallel: int) -> int:
    """Workers of each environment of ground truths: several where many definitions draw side by side."""
    return DRAWING_WORKERS if parallel > PARALLEL else 1


def environment_of(name: str) -> str:
    """The stack whose environment an implementation runs in."""
    return STACK_OF.get(name, MAIN)


class ClosedModel(BaseModel):
    """A frozen value with a closed set of fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def as_json(self) -> dict[str, Any]:
        """The fields that it was made with, as a JSON object."""
        return self.model_dump(exclude_unset=True)


class PlannedCase(ClosedModel):
    """One case of a plan."""

    case: Case  # sizes and drawing instructions
    digest: str  # of the case
    memory: int  # bytes that the reference or the oracle needs, by the op's estimate
    trials: int  # how often a sampling op is run; 0: it is no such op
    skip: Unavailable | None  # why it is not run; None: it is
    large: bool  # whether the judge computes its oracle chunk by chunk
    nonce: int  # what the seeds of its trials follow from
    repeat: bool = False  # whether it is run again, for determinism and remembered answers
    hidden: str = ""  # options of the command that repeats a hidden case; empty: it is none
    blobs: dict[str, str] = {}  # digest of each file that inputs of a workload line are loaded from
    kernel_bytes: int = 0  # what a kernel needs beside that, where it alone gets large tensors
    oracle_bytes: int = 0  # what the oracle alone needs
    further: Further | None = None  # how a sampler draws on after its trials; None: it does not

    @property
    def id(self) -> str:
        """The case's id, unique in its definition."""
        return self.case.id


class PlannedDefinition(ClosedModel):
    """One definition of a plan."""

    path: str  # of its file in the dataset
    digest: str  # of the definition
    no_oracle: str | None  # why there is no oracle for it; None: there is one
    nonce: int  # what the hidden cases and the order of calls follow from
    definition: dict[str, Any]  # the definition as JSON, as workers get it
    cases: tuple[PlannedCase, ...]
    scaled_down: str = (
        ""  # which axes are smaller than in the dataset, as `hidden_size 7168 -> 512`; empty: none is
    )
    renumbered: bool = False  # whether numbers of the scaled-down reference's text are others
    unconfirmed: str = ""  # constants that the reference alone states
    conflicts: tuple[str, ...] = ()  # constants that its sources give different values, and what each says

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
            unconfirmed="" if no_oracle is not None else "; ".join(definition.constants.alone),
            conflicts=definition.constants.conflicts,
        )

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

    def row(
        self,
        planned: PlannedCase,
        implementation: str,
        record: Mapping[str, Any],  # of the environment that the row stands on
        code: str,  # digest of ours that it stands on
        *,
        inputs: str | None = None,  # digest of them
        **said: Any,  # noqa: ANN401 - further fields
    ) -> "VerdictRow":
        """A row about one of its cases."""
        noted: dict[str, Any] = {"scaled_down": self.scaled_down, "constants": self.unconfirmed}
        return VerdictRow(
            definition=self.definition["name"],
            op_type=self.definition["op_type"],
            case=planned.id,
            size=planned.case.size,
            seed=planned.case.seed,
            axes=dict(planned.case.axes),
            implementation=implementation,
            against=ORACLE if self.no_oracle is None else SHADOW,
            **{key: value for key, value in noted.items() if value},
            **said,
            digests=RowDigests(
                definition=self.digest,
                case=planned.digest,
                inputs=inputs,
                code=code,
                environment=record.get("digest"),
            ),
            versions=record.get("versions"),
            device=record.get("device"),
            repeat=planned.hidden or f"--seed {planned.case.seed}",
        )

    def known_rows(self, name: str, record: Mapping[str, Any], code: str) -> "list[VerdictRow]":
        """What is known of an implementation before anything runs: disputed constants, and cases that do not."""
        said = {"verdict": Verdict.FAIL, "reason": Failure.CONSTANTS}
        first = self.cases[:1] if name == REFERENCE and not self.scaled_down else ()
        found = [(one, {**said, "message": why}) for one in first for why in self.conflicts]
        found += [(one, {**asdict(one.skip), "verdict": Verdict.SKIP}) for one in self.cases if one.skip]
        return [self.row(one, name, record, code, output=WHOLE, **said) for one, said in found]


class BrokenFile(ClosedModel):
    """A file of the dataset that is no definition, or can not be planned with."""

    path: str
    message: str


def group_names(count: int) -> list[str]:
    """What tells the jobs over so many definitions of one op_type apart, as a suffix of their files' names."""
    most = -(-count // GROUP)
    return [f".{number}-of-{most}" for number in range(1, most + 1)] if most > 1 else [""]


class PlanFile(ClosedModel):
    """What the rule `cases` writes, sealed."""

    version: Literal[1] = 1

    @classmethod
    def read(cls, path: Path, group: str | None = None) -> Self:
        """Read a file; of a plan and with a group, what that job of the op_type runs, and check no more than that.

        Raises TraceproofError: it is none, another version's, or damaged; it is removed, to be made again.
        """
        try:
            found = json.loads(unsealed(read_regular(path, most=PLAN_BYTES)))
            return cls.model_validate(found if group is None else _of_group(found, group))
        except (BorderError, ValueError) as error:
            path.unlink(missing_ok=True)
            path.with_name(INDEX).unlink(missing_ok=True)
            raise TraceproofError(f"{path} can not be read", problems=[explain(error)], todo=AGAIN) from error

    def as_text(self) -> str:
        """What its file holds."""
        return sealed(self.model_dump_json(indent=1))


class OpTypePlan(PlanFile):
    """The cases of one op_type's definitions, which all later rules read."""

    op_type: str
    dataset: str
    context: str = ""  # digest of what planned it; empty: it may not be made use of when planning again
    definitions: dict[str, PlannedDefinition]  # by name; a scaled-down one by its definition's and SCALED_DOWN
    broken: tuple[BrokenFile, ...]

    def of_group(self, group: str) -> Self:
        """What one of the op_type's jobs runs, the first of them its broken files too.

        Raises TraceproofError: there is no such group.
        """
        return self.model_copy(update=_of_group(dict(self), group))

    @property
    def whole(self) -> dict[str, PlannedDefinition]:
        """The dataset's definitions, by name: all but scaled-down ones."""
        return {name: entry for name, entry in self.definitions.items() if not entry.scaled_down}


def _of_group(plan: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The fields of a plan that holds one group's definitions. Raises TraceproofError: there is no such group."""
    definitions = plan["definitions"]
    names = sorted(name for name in definitions if not name.endswith(SCALED_DOWN))
    if group not in group_names(len(names)):
        raise TraceproofError(f"the plan of {plan['op_type']} has no group {group!r}", todo=AGAIN)
    at = group_names(len(names)).index(group) * GROUP
    wanted = {key for name in names[at : at + GROUP] for key in (name, name + SCALED_DOWN)}
    mine = {name: entry for name, entry in definitions.items() if name in wanted}
    return {**plan, "definitions": mine, "broken": () if at else plan["broken"]}


class Listed(ClosedModel):
    """What the rules have to know of an op_type's plan and jobs."""

    digests: dict[str, str]  # of what each of its jobs runs, by group
    # mem_mb, gpu_mb: MiB of the host and of a GPU that a job takes; no gpu_mb: it opens none
    mem_mb: int
    gpu_mb: int
    parallel: int  # definitions that a job runs side by side
    builds: float  # seconds that the slowest kernel build takes, about
    seconds: float  # and the calls of the longest job


class Index(PlanFile):
    """All plans of a run."""

    dataset: str
    op_types: dict[str, Listed]

    def files(self, op_type: str) -> list[str]:
        """What the verdict files of an op_type are called, one per job, without their ending."""
        return [f"{op_type}{group}" for group in self.op_types[op_type].digests]


UNJUDGED = frozenset({Skip.NO_ORACLE, Skip.UNJUDGED})
NUMBERS = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")  # told of an output


class GateResult(ClosedModel):
    """By what an output was judged, and which share of the limit was used; None: unbounded, or not a share."""

    kind: str
    margin: float | None = None


class RowDigests(ClosedModel):
    """What a verdict stands on."""

    definition: str | None = None
    case: str | None = None
    inputs: str | None = None
    outputs: str | None = None
    code: str | None = None
    environment: str | None = None


class Arbitration(ClosedModel):
    """Who agrees with a failing one, and who with the oracle; `with` and `against` in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    ours: Annotated[tuple[str, ...], Field(alias="with")]
    theirs: Annotated[tuple[str, ...], Field(alias="against")]
    outvoted: tuple[str, ...]
    recognised: tuple[str, ...]


class VerdictRow(ClosedModel):
    """One output of a case of an implementation, or a case as a whole, judged."""

    # definition, op_type, case, size, seed, axes: what was run; no case where the definition can not be read
    definition: str
    op_type: str
    case: str | None
    size: str | None = None
    seed: int | None = None
    axes: dict[str, int] = Field(default_factory=dict)
    implementation: str  # who ran it; two ground truths that are held against each other are joined
    against: str | None = None  # what it was held against
    output: str  # its name, or WHOLE
    # verdict, reason, message: what came of it
    verdict: Verdict
    reason: str | None = None
    message: str = ""
    isolation: str = ""  # what untrusted code could reach, where isolation was not whole
    # worst, metrics, specification: figures of a numeric comparison
    worst: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    specification: dict[str, float] = Field(default_factory=dict)
    tolerance: float | None = None  # the user's, if it decided
    scaled_down: str = ""  # which axes of the definition were smaller in what was run; empty: none
    constants: str = ""  # what an oracle was told by the reference alone; empty: nothing
    grade: Grade | None = None  # how strong the proof is, of a reference's output that passed
    gate: GateResult | None = None  # by what it was judged
    # digests, versions, device: what it stands on
    digests: RowDigests = RowDigests()
    versions: dict[str, str] | None = None
    device: str | None = None
    repeat: str = ""  # the command that repeats it
    arbitration: Arbitration | None = None  # who agrees with whom, of a numeric failure
    replay: str = ""  # where its bundle lies, below the run's folder
    path: str = ""  # of a file that is no definition

    def as_json(self) -> dict[str, Any]:
        """The fields that it was made with, as a JSON object."""
        return self.model_dump(exclude_unset=True, by_alias=True)

    def changed(self, **values: Any) -> Self:  # noqa: ANN401 - fields
        """The row with other values of some fields."""
        return self.model_copy(update=values)

    def command(self, further: str) -> str:
        """The command that repeats it when pasted in the repository's folder; `further` options are its run's.

        `config.reading.repeat_options` says those: stacks, which judge, have nothing to read config.yaml with.
        """
        parts = ["traceproof", "verify", "--definition-name", self.definition, "--case", str(self.case)]
        return " ".join([shlex.join(parts), self.repeat, *([further] if further else [])])

    @property
    def bad(self) -> bool:
        """Whether it is a failure or an error."""
        return self.verdict in {Verdict.FAIL, Verdict.ERROR}

    @property
    def disputed(self) -> bool:
        """Whether it is one of those that tell who agrees with whom: an output that fails by its numbers."""
        numeric = self.reason in {Failure.NUMERICS, Failure.NAN, Failure.INFINITY}
        return (
            self.verdict is Verdict.FAIL and numeric and self.output != WHOLE and PAIR not in self.implementation
        )

    @property
    def unjudged(self) -> bool:
        """Whether nobody judged a reference's numerics: that is no pass."""
        return self.implementation == REFERENCE and self.verdict == Verdict.SKIP and self.reason in UNJUDGED


def place(worst: Mapping[str, Any], against: str | None, implementation: str) -> str:
    """One of the worst places of an output: where, what was expected there, and what came."""
    return f"at {worst['index']}: {against} {worst['expected']}, {implementation} {worst['actual']}"


def figures(metrics: Mapping[str, Any], names: Iterable[str] = NUMBERS) -> str:
    """How far off an output is, in figures; empty: there are none."""
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names if metrics.get(name) is not None)


def read_rows(path: Path) -> list[VerdictRow]:
    """The rows of a verdict file; raises as `each_row` does."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[VerdictRow]:
    """A verdict file's rows, one by one: there may be many. Raises TraceproofError: it can not be read."""
    try:
        with path.open("rb") as file:
            for line in file:
                yield VerdictRow.model_validate_json(line)
    except (OSError, ValidationError) as error:
        what = f"the verdicts {path} cannot be read"
        raise TraceproofError(what, problems=[explain(error)], todo=AGAIN) from error


def rows_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """What a verdict file holds, of rows as JSON objects."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
