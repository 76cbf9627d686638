"""SGLang's absorbed multi-head latent attention over pages: decode and causal prefill.

One key head: keys are the latent and the rotated part side by side, as SGLang caches them, values the latent part.
"""

import torch

from traceproof.ops.adapter import Definition, Values, tensor
from traceproof.ops.common.ground_truths.attention import paged_tokens
from traceproof.ops.common.ground_truths.sglang import Operands, decoding, extending, heads_fit, wide
from traceproof.ops.mla_paged.ground_truths import DECODE, PREFILL, unscaled


def _operands(inputs: Values) -> Operands:
    latent = tensor(inputs, "ckv_cache")
    rows = list(paged_tokens(inputs, latent.shape[1]))
    keys = torch.cat([latent, tensor(inputs, "kpe_cache")], -1).flatten(0, 1)[:, None]
    queries = torch.cat([tensor(inputs, "q_nope"), tensor(inputs, "q_pe")], -1)
    return queries, (keys, keys[..., : latent.shape[-1]]), rows


def _accepts(definition: Definition) -> bool:
    return wide(definition, "ckv_cache", "kpe_cache") and unscaled(definition)


def _accepts_decode(definition: Definition) -> bool:
    return _accepts(definition) and heads_fit(definition, "q_nope", 1)


ADAPTERS = (decoding(DECODE, _accepts_decode, _operands), extending(PREFILL, _accepts, _operands))
