"""Judges one solution: draws and solves its cases, has them called elsewhere, and rules on what came back.

Runs in a process of ours that has torch. The solution runs in others (`traceproof.run.untrusted`), which get
the inputs of one call at a time as a file, and nothing that is expected.
"""

import errno
import os
import secrets
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import find, read_tree
from traceproof.digests import digest_json
from traceproof.files import own_folder, remove_tree
from traceproof.judge.output import Ruling
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Values
from traceproof.ops.cases import WORKLOADS, Case
from traceproof.ops.op import Op
from traceproof.reasons import Failure, Verdict
from traceproof.run.case import CPU, SolvedCase, drawing_device, make_inputs, on_host, place
from traceproof.run.engine import DefinitionRun, Engine, shadowed, this_interpreter
from traceproof.run.judging import JudgedCase, Right, Rulings, rulings
from traceproof.run.plan import PlanSelection, fitting_lines, planned_alone
from traceproof.run.runner import FOLDER
from traceproof.run.schema import WHOLE, PlannedCase, PlannedDefinition
from traceproof.run.untrusted import (
    REASONS,
    CallError,
    CaseResult,
    Layout,
    UntrustedSource,
    loaded,
    new_name,
    refusal,
)
from traceproof.run.workers import EngineSettings
from traceproof.sandbox import MIB, Limits, Pool
from traceproof.sandbox.isolation import HOLDS
from traceproof.solutions.reading import Candidate
from traceproof.solutions.records import (
    JudgeSettings,
    PrecisionResult,
    PropertyResult,
    SolutionRow,
    SolutionTrial,
    SpeedResult,
)
from traceproof.stacks import MAIN

ROOM, BYTE = 4096, 0xFF  # around inputs: NaN as a float, out of range as a place
SETUP_FAILED = "setup: "  # how the message begins where a solution could not be loaded
SEED_BITS = 30
TOLD_SECONDS = 1.0  # between words on how far it is
# Wrong answers that another precision may explain: a narrower one loses infinities and NaN, too.
ROUNDED = (Failure.NUMERICS, Failure.INFINITY, Failure.NAN)
UNJOINED = "capturing stream has unjoined work"  # in CUDA's words
ALIKE = 4  # cases cost alike whose memory has as many digits to the base of 2**ALIKE
SURE = 16  # rows that are right, after which properties are measured beside the other cases
JUDGES = 2  # cases that are judged side by side
CALLERS = 2  # cases that are drawn and solved side by side; one of them is called
DRAWING_TIMES = 4  # how many times as long as a reference a slow sampler may draw
SOLUTION = "solution"  # what it is called among implementations


class Watch:
    """Says what is being done, and keeps how long each part of it took."""

    def __init__(self, tell: Callable[[str], object] = lambda _: None, begun: float | None = None) -> None:
        self._tell, self._last = tell, time.monotonic() if begun is None else begun
        self._told = 0.0
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = {}

    def beside(self) -> "Watch":
        """One for what another thread does meanwhile: it says what this one says, and has parts of its own."""
        other = Watch(self.say)
        other.seconds = self.seconds
        return other

    def say(self, text: str) -> None:
        """Say it, unless something was said just now."""
        with self._lock:
            if time.monotonic() - self._told >= TOLD_SECONDS:
                self._told = time.monotonic()
                self._tell(text)

    def done(self, what: str) -> None:
        """What has gone by since the last such word was for that."""
        now = time.monotonic()
        self.seconds[what] = round(self.seconds.get(what, 0.0) + now - self._last, 3)
        self._last = now


def planned(name: str, settings: JudgeSettings) -> tuple[Definition, list[PlannedCase]]:
    """A definition and its cases: those that anybody can compute, and as many of a seed that nobody knew.

    Raises TraceproofError: the dataset has no such definition.
    """
    tree = read_tree(Path(settings.dataset), naming=[name])
    definition = find(tree, name).definition
    found: dict[tuple[str, int], PlannedCase] = {}
    for seed, lines in ((settings.seed, fitting_lines(tree, definition, [])), (settings.hidden_seed, [])):
        selection = PlanSelection(
            sizes=settings.sizes,
            seed=seed,
            hidden_seed=settings.hidden_seed,
            memory_limit=settings.memory_limit,
            boundaries=True,
        )
        found |= {(one.id, one.case.seed): one for one in planned_alone(definition, selection, lines).cases}
    return definition, list(found.values())


def tried(
    evaluation: "SolutionRun", cases: Sequence[PlannedCase], *, whole: bool = True, watch: Watch | None = None
) -> SolutionTrial:
    """All cases, the precision that was used, and where nothing speaks against the answers, properties and speed.

    If not `whole`, the first bad row ends it.
    """
    from traceproof.solutions.properties import Measuring, beside_cases, measuring
    from traceproof.solutions.speed import measure_speed

    watch = watch or Watch()
    rows: list[SolutionRow] = []
    properties: tuple[PropertyResult, ...] = ()
    seen: tuple[PrecisionResult, ...] = ()
    speed: tuple[SpeedResult, ...] = ()
    with evaluation.prepared() as ready, ExitStack() as stack:
        watch.done("preparing")
        watch.say("a first call" if ready.compiled is None else "compiling, with a first call")
        measured: Measuring | None = None
        for row in ready.rows(cases):
            rows.append(row)
            if "a first call" not in watch.seconds and row.verdict is not Verdict.SKIP:
                watch.done("a first call")
            watch.say(f"{len({(one.case, one.seed) for one in rows})} of {len(cases)} cases")
            if row.bad and (not whole or row.message.startswith(SETUP_FAILED)):
                break
            # What is wrong mostly shows by then.
            if len(rows) == SURE and not bad(rows) and beside_cases(ready, cases):
                measured = stack.enter_context(measuring(ready, cases, watch))
        watch.done("cases")
        wrong = bad(rows)
        if (whole or not wrong) and all(row.reason in ROUNDED for row in wrong):
            watch.say("its precision")
            measured = measured or stack.enter_context(measuring(ready, cases, watch))
            seen = measured.precision.result()
        if not wrong and measured is not None:
            properties, further = measured.properties.result()
            rows += further
        stack.close()  # which ends what nobody waits for
        watch.done("properties")
        if evaluation.settings.timed and not bad(rows):
            watch.say("its speed")
            speed, late = measure_speed(ready, cases)
            rows += late
            watch.done("speed")
    isolation = ", ".join(sorted(evaluation.reached - {""}))
    return SolutionTrial(
        rows=tuple(rows),
        properties=properties,
        precision=seen,
        speed=speed,
        isolation=isolation,
        seconds=watch.seconds,
    )


# Below a worker's home: where compilers put what they are not told to elsewhere.
FOLDERS = (FOLDER, ".cache", ".triton")


@dataclass(frozen=True, slots=True)
class CompiledFiles:
    """What one solution compiles in its first call, for all of its workers."""

    at: Path  # where its workers find their folder: compilers keep paths
    kept: Path  # what was compiled; no worker sees it
    apart: bool = False  # whether each worker has a folder of its own, in a file view of its own; if not, that one
    name: str = field(default_factory=new_name)  # of the module that it becomes

    @classmethod
    @contextmanager
    def new(cls, *, apart: bool = False) -> Iterator[Self]:
        """Those of a solution that has compiled nothing yet; removed in the end."""
        with own_folder("scratch") as scratch, own_folder() as kept:
            yield cls(scratch, kept, apart)

    @contextmanager
    def restored(self) -> Iterator[Path]:
        """The folder for one worker; where it is the same one for all, the worker before must have ended."""
        with own_folder("scratch") if self.apart else self._emptied() as scratch:
            shutil.copytree(self.kept, scratch, dirs_exist_ok=True)
            yield scratch

    @contextmanager
    def _emptied(self) -> Iterator[Path]:
        for path in list(self.at.iterdir()):
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
        yield self.at

    def keep(self, scratch: Path) -> None:
        """Keep what a worker that still runs has compiled in its folder.

        Links are left out, and never followed: those to trusted kernels are made again.
        """
        opened = os.open(scratch, os.O_RDONLY)
        try:
            for name in FOLDERS:
                _copy(opened, name, self.kept / name)
        except (OSError, RecursionError):  # without permission, too deep: nothing that a compiler leaves
            for name in FOLDERS:
                remove_tree(self.kept / name)  # each worker compiles again
        finally:
            os.close(opened)


def _copy(folder: int, name: str, target: Path) -> None:
    """Copy a file or folder out of an open folder that untrusted code may be changing; nothing else is copied."""
    try:
        # Of a pipe nobody waits for the other end.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOENT, errno.ENXIO}:  # a link, gone, a socket
            return
        raise
    try:
        found = os.fstat(opened)
        if stat.S_ISDIR(found.st_mode):
            target.mkdir()
            for inner in os.listdir(opened):  # noqa: PTH208 - of an open folder
                _copy(opened, inner, target / inner)
        elif stat.S_ISREG(found.st_mode):
            with open(opened, "rb", closefd=False) as source, target.open("wb") as copy:
                left = found.st_size  # it may grow
                while data := source.read(min(left, MIB)):
                    copy.write(data)
                    left -= len(data)
            target.chmod(stat.S_IMODE(found.st_mode) | stat.S_IWUSR)
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))  # which ninja compares
    finally:
        os.close(opened)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionRun:
    """A definition, a solution to it, and the workers that the solution runs in."""

    definition: Definition
    op: Op
    candidate: Candidate
    settings: JudgeSettings
    pool: Pool
    unknown: str | None  # why there is no oracle; None: there is one
    engine: Engine | None = None
    reference: UntrustedSource | None = None
    compiled: CompiledFiles | None = None
    reached: set[str] = field(default_factory=set)  # what it could reach where isolation was not whole

    @classmethod
    def of(
        cls, definition: Definition, candidate: Candidate, settings: JudgeSettings, pool: Pool
    ) -> "SolutionRun":
        """The evaluation of a solution to a definition."""
        op, unknown = registry.for_definition(definition)
        return cls(
            definition=definition, op=op, candidate=candidate, settings=settings, pool=pool, unknown=unknown
        )

    @property
    def limits(self) -> Limits:
        """Of one call."""
        return Limits(**self.settings.limits)

    @property
    def device(self) -> str:
        """Where a solution gets its inputs."""
        return "cuda" if self.settings.gpu else "cpu"

    @property
    def layout(self) -> Layout:
        """Where inputs lie in an ordinary call."""
        return Layout(room=ROOM, byte=BYTE, destinations=bool(self.candidate.destinations))

    def source(
        self, *, channels: int | None = None, folder: Path | None = None
    ) -> AbstractContextManager[UntrustedSource]:
        """The solution in a new worker.

        Args:
            channels: to the GPU; None: as few as will do where streams may wait for each other.
            folder: the worker's own, of `compiled`; None: a new one.
        """
        solution = {
            "files": dict(self.candidate.files),
            "entry": self.candidate.entry,
            "binding": self.candidate.binding,
            "channels": channels,
        }
        compiled = self.compiled
        restored = None if compiled is None else compiled.restored() if folder is None else nullcontext(folder)
        return loaded(
            self.definition,
            self.pool,
            limits=self.limits,
            device=self.device,
            solution=solution,
            scratch=restored,
            at=None if compiled is None else compiled.at,
            token="" if compiled is None else compiled.name,
        )

    @contextmanager
    def prepared(self) -> Iterator[Self]:
        """The evaluation with an engine, a place for compiled files, and without an oracle the reference."""
        with ExitStack() as stack:
            settings = EngineSettings(
                environments={MAIN: this_interpreter(on_gpu=self.settings.gpu)},
                limits=self.limits,
                dataset=Path(self.settings.dataset),
                tolerance=self.settings.tolerance,
                figures=False,  # a certificate has those of failures
                alone=True,
            )
            ready = replace(self, engine=stack.enter_context(Engine(settings, untrusted=self.pool)))
            if self.candidate.compiles(gpu=self.settings.gpu):
                apart = self.pool.layers()["files"] == HOLDS
                ready = replace(ready, compiled=stack.enter_context(CompiledFiles.new(apart=apart)))
            if self.unknown is not None and refusal(self.definition.reference) is None:
                reference = loaded(self.definition, self.pool, limits=self.limits)
                ready = replace(ready, reference=stack.enter_context(reference))
            yield ready

    @property
    def side_by_side(self) -> bool:
        """Whether it may run in several workers at once: what it compiled lies in a folder of each."""
        return self.compiled is None or self.compiled.apart

    @contextmanager
    def begun(self, *, channels: int | None = None) -> Iterator[UntrustedSource]:
        """The solution in a new worker, which starts meanwhile."""
        with ThreadPoolExecutor(1) as beside, self.source(channels=channels) as source:
            beside.submit(source.session.start)
            yield source

    def rows(self, cases: Sequence[PlannedCase]) -> Iterator[SolutionRow]:
        """All cases but empty ones, which are a property, in one worker: the cheapest first.

        Nobody knows the order of those that cost alike. Where something is compiled, a further case comes first,
        whose inputs nobody else has: later workers get what it compiles, and that must know of no other case.
        """
        order = [case for case in cases if case.skip is None and not self.is_empty(case.case)]
        random = Random(self.settings.hidden_seed)  # noqa: S311 - an order
        random.shuffle(order)
        order.sort(key=lambda case: case.memory.bit_length() // ALIKE)
        for case in cases:
            if case.skip is not None:
                yield row_of(case.case, WHOLE, Ruling(Verdict.SKIP, case.skip.reason, case.skip.message, {}))
        assert self.engine is not None
        run = DefinitionRun(self.engine, PlannedDefinition.alone(self.definition, order, self.unknown))
        drawn = [case for case in order if case.case.size != WORKLOADS]
        compiling: PlannedCase | None = None
        if self.compiled is not None and drawn:
            smallest = min(drawn, key=lambda case: (case.case.size != "small", case.memory))
            own = replace(smallest.case, seed=random.getrandbits(SEED_BITS))
            compiling = smallest.model_copy(update={"case": own, "digest": own.digest})
            order.insert(0, compiling)
        waiting: deque[tuple[PlannedCase, Future[JudgedCase], Future[list[SolutionRow]]]] = deque()
        with ExitStack() as stack:
            folder = None if self.compiled is None else stack.enter_context(self.compiled.restored())
            source = stack.enter_context(self.source(folder=folder))
            judges = stack.enter_context(ThreadPoolExecutor(JUDGES))
            callers = stack.enter_context(ThreadPoolExecutor(CALLERS))
            judges.submit(source.session.start)  # while the first case is drawn
            turn = threading.Lock()

            def call(case: PlannedCase, drawn: JudgedCase) -> CaseResult:
                with turn:  # one call at a time
                    found = self._called(
                        source, drawn, seconds=self.limits.setup_seconds if case is compiling else None
                    )
                    if case is compiling and self.compiled is not None and folder is not None:
                        self.compiled.keep(folder)
                    return found

            try:
                # The next cases are drawn and called, one after the other, while others are judged.
                for case in order:
                    held = sum(one.memory for one, _, _ in waiting)
                    while waiting and (
                        waiting[0][0] is compiling
                        or len(waiting) >= CALLERS + JUDGES
                        or held + case.memory > self.settings.memory_limit
                    ):
                        held -= waiting[0][0].memory
                        yield from waiting.popleft()[-1].result()
                    calling = callers.submit(next, run.each([case], partial(call, case), SOLUTION))
                    waiting.append((case, calling, judges.submit(self._judged, run, calling)))
                while waiting:
                    yield from waiting.popleft()[-1].result()
            finally:  # whoever wants no more rows waits for no call
                for _, calling, _ in waiting:
                    calling.cancel()
                source.session.interrupt()

    def _judged(self, run: DefinitionRun, calling: "Future[JudgedCase]") -> list[SolutionRow]:
        """Rows of a case, once it was called."""
        drawn = calling.result()
        why = drawn.problem.message if drawn.problem is not None else ""
        why = why or (drawn.right.blocked.message if drawn.right.blocked is not None else "")
        if why:
            raise RuntimeError(f"{drawn.planned.id} can not be judged: {why}")
        self.reached.add(drawn.results[SOLUTION].isolation)
        run.judge(drawn)
        return [row_of(drawn.planned.case, output, ruling) for output, ruling in drawn.rulings(SOLUTION)]

    def _called(self, source: UntrustedSource, drawn: JudgedCase, *, seconds: float | None = None) -> CaseResult:
        """What a call of the solution leaves in a case."""
        case, order = drawn.planned.case, self.op.further(self.definition, drawn.planned.case)
        subject = self._subject(case, drawn.inputs or {})
        if self.unknown is not None:
            drawn.right = Right(oracle=self._shadow(subject))
        # A slow sampler draws longer than a reference does, for it is one alone.
        further = None if order is None else order.within(self.limits.seconds, times=DRAWING_TIMES)
        return self.call(source, subject, further=further, seconds=seconds)

    @property
    def _computing(self) -> torch.device:
        return CPU if self.engine is None else self.engine.computing

    def subject(self, case: Case) -> SolvedCase:
        """A case drawn and solved; by the reference's shadow where there is no oracle."""

        def drawn(device: torch.device) -> Values:
            dataset = Path(self.settings.dataset)
            return on_host(make_inputs(self.op, self.definition, case, device=device, dataset=dataset))

        device = drawing_device(self.definition, case, self._computing)
        inputs = drawn(device) if self.engine is None else self.engine.where_it_fits(device, drawn)
        return self.solved(self._subject(case, inputs))

    def _subject(self, case: Case, inputs: Values) -> SolvedCase:
        """A case drawn. By the seed of torch's generator in its calls, nobody can tell the case."""
        seed = int(digest_json([self.settings.hidden_seed, case.id, case.seed]), 16) % (1 << 62)
        return SolvedCase(definition=self.definition, op=self.op, case=case, inputs=inputs, oracle={}, seed=seed)

    def solved(self, subject: SolvedCase, *, safe: bool = True) -> SolvedCase:
        """The case solved for its inputs; a large one on the GPU, if they name no place out of range (`safe`)."""
        if self.unknown is not None:
            return replace(subject, oracle=self._shadow(subject))

        def expected(device: torch.device) -> Tensors:
            found = self.op.expected(self.definition, place(subject.inputs, device), subject.case.seen)
            return {name: value.cpu() for name, value in found.items()}

        device = drawing_device(subject.definition, subject.case, self._computing) if safe else CPU
        if self.engine is not None and device.type == "cuda":
            with suppress(RuntimeError, ValueError, TypeError):  # the op knows of no other device
                return replace(subject, oracle=self.engine.where_it_fits(device, expected))
        return replace(subject, oracle=expected(CPU))

    def _shadow(self, subject: SolvedCase) -> Tensors:
        """The reference in float64 and in another order of summation; nothing where it can not be had."""
        if self.reference is None:
            return {}
        call = partial(self.reference.run, subject.case, subject.inputs, seed=subject.seed)
        found = shadowed(self.definition.reference, call)
        return {} if found.shadow else found.oracle

    def is_empty(self, case: Case) -> bool:
        """Whether a case has nothing to compute: no output has an element."""
        shapes = (self.definition.shape_of(spec, case.axes) for spec in self.definition.outputs.values())
        return all(shape is not None and 0 in shape for shape in shapes)

    def call(
        self,
        source: UntrustedSource,
        subject: SolvedCase,
        *,
        layout: Layout | None = None,
        **order: Any,  # noqa: ANN401 - what else a CallRequest says
    ) -> CaseResult:
        """One call; where nothing is drawn, by a new seed of torch's generator, so that what depends on it varies.

        Raises CallError: it left no outputs.
        """
        trials = order.pop("trials", subject.trials)
        return source.run(
            subject.case,
            subject.inputs,
            seed=subject.seed if subject.trials else secrets.randbits(62),
            trials=trials,
            layout=layout or self.layout,
            **order,
        )

    def rule(
        self, subject: SolvedCase, taken: CaseResult, variant: str = "", ruled: Rulings | None = None
    ) -> Iterator[SolutionRow]:
        """Rows of what one further call left; `ruled`: the rulings on its outputs, where they are known."""
        for output, ruling in rulings(subject, taken, tolerance=self.settings.tolerance, numeric=ruled):
            yield row_of(subject.case, output, ruling, variant)


def refused(case: Case, error: CallError, variant: str = "") -> SolutionRow:
    """The row of a call that left no outputs."""
    ruling = Ruling(Verdict.ERROR, REASONS[error.reply.status], error.reply.message, {})
    return row_of(case, WHOLE, ruling, variant)


def left_behind(case: Case, error: CallError, variant: str) -> SolutionRow | None:
    """The row of a call whose capture CUDA refused since it left work on another stream; None: another failure."""
    if UNJOINED not in error.reply.message:
        return None
    message = f"work is left on a stream that nothing waits for: {error.told}"
    return row_of(case, WHOLE, Ruling(Verdict.FAIL, Failure.LATE, message, {}), variant)


def bad(rows: Iterable[SolutionRow]) -> list[SolutionRow]:
    """Failures and errors."""
    return [row for row in rows if row.bad]


def row_of(case: Case, output: str, ruling: Ruling, variant: str = "") -> SolutionRow:
    """The row of a ruling on one output, or on a case as a whole."""
    gate = ruling.details.get("gate") or {}
    failed = ruling.details if ruling.verdict is Verdict.FAIL else {}
    return SolutionRow(
        case=case.id,
        size=case.size,
        seed=case.seed,
        axes=dict(case.axes),
        variant=variant,
        output=output,
        verdict=ruling.verdict,
        reason=ruling.reason,
        message=ruling.message,
        margin=gate.get("margin"),
        worst=tuple(failed.get("worst", ())),
        metrics=failed.get("metrics", {}),
    )
