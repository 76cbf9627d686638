"""A report as SARIF 2.1.0, which code hosts and editors show beside the files."""

from __future__ import annotations

from typing import Any

import traceproof
from traceproof.lint.model import Finding, Rule
from traceproof.lint.run import Report, all_rules

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_sarif(report: Report) -> dict[str, Any]:
    """One run with all rules; findings that the baseline knows are 'unchanged', the others 'new'."""
    rules = all_rules()
    index = {rule.code: position for position, rule in enumerate(rules)}
    results = [_result(finding, index, "new") for finding in report.findings]
    results += [_result(finding, index, "unchanged") for finding in report.known]
    driver = {"name": "traceproof", "version": traceproof.__version__, "rules": [_rule(rule) for rule in rules]}
    notifications = [{"level": "note", "message": {"text": reason}} for reason in report.not_run]
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {"DATASET": {"description": {"text": "the dataset's root folder"}}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notifications}],
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.title},
        "help": {"text": rule.todo},
        "defaultConfiguration": {"level": rule.severity.value},
    }


def _result(finding: Finding, index: dict[str, int], state: str) -> dict[str, Any]:
    artifact = {"uri": finding.path.as_posix(), "uriBaseId": "DATASET"}
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": artifact, "region": {"startLine": finding.line or 1}}
    }
    if finding.field:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.field, "kind": "member"}]
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": finding.severity.value,
        "message": {"text": f"{finding.title}: {finding.evidence}. {finding.todo}"},
        "locations": [location],
        "partialFingerprints": {"traceproof/v1": finding.fingerprint},
        "baselineState": state,
    }
