"""A baseline: findings that are known, so that only new ones fail."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from traceproof.errors import TraceproofError
from traceproof.lint.model import Stated

VERSION = 1
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
