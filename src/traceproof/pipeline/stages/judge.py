"""Judge: every actor's outputs against the oracle's, one verdict row per output, one file per op_type.

Definitions are judged in workers, since torch takes seconds to import, and several side by side. The text of a
definition's rows is kept under the digest of all that they depend on: outputs are read, and held to the digests
that their records state, where something is judged, and not where all is as it was judged before.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from traceproof.errors import TraceproofError
from traceproof.pipeline.records import REFERENCE, WHOLE, BrokenFile, OpTypePlan
from traceproof.pipeline.rows import VerdictRow, rows_text
from traceproof.pipeline.stages.judge_settings import REPLAY, JudgeSettings
from traceproof.pipeline.stages.lanes import dealt, lanes_of
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.pipeline.stages.replay import Bundles
from traceproof.pipeline.stages.stack_workers import OWN_CODE
from traceproof.pipeline.stages.to_judge import DAMAGED, ToJudge
from traceproof.reasons import Error, Verdict
from traceproof.store import DamagedError, write_text
from traceproof.untrusted.names import OP_TYPE, confined, path_part
from traceproof.worker import Isolation, Pool, Status

SETUP = "traceproof.pipeline.stages.definition_judge:setup"
LINES, FAILS = "lines", "fails"  # keys of kept rows: their text, and whether any fails


def judge(  # noqa: PLR0913 - a rule's inputs and outputs
    cases: Path, manifests: Sequence[Path], verdicts: Path, settings: JudgeSettings, pool: Pool, *, lanes: int = 1
) -> None:
    """Write the verdict rows of one op_type, one JSON object per line, in a fixed order.

    A definition whose outputs, code and tolerance were judged before is not judged again; `lanes` are judged side
    by side. Raises TraceproofError: the disk is full, or outputs are not what was written.
    """
    planned = OpTypePlan.read(cases)
    left = Manifest.merged(manifests)
    run = verdicts.parent.parent.absolute()
    replay = run / REPLAY / path_part(planned.op_type, OP_TYPE)
    shutil.rmtree(confined(replay, within=run / REPLAY), ignore_errors=True)  # an earlier run's
    judges = {name: _Judge.of(ToJudge.of(planned, name, left), settings) for name in planned.definitions}
    found = {name: settings.judged.record(one.key) for name, one in judges.items()}
    lacking = [name for name, rows in found.items() if rows is None]
    sizes = {name: sum(case.memory for case in planned.definitions[name].cases) for name in lacking}
    shares = [[judges[name] for name in share] for share in dealt(sizes, lanes) if share]
    try:
        with lanes_of(max(1, len(shares))) as threads:
            for part in threads.map(lambda share: dict(_judged(share, settings, pool)), shares):
                found |= part
    except DamagedError:
        for path in manifests:  # jobs that run again find what is whole, and compute the rest anew
            path.unlink(missing_ok=True)
        raise
    bundles = Bundles(run, replay, settings.outputs)
    lines = [rows_text([_broken_row(planned.op_type, broken).as_json() for broken in planned.broken])]
    lines += [judges[name].finished(rows, bundles) for name, rows in found.items() if rows is not None]
    write_text(verdicts, "".join(lines))


@dataclass(frozen=True, slots=True)
class _Judge:
    """One definition's rows, in the store and out of it."""

    one: ToJudge
    settings: JudgeSettings
    key: str  # of the rows

    @classmethod
    def of(cls, one: ToJudge, settings: JudgeSettings) -> Self:
        """Of one definition."""
        return cls(one, settings, one.key(settings))

    @property
    def mark(self) -> str:
        """What stands for the options of commands in kept text, as those are a run's; nobody can guess it."""
        return f"--options-of={self.key}"

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Rows that a worker gave, in the store."""
        fails = any(row["verdict"] == Verdict.FAIL for row in rows)
        return self.settings.judged.finish(self.key, {LINES: rows_text(rows), FAILS: fails})

    def finished(self, rows: Mapping[str, Any], bundles: Bundles) -> str:
        """The text of kept rows with a run's options; bundles of what fails are written."""
        options = json.dumps(self.settings.options, ensure_ascii=False)[1:-1]
        text = str(rows[LINES]).replace(f" {self.mark}", f" {options}" if options else "")
        if not rows[FAILS]:
            return text
        typed = [VerdictRow.model_validate_json(line) for line in text.splitlines()]
        return rows_text([row.as_json() for row in bundles.write(typed, self.one)])


def _judged(share: Sequence[_Judge], settings: JudgeSettings, pool: Pool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of some definitions, by one worker, each kept as it comes."""
    payload = {"settings": settings.as_json(), "threads": 1}
    with pool.session(setup=SETUP, payload=payload, limits=OWN_CODE, isolation=Isolation.TRUSTED) as session:
        for judge in share:
            item = judge.one.model_dump(mode="json", exclude_unset=True)
            outcome = session.ask({"to_judge": item, "options": judge.mark})
            if outcome.status is not Status.OK:
                raise RuntimeError(f"judging {judge.one.name}: {outcome.status}: {outcome.message}")
            if "what" in outcome.value:
                raise (DamagedError if outcome.value[DAMAGED] else TraceproofError).of_json(outcome.value)
            yield judge.one.name, judge.keep(outcome.value["rows"])


def _broken_row(op_type: str, broken: BrokenFile) -> VerdictRow:
    return VerdictRow(
        definition=Path(broken.path).stem,
        op_type=op_type,
        case=None,
        actor=REFERENCE,
        against=None,
        output=WHOLE,
        verdict=Verdict.ERROR,
        reason=Error.DEFINITION,
        message=broken.message,
        path=broken.path,
    )
