"""Running one test file in a process of its own, in bounded time; what it got to until then counts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STDERR_CHARACTERS = 300


@dataclass(slots=True)
class Outcome:
    """What running a file showed.

    Attributes:
        wrong: a row per wrong answer that was tried.
        not_tried: why none could be tried; empty if some were.
        collected: how many tests pytest collected; None: it did not get to that.
        problems: why pytest could not collect the file.
        rows: a row per test that ended.
        running: the test that ran when the time was up; empty if none did.
        timed_out: whether the time was up.
        crashed: how the process ended, unless as it should.
    """

    wrong: list[dict[str, Any]] = field(default_factory=list)
    not_tried: str = ""
    collected: int | None = None
    problems: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    running: str = ""
    timed_out: bool = False
    crashed: str = ""

    def take(self, line: Mapping[str, Any]) -> None:
        """One line of the trial's record."""
        match line:
            case {"wrong": list(rows)}:
                self.wrong += rows
            case {"not_tried": str(why)}:
                self.not_tried = why
            case {"collected": int(count)}:
                self.collected = count
            case {"problem": str(text)}:
                self.problems.append(text)
            case {"begun": str(test)}:
                self.running = test
            case {"test": str(_)}:
                self.rows.append(dict(line))
                self.running = ""


def run(path: Path, order: Mapping[str, Any], *, python: str, seconds: float) -> Outcome:
    """Run `traceproof.audit.trial` on a file; everything that it started has ended when this returns."""
    source = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="traceproof-audit-") as scratch:
        record, said = Path(scratch) / "record.jsonl", Path(scratch) / "stderr.txt"
        command = [python, "-m", "traceproof.audit.trial", str(record), json.dumps(order)]
        with said.open("wb") as stderr:  # no pipes: what a test starts could hold one open for ever
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=path.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            outcome.timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in record.read_text(encoding="utf-8").splitlines() if record.is_file() else ():
            with contextlib.suppress(ValueError):  # the last line of a process that was ended
                outcome.take(json.loads(line))
        if process.returncode and not outcome.timed_out:
            tail = said.read_text(encoding="utf-8", errors="replace").strip()[-STDERR_CHARACTERS:]
            outcome.crashed = f"ended with {process.returncode}: {tail}"
    return outcome
