"""Writing reference tests into a dataset: a file an op_type, a class a definition, and what they need beside."""
