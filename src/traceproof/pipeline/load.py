"""What a job takes of the machine: how many definitions run side by side in it, and the memory for that."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from traceproof.actors.registry import ACTORS
from traceproof.ops.registry import record
from traceproof.pipeline.plan_facts import DRAWING_LANES, LANES, PlanFacts, tensors
from traceproof.pipeline.records import ORACLE, REFERENCE, OpTypePlan, PlannedDefinition, shard_names
from traceproof.pipeline.stages.shards import TRIAL_SECONDS
from traceproof.stacks import STACK_OF, STACKS, TRUTHS

MIB = 1 << 20
BASE_MB = 1500  # MiB: a supervisor, the processes it forks workers from, and torch loaded in each
FEW_LANES = 2  # other references
CLASS = 100  # priorities between one class of jobs and the next; `rules/` has the judge's and those of builds
SHARED = 8  # jobs of one actor in an allocation of a batch system; profiles give as much in `group-components`
SLACK = 1.25  # estimates were up to a fifth below what was measured
LANE_MB = 600  # MiB of a GPU, and of the host as well: what a process that has it open takes
GPU_MB = 1000  # MiB of a GPU: workspaces of libraries, and what is kept between two cases
KERNEL_COPIES = 6  # tensors of a case in a kernel's process: two sets of inputs, outputs of each call, temporaries


@dataclass(frozen=True, slots=True)
class Load:
    """Of the jobs over some planned cases."""

    cases: Path  # the folder of the plan, a file per op_type
    side_by_side: bool  # whether definitions run side by side: where there is a GPU

    def lanes(self, op_type: str, actor: str) -> int:
        """How many definitions an actor's job runs side by side.

        One, but for references where there is a GPU: Python that launches small kernels leaves most of it idle.
        """
        if ACTORS[actor].trusted or not self.side_by_side:
            return 1
        plan = self._plan(op_type)
        most = DRAWING_LANES if plan.trials else LANES if record(op_type).long else FEW_LANES
        return max(1, min(most, len(plan.needs)))

    def opens_gpu(self, op_type: str, actor: str = "") -> bool:
        """Whether an actor's job computes anything on the GPU; the judge's, where no actor is named."""
        plan = self._plan(op_type)
        return actor in plan.on_gpu if actor else plan.large

    def allocation(self, op_type: str, actor: str) -> int:
        """Number of the batch system's allocation that an actor's job shares with those of other op_types.

        Either all of them open a GPU or none does, and the plan alone says which. Snakemake deals a group's
        jobs anew whenever one is finished, and submits what comes out otherwise than before once more.
        """
        planned = sorted(path.stem for path in self.cases.glob("*.json"))
        alike = [[name for name in planned if self.opens_gpu(name, actor) is opens] for opens in (False, True)]
        parts = [names[at : at + SHARED] for names in alike for at in range(0, len(names), SHARED)]
        return next((number for number, part in enumerate(parts, start=1) if op_type in part), 1)

    def shards(self, op_type: str, actor: str) -> list[str]:
        """The suffix that tells each of an actor's jobs apart, of which most have one."""
        return shard_names(self._plan(op_type).shards.get(actor, 1))

    def priority(self, op_type: str, actor: str) -> int:
        """Priority of an actor's job: those that decide when a run is done start first, of equals the longest.

        SGLang and FLA take long to import, FlashInfer less, and it compiles something for most cases of some
        op_types, as cuDNN does for PyTorch's attention; references run one small kernel after the other.
        The judge of large cases takes longest of all judges. Oracles keep cores busy while those wait.
        """
        plan = self._plan(op_type)
        seconds = plan.seconds + TRIAL_SECONDS * plan.trials * (actor == REFERENCE)
        return CLASS * self._class(op_type, actor) + min(CLASS - 1, int(seconds))

    def _class(self, op_type: str, actor: str) -> int:
        facts = record(op_type)
        stack = STACKS[STACK_OF[actor]] if actor in TRUTHS else None
        if (actor == REFERENCE and facts.long) or actor in facts.compiles_late:
            return 7
        if stack is None:
            return 6 if facts.long else 5
        if stack.imports_long or self._plan(op_type).large:
            return 6
        return 5 if stack.needs_nvcc else 0

    def judge_lanes(self, op_type: str) -> int:
        """How many definitions of an op_type are judged side by side.

        One, but where there is a GPU: it is done with most op_types at about the same time.
        """
        return max(1, min(LANES, len(self._plan(op_type).needs))) if self.side_by_side else 1

    def actor_mb(self, op_type: str, actor: str) -> int:
        """Memory of an actor's job over one op_type's cases, in MiB.

        On an H200 workers with the GPU open took 0.2 to 1.8 GiB of the host, whatever their cases took there.
        """
        plan, lanes = self._plan(op_type), self.lanes(op_type, actor)
        if self.side_by_side and actor in plan.on_gpu:
            there = _mb(plan.host_needs, lanes) + LANE_MB * lanes
            return max(there, _mb((ACTORS[actor].host_bytes,), lanes))
        return _mb(plan.kernel_needs if actor in TRUTHS else plan.needs, lanes)

    def gpu_mb(self, op_type: str, actor: str) -> int:
        """Memory of a GPU that an actor's job over one op_type's cases takes, in MiB."""
        plan = OpTypePlan.read(self.cases / f"{op_type}.json")
        lanes = self.lanes(op_type, actor)
        needs = sorted(_gpu_need(entry, actor) for entry in plan.definitions.values())
        return GPU_MB + LANE_MB * lanes + int(SLACK * sum(needs[-lanes:]) / MIB)

    def judge_mb(self, op_type: str) -> int:
        """Memory of a judge of one op_type's cases, in MiB."""
        return _mb(self._plan(op_type).needs, self.judge_lanes(op_type))

    def _plan(self, op_type: str) -> PlanFacts:
        path = self.cases / f"{op_type}.json"
        try:
            return _read(path, path.stat().st_mtime_ns)
        except FileNotFoundError:  # a dry run before anything is planned
            return PlanFacts.of(OpTypePlan(op_type=op_type, dataset="", definitions={}, broken=()))


def _mb(needs: Sequence[int], lanes: int) -> int:
    """The largest cases of as many definitions as run side by side, and what is there anyway, in MiB."""
    return BASE_MB + int(SLACK * sum(needs[-lanes:]) / MIB)


def _gpu_need(entry: PlannedDefinition, actor: str) -> int:
    """Bytes of a GPU that a definition's largest case takes: a kernel needs nothing in float64."""
    cases = [case for case in entry.cases if case.skip is None]
    if actor in TRUTHS:
        definition = entry.parsed
        far = [case.eager_bytes if TRUTHS[actor].eager else case.kernel_bytes for case in cases]
        near = (min(case.memory, KERNEL_COPIES * tensors(definition, case)) for case in cases)
        return max(map(sum, zip(near, far, strict=True)), default=0)
    if actor == ORACLE:  # the others are computed by a CPU, or by the judge
        device = ACTORS[actor].device
        waiting = (case for case in cases if not case.large and device("cuda", case.memory) == "cuda")
        return max((case.oracle_bytes for case in waiting), default=0)
    return max((case.memory for case in cases), default=0)


@cache
def _read(cases: Path, stamp: int) -> PlanFacts:
    """An op_type's facts, read once per state of the file: several rules ask of every job."""
    del stamp
    return PlanFacts.read(cases)
