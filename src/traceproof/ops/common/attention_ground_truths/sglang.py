"""SGLang's causal prefill over ragged keys and values; multi-head latent attention's too."""

from traceproof.ops.adapter import Definition, Values, tensor
from traceproof.ops.common.attention_ground_truths import RAGGED
from traceproof.ops.common.ground_truths.sglang import Operands, extending, ragged, wide


def _operands(inputs: Values) -> Operands:
    return tensor(inputs, "q"), (tensor(inputs, "k"), tensor(inputs, "v")), ragged(inputs)


def _accepts(definition: Definition) -> bool:
    return wide(definition, "q", "k", "v")


ADAPTERS = (extending(RAGGED, _accepts, _operands),)
