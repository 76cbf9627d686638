"""Judge: every actor's outputs against the oracle's, one verdict row per output, one file per op_type.

Definitions are judged in workers, since torch takes seconds to import, and several side by side.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.pipeline.records import REFERENCE, WHOLE, BrokenFile, OpTypePlan
from traceproof.pipeline.rows import VerdictRow, rows_text
from traceproof.pipeline.stages.judge_settings import REPLAY, JudgeSettings
from traceproof.pipeline.stages.lanes import dealt, lanes_of
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.pipeline.stages.stack_workers import OWN_CODE
from traceproof.reasons import Error, Verdict
from traceproof.store import write_text
from traceproof.untrusted.names import OP_TYPE, confined, path_part
from traceproof.worker import Isolation, Pool, Status

SETUP = "traceproof.pipeline.stages.op_type_judge:setup"


def judge(  # noqa: PLR0913 - a rule's inputs and outputs
    cases: Path, manifests: Sequence[Path], verdicts: Path, settings: JudgeSettings, pool: Pool, *, lanes: int = 1
) -> None:
    """Write the verdict rows of one op_type, one JSON object per line, in a fixed order.

    A definition whose outputs, code and tolerance were judged before is not judged again; `lanes` are judged side
    by side. Raises TraceproofError: the disk is full.
    """
    planned = OpTypePlan.read(cases)
    Manifest.merged(manifests)  # a damaged one ends the job here, with a message
    run = verdicts.parent.parent.absolute()
    replay = run / REPLAY / path_part(planned.op_type, OP_TYPE)
    shutil.rmtree(confined(replay, within=run / REPLAY), ignore_errors=True)  # an earlier run's
    payload = {
        "cases": str(cases.absolute()),
        "manifests": [str(path.absolute()) for path in manifests],
        "run": str(run),
        "settings": settings.as_json(),
        "threads": 1,
    }
    sizes = {name: sum(case.memory for case in entry.cases) for name, entry in planned.definitions.items()}
    shares = [share for share in dealt(sizes, lanes) if share]
    with lanes_of(max(1, len(shares))) as threads:
        found = dict(
            pair for part in threads.map(lambda names: _judged(names, payload, pool), shares) for pair in part
        )
    lines = [_broken_row(planned.op_type, broken).as_json() for broken in planned.broken]
    lines += [row for name in planned.definitions for row in found[name]]
    write_text(verdicts, rows_text(lines))


def _judged(
    names: Sequence[str], payload: Mapping[str, Any], pool: Pool
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows of some definitions, by one worker, as JSON objects."""
    items = [{"definition": name} for name in names]
    found = []
    for outcome in pool.run_items(
        setup=SETUP, payload=payload, items=items, limits=OWN_CODE, isolation=Isolation.TRUSTED
    ):
        name = names[outcome.index]
        if outcome.status is not Status.OK:
            raise RuntimeError(f"judging {name}: {outcome.status}: {outcome.message}")
        if "what" in outcome.value:
            raise TraceproofError.of_json(outcome.value)
        found.append((name, outcome.value["rows"]))
    return found


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
