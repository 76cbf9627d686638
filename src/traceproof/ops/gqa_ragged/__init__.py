"""The op_type gqa_ragged."""
