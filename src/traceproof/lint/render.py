"""A report for people and for programs."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from traceproof.lint.model import Severity
from traceproof.lint.run import Report
from traceproof.text import printable

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def as_json(report: Report) -> dict[str, Any]:
    """The report as a JSON object; `fields` of a finding are those of `Finding.as_json`."""
    return {
        "definitions": report.definitions,
        "findings": [finding.as_json() for finding in report.findings],
        "known": [finding.as_json() for finding in report.known],
        "gone": report.gone,
        "not_run": list(report.not_run),
        "failed": report.failed,
    }


def print_report(report: Report, console: Console) -> None:
    """Print new findings by file, a table of codes and counts, and one closing line."""
    path = None
    for finding in report.findings:
        if finding.path != path:
            path = finding.path
            console.print(Text(f"\n{printable(str(path))}", style="bold"))
        line = f":{finding.line}" if finding.line else ""
        head = Text(f"  {finding.code} ", style=STYLES[finding.severity])
        console.print(
            head + Text(printable(f"{line}{finding.field}  {finding.title}: {finding.evidence}")), soft_wrap=True
        )
    if report.findings:
        console.print()
        console.print(_table(report))
    for reason in report.not_run:
        console.print(Text(reason, style="dim"), soft_wrap=True)
    console.print(Text(closing_line(report)), soft_wrap=True)


def closing_line(report: Report) -> str:
    """How many findings of what weight, and how many the baseline knows."""
    counts = Counter(finding.severity for finding in report.findings)
    parts = [_count(counts[severity], severity.value) for severity in Severity]
    text = f"{_count(report.definitions, 'definition')}: {', '.join(parts)}"
    if report.known or report.gone:
        text += f"; {len(report.known)} known by the baseline, {report.gone} of it gone"
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("code", "count", "weight", "what", "what to do"):
        table.add_column(column, justify="right" if column == "count" else "left")
    counts = Counter(finding.code for finding in report.findings)
    first = {finding.code: finding for finding in reversed(report.findings)}
    for code in sorted(counts):
        weight = Text(first[code].severity.value, style=STYLES[first[code].severity])
        table.add_row(code, str(counts[code]), weight, first[code].title, first[code].todo)
    return table
