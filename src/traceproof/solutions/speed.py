"""Measures a correct solution's speed: cold cache, new contents and addresses per call, in turns with others."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean, median, quantiles
from typing import Any

import torch

from traceproof.judge.output import Ruling
from traceproof.ops import lookup
from traceproof.ops.base import Values
from traceproof.ops.cases import ALWAYS, WORKLOADS
from traceproof.programs import nvidia_smi
from traceproof.run import calls
from traceproof.run.case import SolvedCase
from traceproof.run.schema import PlannedCase
from traceproof.run.trusted import Implementation
from traceproof.run.untrusted import PLAIN, CallError, CaseResult, Layout, UntrustedSource, loaded, refusal
from traceproof.solutions.records import SolutionRow, SpeedResult, Times
from traceproof.solutions.trial import SolutionRun, refused
from traceproof.stacks import STACK_OF, STACKS, TRUTHS

CASES = 3  # timed per solution
LARGEST = 1 << 30  # bytes that a timed case may need
WARM = 10  # uncounted calls at first, and WARM_AGAIN before each later turn
WARM_AGAIN = 3
TURNS = 3
SECONDS = 0.1  # for calls per turn at least, within FEWEST and MOST calls
FEWEST, MOST, MOST_ON_CPU = 10, 200, 40
MILLION = 1e6  # nanoseconds in a millisecond
SLACK_MS = 0.1  # allowed difference per call between clocks that agree: starting a call, waiting for a device
# `(first, count, *, call=True)`: makes calls number `first` and on; if not `call`, does all but the calls
Request = Callable[..., CaseResult]
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


@dataclass(slots=True)
class _Party:
    """An implementation that is timed, and per call the nanoseconds (between events, by a wall clock)."""

    name: str
    request: Request
    first: float = 0.0
    turn: int = 0
    times: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def calls(self, count: int, *, warm: int) -> CaseResult:
        """Make `warm + count` more calls; keep the times (ns) of the last `count`, and the seconds of them all."""
        taken = self.request(self.turn, warm + count)
        if not self.turn:
            self.first = taken.times[0][0] / MILLION  # ms, of the very first call, which may compile
        self.turn += warm + count
        self.times += taken.times[warm:]
        self.seconds.append(taken.seconds)
        return taken

    def result(self) -> Times:
        """Statistics of the counted calls, in milliseconds."""
        events = [one / MILLION for one, _ in self.times]
        lower, middle, upper = quantiles(events, n=4)
        return Times(
            name=self.name,
            calls=len(events),
            first=self.first,
            median=middle,
            lower=lower,
            upper=upper,
            mean=fmean(events),
            wall=median(wall / MILLION for _, wall in self.times),
        )


def measure_speed(
    evaluation: SolutionRun, cases: Sequence[PlannedCase]
) -> tuple[tuple[SpeedResult, ...], list[SolutionRow]]:
    """Speeds in up to three cases, and bad rows of timed calls."""
    found: list[SpeedResult] = []
    rows: list[SolutionRow] = []
    with ExitStack() as stack:
        solution = stack.enter_context(evaluation.source())
        reference = None
        if refusal(evaluation.definition.reference) is None:
            loading = loaded(
                evaluation.definition, evaluation.pool, limits=evaluation.limits, device=evaluation.device
            )
            reference = stack.enter_context(loading)
        for case in chosen(evaluation, cases):
            subject = evaluation.subject(case.case)
            try:
                result, wrong = _in_turns(evaluation, subject, solution, reference)
            except CallError as error:
                rows.append(refused(subject.case, error, "time"))
                break
            found.append(result)
            rows += wrong
    return tuple(found), rows


def chosen(evaluation: SolutionRun, cases: Sequence[PlannedCase]) -> list[PlannedCase]:
    """Largest, middle and smallest of the workload lines that fit; of the ordinary cases if no line fits."""
    fitting = [
        case
        for case in cases
        if case.skip is None
        and case.case.seed == evaluation.settings.seed
        and case.case.size not in ALWAYS
        and case.memory <= LARGEST
        and not evaluation.is_empty(case.case)
    ]
    lines = [case for case in fitting if case.case.size == WORKLOADS] or fitting
    by_sizes = {tuple(sorted(case.case.axes.items())): case for case in lines}
    ordered = sorted(by_sizes.values(), key=lambda case: (-case.memory, case.id))
    places = sorted({0, len(ordered) // 2, len(ordered) - 1} & set(range(len(ordered))))
    return [ordered[place] for place in places[:CASES]]


def _in_turns(
    evaluation: SolutionRun, subject: SolvedCase, solution: UntrustedSource, reference: UntrustedSource | None
) -> tuple[SpeedResult, list[SolutionRow]]:
    """Time a solution and others in one case, in turns; returns the speed, and bad rows of the last call."""
    own = _Party("solution", _asked_of(solution, subject, evaluation.layout))
    truth = ground_truth(evaluation, subject)
    others = [] if truth is None else [_Party(*truth)]
    if reference is not None:
        others.append(_Party("reference", _asked_of(reference, subject, PLAIN)))
    before = clocks(gpu=evaluation.settings.gpu)
    most = MOST if evaluation.settings.gpu else MOST_ON_CPU
    counts = {own.name: _count(own, most)}
    for party in list(others):
        try:
            counts[party.name] = _count(party, most)
        except CallError:
            others.remove(party)  # a reference that does not run is reported by the pipeline
    calls = counts[own.name] + WARM_AGAIN
    without: list[CaseResult] = []
    taken: CaseResult | None = None
    for _ in range(TURNS):
        taken = own.calls(counts[own.name], warm=WARM_AGAIN)
        for party in others:
            party.calls(counts[party.name], warm=WARM_AGAIN)
        without.append(own.request(own.turn, calls, call=False))
    assert taken is not None
    mine = own.result()
    # Milliseconds per call by a clock that the solution can not reach, without those of the turns that call
    # nothing.
    empty = [one.seconds for one in without]
    idle = median(wall for one in without for _, wall in one.times) / MILLION
    least = (min(own.seconds) - 2 * max(empty) + min(empty)) * 1e3 / calls  # minus possible noise
    rulings, rows = _checked(evaluation, subject, taken, own.turn - 1)
    figures = [ruling.details["metrics"] for ruling in rulings if "metrics" in ruling.details]
    result = SpeedResult(
        case=subject.case.id,
        size=subject.case.size,
        axes=dict(subject.case.axes),
        inputs=_described(subject),
        times=(mine, *(party.result() for party in others)),
        outside=(min(own.seconds) - min(empty)) * 1e3 / calls,
        doubt=doubt(mine, least, idle),
        clocks=f"before: {before}; after: {clocks(gpu=evaluation.settings.gpu)}",
        max_abs=_largest(figures, "max_abs"),
        max_rel=_largest(figures, "max_rel"),
    )
    return result, rows


def _largest(figures: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [one[name] for one in figures if isinstance(one.get(name), float | int) and math.isfinite(one[name])]
    return max(values, default=None)


def _count(party: _Party, most: int) -> int:
    """Warm up, then return the number of calls per turn."""
    party.calls(WARM, warm=0)
    typical = median(wall for _, wall in party.times[WARM // 2 :]) / 1e9
    party.times.clear()
    party.seconds.clear()
    return max(FEWEST, min(most, math.ceil(SECONDS / max(typical, 1e-6))))


def doubt(times: Times, outside: float, idle: float) -> str:
    """Why a solution's clocks can not be believed; empty: they agree.

    In milliseconds per call: `outside` has passed at least, by a clock that the solution can not reach; `idle` is
    the wall clock's figure without a call.
    """
    wall = max(0.0, times.wall - idle)
    if wall > 1.5 * times.median + SLACK_MS:
        return f"{times.wall:.3g} ms until the device was done, {times.median:.3g} ms between events"
    if outside > 2 * times.wall + SLACK_MS:
        return f"{outside:.3g} ms per call by a clock outside, {times.wall:.3g} ms by the clock in its process"
    return ""


def _asked_of(source: UntrustedSource, subject: SolvedCase, layout: Layout) -> Request:
    """Requests to a worker, with the inputs of a case."""

    def request(first: int, count: int, *, call: bool = True) -> CaseResult:
        order = {"first": first, "count": count, "call": call}
        given = replace(layout, room=0)
        taken = source.run(subject.case, subject.inputs, seed=subject.seed, layout=given, timing=order, fill=None)
        if len(taken.times) != count:
            raise RuntimeError(f"{len(taken.times)} times for {count} calls")
        return taken

    return request


def _checked(
    evaluation: SolutionRun, subject: SolvedCase, taken: CaseResult, turn: int
) -> tuple[list[Ruling], list[SolutionRow]]:
    """The judge's rulings on the last timed call, and the bad rows; nothing for a sampler."""
    if subject.trials:
        return [], []
    values = {
        name: calls.moved(value, turn) if isinstance(value, torch.Tensor) else value
        for name, value in subject.inputs.items()
    }
    try:
        other = evaluation.solved(replace(subject, inputs=values, outputs=taken.outputs))
    except (RuntimeError, ValueError, IndexError):
        return [], []  # the oracle refuses such inputs
    rows = [row for row in evaluation.rule(other, taken, "time") if row.bad]
    names = [name for name in evaluation.definition.outputs if name in taken.outputs]
    return [other.ruling(name, taken.outputs[name], evaluation.settings.tolerance) for name in names], rows


def _described(subject: SolvedCase) -> dict[str, dict[str, Any]]:
    """The inputs in the format of a workload line."""
    given = subject.case.params.get("inputs")
    if subject.case.size == WORKLOADS and isinstance(given, Mapping):
        return {name: dict(value) for name, value in given.items()}
    described: dict[str, dict[str, Any]] = {}
    for name, value in subject.inputs.items():
        scalar = not isinstance(value, torch.Tensor) and value is not None
        described[name] = {"type": "scalar", "value": value} if scalar else {"type": "random"}
    return described


def clocks(*, gpu: bool) -> str:
    """Clocks, temperature, power and reasons for lower clocks, as nvidia-smi reports them."""
    if not gpu:
        return "CPU, wall clock"
    rows = nvidia_smi(",".join(CLOCKS), units=True)
    return ", ".join(rows[0]) if rows else "not known: nvidia-smi is absent, or does not answer"


def ground_truth(evaluation: SolutionRun, subject: SolvedCase) -> tuple[str, Request] | None:
    """(name, request) of the first ground truth that can be called in this process; None: there is none."""
    rank = {truth.name: truth.priority for stack in STACKS.values() for truth in stack.truths}
    definition, device = evaluation.definition, torch.device(evaluation.device)
    for name in sorted(TRUTHS, key=lambda name: rank[name]):
        if lookup.serving(name, definition) is None:
            continue
        found = Implementation(name)
        found.device = device.type
        try:
            if found.unavailable(definition) is not None:
                continue
            request = _called_here(evaluation, found, subject.inputs, device, subject.seed)
            request(0, 1)
        except (ImportError, RuntimeError, ValueError, OSError):
            continue  # it does not work here, which is not a finding about speed
        return f"{name} ({STACK_OF[name]})" if name != STACK_OF[name] else name, request
    return None


def _called_here(
    evaluation: SolutionRun, called: Implementation, inputs: Values, device: torch.device, seed: int
) -> Request:
    """Requests to a ground truth in this process."""
    names = list(inputs)
    placed = [v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs.values()]
    watch = calls.Stopwatch(placed, 0, device, seed)

    def one(given: Sequence[Any]) -> object:
        return called.run(evaluation.definition, dict(zip(names, given, strict=True)))

    def request(first: int, count: int, *, call: bool = True) -> CaseResult:
        times, _, _ = calls.timed(one, watch, {"first": first, "count": count, "call": call})
        pairs = tuple((events, wall) for events, wall in times)
        return CaseResult(times=pairs)

    return request
