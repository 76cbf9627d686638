"""SGLang's selective state update, Triton."""

from __future__ import annotations

from traceproof.ops.adapter import Adapter, names
from traceproof.ops.mamba_ssu.ground_truths.common import INPUTS, update

ADAPTERS = (
    Adapter(
        name="mamba_ssm.selective_state_update",
        inputs=INPUTS,
        outputs=names("output new_state"),
        apis=("mamba",),
        call=update,
        sm=((8, 0), (12, 9)),
    ),
)
