"""Run: one actor over the cases of one op_type, in worker processes, into the store."""

from __future__ import annotations

import errno
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from traceproof.actors import caches
from traceproof.reasons import Error
from traceproof.stages.job import Job
from traceproof.stages.lanes import lanes_of
from traceproof.stages.manifest import Manifest
from traceproof.stages.progress import Progress
from traceproof.store import Store, disk_errors
from traceproof.worker import ItemOutcome, Pool, Status, policy

SETUP = "traceproof.actors.execute:setup"
SETUP_MANY = "traceproof.actors.execute:setup_many"
REASONS: Mapping[Status, Error] = {
    Status.ERROR: Error.EXCEPTION,
    Status.TIMEOUT: Error.TIMEOUT,
    Status.MEMORY: Error.MEMORY,
    Status.CRASH: Error.CRASH,
    Status.OUTPUT: Error.OUTPUT,
    Status.PROCESSES: Error.PROCESSES,
    Status.REFUSED: Error.REFUSED,
}
# CUDA does not start behind Landlock (cuInit gives 304, seen with driver 580); the file view of its own stays.
CUDA_REFUSES = ("landlock",)
ORACLE = "oracle"
MANY_TRIALS = 100  # draws of a reference, a call each: a second and more
PATIENCE = 2  # timeouts of one definition after which its other cases are not waited for
# Outcomes that the same code and inputs would meet again; a timeout or too much memory may be the machine's doing.
LASTING = frozenset({Status.OK, Status.ERROR, Status.OUTPUT, Status.REFUSED})


def run(cases: Path, manifest: Path, store: Path, job: Job) -> None:
    """Run what the store lacks, and write the manifest.

    A case that fails costs itself alone; each finished case is in the store before the next one starts.

    Raises:
        TraceproofError: the disk is full. What was finished stays.
    """
    planned = json.loads(cases.read_text(encoding="utf-8"))
    outputs = Store(store, "outputs")
    total = sum(len(entry["cases"]) for entry in planned["definitions"].values())
    progress = Progress(f"{job.actor:10} {planned['op_type']:12}", total)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    store.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="scratch-", dir=store) as scratch,
        job.crew.pool(
            # A workload line's blobs, and kernels that trusted code compiled.
            readable=[Path(planned["dataset"]), *caches.readable(job.crew.environment)],
            without=CUDA_REFUSES if job.crew.gpu else (),
            most=job.workers,
        ) as pool,
    ):
        runner = _Runner(job, outputs, pool, Path(scratch), planned["dataset"], progress)
        run_all = runner.together if job.trusted else runner.apart
        records = run_all(planned["definitions"])
    Manifest(
        actor=job.actor,
        op_type=planned["op_type"],
        code=job.code,
        environment=job.stack,
        cases=records,
    ).write(manifest)


def _parts(cases: list[dict[str, Any]], *, apart: bool) -> list[list[dict[str, Any]]]:
    """Cases by the worker that runs them."""
    if not apart:
        return [cases]
    long = [planned for planned in cases if planned["trials"] >= MANY_TRIALS]
    rest = [planned for planned in cases if planned["trials"] < MANY_TRIALS]
    return [*([planned] for planned in long), *([rest] if rest else [])]


@dataclass(frozen=True, slots=True)
class _Runner:
    job: Job
    outputs: Store
    pool: Pool
    scratch: Path
    dataset: str
    progress: Progress

    def definition(self, name: str, entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Records of one definition by case id: from the store, else by running."""
        records, items = self._known(name, entry)
        return records | dict(self._run(name, entry, items)) if items else records

    def apart(self, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Records of all definitions, each run in a worker of its own, `lanes` of them at a time.

        Where there are several lanes, a case of many draws has a worker to itself, and these start first: one
        after another they would take longer than all other cases together.
        """
        apart = self.job.lanes > 1
        parts = [
            (name, {**entry, "cases": cases})
            for name, entry in entries.items()
            for cases in _parts(entry["cases"], apart=apart)
        ]
        parts.sort(key=lambda part: -sum(planned["trials"] for planned in part[1]["cases"]) if apart else 0)
        with lanes_of(self.job.lanes) as lanes:
            started = [(name, lanes.submit(partial(self.definition, name, part))) for name, part in parts]
            found: dict[str, dict[str, Any]] = {name: {} for name in entries}
            for name, running in started:
                found[name] |= running.result()
        order = {name: [planned["case"]["id"] for planned in entry["cases"]] for name, entry in entries.items()}
        return {name: {case: found[name][case] for case in cases} for name, cases in order.items()}

    def together(self, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Records of all definitions, run in one worker: most of a short case's time would be starting up."""
        records: dict[str, dict[str, Any]] = {}
        waiting: list[dict[str, Any]] = []
        for name, entry in entries.items():
            records[name], items = self._known(name, entry)
            waiting += [item | {"definition": name} for item in items]
        timeouts: Counter[str] = Counter()
        while waiting:
            names = {item["definition"] for item in waiting}
            payload = self._payload() | {"definitions": {name: entries[name]["definition"] for name in names}}
            items, waiting = waiting, []
            for outcome in self._outcomes(SETUP_MANY, payload, items):
                item = items[outcome.index]
                name = item["definition"]
                records[name][item["case"]["id"]] = self._finished(name, item, outcome)
                timeouts[name] += outcome.status == Status.TIMEOUT
                if outcome.status == Status.TIMEOUT and timeouts[name] == PATIENCE:
                    rest = items[outcome.index + 1 :]
                    records[name] |= self._given_up(name, [left for left in rest if left["definition"] == name])
                    waiting = [left for left in rest if left["definition"] != name]
                    break
        return records

    def _known(
        self, name: str, entry: Mapping[str, Any]
    ) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """Records that need no run, by case id, and the items that do."""
        records: dict[str, dict[str, Any]] = {}
        items: list[dict[str, Any]] = []
        for planned in entry["cases"]:
            case_id = planned["case"]["id"]
            if planned["skip"] is not None:
                records[case_id] = {"status": "skip", **planned["skip"], "key": None}
                self.progress.show(f"{name} {case_id}", "skip")
                continue
            key = self.job.key(entry, planned)
            if planned["large"] and self.job.actor == ORACLE:
                records[case_id] = {"key": key, "status": "ok", "inputs": None}  # computed by the judge
                self.progress.show(f"{name} {case_id}", "judge's")
                continue
            kept = None if self.job.force else self.outputs.record(key)
            if kept is not None:
                records[case_id] = kept
                self.progress.show(f"{name} {case_id}", "kept")
                continue
            repeat = planned["repeat"] and self.job.repeats
            items.append(
                {"case": planned["case"], "key": key, "repeat": repeat, "device": self.job.device_of(planned)}
            )
        return records, items

    def _payload(self) -> dict[str, Any]:
        return {
            "actor": self.job.actor,
            "device": self.job.device,
            "threads": self.job.threads,
            "dataset": self.dataset,
            "variables": self.job.variables,
        }

    def _outcomes(
        self, setup: str, payload: Mapping[str, Any], items: list[dict[str, Any]]
    ) -> Iterator[ItemOutcome]:
        return self.pool.run_items(
            setup=setup,
            payload=payload,
            items=items,
            limits=self.job.limits,
            isolation=self.job.isolation,
            scratch=self.scratch,
        )

    def _finished(self, name: str, item: Mapping[str, Any], outcome: ItemOutcome) -> dict[str, Any]:
        record = self._record(item["key"], outcome)
        self.progress.show(f"{name} {item['case']['id']}", record["status"])
        return record

    def _run(
        self, name: str, entry: Mapping[str, Any], items: list[dict[str, Any]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        refusals = [] if self.job.trusted else policy.check(entry["definition"]["reference"])
        if refusals:
            message = "; ".join(str(refusal) for refusal in refusals)
            outcomes: Iterator[ItemOutcome] = (
                ItemOutcome(index=index, status=Status.REFUSED, message=message) for index in range(len(items))
            )
        else:
            outcomes = self._outcomes(SETUP, self._payload() | {"definition": entry["definition"]}, items)
        timeouts = 0
        for outcome in outcomes:
            item = items[outcome.index]
            yield item["case"]["id"], self._finished(name, item, outcome)
            timeouts += outcome.status == Status.TIMEOUT
            if timeouts == PATIENCE:
                yield from self._given_up(name, items[outcome.index + 1 :]).items()
                return

    def _given_up(self, name: str, items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        limit = f"{self.job.limits.seconds:g} s"
        message = f"not run: {PATIENCE} cases of this definition ran into the limit of {limit}"
        for item in items:
            self.progress.show(f"{name} {item['case']['id']}", "error")
        record = {"status": "error", "reason": Error.TIMEOUT, "message": message}
        return {item["case"]["id"]: record | {"key": item["key"]} for item in items}

    def _record(self, key: str, outcome: ItemOutcome) -> dict[str, Any]:
        """What the manifest says of an outcome; a lasting one goes into the store, tensors first."""
        if outcome.status == Status.OK and "no_space" in outcome.value:
            with disk_errors(self.scratch / f"{key}.safetensors"):
                raise OSError(errno.ENOSPC, outcome.value["no_space"])
        record: dict[str, Any] = {"key": key, "status": "ok", "peak_bytes": outcome.peak_bytes}
        tensors: Path | None = None
        if outcome.status != Status.OK:
            record |= {
                "status": "error",
                "reason": REASONS[outcome.status],
                "message": outcome.message,
                "seconds": outcome.seconds,
            }
        elif "skip" in outcome.value:
            record |= {"status": "skip", "reason": outcome.value["skip"], "message": outcome.value["message"]}
        else:
            record |= outcome.value
            tensors = self.scratch / f"{key}.safetensors"
        if outcome.status in LASTING and record["status"] != "skip":  # what is absent may be there the next time
            self.outputs.finish(key, record, tensors)
        return record
