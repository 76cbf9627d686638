"""What became of each definition of a run: a table by op_type of grades and reasons, references and one kernel.

It reads what is there, so it can be called while the run goes on: an op_type without verdicts yet is not judged.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from traceproof.pipeline.records import REFERENCE, WHOLE, OpTypePlan
from traceproof.pipeline.rows import VerdictRow, read_rows
from traceproof.pipeline.stages.grades import shadow_grade
from traceproof.reasons import Error, Grade, Skip, Verdict

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("run", type=Path, help="a run's folder, with cases/ and verdicts/")
PARSER.add_argument("--kernel", default="flashinfer", help="the ground truth of the second column")
PARSER.add_argument("--reasons", type=Path, help="file: a line per definition and actor, with the reason")
NOT_JUDGED = "not judged"
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
    order = {Verdict.FAIL: 0, Verdict.ERROR: 1, Verdict.SKIP: 2}
    worst = min((row for row in rows if row.verdict in order), key=lambda row: order[row.verdict], default=None)
    return "" if worst is None else _word(worst)


def _word(row: VerdictRow) -> str:
    if row.verdict is Verdict.FAIL:
        return "fails"
    return next((word for reason, word in WORDS.items() if row.reason == reason), str(row.reason))


def _reason(rows: Iterable[VerdictRow]) -> str:
    """The first thing that kept rows from passing, in one line."""
    for row in rows:
        if row.verdict is not Verdict.PASS:
            lines = row.message.strip().splitlines() or [""]
            return f"{row.case}\t{row.output}\t{row.verdict}\t{row.reason}\t{lines[-1][:300]}"
    return ""


def judged(path: Path, kernel: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """By definition of a file of verdicts what became of reference and kernel; and lines with the reasons."""
    rows: dict[tuple[str, str], list[VerdictRow]] = defaultdict(list)
    for row in read_rows(path):
        rows[row.definition, row.actor].append(row)
    lines = [f"{path.stem}\t{name}\t{actor}\t{_reason(found)}" for (name, actor), found in sorted(rows.items())]
    names = sorted({name for name, _ in rows})
    made = {
        name: (
            of_reference(rows[name, REFERENCE]),
            of_kernel(rows[name, kernel]) if (name, kernel) in rows else "",
        )
        for name in names
    }
    return made, lines


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
    for plan in sorted((options.run / "cases").glob("*.json")):
        verdicts = options.run / "verdicts" / plan.name.replace(".json", ".jsonl")
        if verdicts.is_file():
            made[plan.stem], lines = judged(verdicts, options.kernel)
            reasons += lines
        else:
            made[plan.stem] = dict.fromkeys(OpTypePlan.read(plan).definitions, (NOT_JUDGED, ""))
    sys.stdout.write(table(made, options.kernel))
    if options.reasons:
        options.reasons.write_text("\n".join(reasons) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
