"""Runs references, which are strangers' code: in one worker they are called, in another what they did is measured.

A worker that strangers' code ran in is believed nothing but the bytes of its outputs, and what it says against
itself. Inputs are drawn, outputs checked and compared by `traceproof.actors.measure` in a process of our own, and
the record is written here.
"""

import errno
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from traceproof.digests import digest_json
from traceproof.execution.caller import NAN, Caller, CallRequest, calling, refusal
from traceproof.owner import own_folder
from traceproof.pipeline.records import FLOOR, LASTING, SHADOW, PlannedCase, PlannedDefinition, RunRecord
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.progress import Progress
from traceproof.store import Store, disk_errors
from traceproof.untrusted import FLOAT64, OTHER_ORDER
from traceproof.worker import MIB, Isolation, ItemOutcome, Pool, Session, Status

MEASURE = "traceproof.actors.measure:setup"
GOLDEN = 0x9E3779B97F4A7C15
PATIENCE = 2  # timeouts of one definition after which its other cases are not waited for


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of a reference, and what came of it.

    Attributes:
        planned: the case.
        key: of its outputs.
        first: outputs of an earlier call on the same inputs, which this one must meet bit by bit.
        recall: whether to hold the outputs against those of the call before.
        fill: what memory without a value holds; None: whatever lies there.
        threads: torch's.
        followed: whether it is made again in float64, and once more in another order of summation.
    """

    planned: PlannedCase
    key: str
    first: Path | None = None
    recall: bool = False
    fill: float | None = NAN
    threads: int = 1
    followed: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Runs the references of one op_type's definitions.

    Attributes:
        pool: workers for strangers' code.
        measuring: workers of ours.
        drawing: the device on which they draw inputs that take a CPU long.
        store: the folder that scratch folders are made in.
    """

    job: Job
    outputs: Store
    pool: Pool
    measuring: Pool
    store: Path
    dataset: str
    progress: Progress
    drawing: str = "cpu"

    def run(self, name: str, entry: PlannedDefinition, wanted: Sequence[Call]) -> dict[str, RunRecord]:
        """Records by case id of one definition's calls, each finished one in the store before the next begins."""
        refused = refusal(entry.reference)
        if refused is not None:
            for call in wanted:
                call.outcome = refused
            return {call.case_id: self._finished(name, call, None) for call in wanted}
        plain = [call for call in wanted if not call.planned.hidden]
        hidden = [call for call in wanted if call.planned.hidden]
        for call in wanted:
            call.followed = entry.no_oracle is not None and not call.planned.trials
        Random(digest_json([entry.digest, entry.nonce])).shuffle(plain)  # noqa: S311 - an order
        with own_folder("scratch", self.store) as done:
            again = {call.case_id: self._repeat(call, done) for call in plain if call.planned.repeat}
            for call in hidden:
                call.fill, call.threads, call.recall = None, self.job.hidden_threads, bool(again)
            found = {
                call.case_id: self._finished(name, call, done)
                for call in self._made(name, entry, plain, [*again.values(), *hidden], done)
                if call in plain and not (call.planned.repeat and call.succeeded)
            }
            rest = [call for call in plain if call.case_id not in found]  # what is run again and did not fail
            for call in rest:
                _join(call, again[call.case_id], hidden)
            return found | {call.case_id: self._finished(name, call, done) for call in (*rest, *hidden)}

    def _made(
        self, name: str, entry: PlannedDefinition, plain: Sequence[Call], rest: Sequence[Call], done: Path
    ) -> Iterator[Call]:
        """All calls of a definition, as each has been made."""
        for batch in self._batches(plain, rest):
            waited = sum(call.timed_out for call in plain)
            yield from self._calls(name, entry, batch, done, waited=waited)

    @staticmethod
    def _repeat(call: Call, done: Path) -> Call:
        """One more call on a case's inputs, with other memory."""
        first = _outputs(done, call.key)
        return Call(planned=call.planned, key=secrets.token_hex(16), first=first, fill=_drawn_fill())

    def _batches(self, plain: Sequence[Call], rest: Sequence[Call]) -> Iterator[Sequence[Call]]:
        """The calls of each worker: the repeat and the hidden cases have their own, which remembers nothing.

        But for a GPU: processes open it one after the other, and a second one per definition would be waited for.
        """
        if self.job.device != "cpu":
            yield [*plain, *rest]
            return
        yield plain
        failed = {call.case_id for call in plain if not call.succeeded}
        yield [call for call in rest if call.planned.hidden or call.case_id not in failed]

    def _calls(
        self, name: str, entry: PlannedDefinition, calls: Sequence[Call], done: Path, *, waited: int
    ) -> Iterator[Call]:
        """Make the calls in one new worker; after PATIENCE timeouts, `waited` included, the rest is given up."""
        if not calls:
            return
        with (
            calling(
                self.pool,
                entry.reference,
                name=f"reference of {name}",
                limits=self.job.limits,
                need=max(call.planned.memory for call in calls),
                root=self.store,
                device=self.job.device,
                fill=calls[0].fill,
            ) as caller,
            self.measuring.session(
                setup=MEASURE,
                payload={
                    "definition": entry.definition,
                    "dataset": self.dataset,
                    "folder": str(caller.folder),
                    "device": self.drawing,
                    "runs_on": self.job.device,
                },
                limits=self.job.limits,
                isolation=Isolation.TRUSTED,
                scratch=done,
            ) as measure,
        ):
            timeouts = waited
            for call in calls:
                if timeouts >= PATIENCE:
                    call.outcome = self._given_up()
                else:
                    call.outcome, call.facts = self._call(call, measure, caller)
                    timeouts += call.timed_out
                    if call.followed and call.succeeded:
                        call.facts = {**call.facts, "shadow": self._shadowed(call, measure, caller)}
                yield call

    def _shadowed(self, call: Call, measure: Session, caller: Caller) -> str:
        """Put the shadow of a call's outputs, and the outputs in another order of summation, beside them.

        Returns:
            why it could not be done; empty: it was.
        """
        for mode, beside in ((FLOAT64, SHADOW), (OTHER_ORDER, FLOOR)):
            outcome, _ = self._call(call, measure, caller, mode=mode, beside=beside)
            if outcome.status is not Status.OK:
                lines = outcome.message.strip().splitlines() or [str(outcome.status)]
                return lines[-1].rpartition("UnsupportedError: ")[2]
        return ""

    def _call(
        self, call: Call, measure: Session, caller: Caller, *, mode: str = "", beside: str = ""
    ) -> tuple[ItemOutcome, Mapping[str, Any]]:
        """Draw, call, collect: how it ended, and what was measured."""
        token = secrets.token_hex(8)
        case, files = call.planned.case.as_json(), {"data": f"{token}.in", "out": f"{token}.out"}
        drawn = measure.ask({"do": "draw", "case": case, "data": files["data"]})
        if drawn.status is not Status.OK or "digest" not in drawn.value:
            return self._not_drawn(drawn), {}
        call.inputs = drawn.value["digest"]
        planned = call.planned
        request = CallRequest(
            inputs=drawn.value["inputs"],
            seeds=_seeds(call),
            trials=bool(planned.trials),
            fill=call.fill,
            threads=call.threads,
            mode=mode,
            data=files["data"],
            out=files["out"],
        )
        outcome = caller.call(request)
        if outcome.status is not Status.OK:
            return self._not_ours(outcome), {}
        item = {"do": "collect", "case": case, "key": call.key, "returned": outcome.value, "recall": call.recall}
        item["beside"] = beside
        first = None if call.first is None else str(call.first)
        return self._collected(outcome, measure.ask(item | files | {"first": first}))

    def _not_drawn(self, drawn: ItemOutcome) -> ItemOutcome:
        """The case's outcome where its inputs could not be drawn."""
        if drawn.status is not Status.OK:
            return replace(drawn, message=f"drawing the inputs: {drawn.message}")
        self._check_space(drawn.value)
        return replace(drawn, status=Status.CRASH, message=f"drawing the inputs: {drawn.value['bad']}")

    def _not_ours(self, outcome: ItemOutcome) -> ItemOutcome:
        """The outcome of a call that failed, unless the disk is full: that is the machine's."""
        if "No space left on device" in outcome.message:
            with disk_errors(self.store):
                self._probe_space()
        return outcome

    def _probe_space(self) -> None:
        with tempfile.TemporaryFile(dir=self.store) as file:
            file.write(bytes(MIB))
            file.flush()

    def _collected(self, outcome: ItemOutcome, collected: ItemOutcome) -> tuple[ItemOutcome, Mapping[str, Any]]:
        """The case's outcome, and what was measured, of a call that gave an answer."""
        if collected.status is not Status.OK:
            return replace(collected, message=f"reading the outputs: {collected.message}"), {}
        self._check_space(collected.value)
        if "bad" in collected.value:
            message = f"{outcome.message}{collected.value['bad']}"
            return replace(outcome, status=Status.CRASH, message=message, value=None), {}
        return outcome, collected.value

    def _check_space(self, said: Mapping[str, Any]) -> None:
        """Raise what a full disk raises.

        Raises:
            TraceproofError: it is full.
        """
        if "no_space" in said:
            with disk_errors(self.store / "outputs"):
                raise OSError(errno.ENOSPC, said["no_space"])

    def _given_up(self) -> ItemOutcome:
        limit = f"{self.job.limits.seconds:g} s"
        message = f"not run: {PATIENCE} cases of this definition ran into the limit of {limit}"
        return ItemOutcome(index=0, status=Status.TIMEOUT, message=message)

    def _finished(self, name: str, call: Call, done: Path | None) -> RunRecord:
        """The record of a call; a lasting one goes into the store, tensors first."""
        record = call.record()
        assert call.outcome is not None
        if call.outcome.status in LASTING:
            tensors = _outputs(done, call.key) if done is not None and record.status == "ok" else None
            record = RunRecord.model_validate(self.outputs.finish(call.key, record.as_json(), tensors))
        self.progress.show(f"{name} {call.case_id}", record.status)
        return record


def _outputs(done: Path, key: str) -> Path:
    """Where measuring leaves a call's outputs."""
    return done / f"{key}.safetensors"


def _join(call: Call, repeat: Call, hidden: Sequence[Call]) -> None:
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


def _drawn_fill() -> float:
    """What memory without a value holds in a second run: another value in every run."""
    return float(secrets.randbelow(200) + 20) * (1 if secrets.randbits(1) else -1)


def _seeds(call: Call) -> list[int]:
    """Seeds of torch's generator: one per trial, which follow from a number drawn for every results folder.

    Where no trials are asked for, a second run has a seed of its own: an answer that depends on it varies.
    """
    planned = call.planned
    if not planned.trials:
        return [secrets.randbits(62) if call.first is not None else planned.case.seed]
    start = int(digest_json([planned.nonce, planned.digest]), 16)
    return [(start + trial * GOLDEN) % (1 << 63) for trial in range(planned.trials)]
