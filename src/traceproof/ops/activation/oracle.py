"""silu_and_mul, gelu_and_mul, gelu_tanh_and_mul: act(x[:, :d]) * x[:, d:] for rows of 2 d channels."""

import math
from collections.abc import Iterable, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Unsupported, Values, ordered
from traceproof.ops.cases import Case, by_size

SILU, GELU, TANH = "silu", "gelu", "gelu_tanh"
SIZES = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}


def activation_of(definition: Definition) -> str | None:
    """`silu`, `gelu` (by the error function) or `gelu_tanh`; None: nobody states it."""
    found = definition.constants.get("activation")
    return found if isinstance(found, str) else None


class Activation(Op):
    """The gate is the first half of a row; which function is applied to it is a constant."""

    op_type = "activation"

    def check(self, definition: Definition) -> None:
        """Known: one input [tokens, 2 d], one output [tokens, d], one function of the three."""
        shapes = [spec.shape or () for spec in (*definition.inputs.values(), *definition.outputs.values())]
        if list(definition.inputs) != ["input"] or list(definition.outputs) != ["output"]:
            raise Unsupported(f"inputs are {list(definition.inputs)}, outputs {list(definition.outputs)}")
        if any(len(shape) != 2 or shape[0] not in definition.var_axes for shape in shapes):
            raise Unsupported(f"shapes are {shapes}")
        wide, narrow = (definition.const_axes.get(shape[1]) for shape in shapes)
        if wide is None or narrow is None or wide != 2 * narrow:
            raise Unsupported(f"rows of {wide} channels do not halve to {narrow}")
        if activation_of(definition) is None:
            raise Unsupported(
                "nobody states one of silu, gelu and gelu by tanh; the reference calls none, or several"
            )

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's batch sizes; gates far out, where an activation saturates, and around its dip."""
        rows = definition.var_axes[0]
        yield from by_size(sizes, SIZES, axis=rows, seed=seed)
        yield Case("adversarial-large", "adversarial", {rows: 5}, seed, {"scale": 8.0})
        yield Case("adversarial-tiny", "adversarial", {rows: 5}, seed, {"scale": 1e-3})
        # The two forms of gelu lie farthest apart two to three to either side, where a gate rarely is.
        yield Case("adversarial-shoulder", "adversarial", {rows: 5}, seed, {"scale": 0.25, "offset": -2.25})

    def row_axis(self, definition: Definition) -> str:
        """The rows are activated by themselves."""
        return definition.var_axes[0]

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal data; `offset` moves the gates alone."""
        spec = definition.inputs["input"]
        shape = definition.shape_of(spec, case.axes) or ()
        value = draw.normal("input", shape, TORCH_DTYPES[spec.dtype], scale=float(case.params.get("scale", 1.0)))
        if "offset" in case.params:
            value[:, : shape[1] // 2] += float(case.params["offset"])
        return ordered(definition, {"input": value})

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float64."""
        return {"output": self._apply(definition, inputs, torch.float64)}

    def floor(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float32, rounded once to the output's dtype."""
        low = self._apply(definition, inputs, torch.float32)
        return {"output": low.to(TORCH_DTYPES[definition.outputs["output"].dtype])}

    @staticmethod
    def _apply(definition: Definition, inputs: Values, dtype: torch.dtype) -> torch.Tensor:
        value = inputs["input"]
        assert isinstance(value, torch.Tensor)
        gate, up = value.to(dtype).chunk(2, -1)
        match activation_of(definition):
            case kind if kind == SILU:
                activated = gate / (1 + torch.exp(-gate))
            case kind if kind == GELU:
                activated = gate / 2 * (1 + torch.erf(gate / math.sqrt(2)))
            case _:
                inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
                activated = gate / 2 * (1 + torch.tanh(inner))
        return activated * up


OP = Activation()
