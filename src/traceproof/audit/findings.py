"""Findings in Python files, with a span each: for people, as JSON, and as SARIF for code review."""

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.digests import digest_json
from traceproof.lint.model import Code
from traceproof.lint.run import Log


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place in a file; lines and columns count from 1, the end column is the one behind the last."""

    path: Path
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    evidence: str  # what was found, so that a reader can check it
    text: str = ""  # the source line, by which a finding is known again when lines move

    @property
    def fingerprint(self) -> str:
        """Says that two findings are the same one; moving a line does not change it."""
        return digest_json([self.code, self.path.as_posix(), self.text.strip(), self.evidence])

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        names = ("line", "column", "end_line", "end_column", "code", "evidence", "fingerprint")
        return {"path": self.path.as_posix(), **{name: getattr(self, name) for name in names}}


def at(path: Path, node: ast.AST, code: str, evidence: str, lines: Sequence[str] = ()) -> Finding:
    """A finding at a node's span."""
    line = getattr(node, "lineno", 1)
    end = getattr(node, "end_lineno", None) or line
    columns = (getattr(node, "col_offset", 0) + 1, (getattr(node, "end_col_offset", None) or 0) + 1)
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    return Finding(path, line, columns[0], end, columns[1], code, evidence, text)


def as_text(findings: Iterable[Finding], codes: Mapping[str, Code]) -> str:
    """One line per finding, then a table of codes and counts."""
    found = sorted(findings)
    lines = [f"{f.path}:{f.line}:{f.column}: {f.code} {codes[f.code].title}: {f.evidence}" for f in found]
    counts = Counter(finding.code for finding in found)
    files = {code: len({f.path for f in found if f.code == code}) for code in counts}
    if counts:
        lines.append("")
    lines += [
        f"{code}  {counts[code]:4} in {files[code]:3} files  {codes[code].title}; {codes[code].todo}"
        for code in sorted(counts)
    ]
    return "\n".join(lines) + ("\n" if lines else "")


def as_sarif(findings: Iterable[Finding], codes: Mapping[str, Code]) -> dict[str, Any]:
    """A SARIF 2.1.0 log of one run."""
    log = Log([codes[code] for code in sorted(codes)], "ROOT", "the folder that was read")
    for finding in sorted(findings):
        region = {
            "startLine": finding.line,
            "startColumn": finding.column,
            "endLine": finding.end_line,
            "endColumn": max(finding.end_column, 1),
        }
        log.add(finding, region)
    return log.of()
