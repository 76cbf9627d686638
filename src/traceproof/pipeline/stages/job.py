"""What one run of an actor needs beside the cases, and what follows from it for a case."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from traceproof.actors.registry import ACTORS
from traceproof.digests import digest_json
from traceproof.pipeline.records import PlannedCase, PlannedDefinition
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.stacks import STACK_OF, STACKS, TAGGED
from traceproof.worker import Isolation, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one run of an actor needs beside the cases."""

    actor: str  # a name out of traceproof.actors.registry
    code: str  # digest of the code that its outputs depend on
    stack: Mapping[str, Any]  # the stack's record: `digest`, `versions`, `device`
    threads: int  # torch threads of a worker
    limits: Limits  # of one case
    build_seconds: float = 0.0  # of a call that compiles what it calls, if that is more than `limits` gives
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

    def seconds_of_first(self, entry: PlannedDefinition) -> float:
        """What a definition's first call may take: on a GPU one of a function that its tag names compiles it."""
        compiles = self.device == "cuda" and STACK_OF.get(self.actor) == TAGGED
        named = compiles and entry.parsed.dumped_from.startswith(f"{STACKS[TAGGED].package}.")
        return max(self.limits.seconds, self.build_seconds if named else 0.0)

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
