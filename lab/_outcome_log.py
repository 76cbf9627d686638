"""A pytest plugin that needs nothing but pytest: a JSON line for all that begins and ends.

A run that is stopped has no report; this log says what it did, and which test it was in. Used by time_suites.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "OUTCOME_LOG"  # names the file
CHARACTERS = 1200  # of a message


def _write(**line: object) -> None:
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: Any) -> None:  # noqa: ANN401 - pytest's session
    """How many tests there are."""
    _write(collected=len(session.items))


def pytest_collectreport(report: Any) -> None:  # noqa: ANN401 - pytest's report
    """A file that can not be collected."""
    if report.failed:
        _write(test=report.nodeid, when="collect", outcome="failed", s=0.0, message=_message(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _write(begun=nodeid)


def pytest_runtest_logreport(report: Any) -> None:  # noqa: ANN401 - pytest's report
    """A test's setup, call or teardown has ended."""
    message = "" if report.passed else _message(report)
    _write(
        test=report.nodeid, when=report.when, outcome=report.outcome, s=round(report.duration, 3), message=message
    )


def _message(report: Any) -> str:  # noqa: ANN401 - pytest's report
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return "\n".join(str(report.longrepr or "").splitlines()[:12])[:CHARACTERS]
