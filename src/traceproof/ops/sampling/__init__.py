"""The op_type sampling."""
