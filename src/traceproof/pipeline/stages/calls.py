"""One call of a reference: what it is asked for, what came of it, and what calls of one case show together."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from traceproof.digests import digest_json
from traceproof.execution.caller import NAN
from traceproof.pipeline.records import PlannedCase
from traceproof.pipeline.run_record import RunRecord
from traceproof.worker import ItemOutcome, Status

GOLDEN = 0x9E3779B97F4A7C15


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of a reference, and what came of it."""

    planned: PlannedCase  # the case
    key: str  # of its outputs
    first: Path | None = None  # outputs of an earlier call on the same inputs, which this one must meet bit by bit
    recall: bool = False  # whether to hold the outputs against those of the call before
    held: bool = False  # whether the next call is such a one
    fill: float | None = NAN  # what memory without a value holds; None: whatever lies there
    threads: int = 1  # torch's
    followed: bool = False  # whether it is made again in float64, and once more in another order of summation
    outcome: ItemOutcome | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = ""

    @property
    def case_id(self) -> str:
        """The case's id."""
        return self.planned.id

    @property
    def succeeded(self) -> bool:
        """Whether it was made and left outputs."""
        return self.outcome is not None and self.outcome.status is Status.OK

    @property
    def timed_out(self) -> bool:
        """Whether it ran into the limit."""
        return self.outcome is not None and self.outcome.status is Status.TIMEOUT

    def record(self) -> RunRecord:
        """What is written of it."""
        assert self.outcome is not None
        if self.succeeded:
            return RunRecord.ok(self.key, self.outcome, self.facts, inputs=self.inputs)
        return RunRecord.error(self.key, self.outcome)


def join(call: Call, repeat: Call, hidden: Sequence[Call]) -> None:
    """Add to a call what its repeat and the hidden cases after it showed."""
    assert repeat.outcome is not None
    if not repeat.succeeded:
        call.outcome = replace(repeat.outcome, message=f"its second run: {repeat.outcome.message}")
    remembered = any(other.facts.get("remembered", False) for other in hidden)
    call.facts = {**call.facts, "varying": [], **_merged(call.facts, repeat.facts), "remembered": remembered}


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What either of two runs did; `varying` is the second's to say."""
    both = {
        name: sorted({*first.get(name, []), *second.get(name, [])})
        for name in ("mutated", "aliased", "subclassed")
    }
    return both | {name: second[name] for name in ("varying",) if name in second}


def drawn_fill() -> float:
    """What memory without a value holds in a second run: another value in every run."""
    return float(secrets.randbelow(200) + 20) * (1 if secrets.randbits(1) else -1)


def seeds_of(call: Call) -> list[int]:
    """Seeds of torch's generator: one per trial, which follow from a number drawn for every results folder.

    Where no trials are asked for, a second run has a seed of its own: an answer that depends on it varies.
    """
    planned = call.planned
    if not planned.trials:
        return [secrets.randbits(62) if call.first is not None else planned.case.seed]
    start = int(digest_json([planned.nonce, planned.digest]), 16)
    return [(start + trial * GOLDEN) % (1 << 63) for trial in range(planned.trials)]
