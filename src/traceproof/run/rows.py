"""Verdict rows: typed, checked once where they are read."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError

from traceproof.dataset.tree import explain
from traceproof.errors import TraceproofError
from traceproof.reasons import Grade, Skip, Verdict
from traceproof.run.records import AGAIN, REFERENCE, Record

UNJUDGED = frozenset({Skip.NO_ORACLE, Skip.UNJUDGED})
NUMBERS = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")  # told of an output


class GateResult(Record):
    """By what an output was judged, and which share of the limit was used; None: unbounded, or not a share."""

    kind: str
    margin: float | None = None


class RowDigests(Record):
    """What a verdict stands on."""

    definition: str | None = None
    case: str | None = None
    inputs: str | None = None
    outputs: str | None = None
    code: str | None = None
    environment: str | None = None


class Arbitration(Record):
    """Who agrees with a failing one, and who with the oracle; `with` and `against` in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    ours: Annotated[tuple[str, ...], Field(alias="with")]
    theirs: Annotated[tuple[str, ...], Field(alias="against")]
    outvoted: tuple[str, ...]
    recognised: tuple[str, ...]


class VerdictRow(Record):
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
    twin: str = ""  # which axes of the definition were smaller in what was run; empty: none
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
