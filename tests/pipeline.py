"""Running the stages in process, as the rules do."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from traceproof.execution.source import strangers
from traceproof.pipeline.known import Known
from traceproof.pipeline.rows import VerdictRow
from traceproof.pipeline.stages.actor import run
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.judge import judge
from traceproof.pipeline.stages.judge_settings import JudgeSettings
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.pipeline.stages.plan import plan
from traceproof.pipeline.stages.plan_inits import Inits
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.pipeline.stages.report import summarise as summary_of
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.worker import Isolation, Limits, Pool, shared

STACK = {"digest": "0" * 32, "versions": {"torch": "any"}, "device": "cpu"}
Rows = list[dict[str, Any]]


@contextmanager
def sharing() -> Iterator[None]:
    """Jobs started meanwhile share interpreters, as a run's do; programs started later know nothing of it."""
    before = os.environ.get(shared.RUN)
    shared.announce()
    try:
        yield
    finally:
        os.environ.pop(shared.RUN)
        if before is not None:
            os.environ[shared.RUN] = before


def borrowed(*, gpu: bool = False, **options: Any) -> Pool:  # noqa: ANN401 - what `strangers` takes
    """Workers for strangers' code; without a GPU, of an interpreter that lasts as long as this process."""
    with sharing():
        found = strangers(gpu=gpu, shared=not gpu, **options)
        found.start(Isolation.UNTRUSTED)
    return found


class Run:
    """A results folder and what was run into it."""

    def __init__(self, dataset: Path, out: Path, *, selection: Selection | None = None, limits: Limits) -> None:
        self.dataset = dataset
        self.out = out
        self.selection = selection or Selection(sizes=("small",))
        self.limits = limits
        self.weak = False
        self.inits: Inits | None = None

    def verify(self, *actors: str, code: str = "0") -> dict[str, Rows]:
        """Plan, run reference, oracle and the actors named, judge; verdict rows by definition."""
        rows: dict[str, Rows] = defaultdict(list)
        with sharing():
            for cases in plan(self.dataset, self.out / "cases", self.selection, self.inits):
                for name in ("reference", "oracle", *actors):
                    self._actor(cases, name)
                for row in self.judge(cases.stem, "reference", "oracle", *actors, code=code):
                    rows[row["definition"]].append(row)
        return rows

    def judge(self, op_type: str, *actors: str, code: str = "0") -> Rows:
        """Judge what the actors left; the op_type's verdict rows."""
        cases = self.out / "cases" / f"{op_type}.json"
        manifests = [self.out / "actors" / op_type / f"{actor}.json" for actor in actors]
        verdicts = self.out / "verdicts" / f"{op_type}.jsonl"
        with StackWorkers().pool() as pool:
            settings = JudgeSettings(store=self.out / "store", code=code, tolerance=None)
            judge(cases, manifests, verdicts, settings, pool)
        return [json.loads(line) for line in verdicts.read_text(encoding="utf-8").splitlines()]

    def _actor(self, cases: Path, name: str) -> Path:
        path = self.out / "actors" / cases.stem / f"{name}.json"
        job = Job(actor=name, code="0", stack=STACK, threads=1, limits=self.limits, weak_isolation=self.weak)
        run(cases, path, self.out / "store", job)
        return path

    def manifest(self, op_type: str, actor: str) -> Manifest:
        """What an actor's last job left."""
        return Manifest.read(self.out / "actors" / op_type / f"{actor}.json")


def typed(rows: Iterable[Mapping[str, Any]]) -> list[VerdictRow]:
    """Rows of a verdict file as records."""
    return [VerdictRow.model_validate(row) for row in rows]


def summarise(
    rows: Iterable[Mapping[str, Any]], known: Known, stacks: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The summary of rows of a verdict file."""
    return summary_of(typed(rows), known, stacks)


def verdicts(rows: Rows) -> set[tuple[str, str | None]]:
    """The distinct (verdict, reason) pairs."""
    return {(row["verdict"], row["reason"]) for row in rows}
