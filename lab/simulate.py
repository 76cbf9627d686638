"""How long a run would take on other machines: its jobs by what they took in a run that is there, scheduled anew.

    python lab/simulate.py results --per-gpu 16 --gpus 1 2 8 64 --times 1 10

What a job took is what Snakemake noted; an actor's is dealt to its definitions by what each took (its manifests),
and split into shards as planning does for the new number of cores. `--times 10` takes each definition ten times. A
GPU comes with the cores of the run that was measured: as many jobs as then share it. Kernel builds are left out.
"""

from __future__ import annotations

import argparse
import base64
import heapq
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from traceproof.actors.registry import for_op_type
from traceproof.pipeline.load import Load
from traceproof.pipeline.records import OpTypePlan
from traceproof.pipeline.stages.manifest import manifests_of
from traceproof.pipeline.stages.shards import Split, took
from traceproof.stacks import MAIN

RUN_SECONDS = 3.0  # of a run that has nothing to do (docs/benchmarks.md)
START_SECONDS = 0.6  # of a job that has nothing to do
PLANNED_SECONDS = 0.003  # of planning per definition, beside what it takes for none (docs/benchmarks.md)
FIXED = (
    "dataset/",
    f"stacks/{MAIN}.json",
    "cases",
    "summary.json",
)  # of jobs that run alone, before or after all others


@dataclass(frozen=True, slots=True)
class Job:
    """A job to schedule.

    Attributes:
        op_type: whose definitions it is about.
        seconds: how long it takes.
        threads: cores that it takes.
        priority: higher ones start first.
        judge: whether it waits for all other jobs of its op_type.
    """

    op_type: str
    seconds: float
    threads: int
    priority: int
    judge: bool = False


def noted(results: Path) -> dict[str, float]:
    """Seconds of each finished job by the path of its output, as Snakemake noted them."""
    found = {}
    folder = Path(".snakemake", "metadata")
    for path in folder.rglob("*"):
        if path.is_file():
            name = "".join(part.removeprefix("@") for part in path.relative_to(folder).parts)
            output = Path(base64.b64decode(name).decode())
            value = json.loads(path.read_text(encoding="utf-8"))
            if value.get("endtime") and output.is_relative_to(results):
                found[str(output.relative_to(results))] = value["endtime"] - value["starttime"]
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that is there.

    Attributes:
        results: its folder.
        seconds: what its jobs took.
        gpu: whether it ran on one.
    """

    results: Path
    seconds: dict[str, float]
    gpu: bool

    @property
    def alone(self) -> float:
        """Seconds in which at most one job runs: starting, planning and what that needs, and the summary."""
        return RUN_SECONDS + sum(taken for name, taken in self.seconds.items() if name.startswith(FIXED))

    def jobs(self, cores: int, times: int) -> Iterator[Job]:
        """The jobs of the same run with `cores` and each definition taken so many times."""
        for name, seconds in self.seconds.items():
            if name.startswith("stacks/") and not name.startswith(FIXED):
                yield Job("", seconds, 1, priority=1000)
        load = Load(self.results / "cases", side_by_side=self.gpu)
        split = Split(slots=cores, actors=self.results / "actors", gpu=self.gpu)
        for path in sorted((self.results / "cases").glob("*.json")):
            plan = OpTypePlan.read(path)
            judged = self.seconds.get(f"verdicts/{plan.op_type}.jsonl", 0.0)
            judged = START_SECONDS + max(0.0, judged - START_SECONDS) * times
            yield Job(plan.op_type, judged, load.judge_lanes(plan.op_type), 800, judge=True)
            for actor in for_op_type(plan.op_type):
                for seconds in self._shards(plan, actor, split, times):
                    yield Job(plan.op_type, seconds, 1, load.priority(plan.op_type, actor))

    def _shards(self, plan: OpTypePlan, actor: str, split: Split, times: int) -> list[float]:
        """Seconds of each of an actor's jobs; none where the run had no such job."""
        folder = self.results / "actors" / plan.op_type
        ran = [f"actors/{plan.op_type}/{path.name}" for path in manifests_of(folder, actor)]
        if not ran or not plan.definitions:
            return []
        work = times * sum(max(0.0, self.seconds.get(name, 0.0) - START_SECONDS) for name in ran)
        costs = split.costs(plan, actor, took(folder, actor))
        many = {f"{name} {number}": cost for name, cost in costs.items() for number in range(times)}
        whole = sum(many.values()) or 1.0
        parts = split.parts(many)
        return [START_SECONDS + work * sum(many[name] for name in part) / whole for part in parts]


def scheduled(jobs: Iterable[Job], cores: int) -> float:
    """Seconds until the last job ends: of those that can start and fit, the one of highest priority does."""
    waiting = sorted(jobs, key=lambda job: (-job.priority, -job.seconds))
    left = {job.op_type: 0 for job in waiting}
    for job in waiting:
        left[job.op_type] += not job.judge
    running: list[tuple[float, int, Job]] = []
    now, free = 0.0, cores
    while waiting or running:
        for job in list(waiting):
            threads = min(job.threads, cores)
            if threads <= free and not (job.judge and left[job.op_type]):
                waiting.remove(job)
                free -= threads
                heapq.heappush(running, (now + job.seconds, len(waiting), job))
        now, _, ended = heapq.heappop(running)
        free += min(ended.threads, cores)
        left[ended.op_type] -= not ended.judge
    return now


def table(measured: Measured, *, gpus: Sequence[int], per_gpu: int, times: Sequence[int]) -> str:
    """A Markdown table: a row per size of the dataset."""
    count = sum(len(OpTypePlan.read(path).definitions) for path in (measured.results / "cases").glob("*.json"))
    lines = [f"| definitions | {' | '.join(f'{number} x {per_gpu} cores, s' for number in gpus)} |"]
    lines.append("|---:|" + "---:|" * len(gpus))
    for factor in times:
        cells = []
        for number in gpus:
            cores = number * per_gpu
            planned = measured.alone + count * (factor - 1) * PLANNED_SECONDS
            cells.append(f"{planned + scheduled(measured.jobs(cores, factor), cores):.0f}")
        lines.append(f"| {count * factor:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results folder of a finished run of this clone")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8, 64])
    parser.add_argument("--per-gpu", type=int, default=16, help="cores per GPU, as in the measured run")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 10])
    options = parser.parse_args()
    results = options.results
    record = json.loads((results / "stacks" / "torch.json").read_text(encoding="utf-8"))
    measured = Measured(results, noted(results), record["device_type"] == "cuda")
    sys.stdout.write(table(measured, gpus=options.gpus, per_gpu=options.per_gpu, times=options.times))


if __name__ == "__main__":
    main()
