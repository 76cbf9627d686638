"""Planning and verifying in this process, as the rules do, with workers for references that all tests share."""

from __future__ import annotations

import atexit
import copy
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import forked

from traceproof.run.engine import Engine
from traceproof.run.job import Job
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.report import summarise as summary_of
from traceproof.run.schema import OpTypePlan, VerdictRow
from traceproof.run.workers import EngineSettings, Environment, untrusted_pool
from traceproof.sandbox import Limits, Pool
from traceproof.stacks import MAIN

STACK = {"digest": "0" * 32, "versions": {"torch": "any"}, "device": "cpu", "device_type": "cpu", "stack": MAIN}
Rows = list[dict[str, Any]]


@cache
def _interpreter() -> Pool:
    """Workers for untrusted code, of an interpreter that lasts as long as this process."""
    pool = untrusted_pool()
    pool.python = forked.interpreter()
    atexit.register(pool.close)
    return pool


def borrowed(*, gpu: bool = False, environment: Mapping[str, str] | None = None, **options: Any) -> Pool:  # noqa: ANN401
    """The same workers, with other `options` of `untrusted_pool`; others where they need another interpreter."""
    own = untrusted_pool(gpu=gpu, environment=environment, **options)
    if gpu or environment:
        return own
    _interpreter().layers()  # started, so that copies have it in common
    found = copy.copy(_interpreter())
    found.conceal, found.weak, found._conceal = own.conceal, own.weak, own._conceal
    found.close = lambda: None  # type: ignore[method-assign] # others go on
    return found


@contextmanager
def engine_of(settings: EngineSettings) -> Iterator[Engine]:
    """An engine whose references run in shared workers."""
    with Engine(settings) as engine:
        engine.untrusted = borrowed(conceal=settings.conceal, weak=settings.weak)
        yield engine


class Run:
    """A results folder and what was run into it."""

    def __init__(
        self, dataset: Path, out: Path, *, selection: PlanSelection | None = None, limits: Limits
    ) -> None:
        self.dataset = dataset
        self.out = out
        self.selection = selection or PlanSelection(sizes=("small",))
        self.limits = limits
        self.weak = False
        self.tolerance: float | None = None

    def verify(self, *truths: str, code: str = "0", cache: Path | None = None) -> dict[str, Rows]:
        """Plan, run the references and the ground truths named, judge; verdict rows by definition."""
        rows: dict[str, Rows] = defaultdict(list)
        for op_type in plan(self.dataset, self.out / "cases", self.selection).op_types:
            planned = OpTypePlan.read(self.out / "cases" / f"{op_type}.json")
            verdicts = self.out / "verdicts" / f"{op_type}.jsonl"
            self.job(planned, ("reference", *truths), code=code, cache=cache).verify(verdicts)
            for line in verdicts.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                rows[row["definition"]].append(row)
        return rows

    def job(
        self, planned: OpTypePlan, implementations: Sequence[str], *, code: str = "0", cache: Path | None = None
    ) -> Job:
        """The job of an op_type."""
        python = sys.executable if {*implementations} == {"reference"} else forked.interpreter()
        settings = EngineSettings(
            environments={MAIN: Environment(name=MAIN, python=python, record=STACK)},
            limits=self.limits,
            dataset=self.dataset,
            conceal=[self.out, self.dataset],
            code=code,
            tolerance=self.tolerance,
            weak=self.weak,
        )
        return Job(plan=planned, implementations=implementations, settings=settings, engine=engine_of, cache=cache)


def row(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A verdict row that passed, with changes."""
    plain = {
        "definition": "rmsnorm_h8",
        "op_type": "rmsnorm",
        "case": "small-0",
        "implementation": "reference",
        "output": "output",
        "verdict": "pass",
        "reason": None,
        "message": "fine",
        "repeat": "traceproof verify --definition-name rmsnorm_h8 --case small-0",
    }
    return plain | changes


def plans(dataset: Path, folder: Path, selection: PlanSelection) -> list[Path]:
    """The plans of a dataset, in a folder."""
    return [folder / f"{op_type}.json" for op_type in plan(dataset, folder, selection).op_types]


def typed(rows: Iterable[Mapping[str, Any]]) -> list[VerdictRow]:
    """Rows of a verdict file as records."""
    return [VerdictRow.model_validate(row) for row in rows]


def summarise(
    rows: Iterable[Mapping[str, Any]], known: Known, stacks: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The summary of rows of a verdict file."""
    return summary_of(typed(rows), known, stacks)


def told(summary: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What a summary says of each definition: its `verdict`, `conclusion`, `grade` or other field."""
    return {name: one[key] for name, one in summary["definitions"].items()}


def verdicts(rows: Rows) -> set[tuple[str, str | None]]:
    """The distinct (verdict, reason) pairs."""
    return {(row["verdict"], row["reason"]) for row in rows}
