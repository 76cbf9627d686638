"""Findings as SARIF 2.1.0, which code hosts and editors show beside the files."""

from collections.abc import Iterable, Sequence
from typing import Any

import traceproof
from traceproof.lint.model import Code, Stated
from traceproof.lint.run import Report, all_rules

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_sarif(report: Report) -> dict[str, Any]:
    """One run with all rules; findings that the baseline knows are 'unchanged', the others 'new'."""
    notifications = [{"level": "note", "message": {"text": reason}} for reason in report.not_run]
    log = Log(all_rules(), "DATASET", "the dataset's root folder")
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
