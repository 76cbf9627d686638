"""The op_type dsa_paged."""
