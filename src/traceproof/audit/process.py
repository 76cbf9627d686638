"""Running one test file in an isolated worker, in bounded time; what it got to until then counts."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.reading import MIB, read_bytes
from traceproof.sandbox import GIB, Limits, Pool, Status

SETUP = "traceproof.audit.trial:setup"
RECORD_BYTES = 64 * MIB
OUTPUT_BYTES = 64 * MIB  # of what the tests print
MEMORY_BYTES = 16 * GIB
PROCESSES = 64
RECORD = "record.jsonl"  # in the scratch folder
STDERR_CHARACTERS = 300


@dataclass(slots=True)
class Outcome:
    """What running a file showed."""

    wrong: list[dict[str, Any]] = field(default_factory=list)  # a row per wrong answer that was tried
    not_tried: str = ""  # why none could be tried; empty if some were
    collected: int | None = None  # how many tests pytest collected; None: it did not get to that
    problems: list[str] = field(default_factory=list)  # why pytest could not collect the file
    rows: list[dict[str, Any]] = field(default_factory=list)  # a row per test that ended
    running: str = ""  # the test that ran when the time was up; empty if none did
    timed_out: bool = False  # whether the time was up
    crashed: str = ""  # how the process ended, unless as it should

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


def pool(python: str, readable: Sequence[Path]) -> Pool:
    """Isolated workers that may read the tests and the dataset: test files and references are strangers' code."""
    source = str(Path(__file__).resolve().parents[2])
    return Pool(preload=("torch",), python=python, env={"PYTHONPATH": source}, readable=readable)


def run(order: Mapping[str, Any], workers: Pool, *, seconds: float) -> Outcome:
    """Run `traceproof.audit.trial` on a file; everything that it started has ended when this returns."""
    outcome = Outcome()
    limits = Limits(seconds=seconds, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES, processes=PROCESSES)
    with tempfile.TemporaryDirectory(prefix="traceproof-audit-", ignore_cleanup_errors=True) as scratch:
        (ended,) = workers.run_items(
            setup=SETUP, payload=None, items=[order], limits=limits, scratch=Path(scratch)
        )
        for line in _record(Path(scratch) / RECORD):
            outcome.take(line)
    outcome.timed_out = ended.status is Status.TIMEOUT
    if ended.status not in {Status.OK, Status.TIMEOUT}:
        outcome.crashed = f"ended with {ended.status}: {ended.message.strip()[-STDERR_CHARACTERS:]}"
    return outcome


def _record(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines that the trial wrote, as far as they are some: a stranger's code may have written there."""
    try:
        text = read_bytes(path, most=RECORD_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # the last line of a process that was ended
            value = json.loads(line)
            if isinstance(value, dict):
                yield value
