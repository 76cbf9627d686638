"""What one run of an actor needs beside the cases, and what follows from it for a case."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.actors.registry import ACTORS
from traceproof.digests import digest_json
from traceproof.pipeline.records import ORACLE, REFERENCE, OpTypePlan, PlannedCase, PlannedDefinition, SkipNote
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.reasons import Skip
from traceproof.worker import Isolation, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one run of an actor needs beside the cases."""

    actor: str  # a name out of traceproof.actors.registry
    code: str  # digest of the code that its outputs depend on
    stack: Mapping[str, Any]  # the stack's record: `digest`, `versions`, `device`
    threads: int  # torch threads of a worker
    limits: Limits  # of one case
    stack_workers: StackWorkers = field(default_factory=StackWorkers)  # the workers of its stack
    lanes: int = 1  # definitions of strangers' code that run side by side, each in a worker of its own
    force: bool = False  # run what the store already holds
    variables: Mapping[str, str] = field(default_factory=dict)  # more variables for the workers, this job's own
    # how many workers for trusted code the jobs of a stack may have at once; None: one per job
    workers: int | None = None
    weak_isolation: bool = False  # whether strangers' code may run where isolation is not whole

    @property
    def trusted(self) -> bool:
        """Whether the code is ours or a pinned package's."""
        return ACTORS[self.actor].trusted

    @property
    def isolation(self) -> Isolation:
        """How far workers are shut in."""
        return Isolation.TRUSTED if self.trusted else Isolation.UNTRUSTED

    @property
    def device(self) -> str:
        """`cpu` or `cuda`; what the actor computes on the CPU all the same, its entry in the registry says."""
        return "cuda" if self.stack_workers.gpu else "cpu"

    @property
    def hidden_threads(self) -> int:
        """Torch threads of a hidden case: others than elsewhere, where there are several to be had."""
        return 2 * self.threads if self.device == "cpu" else self.threads

    @property
    def repeats(self) -> bool:
        """Whether a planned repeat is worth running: the oracle is not under test."""
        return self.actor != "oracle"

    def device_of(self, planned: PlannedCase) -> str:
        """Where a planned case is computed, `cpu` or `cuda`."""
        return ACTORS[self.actor].device(self.device, planned.memory)

    def key(self, entry: PlannedDefinition, planned: PlannedCase) -> str:
        """Key of a case's outputs in the store: a digest of all that they depend on."""
        return digest_json(
            [
                entry.digest,
                planned.digest,
                planned.repeat,
                planned.blobs,
                None if self.trusted else planned.nonce,
                self.actor,
                self.code,
                self.stack["digest"],
                self.device_of(planned),
            ]
        )


def absent(actor: str, entry: PlannedDefinition) -> SkipNote | None:
    """What the plan says that a definition lacks for an actor, so that no worker is asked; None: nothing."""
    if actor == REFERENCE and not entry.reference:
        return SkipNote(reason=Skip.NO_REFERENCE, message="the definition has no reference")
    if actor == ORACLE and entry.no_oracle is not None:
        return SkipNote(reason=Skip.NO_ORACLE, message=entry.no_oracle)
    return None


def opens_gpu(cases: Path, actor: str) -> bool:
    """Whether an actor's job computes any of the planned cases on the GPU, where there is one."""
    info = ACTORS[actor]
    able = [entry for entry in OpTypePlan.read(cases).definitions.values() if absent(actor, entry) is None]
    waiting = [case for entry in able for case in entry.cases if case.skip is None]
    if not info.host_bytes:
        return bool(waiting)
    # Oracles of large cases are the judge's work.
    return any(info.device("cuda", case.memory) == "cuda" for case in waiting if not case.large)


def judge_opens_gpu(cases: Path) -> bool:
    """Whether the judge computes any of the planned cases on the GPU, where there is one."""
    return any(case.large for case in OpTypePlan.read(cases).to_run)
