"""The op_type mamba_ssu."""
