"""SGLang's attention over pages with shared key heads: decode and causal prefill."""

from traceproof.ops.adapter import Definition, Values, dim, tensor
from traceproof.ops.common.ground_truths.attention import paged_tokens
from traceproof.ops.common.ground_truths.sglang import Operands, decoding, extending, heads_fit, wide
from traceproof.ops.gqa_paged.ground_truths import DECODE, PREFILL


def _operands(inputs: Values) -> Operands:
    """Pages laid end to end."""
    keys, values = tensor(inputs, "k_cache"), tensor(inputs, "v_cache")
    rows = list(paged_tokens(inputs, keys.shape[1]))
    return tensor(inputs, "q"), (keys.flatten(0, 1), values.flatten(0, 1)), rows


def _accepts(definition: Definition) -> bool:
    return wide(definition, "q", "k_cache", "v_cache")


def _accepts_decode(definition: Definition) -> bool:
    return _accepts(definition) and heads_fit(definition, "q", dim(definition, "k_cache", -2) or 0)


ADAPTERS = (decoding(DECODE, _accepts_decode, _operands), extending(PREFILL, _accepts, _operands))
