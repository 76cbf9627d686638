"""What became of each definition of a run: a table by op_type of grades and reasons, references and one kernel.

It reads what is there, so it serves a run that goes on or was cut off: definitions of an op_type without verdicts
are `not reached`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from traceproof.reasons import Error, Grade, Skip, Verdict
from traceproof.run.proof import shadow_grade
from traceproof.run.records import INDEX, REFERENCE, WHOLE, OpTypePlan
from traceproof.run.rows import VerdictRow, read_rows

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("run", type=Path, help="a run's folder, with cases/ and verdicts/")
PARSER.add_argument("--kernel", default="flashinfer", help="the ground truth of the second column")
PARSER.add_argument("--reasons", type=Path, help="file: a line per definition and actor, with the reason")
NOT_REACHED, NO_CASE = "not reached", "no case"
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
    return next((word for known, word in WORDS.items() if row.reason == known), str(row.reason))


def _reason(rows: Iterable[VerdictRow]) -> str:
    """The worst thing that kept rows from passing, in one line."""
    row = _worst(rows)
    return "" if row is None else f"{row.case}\t{row.output}\t{row.verdict}\t{row.reason}\t{_last(row.message)}"


def judged(paths: Iterable[Path], plan: OpTypePlan, kernel: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """By definition of an op_type what became of reference and kernel; and lines with the reasons."""
    rows: dict[tuple[str, str], list[VerdictRow]] = defaultdict(list)
    for path in paths:
        for row in read_rows(path):
            rows[row.definition, row.actor].append(row)
    lines = [f"{plan.op_type}\t{name}\t{actor}\t{_reason(found)}" for (name, actor), found in sorted(rows.items())]
    made = {name: (NOT_REACHED if entry.cases else NO_CASE, "") for name, entry in plan.whole.items()}
    for name in sorted({name for name, _ in rows}):
        kernels = of_kernel(rows[name, kernel]) if (name, kernel) in rows else ""
        made[name] = of_reference(rows[name, REFERENCE]), kernels
    return made, lines


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
    plans = sorted(path for path in (options.run / "cases").glob("*.json") if path.name != INDEX)
    if not plans:
        PARSER.error(f"{options.run} holds no plan: it is no run's folder, or was cut off while planning")
    for plan in map(OpTypePlan.read, plans):
        verdicts = sorted((options.run / "verdicts").glob(f"{plan.op_type}.*jsonl"))
        made[plan.op_type], lines = judged(verdicts, plan, options.kernel)
        reasons += lines
    sys.stdout.write(table(made, options.kernel))
    if options.reasons:
        options.reasons.write_text("\n".join(reasons) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
