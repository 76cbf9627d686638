"""The formula of a form: in float64 it is the oracle, in float32, rounded once, the baseline.

With other parameters it is an equivalent variant, or a mutant: a bug that a kernel could have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.ops.base import Tensors, Unsupported, Value, Values

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.draw import Draw
    from traceproof.ops.cases import Case
    from traceproof.ops.op import Subject

NOTHING: Mapping[str, Any] = MappingProxyType({})
TENSOR = re.compile(r"(\w+)(?:\[([^\]]*)\])?(\?)?")


@dataclass(frozen=True, slots=True)
class Wide:
    """The inputs of a definition in the precision that a formula is evaluated in."""

    definition: Definition
    values: Values
    dtype: torch.dtype
    # name in the formula -> name in the definition, where they differ
    names: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        """An input tensor; one of floating point is converted to `dtype`."""
        value = self.given(name)
        return value.to(self.dtype) if value.dtype.is_floating_point else value

    def __contains__(self, name: str) -> bool:
        """Whether an input is given."""
        return self.value(name) is not None

    def value(self, name: str) -> Value:
        """An input, not converted; None: it is not given."""
        return self.values.get(self.names.get(name, name))

    def given(self, name: str) -> torch.Tensor:
        """An input tensor in its own dtype."""
        value = self.value(name)
        assert isinstance(value, torch.Tensor), name
        return value

    def changed(self, **values: Value) -> Wide:
        """A copy with some inputs replaced."""
        renamed = {self.names.get(name, name): value for name, value in values.items()}
        return replace(self, values={**self.values, **renamed})

    def maybe(self, name: str) -> torch.Tensor | None:
        """`self[name]`; None: it is not given."""
        return None if self.value(name) is None else self[name]

    def factor(self, name: str) -> torch.Tensor | float:
        """An input tensor as `self[name]`, or a scalar input as `number` returns it."""
        return self[name] if isinstance(self.value(name), torch.Tensor) else self.number(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A scalar input, else the constant of that name, else the default.

        Raises Unsupported: there is none of them.
        """
        value: Any = self.value(name)
        if value is None:
            value = self.definition.constants.get(name)
        if value is None:
            value = default
        if value is None:
            raise Unsupported(f"nobody states {name}")
        return float(value)


# (inputs, changes of a variant) -> outputs by name, and what a comparison needs as `<output>@<what>`
Formula = Callable[..., Tensors]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An input to be drawn."""

    definition: Definition
    case: Case
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    names: Mapping[str, str] = field(default_factory=dict)  # name in the op -> name in the definition

    @property
    def params(self) -> Mapping[str, Any]:
        """The case's drawing instructions."""
        return self.case.params

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of another input."""
        return self.definition.shape_of(self.definition.inputs[self.names.get(name, name)], self.case.axes) or ()


DrawInput = Callable[["Draw", Wanted], "torch.Tensor | None"]  # None: normal values, as without it
Size = Callable[[Mapping[str, int]], int]  # of an axis, by the sizes of all letters
Part = Callable[["torch.Tensor"], "torch.Tensor"]  # changes a part of a formula


def same(part: torch.Tensor) -> torch.Tensor:
    """Return a part of a formula unchanged: the default of parameters that mutants replace."""
    return part


class Variant:
    """The formula with other parameters, in a precision: an equivalent way of computing it."""

    def __init__(  # noqa: PLR0913 - what may differ from the formula
        self,
        name: str,
        *,
        applies: Callable[[Wide], bool] = lambda _: True,  # whether it is used on these inputs
        inputs: Callable[[Wide], Mapping[str, Value]] = lambda _: {},  # inputs that are replaced
        outputs: Callable[[Wide, Tensors], Tensors] = lambda _, __: {},  # outputs that are replaced
        precision: str = "float32",
        formula: Formula | None = None,  # another one than the form's
        **changes: Any,  # noqa: ANN401 - the formula's own parameters
    ) -> None:
        self.name, self.applies, self.inputs, self.outputs = name, applies, inputs, outputs
        self.precision, self.formula, self.changes = precision, formula, changes

    def make(self, subject: Subject) -> Tensors | None:
        """The variant's outputs for a case, in their dtypes; None where it does not apply."""
        return subject.op.varied(self, subject)


class Mutant(Variant):
    """A variant that is wrong on purpose: a bug that a kernel could have."""


def has(*names: str) -> Callable[[Wide], bool]:
    """A condition for `applies`: whether one of these inputs is given."""
    return lambda wide: any(name in wide for name in names)


def has_not(name: str) -> Callable[[Wide], bool]:
    """A condition for `applies`: whether an input is not given."""
    return lambda wide: name not in wide


def is_on(name: str) -> Callable[[Wide], bool]:
    """A condition for `applies`: whether a flag is set."""
    return lambda wide: bool(wide.number(name, 0.0))


def altered(
    name: str, *names: str, change: Callable[[Any], Value], applies: Callable[[Wide], bool] = lambda _: True
) -> Mutant:
    """A mutant: the formula on inputs of which those of these names, if given, are replaced by `change`."""
    return Mutant(
        name,
        applies=lambda wide: any(one in wide for one in names) and applies(wide),
        inputs=lambda wide: {one: change(wide.value(one)) for one in names if one in wide},
    )


class Form:
    """Inputs and outputs of one form of an op, and its formula.

    The text names each tensor with its axes, in any letters, `?` after what may be left out, and scalars bare:
    `"x[n h] weight[h]? eps -> y[n h]"`. A number stands for itself, `*` for any further axes.
    """

    def __init__(self, text: str, formula: Formula, *, constants: Iterable[str] = ()) -> None:
        inputs, _, outputs = text.partition("->")
        self.inputs, self.outputs = _parsed(inputs), _parsed(outputs)
        self.formula = formula
        self.constants = tuple(constants)

    def named(self, names: Mapping[str, str]) -> Form:
        """A copy of the form with other names for some inputs and outputs."""
        form = copy(self)
        form.inputs = {names.get(name, name): axes for name, axes in self.inputs.items()}
        form.outputs = {names.get(name, name): axes for name, axes in self.outputs.items()}
        return form

    @property
    def names(self) -> str:
        """The text without axes, and brackets around what may be left out, as `adapter.signature` reads it."""
        inputs = (f"[{name}]" if optional else name for name, (_, optional) in self.inputs.items())
        return f"{' '.join(inputs)} -> {' '.join(self.outputs)}"

    def misfit(self, definition: Definition) -> str | None:
        """The first reason why a definition does not match this form; None if it matches."""
        needed = {name for name, (_, optional) in self.inputs.items() if not optional}
        lacking, unknown = needed - definition.inputs.keys(), definition.inputs.keys() - self.inputs
        if lacking or unknown:
            return f"inputs lack {sorted(lacking)} and have unknown {sorted(unknown)}"
        if not definition.outputs.keys() <= self.outputs.keys():
            return f"outputs are {list(definition.outputs)}"
        axes: dict[str, str] = {}
        specs = {**definition.inputs, **definition.outputs}
        for name, (letters, _) in {**self.inputs, **self.outputs}.items():
            if name in specs and (problem := _unlike(specs[name].shape, letters, axes)):
                return f"{name} has the shape {specs[name].shape}{problem}".rstrip()
        for name in self.constants:
            if name not in specs and definition.constants.get(name) is None:
                return f"nobody states {name}, nor does the reference assign it a single number"
        return None

    def axes(self, definition: Definition) -> dict[str, str]:
        """The definition's axis for each letter."""
        specs = {**definition.inputs, **definition.outputs}
        return {
            letter: axis
            for name, (letters, _) in {**self.inputs, **self.outputs}.items()
            if name in specs
            for letter, axis in zip(letters or (), specs[name].shape or (), strict=False)
            if letter != "*"
        }


def _unlike(shape: Sequence[str] | None, letters: Sequence[str] | None, axes: dict[str, str]) -> str:
    """Why a shape does not fit letters, empty if it does; enters the axes of new letters into `axes`."""
    if shape is None or letters is None:
        return "" if shape is letters else " "
    if letters[-1:] == ("*",):
        letters, shape = letters[:-1], shape[: len(letters) - 1]
    if len(shape) != len(letters):
        return " "
    if any(axes.setdefault(one, axis) != axis for one, axis in zip(letters, shape, strict=True)):
        return f", where {axes} are known"
    return ""


def _parsed(text: str) -> dict[str, tuple[tuple[str, ...] | None, bool]]:
    """By name: the letters of the axes (None for a scalar), and whether it is optional."""
    return {
        match[1]: (None if match[2] is None else tuple(match[2].split()), bool(match[3]))
        for match in TENSOR.finditer(text)
    }


def to_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A value, contiguous, in an output's dtype; for whole numbers rounded, ties to the even one."""
    whole = value.dtype.is_floating_point and not dtype.is_floating_point
    return (value.round() if whole else value).to(dtype).contiguous()
