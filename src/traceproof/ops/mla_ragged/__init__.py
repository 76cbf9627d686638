"""The op_type mla_ragged."""
