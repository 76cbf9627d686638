"""rmsnorm and fused_add_rmsnorm: y = x / sqrt(mean(x^2) + eps) * w over the last axis, x = hidden (+ residual)."""

from collections.abc import Iterable, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Unsupported, Values, ordered, rounded
from traceproof.ops.cases import Case, by_size
from traceproof.ops.far import Far

SIZES = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}


class RmsNorm(Op):
    """Root mean square norm, plain or after adding a residual; eps is a constant."""

    op_type = "rmsnorm"

    def check(self, definition: Definition) -> None:
        """Known: hidden_states [rows, hidden], weight [hidden], optionally residual; one output, one eps."""
        if not {"hidden_states", "weight"} <= definition.inputs.keys() <= {"hidden_states", "weight", "residual"}:
            raise Unsupported(f"inputs are {list(definition.inputs)}")
        if not definition.outputs.keys() <= {"output", "residual_out"}:
            raise Unsupported(f"outputs are {list(definition.outputs)}")
        self.eps(definition)

    @staticmethod
    def eps(definition: Definition) -> float:
        """The constant under the root. Raises Unsupported: nobody states it."""
        try:
            return definition.constants.number("eps")
        except LookupError as error:
            raise Unsupported(f"{error}, nor does the reference assign a single number to a name EPS") from error

    @staticmethod
    def weight_offset(definition: Definition) -> float:
        """Added to the weight, which Gemma stores minus one."""
        return definition.constants.number("weight_offset")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's batch sizes; beside them a tiny scale, where eps shows, and an outlier column."""
        rows = definition.var_axes[0]
        yield from by_size(sizes, SIZES, axis=rows, seed=seed)
        yield Case("adversarial-tiny", "adversarial", {rows: 5}, seed, {"scale": 1e-3})
        yield Case("adversarial-outlier", "adversarial", {rows: 5}, seed, {"outlier": 300.0})
        # A mean that is not zero: it tells a root mean square from a standard deviation.
        yield Case("adversarial-offset", "adversarial", {rows: 5}, seed, {"offset": 2.0})

    def row_axis(self, definition: Definition) -> str:
        """The rows are normed by themselves."""
        return definition.var_axes[0]

    def enlarged(self, definition: Definition) -> Far:
        """Rows, past 32 bits without a sign: of block numbers, compilers know that none is negative.

        A residual's norm holds twice as many tensors, which few GPUs have memory for.
        """
        return Far(axis=self.row_axis(definition), unsigned="residual" not in definition.inputs)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal data; weights around 1 of both signs."""
        scale = float(case.params.get("scale", 1.0))
        values: Values = {}
        for name, spec in definition.inputs.items():
            shape = definition.shape_of(spec, case.axes) or ()
            dtype = TORCH_DTYPES[spec.dtype]
            if name == "weight":
                values[name] = draw.normal(name, shape, dtype)
                continue
            tensor = draw.normal(name, shape, dtype, scale=scale)
            if "offset" in case.params:
                tensor += float(case.params["offset"])
            if "outlier" in case.params:
                tensor[:, shape[-1] // 3] = float(case.params["outlier"])
            values[name] = tensor
        return ordered(definition, values)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float64."""
        return self._norm(definition, inputs, torch.float64)

    def floor(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float32, rounded once to the output's dtype.

        That rounding is the whole floor, but for a norm in float32: there it is one among several, and one order
        of the sum of n squares says nothing of another, which a kernel is free to take. By Higham's probabilistic
        bound n additions lose sqrt(n) roundings, of which the root leaves half; root and products add three.
        """
        low = self._norm(definition, inputs, torch.float32)
        floors = rounded(definition, low)
        if definition.outputs.get("output") is not None and definition.outputs["output"].dtype == "float32":
            terms = floors["output"].shape[-1]
            lost = (terms**0.5 / 2 + 3) * torch.finfo(torch.float32).eps / 2
            floors["output"] = (self.oracle(definition, inputs)["output"] * (1 + lost)).to(torch.float32)
        return floors

    def _norm(self, definition: Definition, inputs: Values, dtype: torch.dtype) -> Tensors:
        hidden, weight, residual = inputs["hidden_states"], inputs["weight"], inputs.get("residual")
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(weight, torch.Tensor)
        x = hidden.to(dtype)
        if isinstance(residual, torch.Tensor):
            x = x + residual.to(dtype)
        mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        gain = weight.to(dtype) + self.weight_offset(definition)
        y = x / torch.sqrt(mean_square + self.eps(definition)) * gain
        outputs = {"output": y, "residual_out": x}
        return {name: outputs[name] for name in definition.outputs}

    def summed(self, definition: Definition) -> tuple[str, ...]:
        """What is squared and added up."""
        return tuple(name for name in ("hidden_states", "residual") if name in definition.inputs)


OP = RmsNorm()
