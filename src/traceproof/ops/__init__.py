"""Op_types: sizes, inputs, float64 oracle, comparison of each output, calls of packages as ground truths, mutants.

Each file of `families` declares some op_types. None of them imports PyTorch before it is used, so that the
driver's environment, which has no PyTorch, can validate a selection.
"""
