"""Answers to a case that are known: right ones by other ways, and wrong ones, of bugs that a kernel could have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.ops import registry
from traceproof.ops.base import Op, Tensors, Values, rounded, tensor

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.ops.cases import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One case, drawn and solved."""

    definition: Definition
    op: Op
    case: Case
    inputs: Values
    oracle: Tensors  # the oracle's entries and baselines, as `output` or `output@what`; empty: there is no oracle
    seed: int  # of this round; what is random in a way of computing starts from it

    @property
    def trials(self) -> int:
        """How often a sampling op is run; 0: it is no such op."""
        return self.op.trials(self.definition, self.case)

    def tensor(self, name: str) -> torch.Tensor:
        """An input that is a tensor."""
        return tensor(self.inputs, name)

    def rounded(self, outputs: Tensors) -> Tensors:
        """Outputs in the definition's dtypes, extras left out."""
        return rounded(self.definition, outputs)

    def exact(self) -> Tensors:
        """The oracle's outputs, rounded once."""
        return self.rounded(self.op.oracle(self.definition, self.inputs))

    def baseline(self, **changes: Any) -> Tensors:  # noqa: ANN401 - tensors and scalars
        """The outputs at the precision that kernels work in, with some inputs replaced."""
        return self.op.baseline(self.definition, self.with_inputs(**changes))

    def with_inputs(self, **changes: Any) -> Values:  # noqa: ANN401 - tensors and scalars
        """The inputs with some replaced."""
        return {**self.inputs, **changes}


Make = Callable[[Subject], Tensors | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A way of computing the outputs; `make` gives the definition's dtypes, or None where it does not apply."""

    name: str
    make: Make


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one op_type."""

    right: tuple[Answer, ...]  # right ways; the first is what generic wrong answers are made from
    wrong: tuple[Answer, ...]  # wrong answers that only this op_type can give


def answers_of(op_type: str) -> Answers | None:
    """The answers of an op_type; None: it declares none."""
    return registry.get(op_type).known_answers()


# Wrong answers that any op_type can give, made from a right one


Change = Callable[["torch.Tensor"], "torch.Tensor | None"]


def _each_float(right: Tensors, change: Change) -> Tensors | None:
    """Apply to the first floating point output that the change says something about."""
    for name, value in right.items():
        if value.dtype.is_floating_point and value.numel():
            narrow = value.dtype.itemsize == 1  # PyTorch computes nothing with such values
            changed = change(value.float() if narrow else value.clone())
            if changed is not None:
                return right | {name: changed.to(value.dtype)}
    return None


def _dead_row(value: torch.Tensor) -> torch.Tensor | None:
    rows = value.view(-1, value.shape[-1]) if value.dim() > 1 else None
    if rows is None or len(rows) < 2:
        return None
    rows[len(rows) // 2] = 0
    return value


def _dead_head(value: torch.Tensor) -> torch.Tensor | None:
    if value.dim() < 3:
        return None
    value[:, value.shape[1] // 2] = 0
    return value


def _nan_row(value: torch.Tensor) -> torch.Tensor:
    value.view(-1, value.shape[-1])[0] = float("nan")
    return value


def _infinite(value: torch.Tensor) -> torch.Tensor:
    value.view(-1)[value.numel() // 2] = float("-inf")
    return value


def _shifted(value: torch.Tensor) -> torch.Tensor | None:
    return value.roll(1, 0) if value.shape[0] > 1 else None


def _swapped(right: Tensors) -> Tensors | None:
    """The first two outputs in each other's place, whatever their shapes."""
    if len(right) < 2:
        return None
    first, second = list(right)[:2]
    return right | {first: right[second], second: right[first]}


CHANGES: dict[str, Change] = {
    "zeros": lambda value: value.zero_(),
    "sign flip": lambda value: -value,
    "scaled by 1.02": lambda value: (value.double() * 1.02).to(value.dtype),
    "one dead row": _dead_row,
    "one dead head": _dead_head,
    "NaN row": _nan_row,
    "-inf against finite": _infinite,
    "rows shifted by one": _shifted,
}

IN_LAST = ("zeros", "scaled by 1.02", "one dead row", "rows shifted by one")  # of a state, a residual, an LSE


def wrong_answers(right: Answer) -> tuple[Answer, ...]:
    """The generic wrong answers, from a right way of computing."""

    def changed(change: Change) -> Callable[[Subject], Tensors | None]:
        def make(subject: Subject) -> Tensors | None:
            outputs = right.make(subject)
            return None if outputs is None else _each_float(outputs, change)

        return make

    def swapped(subject: Subject) -> Tensors | None:
        outputs = right.make(subject)
        return None if outputs is None else _swapped(outputs)

    def in_last(change: Change) -> Callable[[Subject], Tensors | None]:
        def make(subject: Subject) -> Tensors | None:
            outputs = right.make(subject)
            if outputs is None or len(outputs) < 2:
                return None
            return _each_float(dict(reversed(outputs.items())), change)

        return make

    answers = [Answer(name, changed(change)) for name, change in CHANGES.items()]
    answers += [Answer(f"last output: {name}", in_last(CHANGES[name])) for name in IN_LAST]
    return (*answers, Answer("swapped outputs", swapped))
