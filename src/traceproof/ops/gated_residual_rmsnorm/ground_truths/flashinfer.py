"""FlashInfer's gated residual norm."""

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, dim
from traceproof.ops.gated_residual_rmsnorm.ground_truths import GATED

NAME = "flashinfer.norm:gated_residual_rmsnorm"
HIDDEN = 8192  # the only size that it is compiled for


def _accepts(definition: Definition) -> bool:
    return dim(definition, "branch", -1) == HIDDEN


def _gated(api: Api, _: Definition, inputs: Values) -> Outputs:
    return {"output": api[NAME](**inputs)}


ADAPTERS = (
    Adapter("norm.gated_residual_rmsnorm", GATED, _gated, (NAME,), accepts=_accepts, sm=((10, 0), (10, 9))),
)
