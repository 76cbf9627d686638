"""What makes a run's rows of judged ones: the command that repeats each, and bundles of what fails."""

from collections.abc import Sequence
from pathlib import Path

from traceproof.files import write_json
from traceproof.names import OP_TYPE, path_part
from traceproof.reasons import Verdict
from traceproof.run.implementations import PAIR
from traceproof.run.records import PlannedDefinition
from traceproof.run.rows import VerdictRow

REPLAY = "replay"  # folder of a run's replay bundles


def finished(
    rows: Sequence[VerdictRow], entry: PlannedDefinition, *, options: str, run: Path | None = None
) -> list[VerdictRow]:
    """The rows with whole commands; with a run's folder, a bundle of every failing case is written there.

    A bundle, `<run>/replay/<op_type>/<definition>/<case>-<implementation>/replay.json`, holds the definition, the
    case with its seed (inputs are a pure function of these), the failing rows, and the command that repeats it.
    `options` are the run's own, of commands.
    """
    found: list[VerdictRow] = []
    failing: dict[str, list[VerdictRow]] = {}
    for row in rows:
        whole = row.changed(repeat=row.command(options))
        if run is not None and row.verdict == Verdict.FAIL and PAIR not in row.actor:
            names = path_part(entry.definition["name"]), path_part(f"{row.case}-{row.actor}")
            place = Path(REPLAY, path_part(row.op_type, OP_TYPE), *names).as_posix()
            whole = whole.changed(replay=place)
            failing.setdefault(place, []).append(whole)
        found.append(whole)
    cases = {planned.id: planned.case.as_json() for planned in entry.cases}
    for place, about in failing.items():
        content = {
            "repeat": about[0].repeat,
            "case": cases[str(about[0].case)],
            "rows": [row.as_json() for row in about],
            "definition": entry.definition,
        }
        assert run is not None
        write_json(run / place / "replay.json", content)
    return found
