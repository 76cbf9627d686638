"""FlashInfer's gated residual norm."""

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs
from traceproof.ops.base import Values
from traceproof.ops.gated_residual_rmsnorm.ground_truths import GATED

NAME = "flashinfer.norm:gated_residual_rmsnorm"


def _gated(api: Api, definition: Definition, inputs: Values) -> Outputs:
    del definition
    return {"output": api[NAME](**inputs)}


ADAPTERS = (Adapter("norm.gated_residual_rmsnorm", GATED, _gated, (NAME,), sm=((8, 0), (12, 9))),)
