"""The op_type gdn."""
