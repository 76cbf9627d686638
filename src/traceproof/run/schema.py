"""Which implementations there are, and what files hold: plans of cases, then verdict rows.

Each is checked once, where it is read; code in between uses attributes. Fields that were not set are not written,
so a row has only the columns that say something.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import explain
from traceproof.errors import TraceproofError
from traceproof.files import BorderError, read_regular, sealed, unsealed
from traceproof.ops import registry
from traceproof.ops.cases import Case, Further
from traceproof.reasons import Failure, Grade, Skip, Unavailable, Verdict
from traceproof.stacks import MAIN, STACK_OF, STACKS, TAGGED, TRUTHS

WHOLE = "*"  # `output` of a row about a whole case
REFERENCE = "reference"
PAIR = "~"  # joins two ground truths in a row about both: `flashinfer~sglang`
ORACLE = "oracle"
SHADOW = "shadow"  # the reference in float64, in place of an oracle
BASELINE = "baseline"
SCALED_DOWN = "@scaled-down"  # follows the name of a definition in that of its scaled-down form
PLAN_BYTES = 1 << 30  # largest plan file
GROUP = 64  # definitions per job: a larger op_type has several jobs
INDEX = "index.json"  # list of all plans of a run
RETRY = "retry"  # a run's folder: a file per verdict file of which the next run computes some rows again
AGAIN = "Run the same command again, or `traceproof verify`: finished rows are kept."
IMPLEMENTATIONS: tuple[str, ...] = (REFERENCE, *TRUTHS)


def for_op_type(op_type: str) -> tuple[str, ...]:
    """Implementations of an op_type: its definitions' references, and ground truths that have adapters for it.

    Definitions of an op_type that nobody declares may name the function that they were dumped from (stack TAGGED).
    """
    named = () if op_type in registry.known() else tuple(truth.name for truth in STACKS[TAGGED].truths[:1])
    truths = registry.get(op_type).truths
    return (REFERENCE, *(name for name in TRUTHS if name in truths or name in named))


PARALLEL = 4  # definitions of one op_type at a time on a GPU, if references take long, or there are many
DRAWING_WORKERS = 3  # for samplers' ground truths, which may draw for as long as references


def workers_of(parallel: int) -> int:
    """Workers per environment of ground truths, for `parallel` definitions at a time."""
    return DRAWING_WORKERS if parallel > PARALLEL else 1


def environment_of(name: str) -> str:
    """The stack in whose environment an implementation runs."""
    return STACK_OF.get(name, MAIN)


class ClosedModel(BaseModel):
    """A frozen model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def as_json(self) -> dict[str, Any]:
        """The fields that were set, as a JSON object."""
        return self.model_dump(exclude_unset=True, by_alias=True)


class PlannedCase(ClosedModel):
    """One case of a plan."""

    case: Case  # sizes and drawing instructions
    digest: str  # digest of `case`
    memory: int  # bytes for the reference or the oracle, by the op's estimate
    trials: int  # how often a sampling op is run; 0: no such op
    skip: Unavailable | None  # why it is not run; None: it is run
    large: bool  # whether its oracle is computed chunk by chunk
    nonce: int  # the seeds of its trials follow from it
    repeat: bool = False  # whether it is run again, for determinism and cached answers
    hidden: str = ""  # options of the command that repeats a hidden case; empty: not hidden
    blobs: dict[str, str] = {}  # by path, digests of files from which inputs are loaded
    kernel_bytes: int = 0  # a kernel's further bytes, where it alone gets large tensors
    oracle_bytes: int = 0  # the oracle's further bytes
    further: Further | None = None  # how a sampler draws on after its trials; None: not

    @property
    def id(self) -> str:
        """The case's id, unique in its definition."""
        return self.case.id


class PlannedDefinition(ClosedModel):
    """One definition of a plan."""

    path: str  # of its file in the dataset
    digest: str  # of the definition
    no_oracle: str | None  # why it has no oracle; None: it has one
    nonce: int  # hidden cases and the order of calls follow from it
    definition: dict[str, Any]  # as JSON, which workers get
    cases: tuple[PlannedCase, ...]
    scaled_down: str = ""  # which axes are smaller than in the dataset, as `hidden_size 7168 -> 512`
    renumbered: bool = False  # whether numbers of the scaled-down reference's text are others
    unconfirmed: str = ""  # constants that the reference alone states
    conflicts: tuple[str, ...] = ()  # constants that its sources give different values, and what each says

    @classmethod
    def alone(
        cls, definition: Definition, cases: Iterable[PlannedCase], no_oracle: str | None, nonce: int = 0
    ) -> Self:
        """The plan of a definition with these cases, from no plan file."""
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
        """The definition, parsed."""
        return Definition.model_validate(self.definition)

    @property
    def reference(self) -> str:
        """Source text of its reference."""
        return str(self.definition["reference"])

    def holding(self, cases: Iterable[PlannedCase]) -> Self:
        """The same definition with these cases."""
        return self.model_copy(update={"cases": tuple(cases)})

    @property
    def beside(self) -> bool:
        """Whether this is a scaled-down form that is judged beside the definition, not in its place."""
        return bool(self.scaled_down) and all(case.hidden for case in self.cases)

    def row(
        self,
        planned: PlannedCase,
        implementation: str,
        record: Mapping[str, Any],  # of the environment that the row depends on
        code: str,  # digest of our code
        *,
        inputs: str | None = None,  # digest of the inputs
        **said: Any,  # noqa: ANN401 - further fields
    ) -> "VerdictRow":
        """A verdict row of an implementation for a case of this definition; `said` has the verdict itself."""
        noted: dict[str, Any] = {"scaled_down": self.scaled_down, "constants": self.unconfirmed}
        ours = {"definition": self.digest, "case": planned.digest, "inputs": inputs, "code": code}
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
            digests=RowDigests(**ours, environment=record.get("digest")),
            versions=record.get("versions"),
            device=record.get("device"),
            repeat=planned.hidden or f"--seed {planned.case.seed}",
        )

    def known_rows(self, name: str, record: Mapping[str, Any], code: str) -> "list[VerdictRow]":
        """Rows known before anything runs: conflicting constants of the reference, and skipped cases."""
        said = {"verdict": Verdict.FAIL, "reason": Failure.CONSTANTS}
        first = self.cases[:1] if name == REFERENCE and not self.scaled_down else ()
        found = [(one, {**said, "message": why}) for one in first for why in self.conflicts]
        found += [(one, {**asdict(one.skip), "verdict": Verdict.SKIP}) for one in self.cases if one.skip]
        return [self.row(one, name, record, code, output=WHOLE, **said) for one, said in found]


class BrokenFile(ClosedModel):
    """A file of the dataset that is no definition, or whose cases can not be planned."""

    path: str
    message: str


class PlanFile(ClosedModel):
    """A file that the rule `cases` writes, with a digest at its start that shows damage."""

    version: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file.

        Raises TraceproofError: it is no such file, another version's, or damaged; it is removed to be made again.
        """
        try:
            return cls.model_validate(from_json(unsealed(read_regular(path, most=PLAN_BYTES))))
        except (BorderError, ValueError) as error:
            path.unlink(missing_ok=True)
            path.with_name(INDEX).unlink(missing_ok=True)
            raise TraceproofError(f"{path} can not be read", problems=[explain(error)], todo=AGAIN) from error

    def as_text(self) -> str:
        """Text of its file, with the digest."""
        return sealed(self.model_dump_json())


class OpTypePlan(PlanFile):
    """The cases of one op_type's definitions, all or in a file those of one job, which all later rules read."""

    op_type: str
    dataset: str
    context: str = ""  # digest of the code and selection that planned it; empty: planning never reuses it
    definitions: dict[str, PlannedDefinition]  # by name; a scaled-down one under the name + SCALED_DOWN
    broken: tuple[BrokenFile, ...]

    @classmethod
    def read_all(cls, folder: Path, op_type: str) -> Self:
        """Read the files of all its jobs; raises as `read` does."""
        listed = Index.read(folder / INDEX).op_types.get(op_type)
        names = listed.digests if listed else [op_type]  # an op_type that is not listed has no file
        first, *more = (cls.read(folder / f"{name}.json") for name in names)
        definitions = [item for part in (first, *more) for item in part.definitions.items()]
        return first.model_copy(update={"definitions": dict(definitions)})

    @property
    def jobs(self) -> dict[str, Self]:
        """The plan of each of its jobs, by the job's name; the first also has broken files."""
        names, plans = sorted(self.whole), {}
        most = max(1, -(-len(names) // GROUP))
        for at in range(most):
            keys = [key for name in names[at * GROUP : (at + 1) * GROUP] for key in (name, name + SCALED_DOWN)]
            mine = {key: self.definitions[key] for key in keys if key in self.definitions}
            name = f"{self.op_type}.{at + 1}-of-{most}" if most > 1 else self.op_type
            plans[name] = self.model_copy(update={"definitions": mine, "broken": () if at else self.broken})
        return plans

    @property
    def whole(self) -> dict[str, PlannedDefinition]:
        """The dataset's definitions, by name, without scaled-down forms."""
        return {name: entry for name, entry in self.definitions.items() if not entry.scaled_down}


def files_of(folder: Path, op_type: str) -> list[Path]:
    """An op_type's files, one per job, in the folder of plans or of verdicts."""
    return sorted(folder.glob(f"{op_type}.*json*"))


class Listed(ClosedModel):
    """Index entry of an op_type's plan: what the rules need to know of its jobs."""

    digests: dict[str, str]  # by a job's name, which its files have: of what it runs
    mem_mb: int  # MiB of the host per job
    gpu_mb: int  # MiB of a GPU per job; 0: it opens none
    parallel: int  # definitions that a job runs at a time
    builds: float  # rough seconds of the slowest kernel build
    seconds: float  # rough seconds of the longest job's calls


class Index(PlanFile):
    """The list of all plans of a run."""

    dataset: str
    op_types: dict[str, Listed]


UNJUDGED = frozenset({Skip.NO_ORACLE, Skip.UNJUDGED})
NUMBERS = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")  # shown with an output


class GateResult(ClosedModel):
    """The gate that judged an output, and the share of its limit that was used (None: unbounded or no share)."""

    kind: str
    margin: float | None = None


class RowDigests(ClosedModel):
    """Digests of everything that a verdict depends on."""

    definition: str | None = None
    case: str | None = None
    inputs: str | None = None
    outputs: str | None = None
    code: str | None = None
    environment: str | None = None


class Arbitration(ClosedModel):
    """Who agrees with a failing implementation, and who with the oracle; `with` and `against` in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    ours: Annotated[tuple[str, ...], Field(alias="with")]
    theirs: Annotated[tuple[str, ...], Field(alias="against")]
    outvoted: tuple[str, ...]
    recognised: tuple[str, ...]


class VerdictRow(ClosedModel):
    """Verdict over one output of a case of an implementation, or over the whole case."""

    # definition, op_type, case, size, seed, axes: what was run; case None: the definition can not be read
    definition: str
    op_type: str
    case: str | None
    size: str | None = None
    seed: int | None = None
    axes: dict[str, int] = Field(default_factory=dict)
    implementation: str  # whose it is; two ground truths that are compared are joined by PAIR
    against: str | None = None  # ORACLE, SHADOW or a ground truth
    output: str  # its name, or WHOLE
    # verdict, reason, message: the result
    verdict: Verdict
    reason: str | None = None
    message: str = ""
    isolation: str = ""  # what untrusted code could reach, if isolation was incomplete
    # worst, metrics, specification: figures of a numeric comparison
    worst: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    specification: dict[str, float] = Field(default_factory=dict)
    tolerance: float | None = None  # the user's, if it decided
    scaled_down: str = ""  # axes that were smaller in what was run; empty: none
    constants: str = ""  # constants that the oracle got from the reference alone; empty: none
    grade: Grade | None = None  # strength of the proof, for a reference's output that passed
    gate: GateResult | None = None  # the gate that decided
    # digests, versions, device: what the verdict depends on
    digests: RowDigests = RowDigests()
    versions: dict[str, str] | None = None
    device: str | None = None
    repeat: str = ""  # the command that repeats it
    arbitration: Arbitration | None = None  # of a numeric failure: who agrees with whom
    replay: str = ""  # path of its replay bundle, in the run's folder
    path: str = ""  # of a file that is no definition

    def changed(self, **values: Any) -> Self:  # noqa: ANN401 - fields
        """The row with some fields changed."""
        return self.model_copy(update=values)

    def command(self, further: str) -> str:
        """The command that repeats it when pasted in the repository's folder; `further` are its run's options.

        `config.reading.repeat_options` gives those: environments that judge can not read config.yaml.
        """
        parts = ["traceproof", "verify", "--definition-name", self.definition, "--case", str(self.case)]
        return " ".join([shlex.join(parts), self.repeat, *([further] if further else [])])

    @property
    def bad(self) -> bool:
        """Whether it is a failure or an error."""
        return self.verdict in {Verdict.FAIL, Verdict.ERROR}

    @property
    def disputed(self) -> bool:
        """Whether an output fails by its numbers, so that it matters who agrees with whom."""
        numeric = self.verdict is Verdict.FAIL and self.reason in {Failure.NUMERICS, Failure.NAN, Failure.INFINITY}
        return numeric and self.output != WHOLE and PAIR not in self.implementation

    @property
    def unjudged(self) -> bool:
        """Whether nobody judged a reference's numbers, which is no pass."""
        return self.implementation == REFERENCE and self.verdict == Verdict.SKIP and self.reason in UNJUDGED


def place(worst: Mapping[str, Any], against: str | None, implementation: str) -> str:
    """One of an output's worst places in words: index, expected and actual value."""
    return f"at {worst['index']}: {against} {worst['expected']}, {implementation} {worst['actual']}"


def figures(metrics: Mapping[str, Any], names: Iterable[str] = NUMBERS) -> str:
    """Metrics of an output as text; empty: there are none."""
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names if metrics.get(name) is not None)


def each_row(path: Path) -> Iterator[VerdictRow]:
    """The rows of a verdict file one by one, as there may be many. Raises TraceproofError: it can not be read."""
    try:
        with path.open("rb") as file:
            for line in file:
                yield VerdictRow.model_validate_json(line)
    except (OSError, ValidationError) as error:
        what = f"the verdicts {path} cannot be read"
        raise TraceproofError(what, problems=[explain(error)], todo=AGAIN) from error


def rows_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Text of a verdict file with these rows, given as JSON objects."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
