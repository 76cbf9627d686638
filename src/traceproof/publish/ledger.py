"""The ledger: what was proved of a definition, against which ground truth, with what.

`status:verified` is earned here and nowhere else. There is one record per definition and implementation (the
reference, and
each ground truth), all against the oracle; a definition stands as verified while its reference and at least one
ground truth passed everything that was compared, on the definition's present digest. Without an oracle, two ground
truths are needed.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_bytes, digest_json
from traceproof.errors import TraceproofError
from traceproof.files import write_json, write_text
from traceproof.ops.cases import is_hidden
from traceproof.reasons import Verdict
from traceproof.run.implementations import PAIR
from traceproof.run.schema import ORACLE, SHADOW, WHOLE, RowDigests, VerdictRow, read_rows
from traceproof.stacks import TRUTHS

REFERENCE = "reference"
STATUS = "status:"
DATES = "ledger-dates.json"  # below the results: the day on which each record was first written, by its digest
NEEDED = 2  # independent ground truths, where the reference's shadow stands in for an oracle
VERIFIED, UNVERIFIED = f"{STATUS}verified", f"{STATUS}unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one implementation's verdicts on one definition come to."""

    definition: str
    op_type: str
    implementation: str  # `reference`, or a ground truth
    status: str  # `passed` (something was compared and nothing failed), `failed`, or `not run`
    reason: str  # why it is not `passed`; empty if it is
    cases: tuple[str, ...]  # ids of the cases of which an output was compared and passed
    compared: int  # outputs that passed; skipped: rows skipped, by reason
    skipped: Mapping[str, int]
    # by output, the kind of gate and the largest share of its limit that was used
    gates: Mapping[str, Mapping[str, Any]]
    # definition, reference, code, environment, inputs (of all cases compared), verdicts
    digests: Mapping[str, str | None]
    # versions, device, seed: what it ran with
    versions: Mapping[str, str]
    device: str | None
    seed: int | None
    date: str  # UTC day on which a record of exactly this content was first written
    # `oracle`, or `shadow`: the reference's own float64, where there is no independent oracle
    against: str = ORACLE
    infinite: tuple[str, ...] = ()  # of its cases, those whose right outputs hold NaN or infinities

    @property
    def passed(self) -> bool:
        """Whether it counts as evidence."""
        return self.status == "passed"


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a definition is verified, by whom, and if not, why."""

    truths: tuple[str, ...]  # ground truths that passed, in order of priority
    reason: str  # one line; empty if verified

    @property
    def verified(self) -> bool:
        """Whether the tag `status:verified` is earned."""
        return not self.reason


class Ledger:
    """All records, by definition and implementation."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records: dict[str, dict[str, Record]] = {}
        for record in records:
            self.records.setdefault(record.definition, {})[record.implementation] = record

    def standing(self, definition: Definition) -> Standing:
        """What the records say of a definition as it is now."""
        records = self.records.get(definition.name, {})
        reference = records.get(REFERENCE)
        if reference is None:
            return Standing((), "it was not run")
        if reference.digests["definition"] != definition.digest:
            return Standing((), "it changed since it was verified; verify it again")
        alone = definition.constants.alone if reference.against != SHADOW else ()
        if alone or not reference.passed:
            told = f"{'; '.join(alone)}; its description should state it"
            return Standing((), told if reference.passed else f"its reference: {reference.reason}")
        truths = tuple(name for name in TRUTHS if name in records and _supports(records[name], reference))
        if not truths:
            ran = [records[name] for name in TRUTHS if name in records]
            why = "; ".join(
                f"{item.implementation}: {item.reason or 'other cases, or another state'}" for item in ran
            )
            return Standing((), f"no ground truth was compared ({why or 'none ran'})")
        if reference.against == SHADOW and len(truths) < NEEDED:
            return Standing((), f"no oracle, and {len(truths)} of the {NEEDED} ground truths needed then")
        return Standing(truths, "")

    def write(self, path: Path) -> None:
        """One record a line, sorted. Raises TraceproofError: the disk is full."""
        records = (record for _, group in sorted(self.records.items()) for _, record in sorted(group.items()))
        lines = (json.dumps(asdict(record), sort_keys=True, ensure_ascii=False) for record in records)
        write_text(path, "".join(f"{line}\n" for line in lines))

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """Read it back. Raises TraceproofError: it is missing or torn."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            values = map(json.loads, lines)
            tuples = ("cases", "infinite")
            return cls(Record(**value | {name: tuple(value[name]) for name in tuples}) for value in values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            todo = "Run `snakemake --cores 4 ledger` or `traceproof publish` to write it anew."
            raise TraceproofError(f"the ledger {path} cannot be read: {error}", todo=todo) from error


def _supports(truth: Record, reference: Record) -> bool:
    """Whether a ground truth passed, on the same definition, in a case in which the reference did."""
    same = truth.digests["definition"] == reference.digests["definition"]
    return truth.passed and same and not set(truth.cases).isdisjoint(reference.cases)


def keep(verdicts: Sequence[Path], path: Path, results: Path, *, references: Mapping[str, str]) -> Ledger:
    """Write the ledger of a run out of its verdict files, and give it back.

    The results folder remembers the day on which a record was first written; references count by their digests.
    Raises TraceproofError: a verdict file is missing or torn, or the disk is full.
    """
    dates, today = read_dates(results), datetime.now(tz=UTC).date().isoformat()
    rows = (row for file in verdicts for row in read_rows(file))
    ledger = Ledger(records(rows, lambda key: dates.setdefault(key, today), references))
    write_json(results / DATES, dates)
    ledger.write(path)
    return ledger


def read_dates(results: Path) -> dict[str, str]:
    """The day on which each record was first written, by the digest of its content."""
    try:
        found: dict[str, str] = json.loads((results / DATES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def records(
    rows: Iterable[VerdictRow], date: Callable[[str], str], references: Mapping[str, str]
) -> Iterator[Record]:
    """The records that verdict rows come to, one per definition and implementation.

    `date` gives the day on which a record was first written, by the digest of its content.
    """
    groups: dict[tuple[str, str], list[VerdictRow]] = {}
    for row in rows:
        if PAIR not in row.implementation:  # two ground truths held against each other: evidence beside the point
            groups.setdefault((row.definition, row.implementation), []).append(row)
    for (name, _), group in groups.items():
        yield _record(group, date, references.get(name, ""))


def _record(rows: Sequence[VerdictRow], date: Callable[[str], str], reference: str) -> Record:
    first = rows[0]
    fixed = [
        row for row in rows if not is_hidden(row.case) and not row.scaled_down
    ]  # others meet other hidden cases
    compared = [row for row in fixed if row.verdict == Verdict.PASS and row.output != WHOLE]
    skipped = Counter(str(row.reason) for row in rows if row.verdict == Verdict.SKIP)
    known = next((row for row in fixed if row.digests != RowDigests()), first)
    content: dict[str, Any] = {
        "definition": first.definition,
        "op_type": first.op_type,
        "implementation": first.implementation,
        "against": next((row.against for row in compared if row.against is not None), ORACLE),
        **_status(rows, compared, skipped),
        "cases": tuple(dict.fromkeys(row.case for row in compared)),
        "infinite": tuple(
            dict.fromkeys(row.case for row in compared if row.metrics.get("finite") != row.metrics.get("elements"))
        ),
        "compared": len(compared),
        "skipped": dict(sorted(skipped.items())),
        "gates": _gates(compared),
        "digests": _digests(known.digests, fixed, compared, reference),
        "versions": known.versions or {},
        "device": known.device,
        "seed": known.seed,
    }
    return Record(**content, date=date(digest_json(content)))


def _digests(
    known: RowDigests, fixed: Sequence[VerdictRow], compared: Sequence[VerdictRow], reference: str
) -> dict[str, str | None]:
    inputs = sorted({(str(row.case), str(row.digests.inputs)) for row in compared})
    return {
        "definition": known.definition,
        "reference": digest_bytes(reference.encode()) if reference else None,
        "code": known.code,
        "environment": known.environment,
        "inputs": digest_json(inputs),
        "verdicts": digest_json([row.as_json() for row in fixed]),
    }


def _status(
    rows: Sequence[VerdictRow], compared: Sequence[VerdictRow], skipped: Mapping[str, int]
) -> dict[str, str]:
    bad = [row for row in rows if row.bad]
    if bad:
        row = bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        where = f"case {row.case}, {row.output}" if row.case else "the file"
        return {"status": "failed", "reason": f"{row.verdict} {row.reason} in {where}{more}"}
    if any(row.scaled_down for row in rows):
        return {"status": "not run", "reason": "too large, judged by a scaled-down definition alone"}
    if any(row.tolerance is not None for row in rows):
        return {"status": "not run", "reason": "judged by a tolerance of the user's own, which proves nothing"}
    if not compared:
        why = ", ".join(f"{reason} {count}" for reason, count in skipped.items())
        return {"status": "not run", "reason": f"nothing was compared ({why or 'no numerics'})"}
    return {"status": "passed", "reason": ""}


def _gates(compared: Iterable[VerdictRow]) -> dict[str, dict[str, Any]]:
    """By output: the gates' kinds, the largest share of a limit that was used, and the case it was in."""
    gates: dict[str, dict[str, Any]] = {}
    for row in compared:
        entry = gates.setdefault(row.output, {"kinds": [], "margin": None, "case": None})
        kind, margin = (None, None) if row.gate is None else (row.gate.kind, row.gate.margin)
        if kind and kind not in entry["kinds"]:
            entry["kinds"] = sorted([*entry["kinds"], kind])
        if margin is not None and (entry["margin"] is None or margin > entry["margin"]):
            entry |= {"margin": margin, "case": row.case}
    return gates


def tagged(definition: Definition, standing: Standing) -> tuple[str, ...]:
    """The definition's tags with the status derived from the ledger, in its old place or in front."""
    status = VERIFIED if standing.verified else UNVERIFIED
    tags = list(definition.tags)
    places = [index for index, tag in enumerate(tags) if tag.startswith(STATUS)]
    rest = [tag for tag in tags if not tag.startswith(STATUS)]
    rest.insert(places[0] if places else 0, status)
    return tuple(rest)
