"""Which of an op_type's definitions each job of an actor runs, where one job would take long.

The split is a function of the plan, of what earlier runs took and of how many jobs run at once. It is written into
the plan, so that whoever builds the DAG from it gets the same one. Keys of outputs and verdicts do not depend on
it.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from traceproof.actors.registry import ACTORS, for_op_type
from traceproof.errors import TraceproofError
from traceproof.pipeline.records import ORACLE, OpTypePlan, PlannedCase, PlannedDefinition, shard_names
from traceproof.pipeline.stages.lanes import dealt
from traceproof.pipeline.stages.manifest import Manifest, manifests_of

SHARD_SECONDS = 20.0  # of work worth a job of its own, which takes about half a second more
FEWEST = 8  # definitions per shard: a dataset of few keeps one job per op_type and actor
# Estimates in seconds for what never ran, from benchmarks on two cores and on an H200 that 16 processes share.
CASE_SECONDS = 0.03
LAUNCHES_SECONDS = 0.2  # a case of a reference on a GPU: Python that launches one small kernel after the other
TRIAL_SECONDS = 0.015
BYTE_SECONDS = 3e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What a split follows from, beside the plan."""

    slots: int  # how many jobs run at once
    actors: Path  # folder of the manifests that earlier runs left, a folder per op_type
    gpu: bool = False  # whether references run on a GPU

    def applied(self, plan: OpTypePlan) -> OpTypePlan:
        """The plan with its shards. Manifests of another split are removed."""
        folder = self.actors / plan.op_type
        shards = {actor: self._shards(plan, actor, folder) for actor in for_op_type(plan.op_type)}
        for actor, parts in shards.items():
            current = {f"{actor}{shard}" for shard in shard_names(len(parts))}
            for path in manifests_of(folder, actor):
                if path.stem not in current:
                    path.unlink(missing_ok=True)
        return plan.model_copy(
            update={"shards": {name: parts for name, parts in shards.items() if len(parts) > 1}}
        )

    def _shards(self, plan: OpTypePlan, actor: str, folder: Path) -> tuple[tuple[str, ...], ...]:
        """Names of the definitions of each of an actor's jobs."""
        if self._most(len(plan.definitions)) == 1:
            return (tuple(plan.definitions),)
        return self.parts(self.costs(plan, actor, took(folder, actor)))

    def _most(self, definitions: int) -> int:
        return max(1, min(self.slots, definitions // FEWEST))

    def parts(self, costs: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
        """Definitions in as many parts of about the same cost as are worth a job each."""
        return dealt(costs, max(1, min(self._most(len(costs)), int(sum(costs.values()) / SHARD_SECONDS))))

    def costs(self, plan: OpTypePlan, actor: str, known: Mapping[str, float]) -> dict[str, float]:
        """Seconds per definition: what it is known to take, else an estimate by what the others took."""
        guesses = {name: self._estimate(entry, actor) for name, entry in plan.definitions.items()}
        measured = [name for name in guesses if name in known]
        guessed = sum(guesses[name] for name in measured)
        scale = sum(known[name] for name in measured) / guessed if guessed else 1.0
        return {name: known.get(name, guess * scale) for name, guess in guesses.items()}

    def _estimate(self, entry: PlannedDefinition, actor: str) -> float:
        return sum(self._case(planned, actor) for planned in entry.cases if planned.skip is None)

    def _case(self, planned: PlannedCase, actor: str) -> float:
        if ACTORS[actor].trusted:  # the judge computes what is large
            return 0.0 if planned.large and actor == ORACLE else CASE_SECONDS + BYTE_SECONDS * planned.memory
        start = LAUNCHES_SECONDS if self.gpu else CASE_SECONDS
        return start + TRIAL_SECONDS * planned.trials + BYTE_SECONDS * planned.memory


def took(folder: Path, actor: str) -> dict[str, float]:
    """Seconds per definition that an actor took when its outputs were made; none where its manifests are gone."""
    found: dict[str, float] = {}
    for path in manifests_of(folder, actor):
        with suppress(TraceproofError):  # damaged: it is removed, and made again
            for name, records in Manifest.read(path).cases.items():
                seconds = sum(record.seconds for record in records.values())
                if seconds:
                    found[name] = seconds + CASE_SECONDS * len(records)
    return found
