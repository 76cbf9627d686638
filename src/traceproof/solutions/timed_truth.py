"""The ground truth beside which a solution's speed is measured, called in this process."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from traceproof.ops import lookup
from traceproof.ops.base import Values
from traceproof.run import timing
from traceproof.run.case import Subject
from traceproof.run.implementation import Implementation
from traceproof.run.transfer import Taken
from traceproof.solutions.trial import Evaluation
from traceproof.stacks import STACK_OF, STACKS, TRUTHS


class Request(Protocol):
    """Has calls made, or all but the calls."""

    def __call__(self, first: int, count: int, *, call: bool = True) -> Taken:
        """`count` repetitions, numbered from `first` on."""


def ground_truth(evaluation: Evaluation, subject: Subject) -> tuple[str, Request] | None:
    """The first ground truth that this interpreter can call for the definition, called in this process."""
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
            continue  # whether a package works here is not what is measured
        return f"{name} ({STACK_OF[name]})" if name != STACK_OF[name] else name, request
    return None


def _called_here(
    evaluation: Evaluation, called: Implementation, inputs: Values, device: torch.device, seed: int
) -> Request:
    names = list(inputs)
    placed = [v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs.values()]
    watch = timing.Stopwatch(placed, 0, device, seed)

    def one(given: Sequence[Any]) -> object:
        return called.run(evaluation.definition, dict(zip(names, given, strict=True)))

    def request(first: int, count: int, *, call: bool = True) -> Taken:
        times, _, _ = timing.run(one, watch, {"first": first, "count": count, "call": call})
        pairs = tuple((events, wall) for events, wall in times)
        return Taken({}, [], [], [], [], [], [], times=pairs)

    return request
