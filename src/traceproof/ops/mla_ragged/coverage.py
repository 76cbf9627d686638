"""The axes of mla_ragged."""

from traceproof.ops.common.attention_coverage import attention_space

SPACE = attention_space(paged=False)
