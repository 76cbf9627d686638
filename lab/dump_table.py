"""What became of each definition of a run: a table by op_type of grades and reasons, references and one kernel.

It reads what is there, so it serves a run that goes on or was cut off: of an op_type without verdicts it says what
its actors left (`ran` where there are outputs that nobody judged), and `not reached` of those that left nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from traceproof.pipeline.records import REFERENCE, WHOLE, OpTypePlan
from traceproof.pipeline.rows import VerdictRow, read_rows
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.grades import shadow_grade
from traceproof.pipeline.stages.manifest import Manifest, manifests_of
from traceproof.reasons import Error, Grade, Skip, Verdict

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("run", type=Path, help="a run's folder, with cases/ and verdicts/")
PARSER.add_argument("--kernel", default="flashinfer", help="the ground truth of the second column")
PARSER.add_argument("--reasons", type=Path, help="file: a line per definition and actor, with the reason")
NOT_REACHED, RAN, NO_CASE = "not reached", "ran", "no case"
WORDS = {Error.EXCEPTION: "raises", Skip.NO_REFERENCE: "no reference"}


def of_reference(rows: Iterable[VerdictRow]) -> str:
    """What became of a reference: its grade, or the reason that it has none."""
    found = list(rows)
    grades = {row.grade for row in found if row.grade is not None}
    stopped = _stopped(found)
    if stopped or not grades:
        return stopped or "not run"
    oracle = grades & {Grade.PROVED, Grade.CHECKED, Grade.TWIN}
    return str(min(oracle, key=list(Grade).index) if oracle else shadow_grade(grades))


def of_kernel(rows: Iterable[VerdictRow]) -> str:
    """What became of a kernel: whether it passed all its cases, or the reason that it did not."""
    found = [row for row in rows if row.output != WHOLE or row.verdict is not Verdict.PASS]
    passed = any(row.verdict is Verdict.PASS for row in found)
    stopped = _stopped(found)
    if not stopped:
        return "pass" if passed else "not run"
    return "some cases" if passed else stopped


def _stopped(rows: Iterable[VerdictRow]) -> str:
    """The word for the worst thing that kept rows from passing; empty: nothing did."""
    worst = _worst(rows)
    return "" if worst is None else _word(worst)


def _worst(rows: Iterable[VerdictRow]) -> VerdictRow | None:
    """The row of the worst thing that kept rows from passing; None: nothing did."""
    order = {Verdict.FAIL: 0, Verdict.ERROR: 1, Verdict.SKIP: 2}
    return min((row for row in rows if row.verdict in order), key=lambda row: order[row.verdict], default=None)


def _word(row: VerdictRow) -> str:
    if row.verdict is Verdict.FAIL:
        return "fails"
    return _plain(row.reason)


def _plain(reason: object) -> str:
    """The word for a reason."""
    return next((word for known, word in WORDS.items() if reason == known), str(reason))


def _reason(rows: Iterable[VerdictRow]) -> str:
    """The worst thing that kept rows from passing, in one line."""
    row = _worst(rows)
    return "" if row is None else f"{row.case}\t{row.output}\t{row.verdict}\t{row.reason}\t{_last(row.message)}"


def judged(path: Path, plan: OpTypePlan, kernel: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """By definition of a file of verdicts what became of reference and kernel; and lines with the reasons."""
    rows: dict[tuple[str, str], list[VerdictRow]] = defaultdict(list)
    for row in read_rows(path):
        rows[row.definition, row.actor].append(row)
    lines = [f"{path.stem}\t{name}\t{actor}\t{_reason(found)}" for (name, actor), found in sorted(rows.items())]
    named = {name for name, _ in rows}
    made = {
        name: (
            of_reference(rows[name, REFERENCE]),
            of_kernel(rows[name, kernel]) if (name, kernel) in rows else "",
        )
        for name in sorted(named)
    }
    return dict.fromkeys(plan.whole, (NO_CASE, "")) | made, lines


def left(folder: Path, plan: OpTypePlan, kernel: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The same of an op_type without verdicts, by what its actors left in their folder."""
    found = {
        actor: Manifest.merged(paths)[actor]
        for actor in (REFERENCE, kernel)
        if (paths := manifests_of(folder, actor))
    }
    made, lines = {}, []
    for name, entry in plan.whole.items():
        words = []
        for actor in (REFERENCE, kernel):
            records = found[actor].of(name) if actor in found else {}
            words.append(of_records(records.values()) if entry.cases else "")
            lines += [
                f"{plan.op_type}\t{name}\t{actor}\t{case}\t*\t{one.status}\t{one.reason}\t{_last(one.message)}"
                for case, one in records.items()
            ]
        made[name] = (words[0], words[1]) if entry.cases else (NO_CASE, "")
    return made, lines


def of_records(records: Iterable[RunRecord]) -> str:
    """What became of an actor's calls, before anything is judged."""
    found = list(records)
    stopped = [one for one in found if one.status != "ok"]
    return _plain(stopped[0].reason) if stopped else RAN if found else NOT_REACHED


def _last(message: str) -> str:
    return (message.strip().splitlines() or [""])[-1][:300]


def counts(values: Iterable[str]) -> str:
    """`proved 3, raises 1`, the most frequent first."""
    found = Counter(value for value in values if value)
    return ", ".join(f"{word} {count}" for word, count in found.most_common())


def table(made: Mapping[str, Mapping[str, tuple[str, str]]], kernel: str) -> str:
    """The table in Markdown, an op_type a line."""
    lines = [f"| op_type | definitions | reference | {kernel} |", "|---|---:|---|---|"]
    everything = [one for found in made.values() for one in found.values()]
    groups = [
        *((op_type, list(found.values())) for op_type, found in sorted(made.items())),
        ("**all**", everything),
    ]
    for op_type, found in groups:
        words = [counts(column) for column in zip(*found, strict=True)] or ["", ""]
        lines.append(f"| {op_type} | {len(found)} | {words[0]} | {words[1]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table."""
    options = PARSER.parse_args()
    made: dict[str, dict[str, tuple[str, str]]] = {}
    reasons: list[str] = []
    plans = sorted((options.run / "cases").glob("*.json"))
    if not plans:
        PARSER.error(f"{options.run} holds no plan: it is no run's folder, or was cut off while planning")
    for plan in map(OpTypePlan.read, plans):
        verdicts = options.run / "verdicts" / f"{plan.op_type}.jsonl"
        actors = options.run / "actors" / plan.op_type
        source, read = (verdicts, judged) if verdicts.is_file() else (actors, left)
        made[plan.op_type], lines = read(source, plan, options.kernel)
        reasons += lines
    sys.stdout.write(table(made, options.kernel))
    if options.reasons:
        options.reasons.write_text("\n".join(reasons) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
