"""SGLang's selective state update, Triton."""

from traceproof.ops.adapter import SM80, Adapter
from traceproof.ops.mamba_ssu.ground_truths import UPDATE
from traceproof.ops.mamba_ssu.ground_truths.common import update

ADAPTERS = (Adapter("mamba_ssm.selective_state_update", UPDATE, update, ("mamba",), sm=SM80),)
