"""An op_type that has no module: inputs from the schema, no oracle; shape, dtype and determinism are judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Unsupported, Value, Values
from traceproof.ops.cases import Case
from traceproof.ops.compare import Comparison

SIZES = {"small": (1, 2), "medium": (8,), "large": (64,)}
FLOATS = frozenset({"float32", "float16", "bfloat16"})


class GenericOp(Op):
    """Stands in for an op_type that this project does not know; every var axis gets the same size."""

    def __init__(self, op_type: str) -> None:
        self.op_type = op_type  # type: ignore[misc] # one class stands for many op_types

    def check(self, definition: Definition) -> None:
        """Never knows the numerics."""
        raise Unsupported(f"op_type {definition.op_type!r} has no oracle here")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """A few small sizes."""
        for size in sizes:
            for index, length in enumerate(SIZES[size]):
                yield Case(f"{size}-{index}", size, dict.fromkeys(definition.var_axes, length), seed)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal floats, integers 0 or 1 (valid as an index wherever an axis is not empty), scalars 1."""
        return {name: draw_spec(definition, spec, name, case, draw) for name, spec in definition.inputs.items()}

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """There is none."""
        del inputs
        raise Unsupported(f"op_type {definition.op_type!r} has no oracle here")

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """None: numerics are reported as `no oracle`."""
        del definition
        return {}


def draw_spec(definition: Definition, spec: TensorSpec, name: str, case: Case, draw: Draw) -> Value:
    """A value for an input of which only the schema is known."""
    shape = definition.shape_of(spec, case.axes)
    if shape is None:
        return 1.0 if spec.dtype in FLOATS else 1
    if spec.dtype in FLOATS:
        return draw.normal(name, shape, TORCH_DTYPES[spec.dtype])
    if spec.dtype.startswith("float"):
        return draw.bits(name, shape, TORCH_DTYPES[spec.dtype])
    return draw.integers(name, shape, TORCH_DTYPES[spec.dtype], low=0, high=2)
