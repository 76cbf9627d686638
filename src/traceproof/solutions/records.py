"""Results of judging a solution: rows, properties, and the certificate that contains them."""

import sys
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from traceproof.dataset.definition import Definition
from traceproof.judge.kernel_properties import DEMANDED
from traceproof.reasons import Error, Verdict
from traceproof.run.schema import WHOLE, ClosedModel, figures, place
from traceproof.sandbox import GIB, Limits

LIMITS = Limits(seconds=120.0, setup_seconds=900.0, memory_bytes=10 * GIB)  # the defaults of config.yaml
HOLDS, BROKEN, UNMEASURED = "holds", "broken", "not measured"


class JudgeSettings(ClosedModel):
    """How the judging process judges a solution."""

    python: str = sys.executable  # the interpreter that judges
    caches: str = ""  # folder for compiled files; empty: a temporary one
    cuda_home: str = ""  # folder of the CUDA toolkit for compiling; empty: as in the environment
    dataset: str = ""  # the folder with the definition, its workload lines and blobs
    conceal: tuple[str, ...] = ()  # paths to hide from a solution, as well as this project and the dataset
    # sizes, seed, hidden_seed, memory_limit, tolerance: as in config.yaml
    sizes: tuple[str, ...] = ("small", "medium")
    seed: int = 0
    hidden_seed: int
    memory_limit: int = 10 * GIB
    tolerance: float | None = None
    limits: dict[str, Any] = LIMITS.as_json()  # per call
    demanded: tuple[str, ...] = DEMANDED  # properties without which a solution is refused
    gpu: bool = False  # whether to use a GPU if the judging process finds one
    timed: bool = False  # whether to measure the speed of solutions with correct answers
    whole: bool = False  # whether to call all cases; if not, the first wrong answer ends it
    weak: bool = False  # whether to run solutions if isolation is incomplete
    environment: dict[str, str] = Field(default_factory=dict)  # variables for solutions' workers


class SolutionRow(ClosedModel):
    """The ruling on one output of one call, or on the call as a whole."""

    case: str
    size: str
    seed: int
    axes: dict[str, int]
    variant: str = ""  # how the call was made; empty: an ordinary one
    output: str  # name; `*` for the call as a whole
    verdict: Verdict
    reason: str | None = None
    message: str = ""
    margin: float | None = None  # used share of the gate's limit; None: not applicable
    # worst, metrics: the worst places and errors of a numeric failure, as in a row of a verdict
    worst: tuple[dict[str, Any], ...] = ()
    metrics: dict[str, Any] = Field(default_factory=dict)

    @property
    def far(self) -> str:
        """Text on the worst place and the errors; empty: no numeric failure."""
        worst = f"; worst {place(self.worst[0], 'expected', 'solution')}" if self.worst else ""
        numbers = figures(self.metrics)
        return f"{worst}; {numbers}" if numbers else worst

    @property
    def bad(self) -> bool:
        """Whether it is a failure or an error."""
        return self.verdict in {Verdict.FAIL, Verdict.ERROR}


class PropertyResult(ClosedModel):
    """Whether the kernel has a property beyond right answers."""

    name: str
    question: str
    state: Literal["holds", "broken", "not measured"]  # whether the kernel has it
    detail: str = ""  # evidence, in words
    demanded: bool  # whether a solution without it is refused

    @property
    def bad(self) -> bool:
        """Whether it is reason to refuse the solution."""
        return self.demanded and self.state == BROKEN


class PrecisionResult(ClosedModel):
    """What an output's errors say about the precision that the kernel really used."""

    output: str  # name
    asked: str  # dtypes of inputs and output in the definition
    seen: str  # the precision found
    evidence: str  # figures that led to it


class Times(ClosedModel):
    """Times of calls of one kernel in milliseconds, each call with a cold cache."""

    name: str  # `solution`, `reference`, or a ground truth
    calls: int  # number of calls counted, without those that warm up
    first: float  # time of the very first call
    # median, lower, upper, mean: between events (on a CPU by a wall clock); `lower` and `upper` are quartiles
    median: float
    lower: float
    upper: float
    mean: float
    wall: float  # median by a wall clock, until the device is idle


class SpeedResult(ClosedModel):
    """Speed of a solution in one case, with that of other implementations measured in turns with it."""

    # case, size, axes: of the case
    case: str
    size: str
    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]]  # in the format of the dataset's workload lines
    # those of the solution, then of the ground truth and the reference, if they can be called
    times: tuple[Times, ...]
    outside: float  # milliseconds per call by the judging process's own clock
    doubt: str = ""  # why its times are not believed and not in a trace; empty: its clocks agree
    clocks: str  # GPU clocks, before and after
    # max_abs, max_rel: largest errors in the last timed call; None: it could not be judged
    max_abs: float | None = None
    max_rel: float | None = None

    def ratio(self, name: str) -> float | None:
        """How many times faster the solution is than another kernel; None: that was not timed."""
        other = next((one for one in self.times[1:] if one.name == name), None)
        return None if other is None or not self.times[0].median else other.median / self.times[0].median


class SolutionTrial(ClosedModel):
    """The judging process's results for one solution."""

    rows: tuple[SolutionRow, ...]
    properties: tuple[PropertyResult, ...]
    precision: tuple[PrecisionResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    isolation: str = ""
    against: str = ""  # ORACLE, SHADOW, or empty: it was not run
    # device, versions: of the environment that ran it
    device: str = "no device (not run)"
    versions: dict[str, str] = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)  # spent, by step


class Digests(ClosedModel):
    """Digests of what a certificate depends on: the definition, the solution's files, this project's code."""

    definition: str
    solution: str
    code: str


class Certificate(ClosedModel):
    """The verdict on a solution, with everything that it depends on."""

    version: Literal[1] = 1
    solution: str
    path: str
    language: str
    entry: str
    definition: str
    op_type: str
    definition_path: str
    verdict: Literal["accepted", "refused"]
    reasons: tuple[str, ...]  # why it is a refusal
    against: str  # the expected values: `oracle`, `shadow` (the reference in float64); empty: it was not run
    constants: str = ""  # constants that only the definition's reference states, from which the oracle takes them
    rows: tuple[SolutionRow, ...]
    properties: tuple[PropertyResult, ...]
    precision: tuple[PrecisionResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    digests: Digests
    hidden_seed: int  # seed of the hidden cases
    tolerance: float | None
    isolation: str
    # device, versions: of the environment that ran it
    device: str
    versions: dict[str, str]
    seconds: dict[str, float] = Field(default_factory=dict)  # spent, by step
    repeat: str  # the command that repeats it
    judged_at: str  # UTC

    @property
    def accepted(self) -> bool:
        """Whether the solution is accepted."""
        return self.verdict == "accepted"

    @property
    def headline(self) -> str:
        """The verdict in one line, with demanded properties that could not be measured."""
        missed = [one.name for one in self.properties if one.demanded and one.state == UNMEASURED]
        head = str(self).partition("\n")[0]
        return f"{head}, {' and '.join(missed)} not measured" if missed and self.accepted else head

    def __bool__(self) -> bool:
        return self.accepted

    def __str__(self) -> str:
        head = f"{self.verdict.upper()}: {self.solution} for {self.definition} on {self.device}"
        return "\n".join([head, *(f"  {reason}" for reason in self.reasons)])


def objections(trial: SolutionTrial, definition: Definition) -> Iterator[str]:
    """Reasons to refuse a solution to a definition; none: it is accepted."""
    seen: set[tuple[str, str | None, str]] = set()
    for row in trial.rows:
        key = (row.output, row.reason, row.variant)
        if row.bad and key not in seen:
            seen.add(key)
            where = (
                f"{row.output} in case {row.case}, seed {row.seed}{f', {row.variant}' if row.variant else ''}: "
            )
            last = row.message.strip().splitlines()[-1] if row.message.strip() else ""
            yield f"{row.reason}: {'' if row.reason == Error.REFUSED else where}{last}{row.far}"  # no case was run
    yield from (f"{one.name}: {one.detail}" for one in trial.properties if one.bad)
    passed = {row.output for row in trial.rows if row.verdict is Verdict.PASS}
    unjudged = {name for name, spec in definition.outputs.items() if not spec.optional} - passed
    if not seen and unjudged:
        skipped = (row for row in trial.rows if row.verdict is Verdict.SKIP and row.output in {WHOLE, *unjudged})
        yield f"not judged: {next((row.message for row in skipped), 'no case was run')}"
