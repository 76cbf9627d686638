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
from traceproof.judge.precision import examine
from traceproof.ops.base import TORCH_DTYPES, Tensors, Unsupported, tensor
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
# raised for inputs that are in no plan
ODD = (CallError, RuntimeError, ValueError, IndexError, KeyError, Unsupported)


@dataclass(slots=True)
class PropertyCalls:
    """Results so far, and bad rows of calls."""

    evaluation: SolutionRun
    subject: SolvedCase
    first: CaseResult
    watch: Watch
    judged: list[tuple[SolvedCase, Tensors, Rulings]] = field(default_factory=list)  # outputs, and rulings on them
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
        case = subject or self.subject
        self.watch.say(f"property {name}")
        order.setdefault("trials", min(case.trials, DRAWS))
        try:
            result = self.evaluation.call(source, case, **order)
        except CallError as error:
            self.states[name] = BROKEN, f"the call failed: {error.told}"
            late_row = left_behind(case.case, error, name)
            if late_row is not None:
                self.rows.append(late_row)
            elif PROPERTIES[name].must_run:
                self.rows.append(refused(case.case, error, name))
            return None
        else:
            return result if order["trials"] < case.trials or self.right(name, case, result) else None
        finally:
            self.watch.done(f"property {name}")

    def right(self, name: str, case: SolvedCase, result: CaseResult) -> bool:
        """Whether a call did all as it should; if not, `states` says what is wrong."""
        rows = self.evaluation.rule(case, result, name, self.rulings_on(case, result))
        wrong = [row for row in rows if row.bad]
        if wrong:
            self.states[name] = BROKEN, f"wrong: {wrong[0].output}: {wrong[0].message}"
            self.rows += wrong if PROPERTIES[name].must_run else []
        return not wrong

    def rulings_on(self, case: SolvedCase, result: CaseResult) -> Rulings:
        """Rulings on the outputs of a call: those of the case's first call if that gave the same bits."""
        outputs = result.outputs
        for earlier, others, found in self.judged:
            names = others.keys() | outputs.keys() if earlier is case else ()
            if names and all(same_bits(others.get(name), outputs.get(name)) for name in names):
                return found
        ruled = rulings(case, result, tolerance=self.evaluation.settings.tolerance)
        found = {output: ruling for output, ruling in ruled if output != WHOLE}
        if all(earlier is not case for earlier, _, _ in self.judged):  # a kernel may give other bits in each call
            self.judged.append((case, outputs, found))
        return found

    def same(self, name: str, result: CaseResult | None, first: Tensors | None = None) -> None:
        """Set the property's state by whether the call's bits are those of `first`; None: the first call's."""
        if result is None:
            return
        if self.varies and name != "determinism":
            self.states[name] = UNMEASURED, "its bits differ from run to run; the answer is right"
            return
        self.states[name] = _same(first or self.first.outputs, result.outputs)


def _same(first: Tensors, other: Tensors) -> tuple[str, str]:
    """(HOLDS or BROKEN, text): whether two sets of outputs have the same bits, else where they differ most."""
    names = sorted(name for name in first.keys() | other.keys() if not same_bits(first.get(name), other.get(name)))
    if not names:
        return HOLDS, "the same bits"
    value, other_value, where = first.get(names[0]), other.get(names[0]), ""
    if value is not None and other_value is not None and value.shape == other_value.shape and value.numel():
        distance = (value.double() - other_value.double()).abs().nan_to_num(float("inf"))
        place, count = index_of(int(distance.argmax()), distance.shape), int((distance > 0).sum())
        where = f": {count} of {value.numel()} elements, most at {place}: {float(distance.max()):.3g} apart"
    return BROKEN, f"other bits in {', '.join(names)}{where}"


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
    """Measure a solution in three new workers; at exit, results that are not done are abandoned."""
    with ExitStack() as stack:
        channels = (None, CHANNELS, None)
        workers: list[Probing] = [partial(evaluation.source, channels=count) for count in channels]
        sources: list[UntrustedSource] = []
        if evaluation.side_by_side:
            sources = [stack.enter_context(evaluation.begun(channels=count)) for count in channels]
            workers = [partial[nullcontext[UntrustedSource]](nullcontext, source) for source in sources]
        threads = stack.enter_context(ThreadPoolExecutor(4))
        for source in sources:  # interrupt all at once, since ending one that has a GPU takes time
            stack.callback(source.session.interrupt)
        seen = threads.submit(lambda: (*precision(evaluation, workers[0], cases),))

        def measured() -> tuple[tuple[PropertyResult, ...], list[SolutionRow]]:
            wait([seen])
            return measure(evaluation, workers, cases, watch=watch.beside(), threads=threads)

        properties = threads.submit(measured)
        yield Measuring(seen, properties)


def measure(
    evaluation: SolutionRun,
    workers: Sequence[Probing],
    cases: Sequence[PlannedCase],
    *,
    watch: Watch,
    threads: ThreadPoolExecutor,
) -> tuple[tuple[PropertyResult, ...], list[SolutionRow]]:
    """All properties of a solution whose answers are correct, and bad rows of the calls.

    `workers` put it in a worker each: for most properties; for some of a worker that has made no call before; for
    odd inputs, after which a worker may be good for nothing.
    """
    planned = chosen(cases)
    if planned is None:
        why = f"no ordinary case needs less than {LEAST_OF_LARGE >> 30} GiB"
        return tuple(_result(evaluation, name, (UNMEASURED, why)) for name in PROPERTIES), []
    subject = evaluation.subject(planned.case)

    def solved() -> tuple[list[SolvedCase], list[SolvedCase]]:
        sizes = [evaluation.subject(case) for case in _other_sizes(evaluation, subject, cases)]
        return [*_others(evaluation, subject)], sizes

    others = threads.submit(solved)  # in a thread, during calls below
    probing, anew, spoilt = workers
    with probing() as source:
        first = evaluation.call(source, subject, trials=min(subject.trials, DRAWS))
        calls = PropertyCalls(evaluation, subject, first, watch)
        if not subject.trials:
            calls.rulings_on(subject, first)
        watch.done("property first call")
        writes = evaluation.op.mutated(evaluation.definition) or subject.trials
        calls.same("determinism", calls.call(source, "determinism", calls=1 if writes else CALLS))
        elsewhere = [replace(calls, watch=watch.beside(), rows=[]) for _ in range(2)]
        apart = partial(_in_new_process, elsewhere[0], anew), partial(_with_odd_inputs, elsewhere[1], spoilt)
        # Begun now and waited for below; or called below, where workers share a folder.
        finish = [threads.submit(one).result if evaluation.side_by_side else one for one in apart]
        layout = evaluation.layout
        variations: dict[str, dict[str, Any]] = {
            "memory": {"fill": OTHER_FILL, "layout": replace(layout, fill=OTHER_FILL)},
            "surroundings": {"layout": replace(layout, byte=OTHER_BYTE)},
            "addresses": {"layout": replace(layout, room=layout.room + FAR)},
            "alignment": {"layout": replace(layout, shift=1)},
            "threads": {"threads": 2},
        }
        for name, variation in variations.items():
            calls.same(name, calls.call(source, name, **variation))
        contents, sizes = others.result()
        _contents(calls, source, contents)
        _batch(calls, source)
        if all(calls.call(source, "order", other) is not None for other in sizes):
            calls.same("order", calls.call(source, "order"))
        _bounds(calls, source)
        # Last, because the next call also raises CUDA's error of a call that it refused.
        empty = [case.case for case in cases if case.skip is None and evaluation.is_empty(case.case)]
        if not empty:
            calls.states["empty"] = UNMEASURED, "no case of the definition is empty"
        elif calls.call(source, "empty", evaluation.subject(empty[0])) is not None:
            calls.states["empty"] = HOLDS, "empty outputs"
    for one in finish:
        one()
    results = tuple(_result(evaluation, name, calls.states.get(name)) for name in PROPERTIES)
    return results, [row for one in (calls, *elsewhere) for row in one.rows]


def _bounds(calls: PropertyCalls, source: UntrustedSource) -> None:
    """Set `bounds`: in calls whose tensors begin, then end, at memory whose access ends the process."""
    fences: set[str] = set()
    for how in (FENCED_BEFORE, FENCED_BEHIND):
        fenced = calls.call(source, "bounds", how=how)
        if fenced is None:
            return
        fences |= {*fenced.fences}
    between = ", ".join(text for way, text in BETWEEN.items() if way in fences)
    calls.states["bounds"] = HOLDS, f"nothing beside its tensors is touched; they lie between {between}"


def _in_new_process(calls: PropertyCalls, anew: Probing) -> None:
    """Measure the properties that need a worker which has made no call before."""
    with anew() as another:
        calls.same("process", calls.call(another, "process"))
        _on_gpu(calls, another, "stream", ORDINARY, STREAM)
        _on_gpu(calls, another, "load", LOAD)
        _load_on_part(calls, another)
        _on_gpu(calls, another, "graph", GRAPH)  # last, since a failed capture may make the process useless


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


def _contents(calls: PropertyCalls, source: UntrustedSource, others: Sequence[SolvedCase]) -> None:
    """Set `contents`: calls with the inputs of `_others` in the memory of the previous call's inputs."""
    trials = calls.subject.trials
    for other in others:
        if calls.call(source, "contents") is None:
            return
        result = calls.call(source, "contents", other, how=SAME_MEMORY, trials=trials)
        if result is None:
            return
        calls.states["contents"] = HOLDS, "right draws"
        if not trials:
            in_new_memory = calls.call(source, "contents", other)
            calls.same("contents", result, in_new_memory.outputs if in_new_memory is not None else None)
        if calls.states["contents"][0] == BROKEN:
            return


def _others(evaluation: SolutionRun, subject: SolvedCase) -> Iterator[SolvedCase]:
    """The case with its inputs rearranged, unless outputs depend on choices; then with another seed."""
    kinds = evaluation.op.comparisons(evaluation.definition).values()
    values = None if any(isinstance(kind, CHOOSING) for kind in kinds) else moved(subject.inputs)
    if values is not None:
        with suppress(RuntimeError, ValueError, IndexError):  # the oracle refuses such inputs
            yield evaluation.solved(replace(subject, inputs=values))
    yield evaluation.subject(replace(subject.case, seed=subject.case.seed + 1))


def _on_gpu(calls: PropertyCalls, source: UntrustedSource, name: str, *hows: str) -> None:
    """Set a property by calls in ways (`hows`) that need a GPU; the first wrong one ends them."""
    if not calls.evaluation.settings.gpu:
        calls.states[name] = UNMEASURED, "no_cuda: there is no GPU here"
    elif calls.subject.trials:
        calls.states[name] = UNMEASURED, "a sampler draws"
    else:
        for how in hows:
            calls.same(name, calls.call(source, name, how=how))
            if calls.states[name][0] == BROKEN:
                return


def _load_on_part(calls: PropertyCalls, source: UntrustedSource) -> None:
    """Repeat `load` on a part of the multiprocessors, which not every driver and PyTorch can set apart."""
    state, detail = calls.states["load"]
    if state == HOLDS:
        try:
            result = calls.evaluation.call(source, calls.subject, how=LOAD_ON_PART)
        except CallError as error:
            calls.states["load"] = HOLDS, f"{detail}; not on a part of the multiprocessors: {error.told}"
        else:
            if calls.right("load", calls.subject, result):
                calls.same("load", result)


def _batch(calls: PropertyCalls, source: UntrustedSource) -> None:
    """Set `batch`: whether halves of a batch, called alone, have the bits that they have together."""
    evaluation, subject = calls.evaluation, calls.subject
    halves = None if subject.trials else halved(subject)
    if halves is None:
        calls.states["batch"] = UNMEASURED, "it is not known which parts of its inputs are independent"
        return
    if calls.varies:
        calls.states["batch"] = UNMEASURED, "its bits differ from run to run"
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
            calls.states["batch"] = BROKEN, f"a part of the batch alone: {error.told}"
            return
    calls.states["batch"] = _same(halves.whole(calls.first.outputs), halves.joined(outputs))


def _other_sizes(evaluation: SolutionRun, subject: SolvedCase, cases: Sequence[PlannedCase]) -> Iterator[Case]:
    """Up to OTHERS cases in other sizes, smallest first."""
    sizes = {tuple(sorted(subject.case.axes.items()))}
    ordered = sorted(cases, key=lambda case: case.memory)
    for case in (case for case in ordered if case.skip is None and case.memory <= LARGEST):
        key = tuple(sorted(case.case.axes.items()))
        if key not in sizes and len(sizes) <= OTHERS and not evaluation.is_empty(case.case):
            sizes.add(key)
            yield case.case


def _with_odd_inputs(calls: PropertyCalls, spoilt: Probing) -> None:
    """Measure `strides`, then `errors`, in a worker that may be good for nothing afterwards."""
    with spoilt() as source:
        calls.same("strides", calls.call(source, "strides", how=STRIDED))
        calls.states["errors"] = _errors(calls, source)
    calls.watch.done("property errors")


def _errors(calls: PropertyCalls, source: UntrustedSource) -> tuple[str, str]:
    """The state of `errors`: calls with inputs that the definition rules out must raise or be right."""
    evaluation, subject = calls.evaluation, calls.subject
    calls_made = 0
    for what, inputs in evaluation.op.errors(evaluation.definition, subject.inputs):
        if (subject.trials and TOO_MANY not in what) or (evaluation.candidate.destinations and UNEVEN in what):
            continue  # draws for others cost as much and show less; outputs passed in keep their sizes
        calls_made += 1
        try:
            result = evaluation.call(source, replace(subject, inputs=inputs))
        except CallError as error:
            if error.reply.status is Status.ERROR:
                continue
            return BROKEN, f"{what}: {error.told}"
        changed = [name for name, value in inputs.items() if value is not subject.inputs[name]]
        pairs = [(tensor(inputs, name), tensor(subject.inputs, name)) for name in changed]
        safe = all(one.is_floating_point() and one.shape == other.shape for one, other in pairs)
        if not _right_in_values(evaluation, replace(subject, inputs=inputs), result, safe=safe):
            return BROKEN, f"{what}: it neither raises nor is right"
    return (HOLDS, f"{calls_made} such calls raise or are right") if calls_made else (UNMEASURED, "")


def _right_in_values(evaluation: SolutionRun, subject: SolvedCase, result: CaseResult, *, safe: bool) -> bool:
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
    outputs = {name: value.to(dtypes.get(name) or value.dtype) for name, value in result.outputs.items()}
    try:
        solved = replace(evaluation, definition=subject.definition).solved(subject, safe=safe)
        return not any(row.bad for row in evaluation.rule(solved, replace(result, outputs=outputs)))
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
    seen = examine(inputs, summed, observe, exact)
    if seen is None:
        return None
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in inputs.values()})
    asked = f"{', '.join(dtypes)} in, {evaluation.definition.outputs[name].dtype} out"
    return PrecisionResult(output=name, asked=asked, seen=str(seen), evidence=seen.evidence)
