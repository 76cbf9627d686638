"""The op_type gqa_paged."""
