"""Lint a dataset; tell what is found, beside a baseline of known findings, as text, JSON, SARIF."""

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import traceproof
from traceproof.dataset.tree import paused_collection, read_tree
from traceproof.errors import TraceproofError
from traceproof.lint import definitions, workloads
from traceproof.lint.model import Code, DatasetFinding, Hit, LintedDataset, Severity, Stated, codes
from traceproof.text import printable

NEEDS_FLASHINFER = "TP422"  # the rule that needs an unpacked FlashInfer
DEEPEST = 50_000  # Python frames; a walk needs about five a level, the parser takes about 3,000 levels
STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
VERSION = 1  # of a baseline
STATED = ("code", "path", "field", "evidence", "fingerprint")  # of a finding, as far as its kind has them
Found = TypeVar("Found", bound=Stated)


def read_baseline(path: Path) -> Counter[str]:
    """Fingerprints of known findings, each as often as it is known. Raises TraceproofError: it is no baseline."""
    todo = "Write one with --update-baseline."
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["version"] != VERSION:
            raise TraceproofError(f"{path} is a baseline of version {value['version']}, not {VERSION}", todo=todo)
        return Counter(str(entry["fingerprint"]) for entry in value["findings"])
    except OSError as error:
        raise TraceproofError(f"The baseline {path} can not be read: {error.strerror}", todo=todo) from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceproofError(f"{path} is no baseline: {error}", todo=todo) from error


def write_baseline(path: Path, findings: Iterable[Stated]) -> None:
    """Write all findings as known, sorted for short diffs. Raises TraceproofError: the file can not be written."""
    stated = [finding.as_json() for finding in findings]
    entries = [{key: entry[key] for key in STATED if key in entry} for entry in stated]
    entries.sort(key=lambda entry: [entry.get(key, "") for key in ("path", "code", "field", "evidence")])
    text = json.dumps({"version": VERSION, "findings": entries}, indent=1, ensure_ascii=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TraceproofError(f"The baseline {path} can not be written: {error.strerror}") from error


def split(findings: Iterable[Found], known: Counter[str]) -> tuple[list[Found], list[Found], int]:
    """Findings that are new, findings that are known, and how many known ones are gone."""
    left = known.copy()
    new: list[Found] = []
    old: list[Found] = []
    for finding in findings:
        if left[finding.fingerprint] > 0:
            left[finding.fingerprint] -= 1
            old.append(finding)
        else:
            new.append(finding)
    return new, old, left.total()


@dataclass(frozen=True, slots=True)
class LintReport:
    """What the rules found."""

    findings: tuple[DatasetFinding, ...]  # what no baseline knows, by path and code
    known: tuple[DatasetFinding, ...]  # what the baseline knows
    gone: int  # how many findings of the baseline are no longer found
    not_run: tuple[str, ...]  # a line for each rule that could not run, saying why
    definitions: int  # how many definitions were looked at

    @property
    def failed(self) -> bool:
        """Whether there is a new finding that is more than a note."""
        return any(finding.severity is not Severity.NOTE for finding in self.findings)


def chosen(select: Collection[str], ignore: Collection[str]) -> Mapping[str, Code]:
    """The codes that start with one of `select` (empty: all) and with none of `ignore`.

    Raises TraceproofError: an argument that is the beginning of no code.
    """
    known = codes("TP")
    wrong = [code for code in (*select, *ignore) if not any(one.startswith(code) and code for one in known)]
    if wrong:
        problems = [f"{code!r} is the beginning of no code" for code in wrong]
        raise TraceproofError("The rules can not be chosen", problems=problems, todo=f"Codes: {', '.join(known)}.")
    wanted, unwanted = tuple(select) or "TP", tuple(ignore)
    return {code: one for code, one in known.items() if code.startswith(wanted) and not code.startswith(unwanted)}


def hits(dataset: LintedDataset) -> Iterator[Hit]:
    """What all checks find."""
    for check in (*definitions.OF_DATASET, *workloads.OF_DATASET):
        yield from check(dataset)
    for subject in dataset.subjects:
        for of_one in definitions.OF_DEFINITION:
            yield from (hit._replace(path=subject.path) for hit in of_one(subject))


def lint(
    root: Path,  # a dataset folder
    *,
    select: Collection[str] = (),  # codes, or beginnings of codes, to run; empty for all
    ignore: Collection[str] = (),  # codes, or beginnings of codes, not to run
    baseline: Path | None = None,  # a file with known findings
    flashinfer: Path | None = None,  # where an unpacked FlashInfer lies; rules that need it say so without it
) -> LintReport:
    """Hold the dataset at `root` against the chosen rules.

    Raises TraceproofError: no dataset, no baseline or no FlashInfer where one was said to be; unknown codes.
    """
    rules = chosen(select, ignore)
    known = read_baseline(baseline) if baseline is not None else Counter[str]()
    dataset = LintedDataset(read_tree(root), flashinfer)
    not_run: tuple[str, ...] = ()
    if flashinfer is None and (one := rules.get(NEEDS_FLASHINFER)) is not None:
        not_run = (f"{one.code} ({one.title}) did not run: it needs --flashinfer-path",)
    found: list[DatasetFinding] = []
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        with paused_collection():
            for hit in hits(dataset):
                if (one := rules.get(hit.code)) is not None:
                    where = (hit.path, hit.line, hit.field)
                    found.append(DatasetFinding(one.code, one.title, one.severity, *where, hit.evidence, one.todo))
    finally:
        sys.setrecursionlimit(before)
    found.sort(key=lambda one: (one.path, one.line, one.code, one.field, one.evidence))
    new, old, gone = split(found, known) if known else (found, [], 0)
    return LintReport(tuple(new), tuple(old), gone, not_run, len(dataset.tree.definitions))


def as_json(report: LintReport) -> dict[str, Any]:
    """The report as a JSON object; `fields` of a finding are those of `DatasetFinding.as_json`."""
    return {
        "definitions": report.definitions,
        "findings": [finding.as_json() for finding in report.findings],
        "known": [finding.as_json() for finding in report.known],
        "gone": report.gone,
        "not_run": list(report.not_run),
        "failed": report.failed,
    }


def print_report(report: LintReport, console: Console) -> None:
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
    counts = Counter(finding.code for finding in report.findings)
    first = {finding.code: finding for finding in reversed(report.findings)}
    columns = ("code", Column("count", justify="right"), "weight", "what", "what to do")
    table = Table(*columns, box=None, pad_edge=False)
    for code, one in sorted(first.items()):
        weight = Text(one.severity.value, style=STYLES[one.severity])
        table.add_row(code, str(counts[code]), weight, one.title, one.todo)
    if first:
        console.print()
        console.print(table)
    for reason in report.not_run:
        console.print(Text(reason, style="dim"), soft_wrap=True)
    weights = Counter(finding.severity for finding in report.findings)
    parts = [_count(weights[severity], severity.value) for severity in Severity]
    text = f"{_count(report.definitions, 'definition')}: {', '.join(parts)}"
    if report.known or report.gone:
        text += f"; {len(report.known)} known by the baseline, {report.gone} of it gone"
    console.print(Text(text), soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def as_sarif(report: LintReport) -> dict[str, Any]:
    """One run with all rules; findings that the baseline knows are 'unchanged', the others 'new'."""
    notifications = [{"level": "note", "message": {"text": reason}} for reason in report.not_run]
    log = Log([*codes("TP").values()], "DATASET", "the dataset's root folder")
    for state, findings in (("new", report.findings), ("unchanged", report.known)):
        for finding in findings:
            members = [{"fullyQualifiedName": finding.field, "kind": "member"}] if finding.field else []
            log.add(finding, {"startLine": finding.line or 1}, members, baselineState=state)
    return log.of(invocations=[{"executionSuccessful": True, "toolExecutionNotifications": notifications}])


class Log:
    """A log of one run; `base` names what paths are relative to, `root` says it in words."""

    def __init__(self, codes: Sequence[Code], base: str, root: str) -> None:
        self._codes = codes
        self._index = {code.code: position for position, code in enumerate(codes)}
        self._base = base
        self._root = root
        self._results: list[dict[str, Any]] = []

    def add(self, finding: Stated, region: dict[str, int], members: Sequence[Any] = (), **more: str) -> None:
        """Add a finding at a region of its file, and at a member of what the file holds."""
        index = self._index[finding.code]
        code = self._codes[index]
        artifact = {"uri": finding.path.as_posix(), "uriBaseId": self._base}
        place: dict[str, Any] = {"physicalLocation": {"artifactLocation": artifact, "region": region}}
        if members:
            place["logicalLocations"] = list(members)
        self._results.append(
            {
                "ruleId": code.code,
                "ruleIndex": index,
                "level": code.severity.value,
                "message": {"text": f"{code.title}: {finding.evidence}. {code.todo}"},
                "locations": [place],
                "partialFingerprints": {"traceproof/v1": finding.fingerprint},
                **more,
            }
        )

    def of(self, **more: Iterable[Any]) -> dict[str, Any]:
        """The whole log, with more keys of the run."""
        rules = [
            {
                "id": code.code,
                "shortDescription": {"text": code.title},
                "help": {"text": code.todo},
                "defaultConfiguration": {"level": code.severity.value},
            }
            for code in self._codes
        ]
        driver = {"name": "traceproof", "version": traceproof.__version__, "rules": rules}
        run = {
            "tool": {"driver": driver},
            "columnKind": "unicodeCodePoints",
            "originalUriBaseIds": {self._base: {"description": {"text": self._root}}},
            **more,
            "results": self._results,
        }
        return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
