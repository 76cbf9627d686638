"""The op_type mla_paged."""
