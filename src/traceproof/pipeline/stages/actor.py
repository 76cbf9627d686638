"""Run: one actor over the cases of one op_type, in worker processes, into the store."""

import errno
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from traceproof.execution import caches
from traceproof.owner import own_folder
from traceproof.pipeline.records import ORACLE, OpTypePlan, PlannedCase, PlannedDefinition, earlier
from traceproof.pipeline.run_record import LASTING, RunRecord
from traceproof.pipeline.stages.calls import Call
from traceproof.pipeline.stages.finished import Finished
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.lanes import lanes_of
from traceproof.pipeline.stages.manifest import Manifest, Records
from traceproof.pipeline.stages.progress import Progress
from traceproof.pipeline.stages.reference import PATIENCE, References, given_up
from traceproof.store import OUTPUTS, Store, disk_errors
from traceproof.worker import ItemOutcome, Pool, Status

SETUP_MANY = "traceproof.actors.execute:setup_many"
DRAWN_ON_GPU = 64 << 20  # bytes that a case needs: a CPU takes a tenth of a second and more to draw its inputs


def run(cases: Path, manifest: Path, store: Path, job: Job, *, shard: str = "") -> None:
    """Run what the store lacks of all definitions, or of those of a shard, and write the manifest.

    A case that fails costs itself alone; each finished case is in the store before the next one starts. Raises
    TraceproofError: the disk is full. What was finished stays.
    """
    planned = OpTypePlan.read(cases).of_shard(job.actor, shard)
    outputs = Store(store, OUTPUTS)
    total = sum(len(entry.cases) for entry in planned.definitions.values())
    progress = Progress(f"{job.actor:10} {planned.op_type + shard:12}", total)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    store.mkdir(parents=True, exist_ok=True)
    finished = Finished(job=job, outputs=outputs, progress=progress, earlier=Manifest.earlier(manifest))
    if job.trusted:
        records_of = _run_trusted(finished, store, planned)
    else:
        conceal = [store, cases.parent, earlier(cases.parent), manifest.parent, Path(planned.dataset)]
        on_gpu = job.stack_workers.gpu and _draws_much(planned)
        measuring = job.stack_workers if on_gpu else job.stack_workers.on_host()
        with _strangers(job, conceal) as pool, measuring.pool() as measuring_pool:
            references = References(
                job=job,
                outputs=outputs,
                pool=pool,
                measuring=measuring_pool,
                store=store,
                dataset=planned.dataset,
                progress=progress,
                drawing=job.device if on_gpu else "cpu",
            )
            records_of = _apart(references, finished, planned.definitions)
    Manifest(
        actor=job.actor,
        op_type=planned.op_type,
        code=job.code,
        environment=dict(job.stack),
        newest=finished.newest(records_of),
        cases=records_of,
    ).write(manifest)


def _run_trusted(finished: Finished, store: Path, planned: OpTypePlan) -> dict[str, Records]:
    """Records of all definitions of an actor that is ours or a pinned package's, by name."""
    job = finished.job
    with own_folder("scratch", store) as scratch, job.stack_workers.pool(most=job.workers) as pool:
        trusted = _Trusted(finished, pool, scratch, planned.dataset)
        return trusted.together(planned.definitions)


def _draws_much(planned: OpTypePlan) -> bool:
    """Whether a case's inputs are so large that workers which draw them are worth a GPU of their own."""
    return any(case.memory >= DRAWN_ON_GPU for case in planned.to_run)


def _strangers(job: Job, conceal: Sequence[Path]) -> Pool:
    """Workers for references, which do not see some folders."""
    return job.stack_workers.untrusted(
        readable=caches.readable(job.stack_workers.environment),  # kernels that trusted code compiled
        conceal=conceal,
        weak=job.weak_isolation,
    )


def _rows_drawn(entry: PlannedDefinition) -> int:
    """About how many draws of one row a reference makes: it often takes row after row."""
    return sum(planned.trials * math.prod(planned.case.axes.values()) for planned in entry.cases)


def _apart(
    references: References, finished: Finished, entries: Mapping[str, PlannedDefinition]
) -> dict[str, Records]:
    """Records of all definitions, each run in workers of its own, `lanes` of them at a time, the longest first."""
    order = sorted(entries, key=lambda name: -_rows_drawn(entries[name]))
    with lanes_of(references.job.lanes) as lanes:
        started = {
            name: lanes.submit(partial(_definition, references, finished, name, entries[name])) for name in order
        }
        found = {name: started[name].result() for name in entries}
    return {name: {case.id: found[name][case.id] for case in entry.cases} for name, entry in entries.items()}


def _definition(references: References, finished: Finished, name: str, entry: PlannedDefinition) -> Records:
    """Records of one definition by case id: from the store, else by running."""
    found, waiting = finished.of(name, entry)
    if any(planned.repeat for planned, _ in waiting):  # what it remembers shows in the hidden case after it
        names = {planned.id for planned, _ in waiting}
        waiting += [
            (planned, references.job.key(entry, planned))
            for planned in entry.cases
            if planned.hidden and planned.skip is None and planned.id not in names
        ]
    calls = [Call(planned=planned, key=key) for planned, key in waiting]
    return found | references.run(name, entry, calls) if calls else found


@dataclass(frozen=True, slots=True)
class _Trusted:
    """Runs an actor that is our own code or a pinned package's, all definitions in one worker."""

    finished: Finished
    pool: Pool
    scratch: Path
    dataset: str

    @property
    def job(self) -> Job:
        """The actor's run."""
        return self.finished.job

    def together(self, entries: Mapping[str, PlannedDefinition]) -> dict[str, Records]:
        """Records of all definitions, run in one worker: most of a short case's time would be starting up."""
        found: dict[str, Records] = {}
        waiting: list[dict[str, Any]] = []
        for name, entry in entries.items():
            own = entry.holding(planned for planned in entry.cases if self._runs(planned))
            found[name], unknown = self.finished.of(name, own)
            items = [self._item(name, planned, key) for planned, key in unknown]
            for first in items[:1]:
                first["seconds"] = self.job.seconds_of_first(entry)
            waiting += items
        timeouts: Counter[str] = Counter()
        while waiting:
            names = {item["definition"] for item in waiting}
            payload = self._payload() | {"definitions": {name: entries[name].definition for name in names}}
            items, waiting = waiting, []
            items[-1]["last"] = True
            for outcome in self._outcomes(payload, items):
                item = items[outcome.index]
                name = item["definition"]
                found[name][item["case"]["id"]] = self._finished(name, item, outcome)
                timeouts[name] += outcome.status == Status.TIMEOUT
                if outcome.status == Status.TIMEOUT and timeouts[name] == PATIENCE:
                    rest = items[outcome.index + 1 :]
                    found[name] |= self._given_up(name, [left for left in rest if left["definition"] == name])
                    waiting = [left for left in rest if left["definition"] != name]
                    break
        return found

    def _runs(self, planned: PlannedCase) -> bool:
        """Whether the actor runs a case: hidden ones are about strangers' code, and need the oracle alone."""
        return not planned.hidden or self.job.actor == ORACLE

    def _item(self, name: str, planned: PlannedCase, key: str) -> dict[str, Any]:
        repeat = planned.repeat and self.job.repeats
        device = self.job.device_of(planned)
        return {"definition": name, "case": planned.case.as_json(), "key": key, "repeat": repeat, "device": device}

    def _payload(self) -> dict[str, Any]:
        return {
            "actor": self.job.actor,
            "device": self.job.device,
            "threads": self.job.threads,
            "dataset": self.dataset,
            "variables": self.job.variables,
        }

    def _outcomes(self, payload: Mapping[str, Any], items: list[dict[str, Any]]) -> Iterator[ItemOutcome]:
        with self.pool.session(
            setup=SETUP_MANY,
            payload=payload,
            limits=self.job.limits,
            isolation=self.job.isolation,
            scratch=self.scratch,
        ) as session:
            for item in items:
                yield session.ask(item, item.get("seconds"))

    def _finished(self, name: str, item: Mapping[str, Any], outcome: ItemOutcome) -> RunRecord:
        record = self._record(item["key"], outcome)
        self.finished.progress.show(f"{name} {item['case']['id']}", record.status)
        return record

    def _given_up(self, name: str, items: list[dict[str, Any]]) -> Records:
        for item in items:
            self.finished.progress.show(f"{name} {item['case']['id']}", "error")
        outcome = given_up(self.job.limits)
        return {item["case"]["id"]: RunRecord.error(item["key"], outcome) for item in items}

    def _record(self, key: str, outcome: ItemOutcome) -> RunRecord:
        """What the manifest says of an outcome; a lasting one goes into the store, tensors first."""
        if outcome.status != Status.OK:
            record, tensors = RunRecord.error(key, outcome), None
        elif "no_space" in outcome.value:
            with disk_errors(self.scratch / f"{key}.safetensors"):
                raise OSError(errno.ENOSPC, outcome.value["no_space"])
        elif "skip" in outcome.value:  # what is absent may be there the next time: not kept
            return RunRecord.skipped(key, outcome.value["skip"], outcome.value["message"])
        else:
            record = RunRecord.ok(key, outcome, outcome.value, inputs=outcome.value["inputs"])
            tensors = self.scratch / f"{key}.safetensors"
        if outcome.status not in LASTING:
            return record
        return RunRecord.model_validate(self.finished.outputs.finish(key, record.as_json(), tensors))
