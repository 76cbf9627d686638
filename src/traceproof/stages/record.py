"""What the supervisor writes of one case of one actor. Nobody else makes a record: workers answer questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, cast

from traceproof.border import plain_text
from traceproof.reasons import Error, Skip
from traceproof.worker import ItemOutcome, Status

REASONS: Mapping[Status, Error] = {
    Status.ERROR: Error.EXCEPTION,
    Status.TIMEOUT: Error.TIMEOUT,
    Status.MEMORY: Error.MEMORY,
    Status.CRASH: Error.CRASH,
    Status.OUTPUT: Error.OUTPUT,
    Status.PROCESSES: Error.PROCESSES,
    Status.REFUSED: Error.REFUSED,
    Status.ISOLATION: Error.ISOLATION,
}
# Outcomes that the same code and inputs would meet again; a timeout or too much memory may be the machine's doing.
LASTING = frozenset({Status.OK, Status.ERROR, Status.OUTPUT, Status.REFUSED})
MOST_SECONDS = 1e9
NAMES = ("mutated", "aliased", "subclassed", "varying", "surplus")  # fields that are lists of names


class RunRecord(TypedDict):
    """One case of one actor.

    Attributes:
        key: digest of all that the outputs depend on; None where nothing was to be run.
        status: ok, error, or skip, which only our own code can say.
        reason, message: unless ok.
        inputs: digest of what was drawn.
        tensors: digest of the file of outputs.
        seconds, peak_bytes: wall clock and memory.
        isolation: what was absent, where strangers' code ran without whole isolation.
        mutated, aliased, subclassed, varying: names of inputs or outputs; `varying` only where it was run again.
        remembered: whether other inputs gave the same bits.
        surplus: outputs that the definition does not have.
    """

    key: str | None
    status: Literal["ok", "error", "skip"]
    reason: NotRequired[str]
    message: NotRequired[str]
    inputs: NotRequired[str]
    tensors: NotRequired[str]
    seconds: NotRequired[float]
    peak_bytes: NotRequired[int]
    isolation: NotRequired[str]
    mutated: NotRequired[list[str]]
    aliased: NotRequired[list[str]]
    subclassed: NotRequired[list[str]]
    varying: NotRequired[list[str]]
    remembered: NotRequired[bool]
    surplus: NotRequired[list[str]]


def ok(key: str, outcome: ItemOutcome, facts: Mapping[str, Any], *, inputs: str) -> RunRecord:
    """Outputs are there. `facts` are what a process of ours measured, by name."""
    said: dict[str, Any] = {name: _names(facts[name]) for name in NAMES if name in facts}
    if "remembered" in facts:
        said["remembered"] = bool(facts["remembered"])
    return of_json({"key": key, "status": "ok", "inputs": str(inputs), **said, **_costs(outcome)})


def of_json(value: Mapping[str, Any]) -> RunRecord:
    """A record out of the store, which is sealed, or of the fields above."""
    return cast("RunRecord", dict(value))


def _names(value: Sequence[Any]) -> list[str]:
    return [plain_text(str(name)) for name in value]


def error(key: str, outcome: ItemOutcome) -> RunRecord:
    """There is nothing to compare, for the reason that the outcome gives."""
    reason, message = REASONS[outcome.status], plain_text(outcome.message)
    return of_json({"key": key, "status": "error", "reason": reason, "message": message, **_costs(outcome)})


def skip(key: str | None, reason: str, message: str) -> RunRecord:
    """Not run, for a reason of the closed list.

    Raises:
        ValueError: the reason is none of them.
    """
    return RunRecord(key=key, status="skip", reason=Skip(reason), message=plain_text(message))


def _costs(outcome: ItemOutcome) -> dict[str, Any]:
    costs: dict[str, Any] = {
        "seconds": min(max(outcome.seconds, 0.0), MOST_SECONDS),
        "peak_bytes": min(max(outcome.peak_bytes, 0), 1 << 62),
    }
    return costs | ({"isolation": outcome.isolation} if outcome.isolation else {})


def usable(record: Mapping[str, Any], key: str, *, weak: bool) -> bool:
    """Whether a record of the store stands for a case: a skip is never kept, and strict runs want strict ones."""
    if record.get("key") != key or record.get("status") not in {"ok", "error"}:
        return False
    return weak or not record.get("isolation")
