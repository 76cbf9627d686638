"""Judges one solution: draws and solves its cases, has them called in workers, and rules on the results.

Runs in a trusted process that has torch. The solution runs in others (`traceproof.run.untrusted`), which get the
inputs of one call at a time as a file, and never the expected values.
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from traceproof.ops.base import Values
from traceproof.ops.cases import WORKLOADS, Case
from traceproof.ops.op import Op
from traceproof.reasons import Failure, Verdict
from traceproof.run.case import CPU, SolvedCase, drawing_device, make_inputs, on_host
from traceproof.run.engine import DefinitionRun, Engine, shadowed, this_interpreter
from traceproof.run.judging import JudgedCase, Right, Rulings, rulings
from traceproof.run.plan import PlanSelection, fitting_lines, planned_alone
from traceproof.run.runner import FOLDER
from traceproof.run.schema import ORACLE, SHADOW, WHOLE, PlannedCase, PlannedDefinition
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

ROOM, BYTE = 4096, 0xFF  # bytes around inputs, and their value: NaN as a float, out of range as an index
SETUP_FAILED = "setup: "  # prefix of the message if a solution could not be loaded
SEED_BITS = 30
TOLD_SECONDS = 1.0  # between reports of progress
# Wrong answers that another precision may explain: a narrower one also loses infinities and NaN.
ROUNDED = (Failure.NUMERICS, Failure.INFINITY, Failure.NAN)
UNJOINED = "capturing stream has unjoined work"  # in CUDA's error message
ALIKE = 4  # cases cost alike if their memory has equally many digits to the base 2**ALIKE
SURE = 16  # correct rows after which properties are measured during the other cases
JUDGES = 2  # cases judged at once
CALLERS = 2  # cases drawn and solved at once; one of them is called
DRAWING_TIMES = 4  # a slow sampler's drawing time, as a multiple of a reference's
SOLUTION = "solution"  # name among implementations


class Watch:
    """Reports progress, and keeps the seconds that each step took."""

    def __init__(self, tell: Callable[[str], object] = lambda _: None, begun: float | None = None) -> None:
        self._tell, self._last = tell, time.monotonic() if begun is None else begun
        self._told = 0.0
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = {}

    def beside(self) -> "Watch":
        """A watch for another thread: it reports through this one, and adds to the same seconds."""
        other = Watch(self.say)
        other.seconds = self.seconds
        return other

    def say(self, text: str) -> None:
        """Report `text`, unless there was a report within the last second."""
        with self._lock:
            if time.monotonic() - self._told >= TOLD_SECONDS:
                self._told = time.monotonic()
                self._tell(text)

    def done(self, what: str) -> None:
        """Count the time since the last call of `done` for step `what`."""
        now = time.monotonic()
        self.seconds[what] = round(self.seconds.get(what, 0.0) + now - self._last, 3)
        self._last = now


def planned(name: str, settings: JudgeSettings) -> tuple[Definition, list[PlannedCase]]:
    """A definition and its cases: those of a known seed, and as many of the hidden seed.

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
    run: "SolutionRun", cases: Sequence[PlannedCase], *, whole: bool = True, watch: Watch | None = None
) -> SolutionTrial:
    """Judge all cases; the precision, if no other errors are seen; properties and speed, if no row is bad.

    If not `whole`, the first bad row ends it.
    """
    from traceproof.solutions.properties import Measuring, beside_cases, measuring
    from traceproof.solutions.speed import measure_speed

    watch = watch or Watch()
    rows: list[SolutionRow] = []
    properties: tuple[PropertyResult, ...] = ()
    precision: tuple[PrecisionResult, ...] = ()
    speed: tuple[SpeedResult, ...] = ()
    with ExitStack() as stack:
        watch.say("a first call" if run.compiled is None else "compiling, with a first call")
        measured: Measuring | None = None
        for row in run.rows(cases):
            rows.append(row)
            if "a first call" not in watch.seconds and row.verdict is not Verdict.SKIP:
                watch.done("a first call")
            watch.say(f"{len({(one.case, one.seed) for one in rows})} of {len(cases)} cases")
            if row.bad and (not whole or row.message.startswith(SETUP_FAILED)):
                break
            # By then, most wrong answers have been found.
            if len(rows) == SURE and not bad(rows) and beside_cases(run, cases):
                measured = stack.enter_context(measuring(run, cases, watch))
        watch.done("cases")
        wrong = bad(rows)
        if (whole or not wrong) and all(row.reason in ROUNDED for row in wrong):
            watch.say("its precision")
            measured = measured or stack.enter_context(measuring(run, cases, watch))
            precision = measured.precision.result()
        if not wrong and measured is not None:
            properties, further = measured.properties.result()
            rows += further
        stack.close()  # ends measurements whose results are not needed
        watch.done("properties")
        if run.settings.timed and not bad(rows):
            watch.say("its speed")
            speed, timed_rows = measure_speed(run, cases)
            rows += timed_rows
            watch.done("speed")
    isolation = ", ".join(sorted(run.reached - {""}))
    return SolutionTrial(
        rows=tuple(rows),
        properties=properties,
        precision=precision,
        speed=speed,
        isolation=isolation,
        against=ORACLE if run.unknown is None else SHADOW,
        seconds=watch.seconds,
    )


# In a worker's home: where compilers write by default.
FOLDERS = (FOLDER, ".cache", ".triton")


@dataclass(frozen=True, slots=True)
class CompiledFiles:
    """Files that a solution compiles in its first call, for all of its workers."""

    at: Path  # path of the workers' folder, which stays the same because compilers store paths
    kept: Path  # folder of compiled files, which no worker sees
    # whether each worker has a separate folder, in a separate view of files; if not, all use `at`
    apart: bool = False
    name: str = field(default_factory=new_name)  # name of the compiled module

    @classmethod
    @contextmanager
    def new(cls, *, apart: bool = False) -> Iterator[Self]:
        """Files of a solution that has compiled nothing yet; removed at exit."""
        with own_folder("scratch") as scratch, own_folder() as kept:
            yield cls(scratch, kept, apart)

    @contextmanager
    def restored(self) -> Iterator[Path]:
        """The folder for one worker; unless `apart`, the worker before must have ended."""
        with own_folder("scratch") if self.apart else nullcontext(self.at) as scratch:
            for path in list(scratch.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    path.unlink(missing_ok=True)
            shutil.copytree(self.kept, scratch, dirs_exist_ok=True)
            yield scratch

    def keep(self, scratch: Path, room: int) -> None:
        """Keep what a running worker has compiled in its folder, unless that is more than `room` bytes.

        Links are left out, and never followed: those to trusted kernels are made again.
        """
        opened = os.open(scratch, os.O_RDONLY)
        try:
            for name in FOLDERS:
                room = _copy(opened, name, self.kept / name, room)
        except (OSError, RecursionError):  # no permission, too large, too deep: no compiler leaves that
            for name in FOLDERS:
                remove_tree(self.kept / name)  # so each worker compiles again
        finally:
            os.close(opened)


def _copy(folder: int, name: str, target: Path, room: int) -> int:
    """Copy a file or folder `name` out of an open folder that untrusted code may be changing; nothing else.

    Returns how many of the `room` bytes are left. Raises OSError: there are more, as of files with holes.
    """
    try:
        # O_NONBLOCK, to not wait for the other end of a pipe.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOENT, errno.ENXIO}:  # a link, gone, a socket
            return room
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            target.mkdir()
            for inner in os.listdir(descriptor):  # noqa: PTH208 - of an open folder
                room = _copy(descriptor, inner, target / inner, room)
        elif stat.S_ISREG(status.st_mode):
            room -= status.st_size
            if room < 0:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            with open(descriptor, "rb", closefd=False) as source, target.open("wb") as copy:
                bytes_left = status.st_size  # it may grow
                while data := source.read(min(bytes_left, MIB)):
                    copy.write(data)
                    bytes_left -= len(data)
            target.chmod(stat.S_IMODE(status.st_mode) | stat.S_IWUSR)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))  # ninja compares these times
        return room
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionRun:
    """A definition, a solution to it, and the workers that the solution runs in."""

    definition: Definition
    op: Op
    candidate: Candidate
    settings: JudgeSettings
    pool: Pool
    unknown: str | None  # why there is no oracle; None: there is one
    engine: Engine
    limits: Limits  # per call
    reference: UntrustedSource | None = None  # if there is no oracle
    asking: threading.Lock = field(default_factory=threading.Lock)  # held in calls of it: threads share its worker
    compiled: CompiledFiles | None = None
    reached: set[str] = field(default_factory=set)  # accessible things where isolation was incomplete

    @classmethod
    @contextmanager
    def of(
        cls, definition: Definition, candidate: Candidate, settings: JudgeSettings, pool: Pool
    ) -> Iterator[Self]:
        """A solution to a definition, with an engine, a place for compiled files, and a reference if needed."""
        op, unknown = registry.for_definition(definition)
        limits = Limits(**settings.limits)
        of_engine = EngineSettings(
            environments={MAIN: this_interpreter(on_gpu=settings.gpu)},
            limits=limits,
            dataset=Path(settings.dataset),
            tolerance=settings.tolerance,
            figures=False,  # a certificate has only those of failures
            alone=True,
        )
        with ExitStack() as stack:
            made = cls(
                definition=definition,
                op=op,
                candidate=candidate,
                settings=settings,
                pool=pool,
                unknown=unknown,
                engine=stack.enter_context(Engine(of_engine, untrusted=pool)),
                limits=limits,
            )
            if candidate.compiles(gpu=settings.gpu):
                apart = pool.layers()["files"] == HOLDS
                made = replace(made, compiled=stack.enter_context(CompiledFiles.new(apart=apart)))
            if unknown is not None and refusal(definition.reference) is None:
                reference = stack.enter_context(loaded(definition, pool, limits=limits))
                made = replace(made, reference=reference)
            yield made

    @property
    def device(self) -> str:
        """Device of the solution's inputs."""
        return "cuda" if self.settings.gpu else "cpu"

    @property
    def layout(self) -> Layout:
        """Layout of inputs in memory in an ordinary call."""
        return Layout(room=ROOM, byte=BYTE, destinations=bool(self.candidate.destinations))

    def source(
        self, *, channels: int | None = None, folder: Path | None = None
    ) -> AbstractContextManager[UntrustedSource]:
        """The solution in a new worker.

        Args:
            channels: number of channels to the GPU; None: the pool's, which is one.
            folder: the worker's folder, from `compiled`; None: a new one.
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

    @property
    def side_by_side(self) -> bool:
        """Whether it may run in several workers at once: each has a folder for compiled files."""
        return self.compiled is None or self.compiled.apart

    @contextmanager
    def begun(self, *, channels: int | None = None) -> Iterator[UntrustedSource]:
        """The solution in a new worker, which starts in the background."""
        with ThreadPoolExecutor(1) as beside, self.source(channels=channels) as source:
            beside.submit(source.session.start)
            yield source

    def rows(self, cases: Sequence[PlannedCase]) -> Iterator[SolutionRow]:
        """Rows of all cases in one worker, cheapest first; without empty cases, which are a property.

        The order of cases that cost alike is hidden. If something is compiled, an extra case comes first, with
        inputs of its own: later workers get what it compiles, and that must know of no other case.
        """
        order = [case for case in cases if case.skip is None and not self.is_empty(case.case)]
        random = Random(self.settings.hidden_seed)  # noqa: S311 - an order
        random.shuffle(order)
        order.sort(key=lambda case: case.memory.bit_length() // ALIKE)
        for case in cases:
            if case.skip is not None:
                yield row_of(case.case, WHOLE, Ruling(Verdict.SKIP, case.skip.reason, case.skip.message, {}))
        run = DefinitionRun(self.engine, PlannedDefinition.alone(self.definition, order, self.unknown))
        drawn = [case for case in order if case.case.size != WORKLOADS]
        compiling: PlannedCase | None = None
        if self.compiled is not None and drawn:
            smallest = min(drawn, key=lambda case: (case.case.size != "small", case.memory))
            compiled_case = replace(smallest.case, seed=random.getrandbits(SEED_BITS))
            compiling = smallest.model_copy(update={"case": compiled_case, "digest": compiled_case.digest})
            order.insert(0, compiling)
        waiting: deque[tuple[PlannedCase, Future[JudgedCase], Future[list[SolutionRow]]]] = deque()
        with ExitStack() as stack:
            folder = None if self.compiled is None else stack.enter_context(self.compiled.restored())
            source = stack.enter_context(self.source(folder=folder))
            judges = stack.enter_context(ThreadPoolExecutor(JUDGES))
            callers = stack.enter_context(ThreadPoolExecutor(CALLERS))
            judges.submit(source.session.start)  # while the first case is drawn

            def call(case: PlannedCase, earlier: Sequence[Future[JudgedCase]], drawn: JudgedCase) -> CaseResult:
                wait(earlier)  # one call at a time, in order
                result = self._called(
                    source, drawn, seconds=self.limits.setup_seconds if case is compiling else None
                )
                if case is compiling and self.compiled is not None and folder is not None:
                    self.compiled.keep(folder, self.limits.file_bytes)
                return result

            try:
                # The next cases are drawn, solved and called, one call at a time, while previous ones are judged.
                for case in order:
                    bytes_waiting = sum(one.memory for one, _, _ in waiting)
                    while waiting and (
                        waiting[0][0] is compiling
                        or len(waiting) >= CALLERS + JUDGES
                        or bytes_waiting + case.memory > self.settings.memory_limit
                    ):
                        bytes_waiting -= waiting[0][0].memory
                        yield from waiting.popleft()[-1].result()
                    earlier = [one for _, one, _ in waiting]
                    calling = callers.submit(next, run.each([case], partial(call, case, earlier), SOLUTION))
                    waiting.append((case, calling, judges.submit(self._judged, run, calling)))
                while waiting:
                    yield from waiting.popleft()[-1].result()
            finally:  # do not wait for calls if the caller wants no more rows
                for _, calling, _ in waiting:
                    calling.cancel()
                source.session.interrupt()

    def _judged(self, run: DefinitionRun, calling: "Future[JudgedCase]") -> list[SolutionRow]:
        """The rows of a case, after waiting for its call."""
        drawn = calling.result()
        problem = drawn.undrawn or (drawn.right.blocked.message if drawn.right.blocked is not None else "")
        if problem:
            raise RuntimeError(f"{drawn.planned.id} can not be judged: {problem}")
        self.reached.add(drawn.results[SOLUTION].isolation)
        run.judge(drawn)
        return [row_of(drawn.planned.case, output, ruling) for output, ruling in drawn.rulings(SOLUTION)]

    def _called(self, source: UntrustedSource, drawn: JudgedCase, *, seconds: float | None = None) -> CaseResult:
        """Result of the solution's call in a drawn case."""
        case, draws = drawn.planned.case, self.op.further(self.definition, drawn.planned.case)
        subject = self._subject(case, drawn.inputs or {})
        if self.unknown is not None:
            drawn.right = self._shadow(subject)
        # A slow sampler may draw longer than a reference, since only one solution is judged.
        further = None if draws is None else draws.within(self.limits.seconds, times=DRAWING_TIMES)
        return self.call(source, subject, further=further, seconds=seconds)

    def subject(self, case: Case) -> SolvedCase:
        """A case with inputs and expected values, which are the reference's shadow if there is no oracle."""

        def drawn(device: torch.device) -> Values:
            dataset = Path(self.settings.dataset)
            return on_host(make_inputs(self.op, self.definition, case, device=device, dataset=dataset))

        device = drawing_device(self.definition, case, self.engine.computing)
        return self.solved(self._subject(case, self.engine.where_it_fits(device, drawn)))

    def _subject(self, case: Case, inputs: Values) -> SolvedCase:
        """A drawn case. Its seed for torch's generator does not reveal the case."""
        seed = int(digest_json([self.settings.hidden_seed, case.id, case.seed]), 16) % (1 << 62)
        return SolvedCase(definition=self.definition, op=self.op, case=case, inputs=inputs, oracle={}, seed=seed)

    def solved(self, subject: SolvedCase, *, safe: bool = True) -> SolvedCase:
        """The case with expected values, computed on the GPU if it is large and its indices in range (`safe`)."""
        if self.unknown is not None:
            return replace(subject, oracle=self._shadow(subject).oracle)
        case, memory = subject.case, self.op.memory(self.definition, subject.case)
        device = drawing_device(self.definition, case, self.engine.computing) if safe else CPU
        oracle = self.engine.expected(self.op, self.definition, case, lambda: subject.inputs, device, memory)
        return replace(subject, oracle=oracle)

    def _shadow(self, subject: SolvedCase) -> Right:
        """The reference in float64, and with sums in another order; if that can not be computed, why."""
        if self.reference is None:
            return Right(shadow="the policy refuses the reference")
        call = partial(self.reference.run, subject.case, subject.inputs, seed=subject.seed)
        with self.asking:
            found = shadowed(self.definition.reference, call)
        return Right(shadow=found.shadow) if found.shadow else found

    def is_empty(self, case: Case) -> bool:
        """Whether no output of a case has an element."""
        shapes = (self.definition.shape_of(spec, case.axes) for spec in self.definition.outputs.values())
        return all(shape is not None and 0 in shape for shape in shapes)

    def call(
        self,
        source: UntrustedSource,
        subject: SolvedCase,
        *,
        layout: Layout | None = None,
        **order: Any,  # noqa: ANN401 - other fields of a CallRequest
    ) -> CaseResult:
        """One call; except for samplers, with a new seed of torch's generator, so that a dependence on it shows.

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
        """Rows of a further call; `ruled`: the rulings on its outputs, if they are known."""
        for output, ruling in rulings(subject, taken, tolerance=self.settings.tolerance, numeric=ruled):
            yield row_of(subject.case, output, ruling, variant)


def refused(case: Case, error: CallError, variant: str = "") -> SolutionRow:
    """The row of a call that left no outputs."""
    ruling = Ruling(Verdict.ERROR, REASONS[error.reply.status], error.reply.message, {})
    return row_of(case, WHOLE, ruling, variant)


def left_behind(case: Case, error: CallError, variant: str) -> SolutionRow | None:
    """The row of a call whose capture CUDA refused, as it left work on another stream; None: another failure."""
    if UNJOINED not in error.reply.message:
        return None
    message = f"work is left on a stream that nothing waits for: {error.told}"
    return row_of(case, WHOLE, Ruling(Verdict.FAIL, Failure.LATE, message, {}), variant)


def bad(rows: Iterable[SolutionRow]) -> list[SolutionRow]:
    """The rows that are failures or errors."""
    return [row for row in rows if row.bad]


def row_of(case: Case, output: str, ruling: Ruling, variant: str = "") -> SolutionRow:
    """The row for a ruling on one output, or on a case as a whole."""
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
