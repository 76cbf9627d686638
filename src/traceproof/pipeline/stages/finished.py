"""What a job need not run: cases whose outputs the store holds.

Most of them an edit leaves as they were. Their records are taken from what the same job left last, a sealed file,
where the store's files have not changed since, by their inodes: no record is parsed, no tensor is read. What has
changed, or is not in that file, is read and held to its digests, and run again where it is not what was written.
Whoever reads outputs later, as the judge does, holds them to the digest that their record states in any case.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from traceproof.pipeline.records import ORACLE, PlannedCase, PlannedDefinition
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.manifest import Manifest, Records
from traceproof.pipeline.stages.progress import Progress
from traceproof.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What the store holds of a job's cases."""

    job: Job
    outputs: Store
    progress: Progress
    earlier: Manifest | None = None  # what the same job left last

    def of(self, name: str, entry: PlannedDefinition) -> tuple[Records, list[tuple[PlannedCase, str]]]:
        """Records of a definition that need no run, by case id, and the cases that do, with their keys."""
        found: Records = {}
        waiting: list[tuple[PlannedCase, str]] = []
        lacking = entry.lacks(self.job.actor)
        for planned in entry.cases:
            if planned.skip is not None:
                record = RunRecord.skipped(None, planned.skip.reason, planned.skip.message)
                self._found(found, name, planned, record, "skip")
                continue
            key = self.job.key(entry, planned)
            if lacking is not None:
                record = RunRecord.skipped(key, lacking.reason, lacking.message)
                self._found(found, name, planned, record, "skip")
            elif planned.large and self.job.actor == ORACLE:
                record = RunRecord(key=key, status="ok", inputs=None)  # computed by the judge
                self._found(found, name, planned, record, "judge's")
            elif (kept := self._kept(name, planned.id, key)) is not None:
                self._found(found, name, planned, kept, "kept")
            else:
                waiting.append((planned, key))
        return found, waiting

    def newest(self, left: Mapping[str, Records]) -> int:
        """When the last of the store's files that belong to some records changed, or later."""
        latest = self.earlier.newest if self.earlier is not None else 0
        for name, records in left.items():
            before = self._before(name)
            new = (record for case, record in records.items() if record is not before.get(case))
            latest = max(latest, *(self._changed(record) or 0 for record in new if record.status != "skip"), 0)
        return latest

    def _before(self, name: str) -> Mapping[str, RunRecord]:
        """A definition's earlier records by case id."""
        return {} if self.earlier is None else self.earlier.of(name)

    def _found(self, found: Records, name: str, planned: PlannedCase, record: RunRecord, word: str) -> None:
        found[planned.id] = record
        self.progress.show(f"{name} {planned.id}", word)

    def _kept(self, name: str, case: str, key: str) -> RunRecord | None:
        if self.job.force:
            return None
        weak = self.job.weak_isolation
        before = self._before(name).get(case)
        if before is not None and before.key == key and self._stands(before):
            return before if weak or not before.isolation else None
        kept = RunRecord.kept(self.outputs.record(key), key, weak=weak)
        return kept if kept is not None and self.outputs.whole(key, kept.as_json()) else None

    def _stands(self, record: RunRecord) -> bool:
        """Whether an earlier record is as it was: of a skip, in the same stack, nothing is in the store."""
        if record.status == "skip":
            return True
        changed = self._changed(record)
        return self.earlier is not None and changed is not None and changed <= self.earlier.newest

    def _changed(self, record: RunRecord) -> int | None:
        return self.outputs.changed(str(record.key), tensors=record.tensors is not None) if record.key else None
