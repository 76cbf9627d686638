"""One definition, its cases one after the other: drawn, solved, run and judged."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Self

import torch

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.judge.output import OTHER_TIES, Ruling
from traceproof.ops import registry
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.generic import GenericOp
from traceproof.reasons import Error, Unavailable, Verdict
from traceproof.run.calls import BETWEEN_BYTES, giving_back, set_seed
from traceproof.run.case import drawing_device, fingerprints, make_inputs, on_host, place
from traceproof.run.implementation import Implementation
from traceproof.run.implementations import environment_of
from traceproof.run.judging import EXPLAINED_BYTES, CaseResult, JudgedCase, LargeCase, Right, Rows, Rulings
from traceproof.run.proof import graded
from traceproof.run.schema import BASELINE, REFERENCE, SHADOW, WHOLE, PlannedCase, PlannedDefinition
from traceproof.run.shadow import modes_of
from traceproof.run.tensors import plain_tensors, same_bits, same_draws
from traceproof.run.trusted import Runner
from traceproof.run.untrusted import NAN, CallError, Taken, UntrustedSource, loaded
from traceproof.sandbox import Reply, Status
from traceproof.sandbox.worker import describe
from traceproof.stacks import STACKS, TAGGED

if TYPE_CHECKING:
    from traceproof.run.engine import Engine

PATIENCE = 2  # timeouts of an implementation of a definition after which its other cases are not waited for
# In float64 a CPU takes less than two seconds for a case of this memory, and less than a crowded GPU for most.
ORACLE_HOST_BYTES = 512 << 20


@dataclass(slots=True, kw_only=True)
class Drawn:
    """A case's inputs, and what came of it so far."""

    planned: PlannedCase
    inputs: Values | None = None
    problem: Reply | None = None  # why they could not be drawn
    digest: str | None = None
    results: dict[str, CaseResult] = field(default_factory=dict)
    right: Right = field(default_factory=Right)


class DefinitionRun:
    """One definition, its cases one after the other.

    `rows` is what `verify` wants of it. `each` is the loop over cases, with whatever untrusted code is called in
    them: the definition's reference, or a solution in its place (`traceproof.solutions.trial`).
    """

    def __init__(self, engine: "Engine", entry: PlannedDefinition, names: Sequence[str]) -> None:
        self.engine, self.settings, self.entry, self.names = engine, engine.settings, entry, names
        self.definition = entry.parsed
        self.op: Op
        self.op, _ = registry.for_definition(self.definition)
        self.known = {name: engine.known(name, entry, self.definition) for name in names}
        self.origins = {name: engine.origin(name) for name in names}
        self.timeouts: Counter[str] = Counter()
        self.rows_of: dict[str, dict[str, Rows]] = {}  # by case and implementation
        self.pairs: Rows = []
        self.held: list[JudgedCase] = []  # with a disputed output that may be explained
        self.disagreements: Rows = []

    @classmethod
    def of_cases(
        cls,
        engine: "Engine",
        definition: Definition,
        cases: Iterable[PlannedCase],
        *,
        no_oracle: str | None = None,
    ) -> Self:
        """For `each` alone, over cases that no plan file has."""
        return cls(engine, PlannedDefinition.alone(definition, cases, no_oracle), [])

    def rows(self) -> Rows:
        """All rows."""
        cases = self.entry.cases
        for planned in cases:
            if planned.skip is not None:
                self._finish(
                    Drawn(planned=planned, results={name: CaseResult(status="skip") for name in self.names})
                )
        plain = [planned for planned in cases if planned.skip is None and not planned.hidden]
        hidden = [planned for planned in cases if planned.skip is None and planned.hidden]
        if REFERENCE in self.names:
            Random(digest_json([self.entry.digest, self.entry.nonce])).shuffle(plain)  # noqa: S311 - an order
        if REFERENCE in self.names and self.known[REFERENCE] is None and (plain or hidden):
            self._with_reference(plain, hidden)
        else:
            for drawn in self.each([*plain, *(hidden if REFERENCE in self.names else ())]):
                self._finish(drawn)
        return self._assembled()

    def _assembled(self) -> Rows:
        """The rows in their order. Of each implementation's smallest disputed case they say what it looks like."""
        explained: set[str] = set()
        order = {planned.id: place for place, planned in enumerate(self.entry.cases)}
        for judged in sorted(self.held, key=lambda one: (one.planned.memory, order[one.planned.id])):
            rows = self.rows_of[judged.planned.id]
            told = {row.implementation for row in judged.every if row.arbitration is not None} - explained
            for name in told & rows.keys():
                rows[name] = [judged.explained(row) for row in rows[name]]
            explained |= told
        found = [
            row
            for name in self.names
            for row in (
                *(self.disagreements if name == REFERENCE else ()),
                *(row for planned in self.entry.cases for row in self.rows_of.get(planned.id, {}).get(name, ())),
            )
        ]
        pairs = sorted(self.pairs, key=lambda row: (row.implementation, order[str(row.case)], row.output))
        return graded([*found, *pairs])

    # One case.

    def each(
        self, cases: Iterable[PlannedCase], call: Callable[[Drawn], Taken] | None = None, name: str = REFERENCE
    ) -> Iterator[Drawn]:
        """Cases drawn, run and solved, one after the other; `call` has the untrusted code of a name called."""
        for planned in cases:
            drawn = Drawn(planned=planned)
            names = [one for one in self.names if one == REFERENCE or not planned.hidden]
            drawn.results = {one: known for one in names if (known := self.known[one]) is not None}
            if call is not None or len(drawn.results) < len(names):
                with giving_back(BETWEEN_BYTES):
                    self._run(drawn, [one for one in names if one != REFERENCE], call, name)
            yield drawn

    def _run(self, drawn: Drawn, trusted: Sequence[str], call: Callable[[Drawn], Taken] | None, name: str) -> None:
        """One case: the calls are made while it is solved here."""
        self._draw(drawn)
        threads = self.engine.threads
        asked = {
            one: threads.submit(self._attempt, one, partial(self._trusted, one, drawn.planned))
            for one in trusted
            if one not in drawn.results and one not in self.settings.functions
        }
        made = None if call is None else threads.submit(self._attempt, name, partial(self._untrusted, drawn, call))
        if self.entry.no_oracle is None and not drawn.planned.large and drawn.inputs is not None:
            drawn.right = self._solved(drawn, drawn.inputs)
        here = self.settings.functions.keys() & set(trusted) - drawn.results.keys()
        for one in here:  # in the thread of who asks: it may debug its function
            drawn.results[one] = self._attempt(one, partial(self._trusted, one, drawn.planned))
        if made is not None:
            drawn.results[name] = made.result()
        drawn.results |= {one: future.result() for one, future in asked.items()}

    def _attempt(self, name: str, call: Callable[[], CaseResult]) -> CaseResult:
        """What a call leaves; none is made where too many before it took too long."""
        seconds = self.settings.limits.seconds
        if self.timeouts[name] >= PATIENCE:
            message = f"not run: {PATIENCE} cases of this definition ran into the limit of {seconds:g} s"
            return CaseResult(status="error", reason=Error.TIMEOUT, message=message)
        result = call()
        self.timeouts[name] += result.reason == Error.TIMEOUT
        return result

    @staticmethod
    def _untrusted(drawn: Drawn, call: Callable[[Drawn], Taken]) -> CaseResult:
        """What a call of untrusted code leaves of a case."""
        if drawn.inputs is None:
            assert drawn.problem is not None
            return CaseResult.failed(drawn.problem, "drawing the inputs: ")
        try:
            return CaseResult.taken(call(drawn), drawn.digest)
        except CallError as error:
            return CaseResult.failed(error.reply)

    def _draw(self, drawn: Drawn) -> None:
        case = drawn.planned.case
        device = drawing_device(self.definition, case, self.engine.computing)
        try:
            try:
                self._draw_on(drawn, device)
            except RuntimeError as error:
                if device.type == "cpu" or not self.engine.gpu_fails(error):
                    raise
                self._draw_on(drawn, torch.device("cpu"))  # the bits are the same
        except Exception as error:  # noqa: BLE001 - that definition's verdict
            drawn.inputs, drawn.problem = None, raised(error)

    def _draw_on(self, drawn: Drawn, device: torch.device) -> None:
        case, dataset = drawn.planned.case, self.settings.dataset
        drawn.inputs = make_inputs(self.op, self.definition, case, device=device, dataset=dataset)
        drawn.digest = digest_json(fingerprints(drawn.inputs))

    def _solved(self, drawn: Drawn, inputs: Values) -> Right:
        """What the oracle says, on the GPU if there is one and the case is large."""
        planned, cpu = drawn.planned, torch.device("cpu")
        device = self.engine.computing if planned.memory > ORACLE_HOST_BYTES else cpu
        try:
            try:
                return Right(oracle=self._entries(inputs, device, planned.case.seed))
            except RuntimeError as error:
                if self.engine.device.type == "cpu" or not self.engine.gpu_fails(error):
                    raise
                if self.engine.computing.type == "cpu":  # what lay on the GPU is lost
                    self._draw_on(drawn, cpu)
                return Right(oracle=self._entries(drawn.inputs or {}, cpu, planned.case.seed))
        except Exception as error:  # noqa: BLE001 - told in each row of the case
            message = f"the oracle: {describe(error)}"
            return Right(blocked=Ruling(Verdict.ERROR, Error.ORACLE, message, {}))

    def _entries(self, inputs: Values, device: torch.device, seed: int) -> Tensors:
        set_seed(seed, device)
        values = self.op.expected(
            self.definition, place(inputs, device) if device.type == "cuda" else on_host(inputs)
        )
        return _whole(dict(zip(values, plain_tensors(list(values.values())), strict=True)))

    def judged(self, drawn: Drawn) -> JudgedCase:
        """A case, to be judged."""
        planned = drawn.planned
        return JudgedCase(
            entry=self.entry,
            definition=self.definition,
            op=self.op,
            planned=planned,
            results={name: drawn.results[name] for name in sorted(drawn.results)},
            right=drawn.right,
            large=self._large(drawn) if planned.large and planned.skip is None else {},
            inputs=drawn.digest,
            origins=self.origins,
            tolerance=self.settings.tolerance,
            dataset=self.settings.dataset,
        )

    def _finish(self, drawn: Drawn) -> None:
        """Judge a case, and let go of its tensors."""
        planned, judged = drawn.planned, self.judged(drawn)
        names = list(judged.results)
        self.rows_of[planned.id] = dict(judged.rows)
        self.pairs += judged.pairs()
        if judged.disputed and planned.memory <= EXPLAINED_BYTES:
            self.held.append(judged)
        if planned is self.entry.cases[0] and REFERENCE in names and not self.entry.scaled_down:
            self.disagreements = judged.disagreements()
        for name in names:
            verdicts = {row.verdict for row in judged.rows[name]}
            worst = next(
                one for one in (Verdict.ERROR, Verdict.FAIL, Verdict.PASS, Verdict.SKIP) if one in verdicts
            )
            self.settings.progress(name, self.definition.name, planned.id, str(worst))

    def _large(self, drawn: Drawn) -> dict[str, Rulings]:
        """Rulings on a case that is too large to be solved at once."""
        ran = {
            name: result.outputs
            for name, result in drawn.results.items()
            if result.status == "ok" and result.inputs == drawn.digest
        }
        if not ran or drawn.inputs is None:
            return {}
        case = LargeCase(
            definition=self.definition,
            op=self.op,
            case=drawn.planned.case,
            inputs=drawn.inputs,
            tolerance=self.settings.tolerance,
            figures=self.settings.figures,
        )
        try:
            return {**case.rulings(ran, self.engine.computing)}
        except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, OSError) as error:
            message = f"the oracle: {type(error).__name__}: {error}"
            return {name: {WHOLE: Ruling(Verdict.ERROR, Error.ORACLE, message, {})} for name in ran}

    # Ground truths.

    def _trusted(self, name: str, planned: PlannedCase) -> CaseResult:
        """What a ground truth leaves of a case."""
        item = {
            "implementation": name,
            "definition": self.entry.definition,
            "digest": self.entry.digest,
            "case": planned.case.as_json(),
            "repeat": planned.repeat,
        }
        function = self.settings.functions.get(name)
        if function is not None:
            return self._called_here(function, item)
        problem = self.engine.not_built(name, self.definition)
        if problem is not None:
            return CaseResult(status="error", reason=Error.EXCEPTION, message=f"RuntimeError: {problem}")
        reply = self.engine.ask(name, item, self._seconds(name))
        if reply.status is not Status.OK:
            return CaseResult.failed(reply)
        said = reply.value
        if "skip" in said:
            return CaseResult.skipped(Unavailable(said["skip"], said["message"]))
        return CaseResult(status="ok", **said)

    def _called_here(self, function: Implementation, item: Mapping[str, Any]) -> CaseResult:
        """What an implementation leaves of a case that it computes in this process."""
        function.device = self.engine.device.type
        runner = Runner(self.definition, self.op, function, self.engine.device, self.settings.dataset)
        try:
            return CaseResult(status="ok", **runner.run(item))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything, which is its row
            return CaseResult.failed(raised(error))

    def _seconds(self, name: str) -> float:
        """What a call may take: on a GPU, one of a function that the definition's tag names compiles it."""
        seconds = self.settings.limits.seconds
        compiles = self.engine.device.type == "cuda" and environment_of(name) == TAGGED
        named = compiles and self.definition.dumped_from.startswith(f"{STACKS[TAGGED].package}.")
        return max(seconds, self.settings.build_seconds) if named else seconds

    # The reference.

    def _with_reference(self, plain: Sequence[PlannedCase], hidden: Sequence[PlannedCase]) -> None:
        """All cases with the reference among what runs.

        One case is run again, with other memory, and hidden ones after it: on a CPU in a process of their own,
        which has not seen the others.
        """
        again: Drawn | None = None
        repeated = any(planned.repeat for planned in plain)
        with self._reference(NAN) as source:
            for drawn in self.each(plain, partial(self._called, source)):
                if drawn.planned.repeat and drawn.results[REFERENCE].status == "ok":
                    again = drawn
                else:
                    self._finish(drawn)
            if self.engine.device.type == "cuda":
                self._again(source, again, hidden, repeated=repeated, fill=_drawn_fill())
        if self.engine.device.type == "cpu" and (again is not None or hidden):
            fill = _drawn_fill()
            with self._reference(NAN if again is None else fill) as source:
                self._again(source, again, hidden, repeated=repeated, fill=fill)

    @contextlib.contextmanager
    def _reference(self, fill: float | None) -> Iterator[UntrustedSource]:
        """The definition's reference in a new process."""
        with loaded(
            self.definition,
            self.engine.untrusted,
            limits=self.settings.limits,
            device=self.engine.device.type,
            fill=fill,
        ) as source:
            source.start()  # a GPU takes long to open
            yield source

    def _again(
        self,
        source: UntrustedSource,
        first: Drawn | None,
        hidden: Sequence[PlannedCase],
        *,
        repeated: bool,
        fill: float,
    ) -> None:
        """A case's second run, and hidden cases: whether bits vary, and answers are remembered."""
        before: tuple[Values, Tensors] | None = None
        second: CaseResult | None = None
        if first is not None:
            call = partial(self._called, source, fill=fill, again=True)
            second = self._attempt(REFERENCE, partial(self._untrusted, first, call))
            if second.status == "ok" and first.inputs is not None:
                before = first.inputs, second.outputs
        remembered = False
        threads = 2 if self.engine.device.type == "cpu" else 1  # others than elsewhere, where there are several
        for drawn in self.each(hidden, partial(self._called, source, fill=None, threads=threads)):
            result = drawn.results[REFERENCE]
            if repeated and result.status == "ok" and drawn.inputs is not None:
                if before is not None:
                    remembered |= self._remembered(drawn.planned, drawn.inputs, result.outputs, *before)
                before = drawn.inputs, result.outputs
            self._finish(drawn)
        if first is not None and second is not None:
            first.results[REFERENCE] = self._joined(first, second, remembered=remembered)
            self._finish(first)

    def _joined(self, first: Drawn, second: CaseResult, *, remembered: bool) -> CaseResult:
        """What two runs of a case, and hidden cases after it, showed together."""
        if second.status != "ok":
            return replace(second, message=f"its second run: {second.message}")
        one, planned = first.results[REFERENCE], first.planned
        names = sorted(one.outputs.keys() | second.outputs.keys())
        return replace(
            one,
            mutated=sorted({*one.mutated, *second.mutated}),
            aliased=sorted({*one.aliased, *second.aliased}),
            subclassed=sorted({*one.subclassed, *second.subclassed}),
            varying=[
                name for name in names if not self._same(planned, one.outputs.get(name), second.outputs.get(name))
            ],
            remembered=remembered,
        )

    def _same(self, planned: PlannedCase, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        """Whether two calls gave the same bits; draws that one of them alone made do not count."""
        return (same_draws if planned.trials else same_bits)(one, other)

    def _remembered(
        self, planned: PlannedCase, inputs: Values, outputs: Tensors, earlier: Values, before: Tensors
    ) -> bool:
        """Whether every output has the bits of the call before, whose inputs were others."""
        flats = [value.reshape(-1) for value in outputs.values()]
        if isinstance(self.op, GenericOp) and all(same_bits(flat[1:], flat[:-1]) for flat in flats):
            return False  # nothing says that inputs such as these have different answers
        same = bool(outputs) and all(
            self._same(planned, value, before.get(name)) for name, value in outputs.items()
        )
        return same and self.op.tells_apart(self.definition, on_host(inputs), on_host(earlier))

    def _called(
        self,
        source: UntrustedSource,
        drawn: Drawn,
        *,
        fill: float | None = NAN,
        threads: int = 1,
        again: bool = False,
    ) -> Taken:
        """What a call of the reference leaves; without an oracle, its shadow stands beside as what is right."""
        planned, limit = drawn.planned, self.settings.limits.seconds
        once = planned.further is not None and not again and not planned.hidden
        further = planned.further.within(limit) if once and planned.further else None
        call = partial(self._call, source, drawn, fill=fill, threads=threads)
        taken = call(trials=planned.trials, further=further, again=again)
        if self.entry.no_oracle is not None and not planned.trials and not again:
            drawn.right = shadowed(self.entry.reference, call)
        return taken

    def _call(self, source: UntrustedSource, drawn: Drawn, *, again: bool = False, **order: Any) -> Taken:  # noqa: ANN401
        """One call, whose seed nobody can tell the case by where something is drawn."""
        planned = drawn.planned
        seed = secrets.randbits(62) if again else planned.case.seed
        if planned.trials:
            seed = int(digest_json([planned.nonce, planned.digest]), 16) % (1 << 63)
        assert drawn.inputs is not None
        return source.run(planned.case, drawn.inputs, seed=seed, **order)


def shadowed(reference: str, call: Callable[..., Taken]) -> Right:
    """A reference's outputs in float64, in another order of summation, and with equal values in another order.

    `call` makes a call in a `mode` of `traceproof.run.shadow`.
    """
    found: Tensors = {}
    for mode, what in zip(modes_of(reference), (SHADOW, BASELINE, OTHER_TIES), strict=False):
        try:
            taken = call(mode=mode)
        except CallError as error:
            return Right(oracle=_whole(found), shadow=error.told.rpartition("UnsupportedError: ")[2])
        for name, value in taken.outputs.items():
            found[name if what == SHADOW else f"{name}@{what}"] = value
    return Right(oracle=_whole(found))


def _whole(oracle: Tensors) -> Tensors:
    """An oracle's entries, those left out whose output it does not give."""
    return {key: value for key, value in oracle.items() if key.partition("@")[0] in oracle}


def raised(error: Exception) -> Reply:
    """The reply of a call that our own code could not make."""
    short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return Reply(status=Status.MEMORY if short else Status.ERROR, message=describe(error))


def _drawn_fill() -> float:
    """What memory without a value holds in a second run: another value in every run."""
    return float(secrets.randbelow(200) + 20) * (1 if secrets.randbits(1) else -1)
