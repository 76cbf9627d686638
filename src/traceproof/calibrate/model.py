"""What a calibration works on: a case with its inputs and oracle, wrong answers, and right ones by other ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traceproof.execution.case import Subject
from traceproof.ops.base import Tensors

__all__ = ["Answer", "Family", "Make", "Subject"]


Make = Callable[[Subject], Tensors | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A way of computing the outputs; `make` gives the definition's dtypes, or None where it does not apply."""

    name: str
    make: Make


@dataclass(frozen=True, slots=True)
class Family:
    """The answers of one op_type.

    Attributes:
        right: right ways; the first is what generic wrong answers are made from.
        wrong: wrong answers that only this op_type can give.
    """

    right: tuple[Answer, ...]
    wrong: tuple[Answer, ...]
