"""What came of judging a solution: rows, properties, and the certificate that holds them."""

import sys
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from traceproof.judge.kernel_properties import DEMANDED
from traceproof.reasons import Verdict
from traceproof.run.schema import ClosedModel, figures, place
from traceproof.sandbox import GIB, Limits

LIMITS = Limits(seconds=120.0, setup_seconds=900.0, memory_bytes=10 * GIB)  # as config.yaml has them by default
HOLDS, BROKEN, UNMEASURED = "holds", "broken", "not measured"


class JudgeSettings(ClosedModel):
    """How a solution is judged, as the judging process is told."""

    python: str = sys.executable  # the interpreter that judges
    caches: str = ""  # folder for what is compiled on the way; empty: one that goes with the judging process
    cuda_home: str = ""  # the CUDA toolkit of this machine that it compiles with; empty: its environment's
    dataset: str = ""  # the folder that holds the definition, its workload lines and blobs
    conceal: tuple[str, ...] = ()  # what a solution must not see, beside this project and the dataset
    # sizes, seed, hidden_seed, memory_limit, tolerance: as in config.yaml
    sizes: tuple[str, ...] = ("small", "medium")
    seed: int = 0
    hidden_seed: int
    memory_limit: int = 10 * GIB
    tolerance: float | None = None
    limits: dict[str, Any] = LIMITS.as_json()  # of one call
    demanded: tuple[str, ...] = DEMANDED  # names of properties without which a solution is refused
    gpu: bool = False  # whether there may be a GPU; the judging process finds out
    timed: bool = False  # whether what passes is timed
    whole: bool = False  # whether all cases are called; if not, the first wrong answer ends it
    weak: bool = False  # whether they may run where isolation is not whole
    environment: dict[str, str] = Field(default_factory=dict)  # variables for the workers that they run in


class SolutionRow(ClosedModel):
    """One output of one call, judged, or a call as a whole."""

    # case, size, seed, axes: what it was called with
    case: str
    size: str
    seed: int
    axes: dict[str, int]
    variant: str = ""  # how the call was made, where it was not made as any other
    output: str  # its name; `*` for the call as a whole
    # verdict, reason, message: what came of it
    verdict: Verdict
    reason: str | None = None
    message: str = ""
    margin: float | None = None  # the share of the gate's limit that was used; None: not a share
    # worst, metrics: the worst places and how far off it is, of a numeric failure, as in a verdict's row
    worst: tuple[dict[str, Any], ...] = ()
    metrics: dict[str, Any] = Field(default_factory=dict)

    @property
    def far(self) -> str:
        """Its worst place, and how far off it is; empty: nothing numeric failed."""
        worst = f"; worst {place(self.worst[0], 'expected', 'solution')}" if self.worst else ""
        numbers = figures(self.metrics)
        return f"{worst}; {numbers}" if numbers else worst

    @property
    def bad(self) -> bool:
        """Whether it is a failure or an error."""
        return self.verdict in {Verdict.FAIL, Verdict.ERROR}


class PropertyResult(ClosedModel):
    """Whether the kernel has a property beyond right answers."""

    # name, question: which one
    name: str
    question: str
    state: Literal["holds", "broken", "not measured"]  # whether it holds
    detail: str = ""  # what was seen
    demanded: bool  # whether a solution without it is refused

    @property
    def bad(self) -> bool:
        """Whether it decides against the solution."""
        return self.demanded and self.state == BROKEN


class PrecisionResult(ClosedModel):
    """What the errors of an output say about the precision that was really used."""

    output: str  # its name
    asked: str  # what the definition says: dtypes of the inputs and of the output
    seen: str  # what was found
    evidence: str  # the figures that it stands on


class Times(ClosedModel):
    """How long the calls of one kernel took, in milliseconds, each with a cold cache."""

    name: str  # `solution`, `reference`, or a ground truth
    calls: int  # how many were counted; those that warm up are not
    first: float  # the first call of all
    # median, lower, upper, mean: between events (on a CPU by a wall clock); `lower` and `upper` are quartiles
    median: float
    lower: float
    upper: float
    mean: float
    wall: float  # median by a wall clock, until the device had no more to do


class SpeedResult(ClosedModel):
    """How fast a solution is in one case, beside others that took turns with it."""

    # case, size, axes: which one
    case: str
    size: str
    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]]  # the inputs as a workload line of the dataset has them
    # the solution's first, then those of the ground truth and of the reference where they can be called
    times: tuple[Times, ...]
    outside: float  # milliseconds per call by the judging process's own clock
    doubt: str = ""  # why its times can not be believed, and are in no trace; empty: its clocks agree
    clocks: str  # of the GPU, before and after
    # max_abs, max_rel: largest errors in the last timed call; None: it could not be judged
    max_abs: float | None = None
    max_rel: float | None = None

    def ratio(self, name: str) -> float | None:
        """How many times faster than another kernel the solution is; None: that was not timed."""
        other = next((one for one in self.times[1:] if one.name == name), None)
        return None if other is None or not self.times[0].median else other.median / self.times[0].median


class SolutionTrial(ClosedModel):
    """What a judging process says of one solution."""

    rows: tuple[SolutionRow, ...]
    properties: tuple[PropertyResult, ...]
    precision: tuple[PrecisionResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    isolation: str = ""
    # device, versions: where it was run
    device: str = "no device (not run)"
    versions: dict[str, str] = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)  # by what was done


class Digests(ClosedModel):
    """What a certificate stands on: the definition, the solution's files, this project's code."""

    definition: str
    solution: str
    code: str


class Certificate(ClosedModel):
    """Everything that a verdict over a solution stands on; see `verdict`."""

    version: Literal[1] = 1
    # solution, path, language, entry: what was judged
    solution: str
    path: str
    language: str
    entry: str
    # definition, op_type, definition_path: what it was asked to compute
    definition: str
    op_type: str
    definition_path: str
    # verdict, reasons: what came of it, and why it was refused
    verdict: Literal["accepted", "refused"]
    reasons: tuple[str, ...]
    against: str  # `oracle`, `shadow` (the reference in float64), or nothing
    constants: str = ""  # of the definition, what its reference alone states; the oracle takes it from there
    rows: tuple[SolutionRow, ...]
    properties: tuple[PropertyResult, ...]
    precision: tuple[PrecisionResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    digests: Digests
    hidden_seed: int  # what the hidden cases follow from
    tolerance: float | None
    isolation: str
    # device, versions: where it was run
    device: str
    versions: dict[str, str]
    seconds: dict[str, float] = Field(default_factory=dict)  # that went by, by what was done
    repeat: str  # the command that repeats it
    judged_at: str  # the time, UTC

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against it."""
        return self.verdict == "accepted"

    @property
    def headline(self) -> str:
        """The verdict in one line, with what is demanded and could not be measured."""
        said = f"{self.verdict.upper()}: {self.solution} for {self.definition} on {self.device}"
        missed = [one.name for one in self.properties if one.demanded and one.state == UNMEASURED]
        return f"{said}, {' and '.join(missed)} not measured" if missed and self.accepted else said

    def __bool__(self) -> bool:
        return self.accepted

    def __str__(self) -> str:
        head = f"{self.verdict.upper()}: {self.solution} for {self.definition} on {self.device}"
        return "\n".join([head, *(f"  {reason}" for reason in self.reasons)])


def objections(trial: SolutionTrial, outputs: int) -> Iterator[str]:
    """Why a solution to a definition of so many outputs is refused; nothing: it is accepted."""
    seen: set[tuple[str, str | None, str]] = set()
    for row in trial.rows:
        key = (row.output, row.reason, row.variant)
        if row.bad and key not in seen:
            seen.add(key)
            where = f"case {row.case}, seed {row.seed}{f', {row.variant}' if row.variant else ''}"
            last = row.message.strip().splitlines()[-1] if row.message.strip() else ""
            yield f"{row.reason}: {row.output} in {where}: {last}{row.far}"
    yield from (f"{one.name}: {one.detail}" for one in trial.properties if one.bad)
    judged = {row.output for row in trial.rows if row.verdict is Verdict.PASS}
    if not seen and len(judged - {"*"}) < outputs:
        unjudged = next((row.message for row in trial.rows if row.verdict is Verdict.SKIP), "no case was run")
        yield f"not judged: {unjudged}"
