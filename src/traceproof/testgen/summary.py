"""Summarises generated tests: counts by op_type and stack, known failures, and text for the terminal."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypedDict

from traceproof.run.known import Known
from traceproof.run.report import headed, plain
from traceproof.testgen.running import BAD, SHOWN, DefinitionTestRow, failure_line

Versions = Mapping[str, Mapping[str, str]]  # stack -> package -> version


class Judged(DefinitionTestRow):
    """A row with whether its failure is in a case that is known to diverge."""

    known: bool


class TestsReport(TypedDict):
    """All rows of a run's tests; `passed`: there are rows, and only known failures."""

    passed: bool
    rows: list[Judged]


def judged(rows: Iterable[DefinitionTestRow], known: Known, versions: Versions) -> TestsReport:
    """The rows with known failures marked.

    Raises TraceproofError: known.yaml limits versions of a package that no stack contains.
    """

    def is_known(row: DefinitionTestRow) -> bool:
        """Whether a finding is about the test's case, and about the reference or this stack's ground truth."""
        return any(
            entry.implementation in {"reference", row["stack"]}
            and entry.means(row["definition"], row["digest"])
            and row["case"] in entry.cases
            and entry.stands(versions.get(row["stack"], {})) is not False
            for entry in known.findings
        )

    marked: list[Judged] = [{**row, "known": row["outcome"] in BAD and is_known(row)} for row in rows]
    return {"passed": bool(marked) and not any(map(_is_new, marked)), "rows": marked}


def _is_new(row: Judged) -> bool:
    return row["outcome"] in BAD and not row["known"]


def counted(rows: Iterable[Judged]) -> dict[tuple[str, str], Counter[str]]:
    """Counts of outcomes by (op_type, stack); a known failure counts only as `known`."""
    groups: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        group = groups.setdefault((row["op_type"], row["stack"]), Counter())
        group["known" if row["known"] else row["outcome"]] += 1
    return dict(sorted(groups.items()))


def table(report: TestsReport) -> str:
    """Counts and failures, as text for a terminal or a log."""
    console = plain()
    outcomes = ("passed", "failed", "error", "known", "skipped")
    grid = headed("Generated tests (one row per op_type and environment)", ("op_type", "stack"), outcomes)
    for (op_type, stack), counts in counted(report["rows"]).items():
        grid.add_row(op_type, stack, *(str(counts[outcome]) for outcome in outcomes))
    console.print(grid)
    new = [row for row in report["rows"] if _is_new(row)]
    lines = [failure_line(row) for row in new[:SHOWN]]
    if len(new) > SHOWN:
        lines.append(f"and {len(new) - SHOWN} more")
    if not report["rows"]:
        lines.append("no test was run: no op_type was planned")
    return console.export_text() + "".join(f"{line}\n" for line in lines)


def described(rows: Sequence[Judged], digests: Mapping[str, str], names: Collection[str]) -> str:
    """Outcomes of tests, a line per definition and stack; only rows with the definition's digest count."""
    lines = []
    for name in sorted(names):
        rows_of_it = [row for row in rows if row["definition"] == name and row["digest"] == digests.get(name)]
        for (_, stack), counts in counted(rows_of_it).items():
            listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            lines.append(f"{name} in {stack}: {listed}")
    return "\n".join(lines)
