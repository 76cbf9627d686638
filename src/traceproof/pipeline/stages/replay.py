"""Replay bundles: all that a failing case needs to be looked at again, elsewhere and later."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traceproof.pipeline.records import PlannedDefinition
from traceproof.pipeline.rows import VerdictRow
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.to_judge import ToJudge
from traceproof.reasons import Verdict
from traceproof.store import Store, linked, write_json
from traceproof.untrusted.names import path_part


@dataclass(frozen=True, slots=True)
class Bundles:
    """Writes `<root>/<definition>/<case>-<actor>/`: `replay.json`, and the outputs of the actor and of the oracle.

    `replay.json` holds the definition, the case with its seed (inputs are a pure function of these), the failing
    rows with digests, versions and device, and the command that repeats it.
    """

    run: Path  # the run's folder; rows name their bundle relative to it
    root: Path  # where this op_type's bundles go
    outputs: Store  # the store that tensors are linked from

    def write(self, rows: Sequence[VerdictRow], one: ToJudge) -> list[VerdictRow]:
        """Write the bundles of one definition's failing rows; gives all rows, these with where their bundle lies.

        Raises TraceproofError: the disk is full.
        """
        failing: dict[tuple[str, str], list[VerdictRow]] = {}
        written = []
        records, entry = one.others, one.entry
        for row in rows:
            fails = row.verdict == Verdict.FAIL and row.actor in records
            written.append(row.changed(replay=self._place(entry, row)) if fails else row)
            if fails:
                failing.setdefault((str(row.case), row.actor), []).append(written[-1])
        cases = {planned.id: planned.case.as_json() for planned in entry.cases}
        for (case, actor), about in failing.items():
            folder = self.run / about[0].replay
            folder.mkdir(parents=True)
            self._link(records[actor].get(case), folder / "outputs.safetensors")
            self._link(one.oracle.get(case), folder / "oracle.safetensors")
            content = {"repeat": about[0].repeat, "case": cases[case], "rows": [row.as_json() for row in about]}
            write_json(folder / "replay.json", content | {"definition": entry.definition})
        return written

    def _place(self, entry: PlannedDefinition, row: VerdictRow) -> str:
        """The folder of a row's bundle, relative to the run's."""
        folder = self.root / path_part(entry.definition["name"]) / path_part(f"{row.case}-{row.actor}")
        return folder.relative_to(self.run).as_posix()

    def _link(self, record: RunRecord | None, target: Path) -> None:
        source = None if record is None or record.key is None else self.outputs.tensors_path(record.key)
        if source is not None and source.is_file():
            linked(source, target)
