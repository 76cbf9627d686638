"""The workers that a stack's jobs share: what their interpreter imports, and what it is told."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from traceproof.execution import caches, caller
from traceproof.pipeline import jit
from traceproof.stacks import STACKS
from traceproof.worker import GIB, Isolation, Limits, Pool
from traceproof.worker.model import NICE

THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
PRELOAD = ("torch", "traceproof.actors.preload")
# What importing SGLang or FLA brings along of torch, three seconds of it: once, and not in each of their workers.
# torch._inductor is not among it: importing it opens the driver.
COMPILER = ("torch._dynamo",)
STACK = "TRACEPROOF_STACK"  # variable: a worker that served one stack is not given to another
# Of our own code over our own files, to end what hangs. All such work has the same, and so the same workers.
OWN_CODE = Limits(
    seconds=4 * 3600.0,
    setup_seconds=600.0,
    memory_bytes=None,
    output_bytes=GIB,
    file_bytes=1 << 50,
    message_bytes=4 * GIB,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWorkers:
    """What is the same for all jobs of a stack, whatever their cores; jobs that differ in it share nothing."""

    preload: Sequence[str] = PRELOAD  # modules that workers find imported
    # variables for the workers, beside the few that are always passed on
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False  # whether there is a GPU for them

    @classmethod
    def of(cls, caches: Path, stack: Mapping[str, Any]) -> Self:
        """A stack's, by its record; `caches` is for what is compiled on the way."""
        threads = dict.fromkeys(THREADS, "1")
        if stack["device_type"] != "cuda":
            return cls(environment=threads)
        name = stack["stack"]
        told = {STACK: name, NICE: str(STACKS[name].nice)}
        return cls(
            preload=(*PRELOAD, *COMPILER) if STACKS[name].imports_long else PRELOAD,
            environment=threads | told | jit.environment(caches, stack),
            gpu=True,
        )

    @property
    def without(self) -> Collection[str]:
        """Layers of isolation that its workers do without."""
        return caller.CUDA_REFUSES if self.gpu else ()

    def _pool(self, *, shared: bool = True, **more: Any) -> Pool:  # noqa: ANN401 - the other arguments of `Pool`
        return Pool(**{"env": self.environment} | more, gpu=self.gpu, without=self.without, shared=shared)

    def pool(self, *, most: int | None = None, readable: Sequence[Path] = (), python: Path | None = None) -> Pool:
        """A job's access to workers; the arguments are those of `Pool`."""
        return self._pool(preload=self.preload, readable=readable, most=most, python=python)

    def pool_apart(self) -> Pool:
        """Workers for what leaves too much behind in a process for another job to go on with it.

        With a GPU their folders of compiled code, and so their interpreter, are theirs alone.
        """
        return self._pool(preload=self.preload, shared=not self.gpu, lasting=False)

    def untrusted(self, *, conceal: Sequence[Path], readable: Sequence[Path] = (), weak: bool = False) -> Pool:
        """A job's access to workers for strangers' code, which find nothing of ours imported but the runner.

        The arguments are those of `Pool`; this project's own folders are concealed too. They go before others of
        their stack: a sampler's reference, called thousands of times, is what a run waits for.
        """
        hidden = [*caller.project_folders(), *conceal]
        first = {name: value for name, value in self.environment.items() if name != NICE}
        return self._pool(env=first, preload=caller.PRELOAD, readable=readable, conceal=hidden, weak=weak)

    def start(self, *, trusted: bool) -> None:
        """Have the interpreters started that a job of trusted code, or of strangers', is about to need."""
        if trusted:
            self.pool().start(Isolation.TRUSTED)
            return
        self.untrusted(conceal=(), readable=caches.readable(self.environment)).start(Isolation.UNTRUSTED)
        self.on_host().pool().start(Isolation.TRUSTED)

    @classmethod
    def on_host(cls) -> Self:
        """Any stack's workers without a GPU, which plan, draw inputs and measure what strangers' code did."""
        return cls(environment=dict.fromkeys(THREADS, "1"))
