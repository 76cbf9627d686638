"""Judges solutions in this process, with workers that all of a file's tests share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import forked
from pipeline import borrowed

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.judge.kernel_properties import DEMANDED
from traceproof.run.schema import PlannedCase
from traceproof.run.workers import Environment
from traceproof.sandbox import Limits, Pool
from traceproof.solutions.reading import Candidate
from traceproof.solutions.records import JudgeSettings, SolutionTrial, objections
from traceproof.solutions.trial import SolutionRun, planned, tried

DATASET = Path(__file__).parent / "dataset"
whole_tree = cache(read_tree)
LIMITS = Limits(seconds=300.0, setup_seconds=300.0, memory_bytes=2 << 30)


def candidate(name: str, text: str, *, destinations: bool | None = None) -> Candidate:
    """A solution in one Python file, entry point `run`."""
    return Candidate(name=name, path=f"{name}.py", destinations=destinations, files={"main.py": text})


def forked_environment(**given: Any) -> Environment:  # noqa: ANN401 - fields
    """What judges isolated solutions, with an interpreter that has imported PyTorch."""
    return Environment(**given | {"python": forked.interpreter()})


@dataclass(frozen=True, eq=False)
class SolutionJudge:
    """Workers, and plans that are made once."""

    settings: JudgeSettings
    pool: Pool

    @cache  # noqa: B019 - lives as long as the module's tests
    def planned(self, name: str) -> tuple[Definition, list[PlannedCase]]:
        """A definition and its cases; the dataset is read once."""
        with mock.patch("traceproof.solutions.trial.read_tree", lambda root, **_: whole_tree(root)):
            return planned(name, self.settings)

    def trial(
        self, solution: Candidate, definition: str, *, whole: bool = True, only: Collection[str] = ()
    ) -> SolutionTrial:
        """What came of a solution that the policy has not read; of cases, `only` those of these ids or digests.

        If not `whole`, the first bad row ends it.
        """
        found, planned_cases = self.planned(definition)
        cases = [case for case in planned_cases if not only or not {case.id, case.digest}.isdisjoint(only)]
        with SolutionRun.of(found, solution.settled(found), self.settings, self.pool) as run:
            return tried(run, cases, whole=whole)

    def reasons(self, solution: Candidate, definition: str) -> list[str]:
        """Why it is refused; nothing: it is accepted."""
        return self.reasons_of(self.trial(solution, definition), definition)

    def reasons_of(self, trial: SolutionTrial, definition: str) -> list[str]:
        """Why what came of it is no acceptance."""
        found, _ = self.planned(definition)
        return list(objections(trial, found))


@contextmanager
def solution_judge(  # noqa: PLR0913 - all but the folder have defaults
    scratch: Path,
    *,
    dataset: Path = DATASET,
    sizes: Sequence[str] = ("small",),
    gpu: bool = False,
    environment: Mapping[str, str] | None = None,
    limits: Limits = LIMITS,
) -> Iterator[SolutionJudge]:
    """A judge over a dataset, with a hidden seed of its own."""
    settings = JudgeSettings(
        dataset=str(dataset),
        conceal=(str(dataset),),
        sizes=tuple(sizes),
        seed=0,
        hidden_seed=987_654,
        memory_limit=1 << 30,
        tolerance=None,
        limits=limits.as_json(),
        demanded=DEMANDED,
        gpu=gpu,
        weak=True,
        environment=dict(environment or {}),
    )
    conceal = [scratch, *map(Path, settings.conceal)]
    with borrowed(gpu=gpu, conceal=conceal, environment=environment) as pool:
        yield SolutionJudge(settings, pool)
