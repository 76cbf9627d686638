"""Record of what a run left of one case of one actor."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from traceproof.pipeline.records import Record
from traceproof.reasons import Error, Skip
from traceproof.untrusted.border import plain_text
from traceproof.worker.model import ItemOutcome, Status

REASONS: Mapping[Status, Error] = {
    Status.ERROR: Error.EXCEPTION,
    **{status: Error[status.name] for status in Status if status.name in Error.__members__},
}
# Outcomes that the same code and inputs would meet again; a timeout or too much memory may be the machine's doing.
LASTING = frozenset({Status.OK, Status.ERROR, Status.OUTPUT, Status.REFUSED})
MOST_SECONDS = 1e9
LISTS = ("mutated", "aliased", "subclassed", "varying", "surplus")  # of names


class RunRecord(Record):
    """What a run left of one case of one actor. The supervisor writes it: workers answer questions."""

    key: str | None  # digest of all that the outputs depend on; None where nothing was to be run
    status: Literal["ok", "error", "skip"]  # ok, error, or skip, which only our own code can say
    # reason, message: unless ok
    reason: str = ""
    message: str = ""
    inputs: str | None = None  # digest of what was drawn
    # mutated, aliased, subclassed, varying: names of inputs or outputs; `varying` only where it was run again
    mutated: tuple[str, ...] = ()
    aliased: tuple[str, ...] = ()
    subclassed: tuple[str, ...] = ()
    varying: tuple[str, ...] | None = None
    surplus: tuple[str, ...] = ()  # outputs that the definition does not have
    remembered: bool = False  # whether other inputs gave the same bits
    # seconds, peak_bytes: wall clock and memory
    seconds: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 0.0
    peak_bytes: Annotated[int, Field(ge=0)] = 0
    isolation: str = ""  # what was absent, where strangers' code ran without whole isolation
    tensors: str | None = None  # digest of the file of outputs
    # why the file holds no float64 shadow of the outputs, where one was wanted; empty: it does
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
        """Not run, for a reason of the closed list. Raises ValueError: the reason is none of them."""
        return cls(key=key, status="skip", reason=Skip(reason), message=plain_text(message))

    @classmethod
    def kept(cls, value: Mapping[str, Any] | None, key: str, *, weak: bool) -> Self | None:
        """The store's record that stands for a case, or None: no skip, and of strict runs a strict one."""
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
