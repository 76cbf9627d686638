"""The op_type moe."""
