"""The op_type rope."""
