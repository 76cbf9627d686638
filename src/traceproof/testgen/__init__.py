"""Writing reference tests into a dataset: a file per op_type, a class per definition, and what they need."""
