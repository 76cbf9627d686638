"""The engine: draws a case, computes what is right, runs the implementations and judges what they left.

It runs in the torch environment and is trusted. References run shut in, ground truths in one worker per
environment (`traceproof.run.workers`); inputs and outputs lie in memory.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue
from typing import Any, Self

import torch

from traceproof.dataset.definition import Definition
from traceproof.files import sweep
from traceproof.programs import available_memory
from traceproof.reasons import Skip, Unavailable
from traceproof.run import jit
from traceproof.run.calls import cuda_is_lost, keep_memory, wait_asleep
from traceproof.run.definition_run import DefinitionRun, raised
from traceproof.run.implementation import Implementation, absent, blocked
from traceproof.run.implementations import PAIR, environment_of
from traceproof.run.judging import CaseResult, RowOrigin, Rows
from traceproof.run.schema import (
    REFERENCE,
    PlannedDefinition,
)
from traceproof.run.untrusted import refusal, untrusted_pool
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import Limits, Pool, Reply
from traceproof.stacks import MAIN, STACKS, Module


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What is run with."""

    # by stack. The main one missing: this interpreter; another missing: it is not to be had here
    environments: Mapping[str, Environment] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)  # of one call
    build_seconds: float = 0.0  # of a kernel module, or of a call that compiles what it calls
    dataset: Path | None = None  # its root, for workload lines' blobs
    caches: Path | None = None  # folder for what is compiled; None: where packages put it by themselves
    conceal: Sequence[Path] = ()  # what untrusted code must not see, beside the project
    code: str = ""  # digest of our code, for rows
    tolerance: float | None = None  # the user's atol and rtol, in place of the calibrated gates
    figures: bool = True  # whether large outputs that pass have figures in their rows
    weak: bool = False  # whether untrusted code may run where isolation is not whole
    workers: int = 1  # of each environment at most, where definitions side by side would wait for one
    # implementations that are called in this process, by name: code that its user trusts (`traceproof.check`)
    functions: Mapping[str, Implementation] = field(default_factory=dict)
    # told of each (implementation, definition, case, status) that is finished; called from any thread
    progress: Callable[[str, str, str, str], object] = lambda *_: None


class Engine:
    """Runs implementations on definitions' cases, and judges them. A context manager: it owns its workers."""

    def __init__(self, settings: EngineSettings, untrusted: Pool | None = None) -> None:
        """With workers for untrusted code of somebody else's; None: its own."""
        self.settings = settings
        here = {} if MAIN in settings.environments else {MAIN: this_interpreter(on_gpu=torch.cuda.is_available())}
        self.environments = {**here, **settings.environments}
        self.device = torch.device("cuda" if self.environments[MAIN].on_gpu else "cpu")
        self._lost = False
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._workers: dict[str, LifoQueue[Worker]] = {}  # of each environment, those that nobody asks
        self._builds: dict[tuple[str, str], Future[str | None]] = {}
        self._builders = ThreadPoolExecutor(jit.side_by_side(available_memory(), len(os.sched_getaffinity(0))))
        self.threads = ThreadPoolExecutor(64)  # each waits for a worker
        main = self.environments[MAIN]
        self.untrusted = untrusted or self._open.enter_context(
            untrusted_pool(
                gpu=main.on_gpu,
                conceal=settings.conceal,
                weak=settings.weak,
                environment=jit.environment(settings.caches, main.record, python=main.python)
                if main.on_gpu and settings.caches
                else None,
            )
        )
        keep_memory()
        wait_asleep(self.device)
        torch.set_num_threads(1)  # several engines run side by side, and sums have one order
        sweep(Path(tempfile.gettempdir()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, and builds that nobody waits for."""
        self._closed.set()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._builders.shutdown(wait=False, cancel_futures=True)
        self._open.close()

    def rows(self, entry: PlannedDefinition, implementations: Sequence[str]) -> Rows:
        """All verdict rows of a definition: by implementation and case, then pairs of ground truths.

        Raises TraceproofError: a disk is full, or a worker can not be started.
        """
        self.prepare([entry], [name for name in implementations if name not in self.settings.functions])
        wanted = {*implementations}
        needed = {REFERENCE} if entry.no_oracle is not None else set()  # whose shadow stands in for an oracle
        rows = DefinitionRun(self, entry, sorted(wanted | needed)).rows()
        return [row for row in rows if row.implementation in wanted or PAIR in row.implementation]

    def prepare(self, entries: Iterable[PlannedDefinition], implementations: Sequence[str]) -> None:
        """Begin to start what definitions need: a worker beside this process, or builds, the longest first."""
        entries = list(entries)
        if not entries:
            return
        if self.device.type != "cuda":
            main, threads = self.environments[MAIN], [*Path("/proc/self/task").iterdir()]
            here = any(name != REFERENCE and environment_of(name) == MAIN for name in implementations)
            if here and main.name not in self._workers and main.python == sys.executable and len(threads) == 1:
                self._workers_of(main).queue[-1].fork()  # torch is imported, which takes a second
            return
        wanted = [
            (environment, module)
            for entry in entries
            for name in implementations
            if (environment := self._environment(name)) is not None and environment.on_gpu
            for module in jit.told(name, entry.parsed, torch.cuda.get_device_capability())
        ]
        order = sorted(wanted, key=lambda one: jit.urgency(STACKS[one[0].name], one[1]), reverse=True)
        with self._lock:
            for environment, module in order:
                key = environment.name, module.label
                if key not in self._builds:
                    self._builds[key] = self._builders.submit(self._build, environment, module)

    def _environment(self, name: str) -> Environment | None:
        return None if name == REFERENCE else self.environments.get(environment_of(name))

    def _build(self, environment: Environment, module: Module) -> str | None:
        caches = self.settings.caches
        if caches is None:
            return None  # the package compiles it when it is called
        return jit.build(
            environment.name,
            module,
            python=environment.python,
            variables=environment.told(caches),
            marks=jit.folder_of(caches, environment.record) / "built",
            seconds=self.settings.build_seconds,
            stopped=self._closed,
        )

    def not_built(self, name: str, definition: Definition) -> str | None:
        """Why a ground truth's modules for a definition were not built; waits for them. None: they were."""
        if self.device.type != "cuda":
            return None
        modules = jit.told(name, definition, torch.cuda.get_device_capability())
        keys = ((environment_of(name), module.label) for module in modules)
        builds = [self._builds[key] for key in keys if key in self._builds]
        return next((problem for build in builds if (problem := build.result()) is not None), None)

    @property
    def computing(self) -> torch.device:
        """Where it draws and solves what takes a CPU long: the GPU, until that is lost to this process."""
        return torch.device("cpu") if self._lost else self.device

    def gpu_fails(self, error: Exception) -> bool:
        """Whether an error is the GPU's alone: it has no memory left, or is lost, and then it is asked no more."""
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return True
        self._lost = self._lost or (self.device.type == "cuda" and cuda_is_lost())
        return self._lost

    def known(self, name: str, entry: PlannedDefinition, definition: Definition) -> CaseResult | None:
        """What comes of all cases of an implementation without anything being run; None: it has to be run."""
        if name == REFERENCE:
            if not entry.reference:
                return CaseResult.skipped(Unavailable(Skip.NO_REFERENCE, "the definition has no reference"))
            refused = refusal(entry.reference)
            return None if refused is None else CaseResult.failed(refused)
        if name in self.settings.functions:
            return None
        try:
            why = blocked(name, definition, self.device.type)
        except Exception as error:  # noqa: BLE001 - an adapter's condition that can not be told is that definition's
            return CaseResult.failed(raised(error))
        if why is None and self._environment(name) is None:
            why = absent(name, definition)
        return None if why is None else CaseResult.skipped(why)

    def origin(self, name: str) -> RowOrigin:
        """What an implementation's rows stand on."""
        environment = self.environments.get(environment_of(name), self.environments[MAIN])
        return RowOrigin(code=self.settings.code, record=environment.record)

    def ask(self, name: str, item: Mapping[str, Any], seconds: float | None = None) -> Reply:
        """Have a worker of a ground truth's environment run one case: the one that was asked last and is free."""
        with self._lock:
            free = self._workers_of(self.environments[environment_of(name)])
        worker = free.get()
        try:
            return worker.ask(item, seconds)
        finally:
            free.put(worker)

    def _workers_of(self, environment: Environment) -> "LifoQueue[Worker]":
        """The workers of an environment; each starts when it is first asked."""
        if environment.name not in self._workers:
            device = "cuda" if environment.on_gpu else "cpu"
            dataset = None if self.settings.dataset is None else str(self.settings.dataset.absolute())
            payload = {"device": device, "threads": 1, "dataset": dataset}
            setup = "traceproof.run.trusted:setup"
            free = self._workers[environment.name] = LifoQueue()
            for _ in range(self.settings.workers):
                made = Worker(environment, setup, payload, self.settings.limits, self.settings.caches)
                self._open.callback(made.close)
                free.put(made)
        return self._workers[environment.name]


def this_interpreter(*, on_gpu: bool) -> Environment:
    """The environment that this process runs in."""
    record = {"device_type": "cuda" if on_gpu else "cpu", "digest": ""}
    return Environment(name=MAIN, python=sys.executable, record=record)
