"""What came of judging a solution: rows, properties, and the certificate that holds them."""

from collections.abc import Iterator
from typing import Any, Literal

from traceproof.pipeline.records import Record
from traceproof.reasons import Verdict

HOLDS, BROKEN, UNMEASURED = "holds", "broken", "not measured"


class Settings(Record):
    """How a solution is judged, as the judging process is told.

    Attributes:
        dataset: the folder that holds the definition, its workload lines and blobs.
        conceal: what a solution must not see.
        sizes, seed, hidden_seed, memory_limit, tolerance: as in config.yaml.
        limits: of one call.
        demanded: names of properties without which a solution is refused.
        gpu: whether solutions get their inputs on a GPU.
        timed: whether what passes is timed.
        weak: whether they may run where isolation is not whole.
        environment: variables for the workers that they run in.
    """

    dataset: str
    conceal: tuple[str, ...]
    sizes: tuple[str, ...]
    seed: int
    hidden_seed: int
    memory_limit: int
    tolerance: float | None
    limits: dict[str, Any]
    demanded: tuple[str, ...]
    gpu: bool
    timed: bool = False
    weak: bool
    environment: dict[str, str]


class Row(Record):
    """One output of one call, judged, or a call as a whole.

    Attributes:
        case, size, seed, axes: what it was called with.
        variant: how the call was made, where it was not made as any other.
        output: its name; `*` for the call as a whole.
        verdict, reason, message: what came of it.
        margin: the share of the gate's limit that was used; None: not a share.
    """

    case: str
    size: str
    seed: int
    axes: dict[str, int]
    variant: str = ""
    output: str
    verdict: Verdict
    reason: str | None = None
    message: str = ""
    margin: float | None = None

    @property
    def bad(self) -> bool:
        """Whether it is a failure or an error."""
        return self.verdict in {Verdict.FAIL, Verdict.ERROR}


class PropertyResult(Record):
    """Whether the kernel has a property beyond right answers.

    Attributes:
        name, question: which one.
        state: whether it holds.
        detail: what was seen.
        demanded: whether a solution without it is refused.
    """

    name: str
    question: str
    state: Literal["holds", "broken", "not measured"]
    detail: str = ""
    demanded: bool

    @property
    def bad(self) -> bool:
        """Whether it decides against the solution."""
        return self.demanded and self.state == BROKEN


class PrecisionResult(Record):
    """What the errors of an output say about the precision that was really used.

    Attributes:
        output: its name.
        asked: what the definition says: dtypes of the inputs and of the output.
        seen: what was found.
        evidence: the figures that it stands on.
    """

    output: str
    asked: str
    seen: str
    evidence: str


class Times(Record):
    """How long the calls of one kernel took, in milliseconds, each with a cold cache.

    Attributes:
        name: `solution`, `reference`, or a ground truth.
        calls: how many were counted; those that warm up are not.
        first: the first call of all.
        median, lower, upper, mean: between events (on a CPU by a wall clock); `lower` and `upper` are quartiles.
        wall: median by a wall clock, until the device had no more to do.
    """

    name: str
    calls: int
    first: float
    median: float
    lower: float
    upper: float
    mean: float
    wall: float


class SpeedResult(Record):
    """How fast a solution is in one case, beside others that took turns with it.

    Attributes:
        case, size, axes: which one.
        inputs: the inputs as a workload line of the dataset has them.
        times: the solution's first, then those of the ground truth and of the reference where they can be called.
        outside: milliseconds per call by the judging process's own clock.
        doubt: why its times can not be believed, and are in no trace; empty: its clocks agree.
        clocks: of the GPU, before and after.
        max_abs, max_rel: largest errors in the last timed call; None: it could not be judged.
    """

    case: str
    size: str
    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]]
    times: tuple[Times, ...]
    outside: float
    doubt: str = ""
    clocks: str
    max_abs: float | None = None
    max_rel: float | None = None

    def ratio(self, name: str) -> float | None:
        """How many times faster than another kernel the solution is; None: that was not timed."""
        other = next((one for one in self.times[1:] if one.name == name), None)
        return None if other is None or not self.times[0].median else other.median / self.times[0].median


class Trial(Record):
    """What a judging process says of one solution."""

    rows: tuple[Row, ...]
    properties: tuple[PropertyResult, ...]
    precision: tuple[PrecisionResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    isolation: str = ""


class Digests(Record):
    """What a certificate stands on: the definition, the solution's files, this project's code."""

    definition: str
    solution: str
    code: str


class Certificate(Record):
    """Everything that a verdict over a solution stands on; see `verdict`.

    Attributes:
        solution, path, language, entry: what was judged.
        definition, op_type, definition_path: what it was asked to compute.
        verdict, reasons: what came of it, and why it was refused.
        against: `oracle`, `shadow` (the reference in float64), or nothing.
        hidden_seed: what the hidden cases follow from.
        device, versions: where it was run.
        repeat: the command that repeats it.
        judged_at: the time, UTC.
    """

    version: Literal[1] = 1
    solution: str
    path: str
    language: str
    entry: str
    definition: str
    op_type: str
    definition_path: str
    verdict: Literal["accepted", "refused"]
    reasons: tuple[str, ...]
    against: str
    rows: tuple[Row, ...]
    properties: tuple[PropertyResult, ...]
    precision: tuple[PrecisionResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    digests: Digests
    hidden_seed: int
    tolerance: float | None
    isolation: str
    device: str
    versions: dict[str, str]
    repeat: str
    judged_at: str

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against it."""
        return self.verdict == "accepted"


def objections(trial: Trial, outputs: int) -> Iterator[str]:
    """Why a solution is refused; nothing: it is accepted.

    Args:
        trial: what was seen.
        outputs: how many outputs the definition has.
    """
    seen: set[tuple[str, str | None, str]] = set()
    for row in trial.rows:
        key = (row.output, row.reason, row.variant)
        if row.bad and key not in seen:
            seen.add(key)
            where = f"case {row.case}, seed {row.seed}{f', {row.variant}' if row.variant else ''}"
            last = row.message.strip().splitlines()[-1] if row.message.strip() else ""
            yield f"{row.reason}: {row.output} in {where}: {last}"
    yield from (f"{one.name}: {one.detail}" for one in trial.properties if one.bad)
    judged = {row.output for row in trial.rows if row.verdict is Verdict.PASS}
    if not seen and len(judged - {"*"}) < outputs:
        unjudged = next((row.message for row in trial.rows if row.verdict is Verdict.SKIP), "no case was run")
        yield f"not judged: {unjudged}"
