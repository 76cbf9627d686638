"""Answers to a case that are known: right ones by other ways, and wrong ones, of bugs that a kernel could have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from traceproof.ops import registry
from traceproof.ops.base import Op, Tensors, Values, rounded, tensor

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.lazy import torch
    from traceproof.ops.cases import Case

__all__ = ["Tensors", "Values"]  # of other modules, for files of bugs


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


def both_precisions(kernels: str, wide: str) -> tuple[Answer, Answer]:
    """The op's own two right answers: at the precision of kernels, and in float64."""
    return Answer(kernels, Subject.baseline), Answer(wide, Subject.exact)


def answers_of(op_type: str) -> Answers | None:
    """The answers of an op_type; None: it declares none."""
    return registry.get(op_type).known_answers()
