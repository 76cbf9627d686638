"""Properties of a kernel beyond correct answers: what its bits depend on, what it touches, its precision.

Each property is one more call of an ordinary case, judged like any other, whose bits are compared with those of a
first call. If the bits vary from run to run, other properties say nothing about bits, and only wrong answers count
for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from traceproof.dataset.definition import ConstAxis
from traceproof.judge.kernel_properties import PROPERTIES
from traceproof.judge.metrics import index_of
from traceproof.judge.output import Ruling
from traceproof.judge.precision import examine
from traceproof.ops.base import TORCH_DTYPES, Tensors, tensor
from traceproof.ops.batch import halved
from traceproof.ops.cases import UNUSUAL, WORKLOADS, Case
from traceproof.ops.compare import IndexSet, Quantised, Samples
from traceproof.ops.op import TOO_MANY, UNEVEN
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

LARGEST = 256 << 20  # bytes that the case of these calls may need, if there is one so small
LEAST_OF_LARGE = 4 << 30  # bytes that the smallest case may need otherwise, such as one of experts
OTHER_BYTE = 0x3C  # each byte of it as a float is small and positive, as an integer large
OTHER_FILL = 96.0
WIDE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Outputs with a choice between values that may be close: only drawn inputs have margins there.
CHOOSING = IndexSet | Quantised | Samples
FAR = 64 * 129  # bytes more around inputs, for other addresses with the same alignment
OTHERS = 3  # calls in other sizes between two calls that must agree
DRAWS = 4  # of a sampler, in each of these calls
CALLS = 48  # made before the one whose bits are compared with the first
# Channels to a GPU, of the process that shows work left on another stream: in one channel, work begins in the
# order in which streams got it. CUDA allows no more; with so many, opening a GPU takes long.
CHANNELS = 32
EXAMINED = 64 << 20  # bytes that the case may need, since the oracle solves it about ten times
BETWEEN = {  # for a report: what lay around tensors when bounds were measured
    PAGES: "pages that end a process which touches them (PROT_NONE)",
    UNMAPPED: "addresses that have no memory (CUDA's virtual memory)",
    BYTES: "bytes that are compared afterwards, which shows no reads: CUDA gave no pages",
    UNFENCED: "nothing (tensors with holes, or too many)",
}
ODD = (CallError, RuntimeError, ValueError, IndexError, KeyError)  # raised for inputs that are in no plan


@dataclass(slots=True)
class PropertyCalls:
    """Results so far, and bad rows of calls."""

    evaluation: SolutionRun
    subject: SolvedCase
    first: CaseResult
    ruled: Rulings | None  # on outputs of the first call; None: it made fewer draws than a ruling takes
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
        **order: Any,  # noqa: ANN401 - other fields of a CallRequest
    ) -> CaseResult | None:
        """Make and judge one call; None: it left no outputs or wrong ones, which `states` now says."""
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
        """Rows of a call. Outputs with the bits of the first call get its rulings, other findings are new."""
        again = given is self.subject and _same(self.first.outputs, taken.outputs)[0] == HOLDS
        return self.evaluation.rule(given, taken, name, self.ruled if again else None)

    def same(self, name: str, taken: CaseResult | None, first: Tensors | None = None) -> None:
        """Set the property's state by whether the call's bits are those of `first`; None: the first call's."""
        if taken is None:
            return
        if self.varies and name != "determinism":
            self.states[name] = UNMEASURED, "its bits differ from run to run; the answer is right"
            return
        self.states[name] = _same(first or self.first.outputs, taken.outputs)


def _same(first: Tensors, other: Tensors) -> tuple[str, str]:
    """(HOLDS or BROKEN, text): whether two sets of outputs have the same bits, else where they differ most."""
    names = sorted(name for name in first.keys() | other.keys() if not same_bits(first.get(name), other.get(name)))
    if not names:
        return HOLDS, "the same bits"
    one, two, apart = first.get(names[0]), other.get(names[0]), ""
    if one is not None and two is not None and one.shape == two.shape and one.numel():
        far = (one.double() - two.double()).abs().nan_to_num(float("inf"))
        place, count = index_of(int(far.argmax()), far.shape), int((far > 0).sum())
        apart = f": {count} of {one.numel()} elements, most at {place}: {float(far.max()):.3g} apart"
    return BROKEN, f"other bits in {', '.join(names)}{apart}"


Probing = Callable[[], AbstractContextManager[UntrustedSource]]  # puts the solution in a worker


class Measuring(NamedTuple):
    """Results of measuring a solution, as far as they are known."""

    precision: Future[tuple[PrecisionResult, ...]]
    # all properties, and bad rows of calls
    properties: Future[tuple[tuple[PropertyResult, ...], list[SolutionRow]]]


def beside_cases(evaluation: SolutionRun, cases: Sequence[PlannedCase]) -> bool:
    """Whether properties can be measured while cases are called: not if time decides how often it draws."""
    base = chosen(cases)
    if base is None or not evaluation.side_by_side or evaluation.unknown is not None:
        return False
    return base.memory <= LARGEST and not evaluation.op.trials(evaluation.definition, base.case)


@contextmanager
def measuring(evaluation: SolutionRun, cases: Sequence[PlannedCase], watch: Watch) -> Iterator[Measuring]:
    """Measure a solution in two new workers; at exit, results that are not done are abandoned."""
    with ExitStack() as stack:
        probing: Probing = evaluation.source
        anew: Probing = partial(evaluation.source, channels=CHANNELS)
        sources: list[UntrustedSource] = []
        if evaluation.side_by_side:
            sources = [stack.enter_context(evaluation.begun(channels=count)) for count in (None, CHANNELS)]
            probing, anew = (lambda: nullcontext(sources[0])), (lambda: nullcontext(sources[1]))
        threads = stack.enter_context(ThreadPoolExecutor(4))
        for source in sources:  # interrupt both at once, since ending one that has a GPU takes time
            stack.callback(source.session.interrupt)
        seen = threads.submit(lambda: (*precision(evaluation, probing, cases),))

        def measured() -> tuple[tuple[PropertyResult, ...], list[SolutionRow]]:
            wait([seen])
            return measure(evaluation, probing, anew, cases, watch=watch.beside(), threads=threads)

        properties = threads.submit(measured)
        yield Measuring(seen, properties)


def measure(  # noqa: PLR0913 - has one caller
    evaluation: SolutionRun,
    probing: Probing,
    anew: Probing,
    cases: Sequence[PlannedCase],
    *,
    watch: Watch,
    threads: ThreadPoolExecutor,
) -> tuple[tuple[PropertyResult, ...], list[SolutionRow]]:
    """All properties of a solution whose answers are correct, and bad rows of the calls.

    `probing` and `anew` put it in a worker; the latter's has made no call before.
    """
    base = chosen(cases)
    if base is None:
        why = f"no ordinary case needs less than {LEAST_OF_LARGE >> 30} GiB"
        return tuple(_result(evaluation, name, (UNMEASURED, why)) for name in PROPERTIES), []
    subject = evaluation.subject(base.case)

    def solved() -> tuple[list[SolvedCase], list[SolvedCase]]:
        sizes = [evaluation.subject(case) for case in _other_sizes(evaluation, subject, cases)]
        return [*_others(evaluation, subject)], sizes

    others = threads.submit(solved)  # in a thread, during calls below
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
            "memory": {"fill": OTHER_FILL, "layout": replace(layout, fill=OTHER_FILL)},
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
        # Last, because the next call also raises CUDA's error of a call that it refused.
        empty = [case.case for case in cases if case.skip is None and evaluation.is_empty(case.case)]
        if not empty:
            found.states["empty"] = UNMEASURED, "no case of the definition is empty"
        elif found.call(source, "empty", evaluation.subject(empty[0])) is not None:
            found.states["empty"] = HOLDS, "empty outputs"
        if found.states["bounds"][0] == HOLDS:
            _errors(found, source)
            watch.done("property errors")
    if beside is None:
        _in_new_process(rest, anew)
    else:
        beside.result()
    results = tuple(_result(evaluation, name, found.states.get(name)) for name in PROPERTIES)
    return results, [*found.rows, *rest.rows]


def _bounds(found: PropertyCalls, source: UntrustedSource) -> None:
    """Set `bounds`: in calls whose tensors begin, then end, at memory whose access ends the process."""
    fences: set[str] = set()
    for how in (FENCED_BEFORE, FENCED_BEHIND):
        fenced = found.call(source, "bounds", how=how)
        if fenced is None:
            return
        fences |= {*fenced.fences}
    between = ", ".join(text for way, text in BETWEEN.items() if way in fences)
    found.states["bounds"] = HOLDS, f"nothing beside its tensors is touched; they lie between {between}"


def _in_new_process(found: PropertyCalls, anew: Probing) -> None:
    """Measure the properties that need a worker which has made no call before."""
    with anew() as another:
        found.same("process", found.call(another, "process"))
        _on_gpu(found, another, "stream", ORDINARY, STREAM)
        _on_gpu(found, another, "load", LOAD)
        _load_on_part(found, another)
        _on_gpu(found, another, "graph", GRAPH)  # last, since a failed capture may make the process useless


def chosen(cases: Sequence[PlannedCase]) -> PlannedCase | None:
    """The largest ordinary case up to LARGEST bytes; else the smallest one up to LEAST_OF_LARGE; None: none."""
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
    """Set `contents`: calls with the inputs of `_others` in the memory of the previous call's inputs."""
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
    """The case with its inputs rearranged, unless outputs depend on choices; then with another seed."""
    kinds = evaluation.op.comparisons(evaluation.definition).values()
    values = None if any(isinstance(kind, CHOOSING) for kind in kinds) else moved(subject.inputs)
    if values is not None:
        with suppress(RuntimeError, ValueError, IndexError):  # the oracle refuses such inputs
            yield evaluation.solved(replace(subject, inputs=values))
    yield evaluation.subject(replace(subject.case, seed=subject.case.seed + 1))


def _on_gpu(found: PropertyCalls, source: UntrustedSource, name: str, *hows: str) -> None:
    """Set a property by calls in ways (`hows`) that need a GPU; the first wrong one ends them."""
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
    """Repeat `load` on a part of the multiprocessors, which not every driver and PyTorch can set apart."""
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
    """Set `batch`: whether halves of a batch, called alone, have the bits that they have together."""
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
        axes = dict(subject.case.axes)  # with sizes of this half
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
    """Up to OTHERS cases in other sizes, smallest first."""
    sizes = {tuple(sorted(subject.case.axes.items()))}
    ordered = sorted(cases, key=lambda case: case.memory)
    for case in (case for case in ordered if case.skip is None and case.memory <= LARGEST):
        key = tuple(sorted(case.case.axes.items()))
        if key not in sizes and len(sizes) <= OTHERS and not evaluation.is_empty(case.case):
            sizes.add(key)
            yield case.case


def _after_others(found: PropertyCalls, source: UntrustedSource, others: Sequence[SolvedCase]) -> None:
    """Set `order`: repeat the first call after calls in other sizes."""
    if all(found.call(source, "order", other) is not None for other in others):
        found.same("order", found.call(source, "order"))


def _errors(found: PropertyCalls, source: UntrustedSource) -> None:
    """Set `errors`: calls with inputs that the definition rules out must raise or return correct values."""
    evaluation, subject = found.evaluation, found.subject
    count = 0
    for what, inputs in evaluation.op.errors(evaluation.definition, subject.inputs):
        if (subject.trials and TOO_MANY not in what) or (evaluation.candidate.destinations and UNEVEN in what):
            continue  # draws for others cost as much and show less; outputs passed in keep their sizes
        count += 1
        try:
            taken = evaluation.call(source, replace(subject, inputs=inputs))
        except CallError as error:
            if error.reply.status is Status.ERROR:
                continue
            found.states["errors"] = BROKEN, f"{what}: {error.told}"
            return
        changed = [name for name, value in inputs.items() if value is not subject.inputs[name]]
        pairs = [(tensor(inputs, name), tensor(subject.inputs, name)) for name in changed]
        safe = all(one.is_floating_point() and one.shape == other.shape for one, other in pairs)
        if not _right_in_values(evaluation, replace(subject, inputs=inputs), taken, safe=safe):
            found.states["errors"] = BROKEN, f"{what}: it neither raises nor is right"
            return
    if count:
        found.states["errors"] = HOLDS, f"{count} such calls raise or are right"


def _right_in_values(evaluation: SolutionRun, subject: SolvedCase, taken: CaseResult, *, safe: bool) -> bool:
    """Whether outputs are correct for inputs in any dtypes and sizes; False if the oracle fails.

    `safe`: no index in the inputs is out of range, which would cost this process its GPU.
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
    """The precision seen in each floating-point output; nothing without an oracle, or without outputs."""
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
    """The precision of output `name`; None: it can not be determined."""

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
