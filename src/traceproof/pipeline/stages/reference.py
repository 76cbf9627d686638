"""Runs references, which are strangers' code: in one worker they are called, in another what they did is measured.

A worker that strangers' code ran in is believed nothing but the bytes of its outputs, and what it says against
itself. Inputs are drawn, outputs checked and compared by `traceproof.actors.measure` in a process of our own, and
the record is written here.
"""

import errno
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from traceproof.digests import digest_json
from traceproof.execution.caller import Caller, CallRequest, calling, refusal
from traceproof.owner import own_folder
from traceproof.pipeline.records import FLOOR, SHADOW, PlannedDefinition
from traceproof.pipeline.run_record import LASTING, RunRecord
from traceproof.pipeline.stages.calls import Call, drawn_fill, join, seeds_of
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.progress import Progress
from traceproof.store import Store, disk_errors
from traceproof.untrusted import OTHER_TIES, shadow_modes
from traceproof.worker import MIB, Isolation, ItemOutcome, Limits, Pool, Session, Status

MEASURE = "traceproof.actors.measure:setup"
PATIENCE = 2  # timeouts of one definition after which its other cases are not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Runs the references of one op_type's definitions."""

    job: Job
    outputs: Store
    pool: Pool  # workers for strangers' code
    measuring: Pool  # workers of ours
    store: Path  # the folder that scratch folders are made in
    dataset: str
    progress: Progress
    drawing: str = "cpu"  # the device on which they draw inputs that take a CPU long

    def run(self, name: str, entry: PlannedDefinition, wanted: Sequence[Call]) -> dict[str, RunRecord]:
        """Records by case id of one definition's calls, each finished one in the store before the next begins."""
        refused = refusal(entry.reference)
        if refused is not None:
            for call in wanted:
                call.outcome = refused
            return {call.case_id: self._finished(name, call, None) for call in wanted}
        for call in wanted:
            call.followed = entry.no_oracle is not None and not call.planned.trials
        plain = [call for call in wanted if not call.planned.hidden]
        hidden = [call for call in wanted if call.planned.hidden]
        return self._run(name, entry, plain, hidden)

    def _run(
        self, name: str, entry: PlannedDefinition, plain: list[Call], hidden: Sequence[Call]
    ) -> dict[str, RunRecord]:
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
                join(call, again[call.case_id], hidden)
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
        return Call(planned=call.planned, key=secrets.token_hex(16), first=first, fill=drawn_fill())

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
        payload = {"definition": entry.definition, "dataset": self.dataset, "device": self.drawing}
        payload |= {"runs_on": self.job.device}
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
                payload=payload | {"folder": str(caller.folder)},
                limits=self.job.limits,
                isolation=Isolation.TRUSTED,
                scratch=done,
            ) as measure,
        ):
            timeouts = waited
            caller.start()
            for call, following in zip(calls, (*calls[1:], None), strict=True):
                call.held = following is not None and following.recall
                if timeouts >= PATIENCE:
                    call.outcome = given_up(self.job.limits)
                else:
                    call.outcome, call.facts = self._call(call, measure, caller)
                    timeouts += call.timed_out
                    if call.followed and call.succeeded:
                        why = self._shadowed(call, measure, caller, shadow_modes(entry.reference))
                        call.facts = {**call.facts, "shadow": why}
                yield call

    def _shadowed(self, call: Call, measure: Session, caller: Caller, modes: Sequence[str]) -> str:
        """Put the shadow of a call's outputs, and what else the modes give, beside them.

        Returns:
            why it could not be done; empty: it was.
        """
        for mode, beside in zip(modes, (SHADOW, FLOOR, OTHER_TIES), strict=False):
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
            seeds=seeds_of(call),
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
        item |= {"beside": beside, "held": call.held}
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
        """Raise what a full disk raises. Raises TraceproofError: it is full."""
        if "no_space" in said:
            with disk_errors(self.store / "outputs"):
                raise OSError(errno.ENOSPC, said["no_space"])

    def _finished(self, name: str, call: Call, done: Path | None) -> RunRecord:
        """The record of a call; a lasting one goes into the store, tensors first."""
        record = call.record()
        assert call.outcome is not None
        if call.outcome.status in LASTING:
            tensors = _outputs(done, call.key) if done is not None and record.status == "ok" else None
            record = RunRecord.model_validate(self.outputs.finish(call.key, record.as_json(), tensors))
        self.progress.show(f"{name} {call.case_id}", record.status)
        return record


def given_up(limits: Limits) -> ItemOutcome:
    """The outcome of a case that is not run, as too many before it took too long."""
    message = f"not run: {PATIENCE} cases of this definition ran into the limit of {limits.seconds:g} s"
    return ItemOutcome(index=0, status=Status.TIMEOUT, message=message)


def _outputs(done: Path, key: str) -> Path:
    """Where measuring leaves a call's outputs."""
    return done / f"{key}.safetensors"
