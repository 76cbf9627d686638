"""References that are known to diverge: from the verdicts of the last run, and from the list of known findings."""

from collections.abc import Iterator
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.environments.versions import said
from traceproof.run.known import read_known
from traceproof.run.records import REFERENCE
from traceproof.run.rows import VerdictRow, read_rows


class Divergences:
    """What is known of references, by definition; a file or folder that is None or absent holds nothing.

    Raises TraceproofError: the file of known findings can not be used.
    """

    def __init__(self, *, verdicts: Path | None, known: Path | None) -> None:
        self._rows: dict[str, list[VerdictRow]] = {}
        for row in _rows(verdicts):
            self._rows.setdefault(row.definition, []).append(row)
        self._known = read_known(known).findings if known is not None and known.is_file() else []

    def of(self, definition: Definition) -> tuple[str, ...]:
        """One line per case that diverges, sorted; verdicts over another version of the definition do not count.

        Which packages the tests will meet is not known here, so a finding's versions are named.
        """
        found = {
            row.case: row.reason
            for row in self._rows.get(definition.name, ())
            if row.digests.definition == definition.digest
        }
        for entry in self._known:
            if entry.means(definition.name, definition.digest) and entry.actor == REFERENCE:
                found.update(dict.fromkeys(entry.cases, f"{entry.reason}{said(entry.versions)}"))
        return tuple(f"case {case}: {reason}" for case, reason in sorted(found.items()))


def _rows(verdicts: Path | None) -> Iterator[VerdictRow]:
    if verdicts is None:
        return
    for path in sorted(verdicts.glob("*.jsonl")):
        yield from (row for row in read_rows(path) if row.actor == REFERENCE and row.bad and row.case is not None)
