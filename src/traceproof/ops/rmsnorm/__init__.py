"""The op_type rmsnorm."""
