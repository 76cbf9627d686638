"""What the bits of a ground truth's kernel depend on, measured in this process on one definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.planned import PlannedOnce
from kernels.recording import Recording
from kernels.repeats import REPEATS, in_parts, repeat, twice
from traceproof.dataset.definition import Definition
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import Adapter, resolve
from traceproof.ops.base import Tensors, Values
from traceproof.ops.batch import halved
from traceproof.ops.cases import ALWAYS
from traceproof.run.case import CPU, Subject
from traceproof.run.implementation import Implementation, named_outputs
from traceproof.run.inputs import make_inputs
from traceproof.run.runner import arrive_late
from traceproof.run.tensor_files import same_bits
from traceproof.stacks import STACK_OF, STACKS

LARGEST = 2 << 30  # bytes that a case may need
OFFSET = 64 * 9  # bytes
HOLDS, DEPENDS, UNMEASURED = "holds", "depends", "not measured"


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one property of one kernel.

    Attributes:
        definition, truth, adapter, property: of what.
        state: `holds`, `depends` or `not measured`.
        detail: in words.
        case: the sizes.
        script: a repeat without this project; empty: there is none.
    """

    definition: str
    truth: str
    adapter: str
    property: str
    state: str
    detail: str
    case: str = ""
    script: str = ""

    def as_json(self) -> dict[str, str]:
        """As a JSON object."""
        return asdict(self)


class Kernel:
    """A ground truth's kernel for a definition, and one ordinary case."""

    def __init__(self, truth: str, definition: Definition, device: str) -> None:
        self.truth, self.definition, self.device = truth, definition, device
        self.op, _ = registry.for_definition(definition)
        self.implementation = Implementation(truth)
        self.implementation.device = device
        adapter = lookup.serving(truth, definition)
        self.adapter = adapter.name if adapter is not None else ""
        self.axes = ""

    def why_not(self) -> str:
        """Why it can not be called here; empty: it can."""
        found = self.implementation.unavailable(self.definition)
        return "" if found is None else f"{found.reason}: {found.message}"

    def subjects(self) -> Iterator[Subject]:
        """The ordinary cases that fit, drawn, the largest first."""
        found = self.op.cases(self.definition, sizes=("small", "medium"), seed=0)
        ordinary = [case for case in found if case.size not in ALWAYS]
        for case in sorted(ordinary, key=lambda case: -self.op.memory(self.definition, case)):
            if self.op.memory(self.definition, case) <= LARGEST:
                self.axes = ", ".join(f"{name}={size}" for name, size in case.axes.items())
                inputs = make_inputs(self.op, self.definition, case, device=CPU)
                yield Subject(definition=self.definition, op=self.op, case=case, inputs=inputs, oracle={}, seed=0)

    def placed(self, values: Values) -> dict[str, Any]:
        """Inputs on the device."""
        return {n: v.to(self.device) if isinstance(v, torch.Tensor) else v for n, v in values.items()}

    def raw(self, placed: Values) -> Mapping[str, Any]:
        """One call on inputs that lie on the device; outputs stay there."""
        return named_outputs(self.definition, self.implementation.run(self.definition, placed))

    def __call__(self, values: Values) -> Tensors:
        """One call."""
        found = self.raw(self.placed(values))
        self.wait()
        return {name: value.cpu() for name, value in found.items()}

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seen(self, name: str, state: str, detail: str, text: str = "") -> Seen:
        """A result."""
        return Seen(self.definition.name, self.truth, self.adapter, name, state, detail, self.axes, text)

    def package(self) -> tuple[Adapter, Mapping[str, Any]]:
        """The adapter, and what it calls."""
        adapter = lookup.serving(self.truth, self.definition)
        assert adapter is not None
        api = resolve(STACKS[STACK_OF[self.truth]], adapter.apis)
        assert isinstance(api, Mapping)
        return adapter, api

    def recorded(self, recording: Recording, values: Values) -> tuple[list[str], list[tuple[str, torch.Tensor]]]:
        """Lines of one call of the package, and what it gave."""
        adapter, api = self.package()
        recording.begin()
        calls = recording.api(STACKS[STACK_OF[self.truth]], api)
        adapter.call(calls, self.definition, self.placed(values))
        self.wait()
        return list(recording.calls), list(recording.results)


def measured(truth: str, definition: Definition, device: str) -> list[Seen]:
    """All properties of one kernel."""
    kernel = Kernel(truth, definition, device)
    why = kernel.why_not()
    subject = None if why else next(kernel.subjects(), None)
    if subject is not None and subject.trials:
        why = "it draws"
    elif subject is None:
        why = why or "does_not_fit: no ordinary case needs less than 2 GiB"
    if why or subject is None:
        return [kernel.seen("all", UNMEASURED, why)]
    first = kernel(subject.inputs)
    again = determinism(kernel, subject, first)
    found = [again, addresses(kernel, subject, first), stream(kernel, subject, first)]
    found.append(batch(kernel, varies=again.state == DEPENDS))
    return [*found, graph(kernel, subject, first)]  # last: a capture that fails may leave the process useless


def determinism(kernel: Kernel, subject: Subject, first: Tensors) -> Seen:
    """The same call again."""
    for _ in range(REPEATS):
        other = kernel(subject.inputs)
        if not _same(first, other):
            text = repeat(lambda: twice(kernel, subject))
            return kernel.seen("determinism", DEPENDS, _apart(first, other), text)
    return kernel.seen("determinism", HOLDS, f"the same bits in {REPEATS} calls")


def stream(kernel: Kernel, subject: Subject, first: Tensors) -> Seen:
    """The same call on another stream, which still writes the inputs, and outputs as that stream finds them."""
    if kernel.device != "cuda":
        return kernel.seen("stream", UNMEASURED, "no_cuda: there is no GPU here")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    placed = kernel.placed(subject.inputs)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        arrive_late(list(placed.values()))
        found = {name: value.clone() for name, value in kernel.raw(placed).items()}
    kernel.wait()
    return _result(kernel, "stream", first, {name: value.cpu() for name, value in found.items()})


def addresses(kernel: Kernel, subject: Subject, first: Tensors) -> Seen:
    """The same call with inputs elsewhere, OFFSET bytes after where an allocation begins."""
    placed = kernel.placed(subject.inputs)
    for name, value in placed.items():
        if isinstance(value, torch.Tensor) and value.numel():
            size = value.numel() * value.element_size()
            room = torch.empty(size + 2 * OFFSET, dtype=torch.uint8, device=kernel.device)
            copy = room[OFFSET : OFFSET + size].view(value.dtype).reshape(value.shape)
            placed[name] = copy.copy_(value)
    found = kernel.raw(placed)
    kernel.wait()
    return _result(kernel, "addresses", first, {name: value.cpu() for name, value in found.items()})


def batch(kernel: Kernel, *, varies: bool) -> Seen:
    """The halves of a batch on their own, in every size until one shows other bits."""
    if varies:
        return kernel.seen("batch", UNMEASURED, "its bits differ from call to call")
    sizes = 0
    for subject in kernel.subjects():
        halves = halved(subject)
        if halves is None:
            continue
        sizes += 1
        whole, joined = (
            halves.whole(kernel(subject.inputs)),
            halves.joined([kernel(part) for part in halves.inputs]),
        )
        if not _same(whole, joined):
            text = repeat(lambda: in_parts(kernel, subject, list(halves.inputs)))  # noqa: B023 - called at once
            return kernel.seen("batch", DEPENDS, _apart(whole, joined), text)
    if not sizes:
        return kernel.seen("batch", UNMEASURED, "it is not known which parts of its inputs are independent")
    return kernel.seen("batch", HOLDS, f"the same bits in {sizes} sizes")


def graph(kernel: Kernel, subject: Subject, first: Tensors) -> Seen:
    """A CUDA graph that was captured on other contents, replayed; of what is planned first, the run alone."""
    if kernel.device != "cuda":
        return kernel.seen("graph", UNMEASURED, "no_cuda: there is no GPU here")
    placed = kernel.placed(subject.inputs)
    tensors = {name: value for name, value in placed.items() if isinstance(value, torch.Tensor)}
    kept = {name: value.clone() for name, value in tensors.items()}
    for value in tensors.values():
        if value.is_floating_point() and value.itemsize > 1 and value.dim():
            value.copy_(value.flip(0))
    adapter, api = kernel.package()
    planned = PlannedOnce(api)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is planned, compiled or allocated on first use is not captured
        adapter.call(planned.api(), kernel.definition, placed)
    kernel.wait()
    planned.again()
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            found = dict(adapter.call(planned.api(), kernel.definition, placed))
    except (RuntimeError, ValueError) as error:
        last = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return kernel.seen("graph", UNMEASURED, f"it can not be captured as it is called here: {last[:160]}")
    for name, value in kept.items():
        tensors[name].copy_(value)
    captured.replay()
    kernel.wait()
    other = {name: value.cpu() for name, value in found.items()}
    return _result(kernel, "graph", first, other, "run captured after its plan: " if planned.plans else "")


def _result(kernel: Kernel, name: str, first: Tensors, other: Tensors, how: str = "") -> Seen:
    if _same(first, other):
        return kernel.seen(name, HOLDS, f"{how}the same bits")
    return kernel.seen(name, DEPENDS, f"{how}{_apart(first, other)}")


def _same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


def _apart(one: Tensors, other: Tensors) -> str:
    """How far outputs lie apart, in words."""
    told = []
    for name, value in one.items():
        if same_bits(value, other[name]):
            continue
        apart = (value.double() - other[name].double()).abs().nan_to_num(float("inf"))
        size = value.double().abs().nan_to_num(0.0).max().clamp_min(1e-30)
        count = int((apart > 0).sum())
        worst = float(apart.max())
        share = f"{worst / float(size):.1e} of the largest"
        told.append(f"{name}: {count} of {value.numel()} elements, up to {worst:.3g} ({share})")
    return "; ".join(told)
