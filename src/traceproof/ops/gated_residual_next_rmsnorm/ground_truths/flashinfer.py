"""FlashInfer's gated residual with the next norm."""

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs
from traceproof.ops.base import Values
from traceproof.ops.gated_residual_next_rmsnorm.ground_truths import GATED

NAME = "flashinfer.norm:gated_residual_next_rmsnorm"


def _gated(api: Api, definition: Definition, inputs: Values) -> Outputs:
    given = {name: value for name, value in inputs.items() if value is not None}
    return dict(zip(definition.outputs, api[NAME](**given), strict=True))


ADAPTERS = (Adapter("norm.gated_residual_next_rmsnorm", GATED, _gated, (NAME,), sm=((8, 0), (12, 9))),)
