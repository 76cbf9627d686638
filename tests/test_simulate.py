"""A run's jobs, scheduled on other machines."""

from __future__ import annotations

import pytest

from simulate import Job, scheduled

CORES = 4


def jobs(count: int, *, seconds: float = 1.0, threads: int = 1, op_type: str = "one") -> list[Job]:
    return [Job(op_type, seconds, threads, priority=0) for _ in range(count)]


@pytest.mark.parametrize(("count", "seconds"), [(1, 1.0), (4, 1.0), (5, 2.0), (8, 2.0)])
def test_as_many_jobs_run_as_there_are_cores(count: int, seconds: float) -> None:
    assert scheduled(jobs(count), CORES) == pytest.approx(seconds)


def test_a_job_takes_its_threads_and_at_most_all_there_are() -> None:
    assert scheduled(jobs(4, threads=2), CORES) == pytest.approx(2.0)
    assert scheduled(jobs(2, threads=2 * CORES), CORES) == pytest.approx(2.0)


def test_a_judge_waits_for_its_op_type_alone() -> None:
    judges = [Job(name, 1.0, 1, priority=8, judge=True) for name in ("one", "other")]
    work = [*jobs(1, seconds=5.0), *jobs(1, seconds=1.0, op_type="other")]
    assert scheduled([*judges, *work], CORES) == pytest.approx(6.0)
    assert scheduled([judges[1], *work], CORES) == pytest.approx(5.0)


def test_the_longest_of_the_most_urgent_jobs_starts_first() -> None:
    urgent = Job("one", 3.0, 1, priority=7)
    assert scheduled([*jobs(3), urgent], 1) == pytest.approx(6.0)
    assert scheduled([*jobs(3), urgent], 2) == pytest.approx(3.0)
