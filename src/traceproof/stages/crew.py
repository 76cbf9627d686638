"""The workers that a stack's jobs share: what their interpreter imports, and what it is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from traceproof import jit
from traceproof.worker import Pool
from traceproof.worker.model import NICE

PRELOAD = ("torch", "traceproof.actors.preload")
# What importing SGLang or FLA brings along of torch, three seconds of it: once, and not in each of their workers.
# torch._inductor is not among it: importing it opens the driver.
COMPILER = ("torch._dynamo",)
IMPORT_LONG = frozenset({"sglang", "fla"})
# Importing them is what a run waits for at last, and takes one core; references poll for the GPU on many.
STANDS_BACK = {"torch": "5"}
STACK = "TRACEPROOF_STACK"  # variable: a worker that served one stack is not given to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What is the same for all jobs of a stack, however many cores one has; jobs that differ in it share nothing.

    Attributes:
        preload: modules that workers find imported.
        environment: variables for the workers, beside the few that are always passed on.
        gpu: whether there is a GPU for them.
    """

    preload: Sequence[str] = PRELOAD
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False

    @classmethod
    def of(cls, caches: Path, stack: Mapping[str, Any]) -> Self:
        """A stack's.

        Args:
            caches: folder for what is compiled on the way.
            stack: the stack's record.
        """
        threads = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        if stack["device_type"] != "cuda":
            return cls(environment=threads)
        name = stack["stack"]
        told = {STACK: name, NICE: STANDS_BACK.get(name, "0")}
        return cls(
            preload=(*PRELOAD, *COMPILER) if name in IMPORT_LONG else PRELOAD,
            environment=threads | told | jit.environment(caches, stack),
            gpu=True,
        )

    def pool(
        self, *, readable: Sequence[Path] = (), without: Collection[str] = (), most: int | None = None
    ) -> Pool:
        """A job's access to them; the arguments are those of `Pool`."""
        return Pool(
            preload=self.preload,
            env=self.environment,
            gpu=self.gpu,
            readable=readable,
            without=without,
            shared=True,
            most=most,
        )
