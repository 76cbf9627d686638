"""Dataset lint: what is wrong with a dataset's files, said without running anything."""

from traceproof.lint.model import Finding, Severity
from traceproof.lint.run import LintReport, lint

__all__ = ["Finding", "LintReport", "Severity", "lint"]
