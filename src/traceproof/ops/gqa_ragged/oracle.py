"""gqa_ragged: causal grouped-query prefill over ragged keys and values."""

from traceproof.ops.common.attention_ragged import RaggedAttention


class GqaRagged(RaggedAttention):
    """Query heads share key heads in equal groups; see `RaggedAttention`."""

    op_type = "gqa_ragged"


OP = GqaRagged()
