"""Ops that one formula says: in float64 it is the oracle, in float32, rounded once, the baseline.

With other parameters it is an equivalent variant, or a mutant: a bug that a kernel could have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from traceproof.lazy import torch
from traceproof.ops.adapter import Adapter, Call, Conditions, signature
from traceproof.ops.base import Facts, Op, Subject, Tensors, Unsupported, Value, Values, dtype_of, ordered
from traceproof.ops.cases import BOUNDARY_ROWS, STRESS, Case, at_boundaries
from traceproof.ops.compare import Backward, Close, Comparison, Exact
from traceproof.ops.far import Far

if TYPE_CHECKING:
    from traceproof.dataset.constants import Rule
    from traceproof.dataset.definition import Definition, TensorSpec
    from traceproof.draw import Draw
    from traceproof.ops.lossless import Exactly

SIZES: Mapping[str, tuple[int, ...]] = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}
NOTHING: Mapping[str, Any] = MappingProxyType({})
TENSOR = re.compile(r"(\w+)(?:\[([^\]]*)\])?(\?)?")
# Beside plain values: a tiny scale, where an eps shows; an outlier column; a mean that is not zero.
ADVERSARIAL: Mapping[str, Mapping[str, float]] = {
    "tiny": {"scale": 1e-3},
    "outlier": {"outlier": 300.0},
    "offset": {"offset": 2.0},
}
# One order of a float32 sum says nothing of another, which a kernel is free to take; nor does one exponential.
UNUSUAL: Mapping[str, Sequence[str]] = {"nan": (), "inf": (), "large": (), "small": ()}
WIDE = Close(factor=16.0, reason="a float32 output is rounded no more than the sums and exponentials before it")


@dataclass(frozen=True, slots=True)
class Wide:
    """The inputs of a definition in the precision that a formula is evaluated in."""

    definition: Definition
    values: Values
    dtype: torch.dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor; one of floating point in the precision of the formula."""
        value = self.values[name]
        assert isinstance(value, torch.Tensor), name
        return value.to(self.dtype) if value.dtype.is_floating_point else value

    def __contains__(self, name: str) -> bool:
        """Whether an input is given."""
        return self.values.get(name) is not None

    def given(self, name: str) -> torch.Tensor:
        """A tensor in its own dtype."""
        value = self.values[name]
        assert isinstance(value, torch.Tensor), name
        return value

    def changed(self, **values: Value) -> Wide:
        """The same with some inputs replaced."""
        return Wide(self.definition, {**self.values, **values}, self.dtype)

    def maybe(self, name: str) -> torch.Tensor | None:
        """That tensor, if it is given."""
        return None if self.values.get(name) is None else self[name]

    def number(self, name: str, default: float | None = None) -> float:
        """A scalar input, else the constant of that name, else the default.

        Raises Unsupported: there is none of them.
        """
        value = self.values.get(name)
        if value is not None:
            return float(value)
        found = self.definition.constants.get(name)
        found = default if found is None else found
        if found is None:
            raise Unsupported(f"nobody states {name}")
        return float(found)


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

    @property
    def params(self) -> Mapping[str, Any]:
        """The case's drawing instructions."""
        return self.case.params

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of another input."""
        return self.definition.shape_of(self.definition.inputs[name], self.case.axes) or ()


DrawInput = Callable[["Draw", Wanted], "torch.Tensor | None"]  # None: normal values, as without it
Part = Callable[["torch.Tensor"], "torch.Tensor"]  # changes a part of a formula


def same(part: torch.Tensor) -> torch.Tensor:
    """What is given: of a formula's parameter, nothing is changed."""
    return part


class Variant:
    """The formula with other parameters, in a precision: an equivalent way of computing it."""

    def __init__(
        self,
        name: str,
        *,
        applies: Callable[[Wide], bool] = lambda _: True,  # elsewhere it says nothing
        inputs: Callable[[Wide], Mapping[str, Value]] = lambda _: {},  # those that are replaced
        outputs: Callable[[Wide, Tensors], Tensors] = lambda _, __: {},  # likewise, of what the formula gives
        precision: str = "float32",
        **changes: Any,  # noqa: ANN401 - the formula's own parameters
    ) -> None:
        self.name, self.applies, self.inputs, self.outputs = name, applies, inputs, outputs
        self.precision, self.changes = precision, changes

    def make(self, subject: Subject) -> Tensors | None:
        """What it gives for a case, in the outputs' dtypes; None where it does not apply."""
        return subject.op.varied(self, subject)


class Mutant(Variant):
    """One that is wrong, as a kernel could be."""


def has(name: str) -> Callable[[Wide], bool]:
    """Whether an input is given."""
    return lambda wide: name in wide


def altered(name: str, *names: str, change: Callable[[Any], Value]) -> Mutant:
    """The formula on inputs of which some are not what they should be; those absent stay so."""
    return Mutant(
        name,
        applies=lambda wide: any(one in wide for one in names),
        inputs=lambda wide: {one: change(wide.values[one]) for one in names if one in wide},
    )


class Form:
    """Inputs and outputs of one form of an op, and its formula.

    The text names each tensor with its axes, in any letters, `?` after what may be left out, and scalars bare:
    `"x[n h] weight[h]? eps -> y[n h]"`. A number stands for itself.
    """

    def __init__(self, text: str, formula: Formula, *, constants: Iterable[str] = ()) -> None:
        inputs, _, outputs = text.partition("->")
        self.inputs, self.outputs = _parsed(inputs), _parsed(outputs)
        self.formula = formula
        self.constants = tuple(constants)

    @property
    def names(self) -> str:
        """The text without axes, and brackets around what may be left out, as `adapter.signature` reads it."""
        given = (f"[{name}]" if optional else name for name, (_, optional) in self.inputs.items())
        return f"{' '.join(given)} -> {' '.join(self.outputs)}"

    def misfit(self, definition: Definition) -> str | None:
        """What of a definition is not of this form; None: nothing."""
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
        unstated = next((name for name in self.constants if definition.constants.get(name) is None), None)
        return (
            f"nobody states {unstated[0]}, nor does the reference assign it a single number" if unstated else None
        )

    def axes(self, definition: Definition) -> dict[str, str]:
        """The definition's axis for each letter."""
        specs = {**definition.inputs, **definition.outputs}
        return {
            letter: axis
            for name, (letters, _) in {**self.inputs, **self.outputs}.items()
            if name in specs
            for letter, axis in zip(letters or (), specs[name].shape or (), strict=True)
        }


def _unlike(shape: Sequence[str] | None, letters: Sequence[str] | None, axes: dict[str, str]) -> str:
    """A text where a shape is not what letters say, with the axes that they stand for so far; else empty."""
    if shape is None or letters is None:
        return "" if shape is letters else " "
    if len(shape) != len(letters):
        return " "
    if any(axes.setdefault(one, axis) != axis for one, axis in zip(letters, shape, strict=True)):
        return f", where {axes} are known"
    return ""


def _parsed(text: str) -> dict[str, tuple[tuple[str, ...] | None, bool]]:
    return {
        match[1]: (None if match[2] is None else tuple(match[2].split()), bool(match[3]))
        for match in TENSOR.finditer(text)
    }


class FormulaOp(Op):
    """An op that a formula says."""

    def __init__(  # noqa: PLR0913 - one op, spelled out
        self,
        op_type: str,
        *forms: Form,  # the forms it knows; the first that fits counts
        family: str = "",
        rules: Iterable[Rule] = (),  # where its constants are stated
        scalars: Mapping[str, float] = NOTHING,  # what scalar inputs get
        sizes: Mapping[str, Sequence[int]] = NOTHING,  # of further var axes by letter, taken in turn
        # cases beside the ordinary ones, by name: `scale`, `offset`, `outlier` of `data`
        adversarial: Mapping[str, Mapping[str, float]] = ADVERSARIAL,
        extremes: Mapping[str, Mapping[str, Any]] = NOTHING,  # cases of the size class `stress`, likewise
        data: Iterable[str] = (),  # inputs that these befall; empty: all of two axes and more
        draws: Mapping[str, DrawInput] = NOTHING,  # inputs that are not normal values
        # changes inputs once they are drawn, as the case's params say
        adjust: Callable[[dict[str, torch.Tensor], Mapping[str, float]], None] = lambda _, __: None,
        # how outputs are compared, by name, where it is not `Close` (of float32 outputs WIDE)
        gates: Mapping[str, Comparison] = NOTHING,
        wide_gate: Comparison = WIDE,  # how float32 outputs are compared that `gates` does not name
        # float32 outputs whose baseline is so many roundings of the oracle's value: of one computed naively often
        # none is lost, and right kernels lose some. A function of the row's width, or their number
        roundings: Mapping[str, float | Callable[[int], float]] = NOTHING,
        requires: Callable[[Definition], str | None] = lambda _: None,  # why a definition is not of the form yet
        apart: bool = True,  # whether the rows (the first axis of the outputs) are computed by themselves
        # what hidden cases put into inputs, where right kernels agree, and into which; no names: all of floating
        # point. None: UNUSUAL, where rows are computed by themselves and judged by their numbers
        unusual: Mapping[str, Sequence[str]] | None = None,
        # see `Op`; sizes of axes in that case by letter
        lossless: Callable[[Definition], Mapping[str, Exactly]] = lambda _: NOTHING,
        lossless_sizes: Mapping[str, int] = NOTHING,
        exact_on_gpu: Callable[[Definition], bool] = lambda _: True,
        summed: Sequence[str] = (),  # see `Op.summed`
        far: Callable[[Definition, str], Far] = lambda _, rows: Far(axis=rows),  # see `Op`
        variants: Sequence[Variant] = (),  # equivalent ways; generic mutants are made from the first
        mutants: Sequence[Mutant] = (),
        **facts: Unpack[Facts],
    ) -> None:
        self.op_type, self.family, self.rules = op_type, family, tuple(rules)
        vars(self).update(facts)
        self.forms, self.scalars, self.sizes = forms, scalars, sizes
        self.adversarial, self.data, self.gates = adversarial, frozenset(data), gates
        self.roundings, self.apart, self.adjust, self.far = roundings, apart, adjust, far
        self.wide_gate = wide_gate
        self.draws, self.requires, self.extremes = draws, requires, extremes
        self.spread = unusual
        self.lossless, self.lossless_sizes, self.exact_on_gpu = lossless, lossless_sizes, exact_on_gpu
        self.inputs_summed, self.variants, self.mutants = tuple(summed), tuple(variants), tuple(mutants)

    def truth(
        self,
        source: str,
        name: str,
        *apis: str,
        serves: str = "",
        rows: str | None = "",
        **conditions: Unpack[Conditions],
    ) -> Callable[[Call], Call]:
        """Decorate a call of a ground truth's package: its name as people know it, and the API keys that it uses.

        `serves` are the inputs and outputs of the definitions that it computes, else those of the first form.
        `rows` is the input without whose rows it is not called (`adapter.Signature`): the first one unless said
        otherwise, None where it takes that.
        """

        def added(call: Call) -> Call:
            served = serves or self.forms[0].names
            first = served.split(maxsplit=1)[0] if rows == "" else rows
            adapter = Adapter(name, signature(served, rows=first), call, apis, **conditions)
            self.truths.setdefault(source, []).append(adapter)
            return call

        return added

    def check(self, definition: Definition) -> None:
        """Known: one of `forms`, with sizes for its var axes."""
        self.form(definition)

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """The forms it knows, where names are open in the definition's."""
        del definition
        return self.forms

    def form(self, definition: Definition) -> Form:
        """The form that a definition has. Raises Unsupported: none; what it lacks of the nearest one is said."""
        forms = self.forms_of(definition)
        found = next((form for form in forms if form.misfit(definition) is None), None)
        if found is None:
            nearest = min(forms, key=lambda form: len(form.inputs.keys() ^ definition.inputs.keys()))
            raise Unsupported(nearest.misfit(definition) or "")
        lacking = self._unsized(definition, found) or self.requires(definition)
        if lacking is not None:
            raise Unsupported(lacking)
        return found

    def _unsized(self, definition: Definition, form: Form) -> str | None:
        """A var axis that no size is known for; None: there is none."""
        letters = form.axes(definition)
        sized = {axis for letter, axis in letters.items() if letter in self.sizes} | {self._rows(definition)}
        unsized = [axis for axis in definition.var_axes if axis not in sized]
        if self.apart and self._rows(definition) is None:
            return f"the rows are no var axis: {next(iter(definition.outputs.values())).shape}"
        return f"the axes {unsized} are var" if unsized else None

    @staticmethod
    def _rows(definition: Definition) -> str | None:
        """The first axis of the first output, if it is var."""
        first = (next(iter(definition.outputs.values())).shape or ("",))[0]
        return first if first in definition.var_axes else None

    def row_axis(self, definition: Definition) -> str | None:
        """The rows, if they are computed by themselves."""
        return self._rows(definition) if self.apart else None

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's batch sizes, none at all, and what is adversarial."""
        rows = self._rows(definition)
        letters = self.form(definition).axes(definition)
        others = {axis: self.sizes[one] for one, axis in letters.items() if one in self.sizes and axis != rows}

        def axes(count: int, turn: int) -> dict[str, int]:
            own = {} if rows is None else {rows: count}
            return own | {axis: wanted[turn % len(wanted)] for axis, wanted in others.items()}

        turn = 0
        for size in sizes:
            for index, count in enumerate(SIZES[size]):
                yield Case(f"{size}-{index}", size, axes(count, turn), seed)
                turn += 1
        if rows is not None:
            yield Case("edge-empty", "edge", axes(0, 0), seed)
        for turn, (name, params) in enumerate(self.adversarial.items(), 2):
            yield Case(f"adversarial-{name}", "adversarial", axes(5, turn), seed, dict(params))

    def case(
        self,
        definition: Definition,
        name: str,
        sizes: Mapping[str, int],
        seed: int,
        params: Mapping[str, Any] = NOTHING,
    ) -> Case:
        """A case of the size class that its name begins with, the var axes by the form's letters; others of 1."""
        letters = self.form(definition).axes(definition)
        axes = {letters[one]: size for one, size in sizes.items() if one in letters}
        var = {axis: axes.get(axis, 1) for axis in definition.var_axes}
        return Case(name, name.partition("-")[0], var, seed, dict(params))

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Far rows, where rows are computed by themselves, and `extremes`, of a medium case's sizes."""
        yield from super().stress(definition, seed=seed)
        plain = next(iter(self.cases(definition, sizes=("medium",), seed=seed)))
        for name, params in self.extremes.items():
            yield Case(f"stress-{name}", STRESS, plain.axes, seed, dict(params))

    def boundaries(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Where rows are computed by themselves and outliers are no news."""
        rows = self.row_axis(definition)
        shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
        names = [name for name in shapes if self._befallen(name, shapes[name]) and name not in self.draws]
        outliers = any("outlier" in params for params in self.adversarial.values())
        if rows is not None and names and outliers and type(self) is FormulaOp:
            plain = next(case for case in self.cases(definition, sizes=("medium",), seed=seed) if not case.params)
            yield at_boundaries({**plain.axes, rows: BOUNDARY_ROWS}, names, seed)

    def _befallen(self, name: str, shape: Sequence[object]) -> bool:
        """Whether adversarial values befall an input."""
        return name in self.data if self.data else len(shape) > 1

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal data; see `value`."""
        values = {name: self.value(definition, name, spec, case, draw) for name, spec in definition.inputs.items()}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self.adjust(tensors, case.params)
        return ordered(definition, {**values, **tensors})

    def unusual(self, definition: Definition) -> Mapping[str, Sequence[str]]:
        """Those of the declaration."""
        kinds = self.comparisons(definition).values()
        numeric = all(isinstance(kind, Close | Backward | Exact) for kind in kinds)
        usual = UNUSUAL if numeric and self.row_axis(definition) is not None else {}
        if any(isinstance(kind, Exact) for kind in kinds):  # bits say nothing of NaN
            usual = {value: names for value, names in usual.items() if value in {"large", "small"}}
        wide = [
            name
            for name, spec in definition.inputs.items()
            if spec.shape is not None and spec.dtype in {"float32", "float16", "bfloat16"}
        ]
        declared = usual if self.spread is None else self.spread
        return {value: [name for name in wide if name in (names or wide)] for value, names in declared.items()}

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """The default, with the sizes of the declaration."""
        case, letters = super().lossless_case(definition, base), self.form(definition).axes(definition)
        sizes = {letters[one]: size for one, size in self.lossless_sizes.items() if letters.get(one) in case.axes}
        return replace(case, axes={**case.axes, **sizes})

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """One input: a scalar of `scalars`, or normal values, with what befalls `data` in an adversarial case."""
        shape = definition.shape_of(spec, case.axes)
        if shape is None:
            return self.scalars.get(name, 1.0)
        own = self.draws.get(name)
        drawn = None if own is None else own(draw, Wanted(definition, case, name, shape, dtype_of(spec)))
        if drawn is not None:
            return drawn
        dtype = dtype_of(spec)
        plain = dtype in {torch.float32, torch.float16, torch.bfloat16}
        params = case.params if self._befallen(name, shape) else {}
        scale = float(params.get("scale", 1.0))
        made = draw.normal(name, shape, dtype if plain else torch.float32, scale=scale)
        if "offset" in params:
            made += float(params["offset"])
        if "outlier" in params:
            made[..., shape[-1] // 3] = float(params["outlier"])
        return made.to(dtype)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float64."""
        return self._computed(definition, inputs, torch.float64, extras=True)

    def baseline(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float32, rounded once to the output's dtype; for outputs that are `Close` alone."""
        kinds = self.comparisons(definition)
        if not any(isinstance(kind, Close) for kind in kinds.values()):
            return {}
        low, specs = self._computed(definition, inputs, torch.float32, extras=False), self.judged(definition)
        counts = {
            name: count for name, count in self.roundings.items() if name in low and specs[name].dtype == "float32"
        }
        exact = self.oracle(definition, inputs) if counts else {}
        for name, count in counts.items():
            lost = count if isinstance(count, int | float) else count(low[name].shape[-1])
            low[name] = exact[name] * (1 + lost * 2.0**-24)
        return {
            name: to_dtype(low[name], dtype_of(spec))
            for name, spec in specs.items()
            if isinstance(kinds[name], Close) and (name in low or name in definition.outputs)
        }

    def _computed(self, definition: Definition, inputs: Values, dtype: torch.dtype, *, extras: bool) -> Tensors:
        found = self.form(definition).formula(Wide(definition, inputs, dtype))
        return {
            name: value
            for name, value in found.items()
            if name in self.judged(definition) or (extras and name.partition("@")[0] in definition.outputs)
        }

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close: one rounding of the output is the whole baseline, but of a float32 one."""
        return {
            name: self.gates.get(name, self.wide_gate if spec.dtype == "float32" else Close())
            for name, spec in self.judged(definition).items()
        }

    def varied(self, variant: Variant, subject: Subject) -> Tensors | None:
        """The formula with the variant's parameters, rounded once."""
        definition = subject.definition
        wide = Wide(definition, subject.inputs, getattr(torch, variant.precision))
        if not variant.applies(wide):
            return None
        found = self.form(definition).formula(wide.changed(**variant.inputs(wide)), **variant.changes)
        found |= variant.outputs(wide, found)
        return {
            name: to_dtype(found[name], dtype_of(spec))
            for name, spec in self.judged(definition).items()
            if name in found or name in definition.outputs
        }


def to_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A value in an output's dtype; whole numbers are the nearest ones, of two the even one."""
    whole = value.dtype.is_floating_point and not dtype.is_floating_point
    return (value.round() if whole else value).to(dtype).contiguous()


# Mutants of any op: a variant whose outputs are changed.

Change = Callable[["torch.Tensor"], "torch.Tensor | None"]


class OutputMutant(Mutant):
    """What a variant gives, with `change` made to its outputs; None where that changes nothing."""

    def __init__(self, name: str, variant: Variant, change: Callable[[Tensors], Tensors | None]) -> None:
        super().__init__(name)
        self.variant, self.change = variant, change

    def make(self, subject: Subject) -> Tensors | None:
        """The variant's outputs, changed."""
        outputs = self.variant.make(subject)
        return None if outputs is None else self.change(outputs)


def first_float(change: Change, outputs: Tensors, *, last: bool = False) -> Tensors | None:
    """Change the first floating-point output that the change says something about; `last`: of several the last."""
    if last and len(outputs) < 2:
        return None
    for name, value in reversed(outputs.items()) if last else outputs.items():
        if value.dtype.is_floating_point and value.numel():
            narrow = value.dtype.itemsize == 1  # PyTorch computes nothing with such values
            changed = change(value.float() if narrow else value.clone())
            if changed is not None:
                return outputs | {name: changed.to(value.dtype)}
    return None


def filled(value: torch.Tensor, part: torch.Tensor, number: float) -> torch.Tensor:
    """The tensor, once a number fills a part of it."""
    part.fill_(number)
    return value


def dead_row(value: torch.Tensor) -> torch.Tensor | None:
    """Zeros in the row in the middle."""
    rows = value.view(-1, value.shape[-1]) if value.dim() > 1 else value[:0]
    return filled(value, rows[len(rows) // 2], 0) if len(rows) > 1 else None


def swapped(outputs: Tensors) -> Tensors | None:
    """The first two outputs in each other's place, whatever their shapes."""
    if len(outputs) < 2:
        return None
    first, second = list(outputs)[:2]
    return outputs | {first: outputs[second], second: outputs[first]}


CHANGES: Mapping[str, Change] = {
    "zeros": lambda value: value.zero_(),
    "sign flip": lambda value: -value,
    "scaled by 1.02": lambda value: (value.double() * 1.02).to(value.dtype),
    "one dead row": dead_row,
    "one dead head": lambda value: filled(value, value[:, value.shape[1] // 2], 0) if value.dim() > 2 else None,
    "NaN row": lambda value: filled(value, value.view(-1, value.shape[-1])[0], math.nan),
    "-inf against finite": lambda value: filled(value, value.view(-1)[value.numel() // 2], -math.inf),
    "rows shifted by one": lambda value: value.roll(1, 0) if value.shape[0] > 1 else None,
}
IN_LAST = ("zeros", "scaled by 1.02", "one dead row", "rows shifted by one")  # of a state, a residual, an LSE


def generic_mutants(variant: Variant) -> tuple[Mutant, ...]:
    """The mutants of any op, made from an equivalent variant of it."""
    changes = {name: partial(first_float, change) for name, change in CHANGES.items()}
    changes |= {f"last output: {name}": partial(first_float, CHANGES[name], last=True) for name in IN_LAST}
    mutants = [OutputMutant(name, variant, change) for name, change in changes.items()]
    return (*mutants, OutputMutant("swapped outputs", variant, swapped))
