"""The engine: draws cases, computes what is expected, runs implementations and judges their outputs.

It runs in the torch environment and is trusted. References run isolated (`traceproof.run.untrusted`), ground
truths in a worker per environment (`traceproof.run.workers`); inputs and outputs stay in memory. `Engine` holds
what all definitions share; `DefinitionRun` runs one definition and has the only loop over cases.
"""

import contextlib
import os
import secrets
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import LifoQueue
from random import Random
from typing import Any, TypeVar

import torch

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.draw import normal_table
from traceproof.environments import jit
from traceproof.files import sweep
from traceproof.judge.output import MISCONDUCT, OTHER_TIES, Ruling
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.ops.op import Op
from traceproof.programs import available_memory
from traceproof.reasons import WORST_FIRST, Error, Skip, Unavailable, Verdict
from traceproof.run.calls import BETWEEN_BYTES, cuda_is_lost, giving_back, keep_memory, set_seed, wait_asleep
from traceproof.run.case import CPU, drawing_device, fingerprints, make_inputs, on_host, place
from traceproof.run.inits import filled
from traceproof.run.judging import EXPLAINED_BYTES, JudgedCase, LargeCase, Right, Rows
from traceproof.run.runner import SAME_MEMORY
from traceproof.run.schema import (
    BASELINE,
    PAIR,
    REFERENCE,
    SHADOW,
    WHOLE,
    PlannedCase,
    PlannedDefinition,
    environment_of,
)
from traceproof.run.shadow import modes_of
from traceproof.run.tensors import plain_tensors, same_bits, same_draws
from traceproof.run.trusted import Runner, blocked
from traceproof.run.untrusted import NAN, CallError, CaseResult, UntrustedSource, loaded, refusal
from traceproof.run.workers import EngineSettings, Environment, Worker, untrusted_pool
from traceproof.sandbox import Pool, Reply, Status
from traceproof.sandbox.worker import describe
from traceproof.stacks import MAIN, STACKS, TAGGED

MANY_CALLS = 32  # calls before the second run whose bits are compared: from this number to twice as many
PATIENCE = 2  # timeouts of an implementation in a definition after which its other cases are not run
# A case of up to this memory takes a CPU less than two seconds in float64, mostly less than a crowded GPU.
ORACLE_HOST_BYTES = 512 << 20
Caller = Callable[[JudgedCase], CaseResult]  # of untrusted code: calls it for a drawn case
Call = tuple[Values, Tensors]  # inputs and outputs of a call
T = TypeVar("T")


class Engine(contextlib.AbstractContextManager["Engine"]):
    """Runs implementations on definitions' cases, and judges them. A context manager: it owns its workers."""

    def __init__(self, settings: EngineSettings, untrusted: Pool | None = None) -> None:
        """`untrusted`: a pool of workers for untrusted code, from elsewhere; None: the engine makes its own."""
        here = {} if MAIN in settings.environments else {MAIN: this_interpreter(on_gpu=torch.cuda.is_available())}
        self.settings = replace(settings, environments={**here, **settings.environments})
        self.environments = self.settings.environments
        main = self.environments[MAIN]
        self.device = torch.device("cuda" if main.on_gpu else "cpu")
        self._lost = False
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._workers: dict[str, LifoQueue[Worker]] = {}  # by environment: the workers that are free
        self._builds: dict[tuple[str, str], Future[str | None]] = {}
        self._builders = ThreadPoolExecutor(jit.side_by_side(available_memory(), len(os.sched_getaffinity(0))))
        self.threads = ThreadPoolExecutor(64)  # each thread waits for a worker
        compiled = settings.caches if main.on_gpu else None
        variables = jit.environment(compiled, main.record, python=main.python) if compiled else None
        options: dict[str, Any] = {"conceal": settings.conceal, "weak": settings.weak, "environment": variables}
        self.untrusted = untrusted or self._open.enter_context(untrusted_pool(gpu=main.on_gpu, **options))
        keep_memory()
        torch.set_num_threads(1)  # several engines run side by side; and one thread sums in one order
        sweep(Path(tempfile.gettempdir()))

    def __exit__(self, *_: object) -> None:
        """End all workers and builds."""
        self._closed.set()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._builders.shutdown(wait=False, cancel_futures=True)
        self._open.close()

    def rows(self, entry: PlannedDefinition, implementations: Sequence[str]) -> Rows:
        """All rows of a definition, pairs last. Raises TraceproofError: a disk is full, or no worker starts."""
        self.prepare([entry], [name for name in implementations if name not in self.settings.functions])
        requested = {*implementations}
        needed = {REFERENCE} if entry.no_oracle is not None else set()  # the reference's shadow replaces an oracle
        with filled(entry, self.untrusted) as filled_entry:
            rows = DefinitionRun(self, filled_entry, sorted(requested | needed)).rows()
        return [row for row in rows if row.implementation in requested or PAIR in row.implementation]

    def prepare(self, entries: Sequence[PlannedDefinition], implementations: Sequence[str]) -> None:
        """Start ahead what definitions need: a worker per environment, and kernel builds, the longest first."""
        self._fork_workers(implementations)
        wait_asleep(self.device)
        caches = self.settings.caches
        if self.device.type != "cuda" or caches is None:  # modules are compiled when called
            return
        capability = torch.cuda.get_device_capability()
        modules = [
            (environment, module)
            for entry in entries
            for name in implementations
            if name != REFERENCE and (environment := self.environments.get(environment_of(name))) is not None
            for module in (jit.modules_for(name, entry.parsed, capability) if environment.on_gpu else ())
        ]
        modules.sort(key=lambda one: jit.urgency(STACKS[one[0].name], one[1]), reverse=True)
        with self._lock:
            for environment, module in modules:
                key = environment.name, module.label
                if key not in self._builds:
                    self._builds[key] = self._builders.submit(
                        jit.build,
                        environment.name,
                        module,
                        python=environment.python,
                        variables=environment.told(caches),
                        marks=jit.folder_of(caches, environment.record) / "built",
                        seconds=self.settings.build_seconds,
                        stopped=self._closed,
                    )

    def _fork_workers(self, implementations: Sequence[str]) -> None:
        """Fork a worker per environment with this interpreter, which spares each the import of torch.

        Not from a process with other threads, or with a GPU open, which a fork would not survive.
        """
        normal_table(CPU)  # computed before the fork, so that the workers have it, too
        main = self.environments[MAIN]
        gpu_may_be_open = main.on_gpu and not main.record["digest"]  # a record of `this_interpreter` has none
        if gpu_may_be_open or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - their number
            return
        names = {environment_of(name) for name in implementations if name != REFERENCE}
        for name in sorted(names & self.environments.keys() - self._workers.keys()):
            if self.environments[name].python == sys.executable:
                self._workers_of(self.environments[name]).queue[-1].fork()

    def not_built(self, name: str, definition: Definition) -> str | None:
        """Why a ground truth's kernel modules for a definition were not built, after waiting; None: they were."""
        capability = torch.cuda.get_device_capability() if self.device.type == "cuda" else None
        modules = jit.modules_for(name, definition, capability) if capability else ()
        builds = (self._builds.get((environment_of(name), module.label)) for module in modules)
        return next((problem for build in builds if build and (problem := build.result()) is not None), None)

    @property
    def computing(self) -> torch.device:
        """The device that draws and solves large cases: the GPU; the CPU once this process has lost the GPU."""
        return CPU if self._lost else self.device

    def where_it_fits(self, device: torch.device, compute: Callable[[torch.device], T]) -> T:
        """The result of `compute(device)`; of `compute(CPU)` where the GPU has no memory left or is lost."""
        try:
            return compute(device)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            else:
                self._lost = self._lost or (self.device.type == "cuda" and cuda_is_lost())
                if not self._lost:
                    raise
            return compute(CPU)

    def expected(  # noqa: PLR0913, PLR0917 - one case, spelled out
        self,
        op: Op,
        definition: Definition,
        case: Case,
        inputs: Callable[[], Values],  # called on each try: inputs that lie on a GPU are lost with it
        device: torch.device,
        memory: int,  # bytes that the case needs
    ) -> Tensors:
        """The oracle's entries for a case, computed on `device`; on the CPU where that has no memory or is lost.

        An op whose cases are mostly solved on a CPU may not support another device: if it raises there, a small
        case is computed on the CPU. Raises what the op raises: it can not be computed.
        """

        def entries(device: torch.device) -> Tensors:
            set_seed(case.seed, device)
            try:
                placed = place(inputs(), device) if device.type == "cuda" else on_host(inputs())
                values = op.expected(definition, placed, case.seen)
                return _whole(dict(zip(values, plain_tensors(list(values.values())), strict=True)))
            except (RuntimeError, ValueError, TypeError):
                if device.type == "cpu" or memory > ORACLE_HOST_BYTES or cuda_is_lost():
                    raise
                return entries(CPU)

        return self.where_it_fits(device, entries)

    def known(self, name: str, entry: PlannedDefinition, definition: Definition) -> CaseResult | None:
        """An implementation's result for all cases that is known without running it; None: it has to be run."""
        if name == REFERENCE and not entry.reference:
            return CaseResult.skipped(Unavailable(Skip.NO_REFERENCE, "the definition has no reference"))
        if name == REFERENCE:
            refused = refusal(entry.reference)
            return None if refused is None else CaseResult.failed(refused)
        if name in self.settings.functions:
            return None
        try:
            installed = environment_of(name) in self.environments
            why = blocked(name, definition, self.device.type, installed=installed)
        except Exception as error:  # noqa: BLE001 - an adapter's condition raised: this definition's result
            return CaseResult.failed(raised(error))
        return None if why is None else CaseResult.skipped(why)

    def ask(self, name: str, item: Mapping[str, Any], seconds: float | None = None) -> Reply:
        """Have a free worker of a ground truth's environment run one case; the one used last is taken first."""
        with self._lock:
            free = self._workers_of(self.environments[environment_of(name)])
        worker = free.get()
        try:
            return worker.ask(item, seconds)
        finally:
            free.put(worker)

    def _workers_of(self, environment: Environment) -> "LifoQueue[Worker]":
        """Free workers of an environment; each starts when it is first asked."""
        if environment.name not in self._workers:
            dataset = None if self.settings.dataset is None else str(self.settings.dataset.absolute())
            payload = {"device": "cuda" if environment.on_gpu else "cpu", "threads": 1, "dataset": dataset}
            free = self._workers[environment.name] = LifoQueue()
            for _ in range(self.settings.workers):
                options = environment, "traceproof.run.trusted:setup", payload, self.settings.limits
                free.put(self._open.enter_context(Worker(*options, caches=self.settings.caches)))
        return self._workers[environment.name]


def this_interpreter(*, on_gpu: bool) -> Environment:
    """An Environment for the interpreter of this process."""
    record = {"device_type": "cuda" if on_gpu else "cpu", "digest": ""}
    return Environment(name=MAIN, python=sys.executable, record=record)


class DefinitionRun:
    """Runs one definition, its cases one after the other.

    `rows` makes all verdict rows, for `verify`. `each` is the loop over cases; it can call any untrusted code in
    them: the definition's reference, or a solution in its place (`traceproof.solutions.trial`).
    """

    def __init__(self, engine: Engine, entry: PlannedDefinition, names: Sequence[str] = ()) -> None:
        self.engine, self.settings, self.entry, self.names = engine, engine.settings, entry, names
        self.definition = entry.parsed
        self.op, _ = registry.for_definition(self.definition)
        self.known = {name: engine.known(name, entry, self.definition) for name in names}
        # Whether two calls gave the same bits; draws that only one of them made do not count.
        self.same = same_draws if any(planned.trials for planned in entry.cases) else same_bits
        self.timeouts: Counter[str] = Counter()  # by implementation
        self.compiled: set[str] = set()  # implementations that were called with a batch that is not empty
        self.rows_of: dict[str, dict[str, Rows]] = {}  # by case and implementation
        self.pairs: Rows = []  # of ground truths, held against each other
        self.held: list[JudgedCase] = []  # cases with a disputed output, whose cause may be recognised

    def rows(self) -> Rows:
        """All rows, in a fixed order; the smallest disputed case of each implementation names known causes."""
        cases = self.entry.cases
        plain = [planned for planned in cases if planned.skip is None and not planned.hidden]
        hidden = [planned for planned in cases if planned.skip is None and planned.hidden]
        if REFERENCE in self.names:
            Random(digest_json([self.entry.digest, self.entry.nonce])).shuffle(plain)  # noqa: S311 - an order
        if REFERENCE in self.names and self.known[REFERENCE] is None and (plain or hidden):
            self._with_reference(plain, hidden)
        else:
            for case in self.each([*plain, *(hidden if REFERENCE in self.names else ())]):
                self._finish(case)
        explained: set[str] = set()
        order = {planned.id: position for position, planned in enumerate(cases)}
        for judged in sorted(self.held, key=lambda one: (one.planned.memory, order[one.planned.id])):
            rows = self.rows_of[judged.planned.id]
            names = {row.implementation for row in judged.every if row.arbitration is not None} - explained
            for name in names & rows.keys():
                rows[name] = [judged.explained(row) for row in rows[name]]
            explained |= names
        all_rows: Rows = []
        for name in self.names:
            of_name = self.entry.known_rows(name, self.settings.record(name), self.settings.code)
            for row in (one for one in of_name if one.verdict is Verdict.SKIP):
                self.settings.progress(name, row.definition, str(row.case), row.verdict)
            of_name += (row for rows in self.rows_of.values() for row in rows.get(name, ()))
            all_rows += sorted(of_name, key=lambda row: order[str(row.case)])
        all_rows += sorted(self.pairs, key=lambda row: (row.implementation, order[str(row.case)], row.output))
        return all_rows

    def each(
        self, cases: Iterable[PlannedCase], call: Caller | None = None, name: str = REFERENCE
    ) -> Iterator[JudgedCase]:
        """Each case once it is drawn, run and solved; `call` calls the untrusted code that rows name `name`."""
        for planned in cases:
            case = JudgedCase(
                entry=self.entry,
                definition=self.definition,
                op=self.op,
                planned=planned,
                records={name: self.settings.record(name) for name in self.names},
                code=self.settings.code,
                tolerance=self.settings.tolerance,
                dataset=self.settings.dataset,
            )
            names = [one for one in self.names if one == REFERENCE or not planned.hidden]
            case.results = {one: known for one in names if (known := self.known[one]) is not None}
            if call is not None or len(case.results) < len(names):
                with giving_back(BETWEEN_BYTES):
                    self._run(case, [one for one in names if one != REFERENCE], call, name)
            yield case

    def _run(self, case: JudgedCase, trusted: Sequence[str], call: Caller | None, name: str) -> None:
        """Run one case: the calls are made by threads while the oracle is computed here."""
        device = drawing_device(self.definition, case.planned.case, self.engine.computing)
        try:
            self.engine.where_it_fits(device, partial(self._draw_on, case))
        except Exception as error:  # noqa: BLE001 - an op's or init's error is this definition's verdict
            *frames, last = describe(error).splitlines()
            why = CaseResult.failed(raised(error, "\n".join([*frames, f"drawing the inputs: {last}"])))
            case.inputs, case.undrawn = None, why.message
            case.results |= dict.fromkeys([*trusted, *([name] if call else [])], why) | case.results
            return
        calls = {one: partial(self._trusted, one, case.planned) for one in trusted if one not in case.results}
        local = self.settings.functions.keys() & calls.keys()  # in this thread: the user may debug the function
        if call is not None:
            calls[name] = partial(self._untrusted, case, call)
        submit = self.engine.threads.submit
        futures = {one: submit(self._attempt, one, calls[one]) for one in calls if one not in local}
        if self.entry.no_oracle is None and not case.planned.large:
            case.right = self._solved(case)
        case.results |= {one: self._attempt(one, calls[one]) for one in local}
        case.results |= {one: future.result() for one, future in futures.items()}

    def _draw_on(self, case: JudgedCase, device: torch.device) -> None:
        planned, dataset = case.planned.case, self.settings.dataset
        case.inputs = make_inputs(self.op, self.definition, planned, device=device, dataset=dataset)
        # Without named implementations, no digest of the inputs is compared.
        case.digest = digest_json(fingerprints(case.inputs)) if self.names else None

    def _solved(self, case: JudgedCase) -> Right:
        """The oracle's entries, computed on the GPU if there is one and the case is large."""
        on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in (case.inputs or {}).values())
        large = case.planned.memory > ORACLE_HOST_BYTES or (self.settings.alone and on_gpu)
        device = self.engine.computing if large else CPU

        def inputs() -> Values:
            if on_gpu and self.engine.computing.type == "cpu":  # the inputs on the GPU are lost with it
                self._draw_on(case, CPU)
            return case.inputs or {}

        planned = case.planned
        try:
            oracle = self.engine.expected(self.op, self.definition, planned.case, inputs, device, planned.memory)
            return Right(oracle=oracle)
        except Exception as error:  # noqa: BLE001 - the error stands in each row of the case
            message = f"the oracle: {describe(error)}"
            return Right(blocked=Ruling(Verdict.ERROR, Error.ORACLE, message, {}))

    def _attempt(self, name: str, call: Callable[[], CaseResult]) -> CaseResult:
        """The result of a call; where too many before it timed out, an error without calling."""
        seconds = self.settings.limits.seconds
        if self.timeouts[name] >= PATIENCE:
            message = f"not run: {PATIENCE} cases of this definition ran into the limit of {seconds:g} s"
            return CaseResult(status="error", reason=Error.TIMEOUT, message=message)
        result = call()
        self.timeouts[name] += result.reason == Error.TIMEOUT
        return result

    @staticmethod
    def _untrusted(case: JudgedCase, call: Caller) -> CaseResult:
        """The result of calling untrusted code for a case."""
        try:
            return replace(call(case), inputs=case.digest)
        except CallError as error:
            return CaseResult.failed(error.reply)

    def _trusted(self, name: str, planned: PlannedCase) -> CaseResult:
        """The result of a ground truth for a case, in a worker; of a user's function, which is called here."""
        item: dict[str, Any] = {"implementation": name, "digest": self.entry.digest, "repeat": planned.repeat}
        item |= {"case": planned.case.as_json(), "definition": self.entry.definition}
        function = self.settings.functions.get(name)
        if function is not None:
            function.device, function.axes = self.engine.device.type, planned.case.axes
            runner = Runner(self.definition, self.op, function, self.engine.device, self.settings.dataset)
            try:
                return CaseResult(**runner.run(item))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything, which is its row
                trace, ours = error.__traceback__, str(Path(__file__).parents[1])
                while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(ours):
                    trace = trace.tb_next  # skip our own frames
                return CaseResult.failed(raised(error.with_traceback(trace)))
        problem = self.engine.not_built(name, self.definition)
        if problem is not None:
            return CaseResult(status="error", reason=Error.EXCEPTION, message=f"RuntimeError: {problem}")
        seconds = self.settings.limits.seconds
        # On a GPU the first call with rows compiles; any call may of a function that the definition's tag names.
        compiles = name not in self.compiled or (environment_of(name) == TAGGED and self.definition.dumped_from)
        if self.engine.device.type == "cuda" and compiles:
            seconds = max(seconds, self.settings.build_seconds)
        reply = self.engine.ask(name, item, seconds)
        if all(planned.case.axes.values()):
            self.compiled.add(name)
        if reply.status is not Status.OK:
            return CaseResult.failed(reply)
        if "skip" in reply.value:
            return CaseResult.skipped(Unavailable(**reply.value["skip"]))
        return CaseResult(**reply.value)

    def judge(self, case: JudgedCase) -> None:
        """Judge a case that is too large to be solved in one piece (others are judged by JudgedCase itself)."""
        if not case.planned.large or case.inputs is None or not case.ran:
            return
        try:
            case.large = LargeCase(case, figures=self.settings.figures).rulings(self.engine.computing)
        except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, OSError) as error:
            message = f"the oracle: {type(error).__name__}: {error}"
            case.large = {name: {WHOLE: Ruling(Verdict.ERROR, Error.ORACLE, message, {})} for name in case.ran}

    def _finish(self, case: JudgedCase) -> None:
        """Judge a case, keep its rows, and free its tensors."""
        planned = case.planned
        case.results = {name: case.results[name] for name in sorted(case.results)}
        self.judge(case)
        case.inputs = None
        self.rows_of[planned.id] = dict(case.rows)
        self.pairs += case.pairs()
        if any(row.arbitration for row in case.every) and planned.memory <= EXPLAINED_BYTES:
            self.held.append(case)
        for name, rows in case.rows.items():
            verdicts = {row.verdict for row in rows}
            worst = next(one for one in WORST_FIRST if one in verdicts)
            self.settings.progress(name, self.definition.name, planned.id, str(worst))

    def _with_reference(self, plain: Sequence[PlannedCase], hidden: Sequence[PlannedCase]) -> None:
        """All cases with the reference; then one with other fill and hidden ones, on a CPU in a new process."""
        again: JudgedCase | None = None
        device = self.engine.device.type
        fill = float(secrets.randbelow(200) + 20) * (1 if secrets.randbits(1) else -1)  # different in every run
        process = partial(
            loaded, self.definition, self.engine.untrusted, limits=self.settings.limits, device=device
        )
        with process(fill=NAN) as source:
            for case in self.each(plain, partial(self._called, source)):
                if case.planned.repeat and case.results[REFERENCE].status == "ok":
                    again = case
                else:
                    self._finish(case)
            if device == "cuda":
                self._again(source, again, hidden, fill)
        if device == "cpu" and (again is not None or hidden):
            with process(fill=NAN if again is None else fill) as source:
                self._again(source, again, hidden, fill)

    def _again(
        self, source: UntrustedSource, first: JudgedCase | None, hidden: Sequence[PlannedCase], fill: float
    ) -> None:
        """Run one case a second time, then hidden cases, to find bits that vary and cached answers."""
        once = bool(self.op.mutated(self.definition)) or any(planned.trials for planned in hidden)
        if first is None:
            self._hidden(source, hidden, None, once=once)
            return
        calls = 1 if once else MANY_CALLS + secrets.randbelow(MANY_CALLS)
        call = partial(self._called, source, fill=fill, second_run=True, calls=calls)
        second = self._attempt(REFERENCE, partial(self._untrusted, first, call))
        before = (first.inputs, second.outputs) if second.status == "ok" and first.inputs is not None else None
        remembered = self._hidden(source, hidden, before, once=once)
        first.results[REFERENCE] = self._joined(first.results[REFERENCE], second, remembered=remembered)
        self._finish(first)

    def _hidden(
        self, source: UntrustedSource, cases: Sequence[PlannedCase], before: Call | None, *, once: bool
    ) -> bool:
        """Run and judge hidden cases; returns whether one gave the answer of the call `before` it.

        `once`: inputs serve one call only, since it changes them.
        """
        repeated = any(planned.repeat for planned in self.entry.cases)
        remembered = False
        threads = 2 if self.engine.device.type == "cpu" else 1  # a cached answer by thread would show
        last_shapes = None if before is None or once else shapes_of(before[0])

        def called(case: JudgedCase) -> CaseResult:  # SAME_MEMORY if its inputs have the shapes of the call before
            nonlocal last_shapes
            shapes = None if once or case.inputs is None else shapes_of(case.inputs)
            fits, last_shapes = shapes is not None and shapes == last_shapes, None
            result = self._called(source, case, fill=None, threads=threads, how=SAME_MEMORY if fits else "")
            last_shapes = shapes
            return result

        for case in self.each(cases, called):
            result = case.results[REFERENCE]
            if repeated and result.status == "ok" and case.inputs is not None:
                remembered |= before is not None and self._remembered(case.inputs, result.outputs, *before)
                before = case.inputs, result.outputs
            self._finish(case)
        return remembered

    def _joined(self, first: CaseResult, second: CaseResult, *, remembered: bool) -> CaseResult:
        """The result of a case that was run twice."""
        if second.status != "ok":
            return replace(second, message=f"its second run: {second.message}")
        names = sorted(first.outputs.keys() | second.outputs.keys())
        varying = [one for one in names if not self.same(first.outputs.get(one), second.outputs.get(one))]
        conduct: dict[str, Any] = {name: [*getattr(first, name), *getattr(second, name)] for name in MISCONDUCT}
        conduct = {name: sorted(set(places)) for name, places in conduct.items()}
        return replace(first, **conduct, varying=varying, remembered=remembered)

    def _remembered(self, inputs: Values, outputs: Tensors, old_inputs: Values, old_outputs: Tensors) -> bool:
        """Whether every output has the bits of the call before, though its inputs were different."""
        if not outputs or not all(self.same(value, old_outputs.get(name)) for name, value in outputs.items()):
            return False
        flats = [value.reshape(-1) for value in outputs.values()]
        uniform = all(same_bits(flat[1:], flat[:-1]) for flat in flats)
        if uniform and (isinstance(self.op, GenericOp) or all(flat.double().isnan().all() for flat in flats)):
            return False  # nothing says that different inputs have different answers here; one NaN stands for all
        return self.op.tells_apart(self.definition, on_host(inputs), on_host(old_inputs))

    def _called(
        self,
        source: UntrustedSource,
        case: JudgedCase,
        *,
        fill: float | None = NAN,
        threads: int = 1,
        second_run: bool = False,
        **options: Any,  # noqa: ANN401 - what else a CallRequest says
    ) -> CaseResult:
        """Call the reference, a sampler with a secret seed; without an oracle, expect its shadow (`shadowed`)."""
        planned, inputs = case.planned, case.inputs
        assert inputs is not None
        secret_seed = int(digest_json([planned.nonce, planned.digest]), 16) % (1 << 63) if planned.trials else None
        draws = planned.further if not second_run else None

        def call(**order: Any) -> CaseResult:  # noqa: ANN401 - what else a CallRequest says
            seed = planned.case.seed if secret_seed is None else secret_seed
            return source.run(planned.case, inputs, **{"seed": seed, "fill": fill, "threads": threads} | order)

        seed = {"seed": secrets.randbits(62)} if second_run and secret_seed is None else {}
        further = draws and draws.within(self.settings.limits.seconds)
        result = call(trials=planned.trials, further=further, **seed, **options)
        if self.entry.no_oracle is not None and not planned.trials and not second_run:
            case.right = shadowed(self.entry.reference, call)
        return result


def shapes_of(inputs: Values) -> list[object]:
    """Shape and dtype (or type) of each input; inputs where these are equal can use the same memory."""
    return [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else type(one) for one in inputs.values()]


def shadowed(reference: str, call: Callable[..., CaseResult]) -> Right:
    """Results of `call(mode=...)` in float64, with sums in another order, and with ties in another order."""
    entries: Tensors = {}
    for mode, what in zip(modes_of(reference), (SHADOW, BASELINE, OTHER_TIES), strict=False):
        try:
            result = call(mode=mode)
        except CallError as error:
            return Right(oracle=_whole(entries), shadow=error.told.rpartition("UnsupportedError: ")[2])
        for name, value in result.outputs.items():
            entries[name if what == SHADOW else f"{name}@{what}"] = value
    return Right(oracle=_whole(entries))


def _whole(oracle: Tensors) -> Tensors:
    """The oracle's entries without those of outputs that it does not compute."""
    return {key: value for key, value in oracle.items() if key.partition("@")[0] in oracle}


def raised(error: BaseException, told: str = "") -> Reply:
    """The reply for an exception in our own code around a call; `told`: its message, if not its own."""
    short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return Reply(status=Status.MEMORY if short else Status.ERROR, message=told or describe(error))
