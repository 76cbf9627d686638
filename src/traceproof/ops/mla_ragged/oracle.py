"""mla_ragged: causal prefill of multi-head latent attention before absorption; keys are wider than values."""

from traceproof.ops.common.attention_ragged import RaggedAttention


class MlaRagged(RaggedAttention):
    """Keys are nope and rope parts side by side (128 + 64), values 128 wide; see `RaggedAttention`."""

    op_type = "mla_ragged"


OP = MlaRagged()
