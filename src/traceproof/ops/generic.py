"""An op_type that nobody declares: sizes by the constraints, inputs by the schema, no oracle of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from traceproof.dataset.constants import implied_constraints
from traceproof.dataset.constraints import System
from traceproof.dataset.definition import Definition, DType
from traceproof.lazy import torch
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Unsupported, Values
from traceproof.ops.cases import Case
from traceproof.ops.compare import Close, Comparison, Exact
from traceproof.ops.generic_inputs import draw_spec, text_of

if TYPE_CHECKING:
    from traceproof.draw import Draw

# Sizes wanted of var axes, the n-th axis getting the n-th of a row: unlike ones, so that axes which are confused
# show; odd ones and one more than a block, so that tails do.
SIZES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "small": ((1, 2, 3, 4, 5), (3, 5, 2, 7, 4)),
    "medium": ((8, 16, 4, 12, 6), (17, 9, 33, 21, 13)),
    "large": ((64, 128, 96, 48, 80), (129, 65, 257, 193, 97)),
}
# Values: `scale` of data, `levels` when data has few values, so that ties are everywhere.
ADVERSARIAL: Mapping[str, Mapping[str, float]] = {
    "ties": {"levels": 4},
    "tiny": {"scale": 2.0**-12},
    "large": {"scale": 16.0},
}


# Of a narrower output the last rounding is most of what is lost, of these it is not.
WIDE_REASON = (
    "another order of summation shows a part of what float32 costs: right references of FlashInfer's lose up to "
    "10.2 times as much (21 outputs; all but four of them at most 2.7 times)"
)


class GenericOp(Op):
    """Stands in for an op_type that this project does not know."""

    def __init__(self, op_type: str) -> None:
        self.op_type = op_type

    def check(self, definition: Definition) -> None:
        """Never knows the numerics."""
        raise Unsupported(f"op_type {definition.op_type!r} has no oracle here")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Sizes near the wanted ones, the smallest that there are, and tied, tiny and large values."""
        met: list[Mapping[str, int]] = []
        for name, size, wanted in _wanted(sizes):
            axes = sizes_near(definition, wanted)
            if axes is not None and axes not in met:
                met.append(axes)
                yield Case(name, size, axes, seed, {"drawn": "by role"})
        axes = sizes_near(definition, SIZES["small"][1])
        for name, params in ADVERSARIAL.items() if axes is not None else ():
            yield Case(f"adversarial-{name}", "adversarial", axes or {}, seed, {"drawn": "by role", **params})

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """The case as it is: nothing says which sizes a reference takes beside those that it states."""
        del definition, count, long
        return case

    def no_inputs(self, definition: Definition) -> str | None:
        """Why no case can be drawn at all; None: it can."""
        for name, spec in definition.inputs.items():
            if spec.dtype is DType.STRING and not spec.optional and text_of(definition, name) is None:
                return f"the input {name} is a text, and nothing says which"
            if spec.dtype not in TORCH_DTYPES and spec.dtype is not DType.STRING and not spec.optional:
                return f"the input {name} is {spec.dtype}, which is not drawn"
        if sizes_near(definition, SIZES["small"][0]) is None:
            return f"no sizes were found that satisfy the constraints {list(definition.constraints or ())}"
        return None

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Values by role: data, offsets, indices, lengths, masks, scales; see `generic_inputs`."""
        return {name: draw_spec(definition, spec, name, case, draw) for name, spec in definition.inputs.items()}

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """There is none."""
        del inputs
        raise Unsupported(f"op_type {definition.op_type!r} has no oracle here")

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close for floating point and exact for the rest, where anything but an oracle says what is right."""
        return {name: _comparison(spec.dtype) for name, spec in definition.outputs.items()}

    def tells_apart(self, definition: Definition, one: Values, other: Values) -> bool:
        """Whether the inputs differ at all: what an `init` made is the same for any seed of ours, NaN included."""
        pairs = [(one[name], other[name]) for name in definition.inputs]
        return any(
            not torch.equal(_bytes(first), _bytes(second))
            if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
            else first is not second and first != second
            for first, second in pairs
        )

    def mutated(self, definition: Definition) -> frozenset[str]:
        """Inputs that an output is written to."""
        return definition.in_place


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes: memory that an `init` left as it was holds NaN, which equal nothing."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def _comparison(dtype: DType) -> Comparison:
    if dtype in {DType.FLOAT32, DType.FLOAT64, DType.UNKNOWN}:
        return Close(factor=16.0, reason=WIDE_REASON)
    return Close() if "float" in dtype else Exact("whole numbers have no rounding")


def _wanted(sizes: Sequence[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for size in sizes:
        for index, wanted in enumerate(SIZES[size]):
            yield f"{size}-{index}", size, wanted
    yield "edge-ones", "edge", (1,)


def sizes_near(definition: Definition, wanted: Sequence[int]) -> dict[str, int] | None:
    """Sizes of the var axes that satisfy the constraints, near the wanted ones; None: none were found.

    What a reference divides one axis by, as whole numbers, should divide it, and what it asserts of axes should
    hold, unless no sizes do.
    """
    names = definition.var_axes
    near = {name: wanted[index % len(wanted)] for index, name in enumerate(names)}
    stated = definition.constraints or ()
    implied = implied_constraints(definition)
    for constraints in ((*stated, *implied), stated) if implied else (stated,):
        found = System(tuple(definition.axes), constraints).solve(definition.const_axes, near)
        if found is not None:
            return {name: found[name] for name in names}
    return None
