"""Dataset lint: what is wrong with a dataset's files, said without running anything."""

from traceproof.lint.model import DatasetFinding, Severity
from traceproof.lint.run import LintReport, lint

__all__ = ["DatasetFinding", "LintReport", "Severity", "lint"]
