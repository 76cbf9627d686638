"""Properties of a kernel beyond right answers: what its bits depend on, what it touches, its precision.

Each property is one more call of an ordinary case, judged as any other, whose bits are held against those of a
first call. Where the kernel's own bits vary from run to run, the others say nothing of bits: only wrong answers
count then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from traceproof.dataset.definition import ConstAxis
from traceproof.judge.kernel_properties import PROPERTIES
from traceproof.judge.metrics import index_of
from traceproof.judge.output import Ruling
from traceproof.judge.precision import examine
from traceproof.ops.base import TORCH_DTYPES, Tensors
from traceproof.ops.batch import halved
from traceproof.ops.cases import UNUSUAL, WORKLOADS, Case
from traceproof.ops.compare import IndexSet, Quantised, Samples
from traceproof.ops.op import BEST, UNEVEN
from traceproof.run.calls import BYTES, PAGES, UNFENCED, UNMAPPED
from traceproof.run.case import SolvedCase, moved
from traceproof.run.judging import Rulings, rulings
from traceproof.run.runner import (
    FENCED_BEFORE,
    FENCED_BEHIND,
    GRAPH,
    LOAD,
    LOAD_ON_PART,
    ORDINARY,
    SAME_MEMORY,
    STREAM,
    STRIDED,
)
from traceproof.run.schema import WHOLE, PlannedCase
from traceproof.run.tensors import same_bits
from traceproof.run.untrusted import CallError, CaseResult, UntrustedSource
from traceproof.sandbox import Status
from traceproof.solutions.records import BROKEN, HOLDS, UNMEASURED, PrecisionResult, PropertyResult, SolutionRow
from traceproof.solutions.trial import SolutionRun, Watch, left_behind, refused

LARGEST = 256 << 20  # bytes that the case of these calls may need, where there is such a case
LEAST_OF_LARGE = 4 << 30  # bytes that the smallest one may need elsewhere: experts
OTHER_BYTE = 0x3C  # small positive floats, and large whole numbers
OTHER_FILL = 96.0
WIDE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Outputs for which something is chosen by what may be close: only drawn inputs have margins.
CHOOSING = IndexSet | Quantised | Samples
FAR = 64 * 129  # bytes: another room around inputs, so other addresses with the same alignment
OTHERS = 3  # sizes between two calls that must agree
DRAWS = 4  # of a sampler, in these calls
CALLS = 48  # before one that must have the bits of the first
# To a GPU, from the process in which work left on another stream shows: in one channel, work begins in the order
# in which streams got it. CUDA has no more; a process with so many takes long to open a GPU.
CHANNELS = 32
EXAMINED = 64 << 20  # bytes that the case may need: the oracle solves it some ten times
BETWEEN = {  # what tensors lay between when bounds were measured
    PAGES: "pages that end a process which touches them (PROT_NONE)",
    UNMAPPED: "addresses that have no memory (CUDA's virtual memory)",
    BYTES: "bytes that are compared afterwards, which shows no reads: CUDA gave no pages",
    UNFENCED: "nothing (tensors with holes, or too many)",
}
ODD = (CallError, RuntimeError, ValueError, IndexError, KeyError)  # of inputs that nobody planned


@dataclass(slots=True)
class PropertyCalls:
    """Results so far, and rows of calls whose answers were wrong."""

    evaluation: SolutionRun
    subject: SolvedCase
    first: CaseResult
    ruled: Rulings | None  # on the first call's outputs; None: of fewer draws than a ruling takes
    watch: Watch
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    rows: list[SolutionRow] = field(default_factory=list)

    @property
    def varies(self) -> bool:
        """Whether bits differ from run to run."""
        return self.states.get("determinism", (HOLDS, ""))[0] == BROKEN

    def call(
        self,
        source: UntrustedSource,
        name: str,
        subject: SolvedCase | None = None,
        **order: Any,  # noqa: ANN401 - what else a CallRequest says
    ) -> CaseResult | None:
        """One call, judged; None: it left no outputs, which is the property's result."""
        given = subject or self.subject
        self.watch.say(f"property {name}")
        order.setdefault("trials", min(given.trials, DRAWS))
        try:
            taken = self.evaluation.call(source, given, **order)
        except CallError as error:
            self.states[name] = BROKEN, f"the call failed: {error.told}"
            left = left_behind(given.case, error, name)
            if left is not None:
                self.rows.append(left)
            elif PROPERTIES[name].must_run:
                self.rows.append(refused(given.case, error, name))
            return None
        else:
            few = order["trials"] < given.trials
            wrong = [] if few else [row for row in self._rows(given, taken, name) if row.bad]
            if wrong:
                self.states[name] = BROKEN, f"wrong: {wrong[0].output}: {wrong[0].message}"
                self.rows += wrong if PROPERTIES[name].must_run else []
                return None
            return taken
        finally:
            self.watch.done(f"property {name}")

    def _rows(self, given: SolvedCase, taken: CaseResult, name: str) -> Iterator[SolutionRow]:
        """Rows of a call. The bits of the first call have its rulings; what the call did beside is its own."""
        again = given is self.subject and _same(self.first.outputs, taken.outputs)[0] == HOLDS
        return self.evaluation.rule(given, taken, name, self.ruled if again else None)

    def same(self, name: str, taken: CaseResult | None, first: Tensors | None = None) -> None:
        """Hold a call's bits against the first one's."""
        if taken is None:
            return
        if self.varies and name != "determinism":
            self.states[name] = UNMEASURED, "its bits differ from run to run; the answer is right"
            return
        self.states[name] = _same(first or self.first.outputs, taken.outputs)


def _same(first: Tensors, other: Tensors) -> tuple[str, str]:
    names = sorted(name for name in first.keys() | other.keys() if not same_bits(first.get(name), other.get(name)))
    if not names:
        return HOLDS, "the same bits"
    one, two, apart = first.get(names[0]), other.get(names[0]), ""
    if one is not None and two is not None and one.shape == two.shape and one.numel():
        far = (one.double() - two.double()).abs().nan_to_num(float("inf"))
        place, count = index_of(int(far.argmax()), far.shape), int((far > 0).sum())
        apart = f": {count} of {one.numel()} elements, most at {place}: {float(far.max()):.3g} apart"
    return BROKEN, f"other bits in {', '.join(names)}{apart}"


Probing = Callable[[], AbstractContextManager[UntrustedSource]]  # the solution in a worker


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is being found out of a solution."""

    precision: Future[tuple[PrecisionResult, ...]]
    # all properties, and rows of calls whose answers were wrong
    properties: Future[tuple[tuple[PropertyResult, ...], list[SolutionRow]]]


def beside_cases(evaluation: SolutionRun, cases: Sequence[PlannedCase]) -> bool:
    """Whether it may be measured while its cases are called: not where seconds decide how often it draws."""
    base = chosen(cases)
    if base is None or not evaluation.side_by_side or evaluation.unknown is not None:
        return False
    return base.memory <= LARGEST and not evaluation.op.trials(evaluation.definition, base.case)


@contextmanager
def measuring(evaluation: SolutionRun, cases: Sequence[PlannedCase], watch: Watch) -> Iterator[Measuring]:
    """Measure a solution in two new workers; what nobody has waited for in the end is broken off."""
    with ExitStack() as stack:
        probing: Probing = evaluation.source
        anew: Probing = partial(evaluation.source, channels=CHANNELS)
        sources: list[UntrustedSource] = []
        if evaluation.side_by_side:
            sources = [stack.enter_context(evaluation.begun(channels=count)) for count in (None, CHANNELS)]
            probing, anew = (lambda: nullcontext(sources[0])), (lambda: nullcontext(sources[1]))
        threads = stack.enter_context(ThreadPoolExecutor(4))
        for source in sources:  # at once, since the end of one that has a GPU takes its time
            stack.callback(source.session.interrupt)
        seen = threads.submit(lambda: (*precision(evaluation, probing, cases),))

        def measured() -> tuple[tuple[PropertyResult, ...], list[SolutionRow]]:
            wait([seen])
            return measure(evaluation, probing, anew, cases, watch=watch.beside(), threads=threads)

        properties = threads.submit(measured)
        yield Measuring(seen, properties)


def measure(  # noqa: PLR0913 - of one caller
    evaluation: SolutionRun,
    probing: Probing,
    anew: Probing,
    cases: Sequence[PlannedCase],
    *,
    watch: Watch,
    threads: ThreadPoolExecutor,
) -> tuple[tuple[PropertyResult, ...], list[SolutionRow]]:
    """All properties of a solution that is right, and rows of calls whose answers were wrong."""
    base = chosen(cases)
    if base is None:
        why = f"no ordinary case needs less than {LEAST_OF_LARGE >> 30} GiB"
        return tuple(_result(evaluation, name, (UNMEASURED, why)) for name in PROPERTIES), []
    subject = evaluation.subject(base.case)

    def solved() -> tuple[list[SolvedCase], list[SolvedCase]]:
        sizes = [evaluation.subject(case) for case in _other_sizes(evaluation, subject, cases)]
        return [*_others(evaluation, subject)], sizes

    others = threads.submit(solved)  # while others are called
    with probing() as source:
        first = evaluation.call(source, subject, trials=min(subject.trials, DRAWS))
        ruled: dict[str, Ruling] | None = None
        if not subject.trials:
            told = rulings(subject, first, tolerance=evaluation.settings.tolerance)
            ruled = {output: ruling for output, ruling in told if output != WHOLE}
        found = PropertyCalls(evaluation, subject, first, ruled, watch)
        watch.done("property first call")
        writes = evaluation.definition.in_place or evaluation.op.mutated(evaluation.definition) or subject.trials
        found.same("determinism", found.call(source, "determinism", calls=1 if writes else CALLS))
        rest = replace(found, watch=watch.beside(), rows=[])
        beside = threads.submit(_in_new_process, rest, anew) if evaluation.side_by_side else None
        layout = evaluation.layout
        ways: dict[str, dict[str, Any]] = {
            "memory": {
                "fill": OTHER_FILL,
                "layout": replace(layout, fill=OTHER_FILL),
            },  # in new memory, places too
            "surroundings": {"layout": replace(layout, byte=OTHER_BYTE)},
            "addresses": {"layout": replace(layout, room=layout.room + FAR)},
            "alignment": {"layout": replace(layout, shift=1)},
            "threads": {"threads": 2},
            "strides": {"how": STRIDED},
        }
        for name, way in ways.items():
            found.same(name, found.call(source, name, **way))
        contents, sizes = others.result()
        _contents(found, source, contents)
        _batch(found, source)
        _after_others(found, source, sizes)
        _bounds(found, source)
        # Last: CUDA's error of a call that it refuses is raised by the next one, too.
        empty = [case.case for case in cases if case.skip is None and evaluation.is_empty(case.case)]
        if not empty:
            found.states["empty"] = UNMEASURED, "no case of the definition is empty"
        elif found.call(source, "empty", evaluation.subject(empty[0])) is not None:
            found.states["empty"] = HOLDS, "empty outputs"
        if found.states["bounds"][0] == HOLDS:
            _errors(found, source)
    if beside is None:
        _in_new_process(rest, anew)
    else:
        beside.result()
    results = tuple(_result(evaluation, name, found.states.get(name)) for name in PROPERTIES)
    return results, [*found.rows, *rest.rows]


def _bounds(found: PropertyCalls, source: UntrustedSource) -> None:
    """Calls whose tensors begin, then end, at what nothing may touch: what does ends its process."""
    fences: set[str] = set()
    for how in (FENCED_BEFORE, FENCED_BEHIND):
        fenced = found.call(source, "bounds", how=how)
        if fenced is None:
            return
        fences |= {*fenced.fences}
    between = ", ".join(text for way, text in BETWEEN.items() if way in fences)
    found.states["bounds"] = HOLDS, f"nothing beside its tensors is touched; they lie between {between}"


def _in_new_process(found: PropertyCalls, anew: Probing) -> None:
    """What another worker is needed for, which has made no call before."""
    with anew() as another:
        found.same("process", found.call(another, "process"))
        _on_gpu(found, another, "stream", ORDINARY, STREAM)
        _on_gpu(found, another, "load", LOAD)
        _load_on_part(found, another)
        _on_gpu(found, another, "graph", GRAPH)  # last: a capture that fails may leave the process useless


def chosen(cases: Sequence[PlannedCase]) -> PlannedCase | None:
    """The largest ordinary case that these calls may take, or the smallest one of large ones."""
    ordinary = [
        case
        for case in cases
        if case.skip is None
        and case.case.size not in {"edge", "adversarial", WORKLOADS}
        and UNUSUAL not in case.case.params
        and case.memory <= LEAST_OF_LARGE
    ]
    fitting = [case for case in ordinary if case.memory <= LARGEST]
    if not fitting:
        return min(ordinary, key=lambda case: (case.memory, case.id), default=None)
    return max(fitting, key=lambda case: (case.memory, case.id))


def _result(evaluation: SolutionRun, name: str, state: tuple[str, str] | None) -> PropertyResult:
    found, detail = state or (UNMEASURED, "")
    demanded = name in evaluation.settings.demanded
    question = PROPERTIES[name].question
    return PropertyResult.model_validate(
        {"name": name, "question": question, "state": found, "detail": detail, "demanded": demanded}
    )


def _contents(found: PropertyCalls, source: UntrustedSource, others: Sequence[SolvedCase]) -> None:
    """Other contents where the last call had its inputs: those of `_others`."""
    trials = found.subject.trials
    for other in others:
        if found.call(source, "contents") is None:
            return
        taken = found.call(source, "contents", other, how=SAME_MEMORY, trials=trials)
        if taken is None:
            return
        found.states["contents"] = HOLDS, "right draws"
        if not trials:
            fresh = found.call(source, "contents", other)
            found.same("contents", taken, fresh.outputs if fresh is not None else None)
        if found.states["contents"][0] == BROKEN:
            return


def _others(evaluation: SolutionRun, subject: SolvedCase) -> Iterator[SolvedCase]:
    """The case with other inputs: of the same sums and ends, where right answers allow for it; of another seed."""
    kinds = evaluation.op.comparisons(evaluation.definition).values()
    values = None if any(isinstance(kind, CHOOSING) for kind in kinds) else moved(subject.inputs)
    if values is not None:
        with suppress(RuntimeError, ValueError, IndexError):  # the oracle does not take such inputs
            yield evaluation.solved(replace(subject, inputs=values))
    yield evaluation.subject(replace(subject.case, seed=subject.case.seed + 1))


def _on_gpu(found: PropertyCalls, source: UntrustedSource, name: str, *hows: str) -> None:
    """Calls that are made in ways that only a GPU has; the first that is wrong ends them."""
    if not found.evaluation.settings.gpu:
        found.states[name] = UNMEASURED, "no_cuda: there is no GPU here"
    elif found.subject.trials:
        found.states[name] = UNMEASURED, "a sampler draws"
    else:
        for how in hows:
            found.same(name, found.call(source, name, how=how))
            if found.states[name][0] == BROKEN:
                return


def _load_on_part(found: PropertyCalls, source: UntrustedSource) -> None:
    """The same on a part of the multiprocessors, which not every driver and PyTorch can set apart."""
    state, detail = found.states["load"]
    if state == HOLDS:
        try:
            taken = found.evaluation.call(source, found.subject, how=LOAD_ON_PART)
        except CallError as error:
            found.states["load"] = HOLDS, f"{detail}; not on a part of the multiprocessors: {error.told}"
        else:
            wrong = [row for row in found.evaluation.rule(found.subject, taken, "load") if row.bad]
            found.rows += wrong
            found.states["load"] = (BROKEN, f"wrong: {wrong[0].message}") if wrong else found.states["load"]
            if not wrong:
                found.same("load", taken)


def _batch(found: PropertyCalls, source: UntrustedSource) -> None:
    """The parts of a batch on their own must have the bits that they have beside others."""
    evaluation, subject = found.evaluation, found.subject
    halves = None if subject.trials else halved(subject)
    if halves is None:
        found.states["batch"] = UNMEASURED, "it is not known which parts of its inputs are independent"
        return
    if found.varies:
        found.states["batch"] = UNMEASURED, "its bits differ from run to run"
        return
    outputs: list[Tensors] = []
    for values in halves.inputs:
        axes = dict(subject.case.axes)  # with the sizes that this part has
        for name, spec in evaluation.definition.inputs.items():
            sizes = zip(spec.shape or (), getattr(values[name], "shape", ()), strict=False)
            axes |= {axis: size for axis, size in sizes if axis in axes}
        part = replace(subject, inputs=values, case=replace(subject.case, axes=axes))
        try:
            outputs.append(evaluation.call(source, part).outputs)
        except CallError as error:
            found.states["batch"] = BROKEN, f"a part of the batch alone: {error.told}"
            return
    found.states["batch"] = _same(halves.whole(found.first.outputs), halves.joined(outputs))


def _other_sizes(evaluation: SolutionRun, subject: SolvedCase, cases: Sequence[PlannedCase]) -> Iterator[Case]:
    """Cases in other sizes, the smallest first."""
    sizes = {tuple(sorted(subject.case.axes.items()))}
    ordered = sorted(cases, key=lambda case: case.memory)
    for case in (case for case in ordered if case.skip is None and case.memory <= LARGEST):
        key = tuple(sorted(case.case.axes.items()))
        if key not in sizes and len(sizes) <= OTHERS and not evaluation.is_empty(case.case):
            sizes.add(key)
            yield case.case


def _after_others(found: PropertyCalls, source: UntrustedSource, others: Sequence[SolvedCase]) -> None:
    """The same call again, after calls in other sizes."""
    if all(found.call(source, "order", other) is not None for other in others):
        found.same("order", found.call(source, "order"))


def _errors(found: PropertyCalls, source: UntrustedSource) -> None:
    """Calls with inputs that the definition rules out: an answer to them is right in its values, or is none."""
    evaluation, subject = found.evaluation, found.subject
    count = 0
    for what, inputs in evaluation.op.errors(evaluation.definition, subject.inputs):
        if (subject.trials and BEST not in what) or (evaluation.candidate.destinations and UNEVEN in what):
            continue  # of other inputs draws cost as much, and say less; places of outputs keep their size
        count += 1
        try:
            taken = evaluation.call(source, replace(subject, inputs=inputs))
        except CallError as error:
            if error.reply.status is Status.ERROR:
                continue
            found.states["errors"] = BROKEN, f"{what}: {error.told}"
            return
        changed = ((inputs[name], value) for name, value in subject.inputs.items())
        safe = all(one is other or _of_floats(one, other) for one, other in changed)
        if not _right_in_values(evaluation, replace(subject, inputs=inputs), taken, safe=safe):
            found.states["errors"] = BROKEN, f"{what}: it neither raises nor is right"
            return
    if count:
        found.states["errors"] = HOLDS, f"{count} such calls raise or are right"
    found.watch.done("property errors")


def _of_floats(one: Any, other: Any) -> bool:  # noqa: ANN401 - inputs
    """Whether both are floats in the same shape."""
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.is_floating_point() and other.is_floating_point() and one.shape == other.shape


def _right_in_values(evaluation: SolutionRun, subject: SolvedCase, taken: CaseResult, *, safe: bool) -> bool:
    """Whether outputs are right, of whatever dtype and sizes the inputs are; not where nothing is right.

    `safe`: no place that the inputs name is out of range, which would cost this process its GPU.
    """
    definition = evaluation.definition
    sizes: dict[str, set[int]] = {}
    for name, spec in definition.inputs.items():
        for axis, size in zip(spec.shape or (), getattr(subject.inputs[name], "shape", ()), strict=False):
            sizes.setdefault(axis, set()).add(size)
    const = {axis: size for axis in definition.const_axes for size in sizes.get(axis, ()) if len(sizes[axis]) == 1}
    axes = {
        **definition.axes,
        **{axis: ConstAxis(type="const", value=size) for axis, size in const.items() if size},
    }
    subject = replace(subject, definition=definition.model_copy(update={"axes": axes}))
    dtypes = {name: TORCH_DTYPES.get(spec.dtype) for name, spec in evaluation.definition.outputs.items()}
    outputs = {name: value.to(dtypes.get(name) or value.dtype) for name, value in taken.outputs.items()}
    try:
        solved = replace(evaluation, definition=subject.definition).solved(subject, safe=safe)
        return not any(row.bad for row in evaluation.rule(solved, replace(taken, outputs=outputs)))
    except ODD:
        return False


def precision(
    evaluation: SolutionRun, probing: Probing, cases: Sequence[PlannedCase]
) -> Iterator[PrecisionResult]:
    """What is seen of each floating-point output; nothing where there is no oracle, or no call left outputs."""
    base = chosen(cases)
    if (
        base is None
        or base.memory > EXAMINED
        or evaluation.unknown is not None
        or evaluation.op.trials(evaluation.definition, base.case)
    ):
        return
    subject = evaluation.subject(base.case)
    inputs = {
        name: value
        for name, value in subject.inputs.items()
        if isinstance(value, torch.Tensor) and value.dtype in WIDE and value.numel()
    }
    with probing() as source:
        for name, spec in evaluation.definition.outputs.items():
            if "float" not in spec.dtype or not inputs:
                continue
            try:
                found = _examined(evaluation, source, subject, inputs, name)
            except ODD:
                continue
            if found is not None:
                yield found


def _examined(
    evaluation: SolutionRun,
    source: UntrustedSource,
    subject: SolvedCase,
    inputs: Mapping[str, torch.Tensor],
    name: str,
) -> PrecisionResult | None:
    """One output."""

    def observe(changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return evaluation.call(source, replace(subject, inputs={**subject.inputs, **changed})).outputs[name]

    def exact(changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return evaluation.op.oracle(evaluation.definition, {**subject.inputs, **changed})[name]

    summed = tuple(one for one in evaluation.op.summed(evaluation.definition) if one in inputs)
    found = examine(inputs, summed, observe, exact)
    if found is None:
        return None
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in inputs.values()})
    asked = f"{', '.join(dtypes)} in, {evaluation.definition.outputs[name].dtype} out"
    return PrecisionResult(output=name, asked=asked, seen=str(found), evidence=found.evidence)
