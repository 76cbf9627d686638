"""Answers of mla_ragged: those of any attention."""

from traceproof.ops.common.attention_bugs import ANSWERS

__all__ = ["ANSWERS"]
