"""A baseline: findings that are known, so that only new ones fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.lint.model import Finding

VERSION = 1


def read_baseline(path: Path) -> Counter[str]:
    """Fingerprints of the known findings, each as often as it is known.

    Raises:
        TraceproofError: the file can not be read or is no baseline.
    """
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


def write_baseline(path: Path, findings: Iterable[Finding]) -> None:
    """Write all findings as known; sorted, so that a change shows as few lines of a diff.

    Raises:
        TraceproofError: the file can not be written.
    """
    entries = [
        {key: finding.as_json()[key] for key in ("code", "path", "field", "evidence", "fingerprint")}
        for finding in findings
    ]
    entries.sort(key=lambda entry: (entry["path"], entry["code"], entry["field"], entry["evidence"]))
    text = json.dumps({"version": VERSION, "findings": entries}, indent=1, ensure_ascii=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TraceproofError(f"The baseline {path} can not be written: {error.strerror}") from error


def split(findings: Iterable[Finding], known: Counter[str]) -> tuple[list[Finding], list[Finding], int]:
    """Findings that are new, findings that are known, and how many known ones are gone."""
    left = known.copy()
    new, old = [], []
    for finding in findings:
        if left[finding.fingerprint] > 0:
            left[finding.fingerprint] -= 1
            old.append(finding)
        else:
            new.append(finding)
    return new, old, left.total()
