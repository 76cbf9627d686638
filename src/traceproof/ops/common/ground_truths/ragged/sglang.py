"""SGLang's causal prefill over ragged keys and values; multi-head latent attention's too."""

from __future__ import annotations

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, names, tensor
from traceproof.ops.base import Values
from traceproof.ops.common.ground_truths.sglang import DTYPES, SM, extend, ragged, wide


def _prefill(api: Api, definition: Definition, inputs: Values) -> Outputs:
    cache = (tensor(inputs, "k"), tensor(inputs, "v"))
    outputs = extend(api, inputs, tensor(inputs, "q"), cache, ragged(inputs))
    return {name: outputs[name] for name in definition.outputs}


ADAPTERS = (
    Adapter(
        name="triton_ops.extend_attention_fwd",
        inputs=names("q k v qo_indptr kv_indptr sm_scale"),
        outputs=names("output lse"),
        accepts=lambda definition: wide(definition, "q", "k", "v"),
        dtypes=DTYPES,
        apis=("extend_attention",),
        call=_prefill,
        sm=SM,
        rows="q",
    ),
)
